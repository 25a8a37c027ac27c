#!/usr/bin/env bash
# Runs the short tests of everything else in a copy of this checkout without perfed/sites, which only federations of
# real sites need. Usage: tests/without_sites.sh PYTHON [pytest's options]
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
tar --create --exclude=./.git --exclude=./.venv --exclude=./build --exclude=./dist --exclude=./runs --exclude=__pycache__ . | tar --extract --directory "$copy"
cd "$copy"
rm -r perfed/sites tests/sites
# The documentation describes the commands for real sites, and what clients send to a server.
documentation=(--ignore tests/test_web_pages.py --ignore tests/test_docs.py --ignore tests/cli/test_documented_commands.py)
PYTHONPATH="$copy" "$python" -m pytest tests -m "not long" "${documentation[@]}" "${@:2}"
