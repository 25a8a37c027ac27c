#!/bin/sh
# The SuperLink: it takes runs from this machine and hands messages to the sites. It listens on the loopback address.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
mkdir -p "$here/state"
exec flower-superlink --host 127.0.0.1 --port @{superlink_port} --database "$here/state/superlink.db" \
    --isolation process --disable-runtime-dependency-installation @{superlink_tls}
