"""A site that joins after the run, against having been there from the start and against its own local model.

``python benchmarks/joining.py``: digits-views and heart-disease, five seeds (on heart-disease the five folds), each of
the first four sites left out in turn; about ten minutes on one core.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from usage import usage

from perfed.data.federation import Federation
from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import start
from perfed.run.run import Run

EXPERIMENTS, METHODS = ("flic-digits-views", "heart-disease"), ("flic-class", "hetfedrep")
SEEDS, SITES = range(5), 4


def trained(experiment: str, method: str, seed: int, federation: Federation) -> Run:
    """The run of ``method`` on these clients."""
    settings = [f"method={method}", f"seed={seed}", "plan.engine=stacked", "plan.threads=1", "snapshots.rounds=[]"]
    run = start(validate(override(find_experiment(experiment), settings, [method])), federation=federation)
    run.execute()
    return run


def measured(experiment: str, method: str, seed: int) -> tuple[float, float, float]:
    """Mean accuracy of the sites joined, there from the start, and local."""
    federation = validate(find_experiment(experiment)).data.load(seed, None)
    whole, local = (trained(experiment, name, seed, federation).client_metrics for name in (method, "local"))
    found = []
    for client in federation.clients[:SITES]:
        others = tuple(other for other in federation if other.id != client.id)
        site = trained(experiment, method, seed, replace(federation, clients=others, notes={})).join(client)
        joined = site.facts["metrics"]["of"]["accuracy"]["value"]
        found.append((joined, whole[client.id]["accuracy"], local[client.id]["accuracy"]))
    joined, start_, alone = np.mean(found, 0).tolist()
    return joined, start_, alone


def main() -> None:
    """Print a line per experiment and method."""
    for experiment, method in product(EXPERIMENTS, METHODS):
        found = 100 * np.array([measured(experiment, method, seed) for seed in SEEDS])
        mean, std = found.mean(0), found.std(0, ddof=1)
        parts = zip(("joined", "from the start", "local"), mean, std, strict=True)
        print(f"{experiment}, {method}: " + ", ".join(f"{name} {m:.2f} ± {s:.2f}" for name, m, s in parts))


if __name__ == "__main__":
    usage(__doc__)
    main()
