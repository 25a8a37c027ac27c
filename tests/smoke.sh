#!/usr/bin/env bash
# smoke.sh PYTHON FILE: install a wheel or an sdist in an empty folder with nothing else, and do there what a newcomer does.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
file="$(realpath "$2")"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
"$1" -m venv "$place/venv"
cd "$place"
export PATH="$place/venv/bin:$PATH" XDG_CACHE_HOME="$place/cache"
unset PYTHONPATH
pip install --quiet --constraint "$here/constraints.txt" "$file[tables]"
perfed --version
python -c 'import perfed; print(perfed.__version__, perfed.__file__)'
perfed list methods > methods.txt
grep -q FedPAC methods.txt
tiny="rounds=1 clients=3 plan.engine=stacked plan.threads=1"
perfed compare digits-label-skew --methods local,fedavg-ft,sklearn:logistic --seeds 0 $tiny --out study > out.txt
grep -q '^Against\|No method\|ahead' out.txt
mkdir tables
python - <<'PYTHON'
from sklearn.datasets import load_breast_cancer
table = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
for number, site in enumerate(("north", "south", "west")):
    table.iloc[number::3].to_csv(f"tables/{site}.csv", index=False)
PYTHON
perfed init tables --target target --out study.toml > /dev/null
perfed run study.toml --method mixed --out run > /dev/null
perfed predict run tables/north.csv --site north --out said.csv > /dev/null
test "$(wc -l < said.csv)" = "$(wc -l < tables/north.csv)"
echo "$(python --version), $(basename "$file"): works"
