# Read by the scripts beside this file: Flower calls nobody but the configured server, and installs nothing.
umask 077 # what is written is for this user alone
@{switches}
export FLWR_HOME="$here/flwr"
export PATH="$here/../venv/bin:$PATH"
