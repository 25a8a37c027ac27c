#!/bin/sh
# The SuperExec: it starts the server's program of each run, apart from the SuperLink, so that either may be restarted.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
exec flower-superexec --runtime-api-address 127.0.0.1:@{superlink_port} @{superexec_tls}
