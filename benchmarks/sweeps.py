"""The sweeps of the papers' figures, smaller than in the papers.

``python benchmarks/sweeps.py [NAME...]`` makes those of :data:`SWEEPS` that are not kept yet, one run at a time on one
thread, and keeps means and deviations in ``docs/results/sweeps.json`` and each one's figure as ``docs/sweep-NAME.svg``.
``python docs/build_docs.py --render`` writes the tables of ``docs/results.md`` from them.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from usage import usage

DOCS = Path(__file__).parent.parent / "docs"
KEPT = DOCS / "results/sweeps.json"
ONE_THREAD = "plan.engine=stacked plan.threads=1"
FASHION = f"""test_samples=300 'model.body={{kind="mlp",hidden=[128],out=64}}' rounds=50 {ONE_THREAD}"""
TOY = f"""'model.embedding={{kind="mlp",hidden=[64],out=16}}' rounds=10 local_epochs=10 lr=3e-3 {ONE_THREAD}"""
LENGTHS = "flic-toy-linear pretrain_epochs=1,10,50,100 --methods flic-class --seeds 0..4"
PRETRAINED = f"{LENGTHS} clients=20 train_per_class=200 {TOY}"
# Name -> the figure that is kept, and what follows "perfed sweep".
SWEEPS = {
    "fedpac-uniform": (
        "sweep-mean",
        "fedpac-fashion-20 uniform=0,20,50,80 --methods "
        f"local,fedavg-ft,fedrep,ditto,fedpac,sklearn:logistic,sklearn:svc --seeds 0..2 samples=100 {FASHION}",
    ),
    "fedpac-samples": (
        "sweep-mean",
        f"fedpac-fashion-20 samples=50,100,300 --methods local,fedavg,fedpac --seeds 0..2 {FASHION}",
    ),
    "fedpac-epochs": (
        "curves-fedpac",
        f"fedpac-fashion-20 local_epochs=1,5,10 --methods fedpac --seeds 0..2 evaluation.every=1 samples=100 {FASHION}",
    ),
    "feddar-dimension": (
        "sweep-mean",
        f"feddar-adult-race model.body.out=2,8,32 --methods feddar-sa,feddar-wa --seeds 0..2 {ONE_THREAD}",
    ),
    "flic-clients": (
        "sweep-mean",
        "flic-toy-noisy clients=10,20,40 --methods local,fedhenn,hetfedrep,flic-class,flic-hl --seeds 0..2 "
        f"pretrain_epochs=10 train_per_class=200 {TOY}",
    ),
    "flic-pretraining": ("sweep-mean", PRETRAINED),
    "flic-frozen": ("sweep-mean", f"{PRETRAINED} freeze_embedding=true"),
}


def command(name: str) -> str:
    """What gives the numbers."""
    return f"perfed sweep {SWEEPS[name][1]}"


def perfed(*words: str) -> str:
    """What the program prints."""
    return subprocess.check_output([sys.executable, "-m", "perfed", *words], text=True)


def swept(name: str) -> dict[str, Any]:
    """Make the sweep, and keep its figure."""
    figure, words = SWEEPS[name]
    with tempfile.TemporaryDirectory() as folder:
        told = json.loads(perfed("sweep", *shlex.split(words), "--out", f"{folder}/made", "--json"))
        perfed("report", f"{folder}/made", "--figures", f"{folder}/figures")
        shutil.copy(f"{folder}/figures/{figure}.svg", DOCS / f"sweep-{name}.svg")
    fields = ("comparison", "method", "mean", "mean_std")
    rows = [{field: row[field] for field in fields} for row in told["table"] if row["metric"] == "accuracy"]
    return {"command": command(name), "rows": rows}


def kept() -> dict[str, Any]:
    """What there is so far; read anew whenever it is asked for, since others may be at work on other sweeps."""
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def main(*names: str) -> None:
    """Those that are named, or all; what is kept with the same command stays."""
    if unknown := set(names) - set(SWEEPS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(SWEEPS)}")
    for name in names or SWEEPS:
        if kept().get(name, {}).get("command") != command(name) or not (DOCS / f"sweep-{name}.svg").exists():
            found = swept(name)
            now = {**kept(), name: found}
            KEPT.write_text(json.dumps({at: now[at] for at in SWEEPS if at in now}, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main(*sys.argv[1:])
