"""What FLIC's anchors gain from learnt covariances and from other distances than the closed form.

``python benchmarks/anchors.py`` trains FLIC-Class with each of :data:`ROWS` on each of :data:`DATA`, smaller than the
experiments are, and keeps the accuracies in ``docs/results/anchors.json``; what is kept is not trained again.
``python docs/build_docs.py --render`` writes the table of ``docs/results.md`` from them.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from usage import usage

from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.experiment.study import Study
from perfed.report import comparison_rows, load_runs

KEPT = Path(__file__).parent.parent / "docs/results/anchors.json"
SEEDS = (0, 1, 2, 3, 4)
FASTER = "anchor_lr=0.05"
ROWS: dict[str, tuple[str, ...]] = {
    "no alignment": ("lambda1=0.0", "lambda2=0.0", "pretrain_epochs=0"),
    "W2, fixed covariance": (),
    "the same, anchors fifty times as fast": (FASTER,),
    "diagonal covariance learnt": (FASTER, "covariance=diagonal"),
    "full covariance learnt, mean of factors": (FASTER, "covariance=full"),
    "full covariance learnt, barycentre": (FASTER, "covariance=full", "covariance_average=barycentre"),
    "MMD (lambda1 = 1)": ("distance=mmd", "lambda1=1.0"),
    "optimal transport": ("distance=ot",),
    "two Gaussians per class": ("distance=mixture",),
}
ROWS |= {
    f"{row}, lambda1 = 0.1": (*own, "lambda1=0.1") for row, own in ROWS.items() if not any("lambda1" in s for s in own)
}
ROWS["W2, lambda1 = 1"] = ("lambda1=1.0",)
SMALL = ('model.embedding={kind="mlp",hidden=[64],out=16}', "rounds=10", "local_epochs=10", "lr=3e-3")
TOY = (*SMALL, "clients=20", "train_per_class=200", "pretrain_epochs=10")
DATA: dict[str, tuple[str, ...]] = {
    "heart-disease": (),
    "flic-digits-views": (*SMALL, "clients=8", "pretrain_epochs=10"),
    "flic-toy-noisy": TOY,
    "flic-toy-linear": TOY,
}


def accuracy(experiment: str, row: str, seed: int) -> float:
    """Mean over clients, on test data, after the last round."""
    own = [f"methods.flic-class.{setting}" for setting in ROWS[row]]
    settings = [*DATA[experiment], *own, "plan.engine=stacked", "plan.threads=1", "evaluation.every=100"]
    table = override(find_experiment(experiment), settings, federated(["flic-class"]))
    with tempfile.TemporaryDirectory() as folder:
        planned = ComparisonSpec(table, ["flic-class"], [seed])
        study = Study.create(Path(folder) / "made", planned)
        study.execute()
        (found,) = comparison_rows(load_runs(study.comparisons[""].started()))
    return float(found["accuracy"]["mean"])


def main() -> None:
    """Train what is not kept, a seed at a time."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in SEEDS:
        for experiment in DATA:
            for row in ROWS:
                found = kept.setdefault(experiment, {}).setdefault(row, {"accuracy": [], "cpu_s": []})
                if len(found["accuracy"]) > seed:
                    continue
                start = time.process_time()
                found["accuracy"].append(accuracy(experiment, row, seed))
                found["cpu_s"].append(round(time.process_time() - start, 1))
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                print(experiment, row, seed, found["accuracy"][-1], found["cpu_s"][-1], flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
