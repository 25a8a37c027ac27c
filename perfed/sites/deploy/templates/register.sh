#!/bin/sh
# Makes the keys of sites known to the SuperLink, those that are not yet: sh register.sh @{sites_in_a_row}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
for name in "$@"; do
    if said=$(flwr supernode register "$here/keys/$name.pub" @{connection} --name "$name" 2>&1); then
        echo "$name: its key is known now"
    else
        case $said in
            *"[code: 23]"*) echo "$name: its key was known already; one that was barred stays so" ;;
            *) echo "$name: $said" >&2; exit 1 ;;
        esac
    fi
done
