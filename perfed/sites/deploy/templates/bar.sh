#!/bin/sh
# Bars for good every key by which the SuperLink knows a site: sh bar.sh NAME
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
exec python -m perfed.sites.flower.revoke_keys @{connection} "$@"
