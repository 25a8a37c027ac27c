#!/bin/sh
# Makes the keys of sites known to the SuperLink: sh register.sh @{sites_in_a_row}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
for name in "$@"; do
    flwr supernode register "$here/keys/$name.pub" @{connection} --name "$name"
done
