"""FLamby's Heart under privacy of rows: FedAvg at its budgets, under its accounting and an honest one.

``python benchmarks/private_heart.py [SEEDS]``

Their protocol: one linear layer to a logit, 15 rounds of 100 mini-batches of 4, SGD with rate .001, gradients of rows
cut to 1.1, delta 1e-4. Their program (owkin/FLamby, ``strategies/utils.py``) asks Opacus for the noise of 15 *epochs*
of Poisson samples. It then takes 1,500 steps, 30 passes in Cleveland and 188 in Switzerland, of its shuffled loader.
Published figures are the means of the four hospitals' accuracies over seeds 42 to 46 (their result file). Numbers are
kept in ``docs/results/private-heart.json``.
"""

from __future__ import annotations

import json
import logging
import sys
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from noise_by_client import rdp_noise, with_noises

from perfed import Federation, Model, Run, build_method
from perfed.datasets import load
from perfed.model.presets import logit
from perfed.privacy.accountant import Releases, epsilon
from perfed.privacy.apply import privately
from perfed.privacy.settings import Privacy
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

FILE = Path(__file__).parent.parent / "docs/results/private-heart.json"
# Mean and sample deviation over their five seeds; without privacy, then by epsilon.
PUBLISHED: dict[float | None, tuple[float, float]] = {
    None: (0.71247, 0.02376),
    50.0: (0.70161, 0.05211),
    10.0: (0.70043, 0.05494),
    5.0: (0.70362, 0.04872),
    1.0: (0.68526, 0.05477),
    0.1: (0.60562, 0.12132),
}
ROUNDS, STEPS, BATCH, CLIP, DELTA = 15, 100, 4, 1.1, 1e-4
TRAINING = {"optimizer": "sgd", "lr": 1e-3, "batch_size": BATCH, "local_steps": STEPS, "local_epochs": 1}
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]  # Opacus' own
Way = Literal["theirs", "honest"]


@cache
def their_noise(budget: float, rows: int) -> float:
    """The noise multiplier that Opacus finds for 15 epochs of Poisson samples with one over the number of batches."""
    batches = ceil(rows / BATCH)
    return rdp_noise(budget, DELTA, 1 / batches, ROUNDS * batches, ORDERS)


def accuracy(clients: Federation, budget: float | None, way: Way, seed: int) -> float:
    """Mean accuracy of the four hospitals after the last round."""
    method, rows = build_method("fedavg", TRAINING), {client.id: len(client.train) for client in clients}
    if budget is not None and way == "theirs":
        method = with_noises(
            method, {i: their_noise(budget, n) for i, n in rows.items()}, CLIP, counts=0.0, poisson=False
        )
    elif budget is not None:
        settings = Privacy(epsilon=budget, delta=DELTA, clip=CLIP, sampling="poisson")
        method = privately(method, settings, ROUNDS, [*rows.values()], name="fedavg").method
    run = Run(
        clients,
        method,
        Model(head=logit()),
        name="fedavg",
        rounds=ROUNDS,
        seed=seed,
        evaluation=Evaluation(every=ROUNDS),
        plan=Plan("stacked", 0, threads=1),
    )
    return float(run.execute()["metrics"]["accuracy"]["mean"])


def costs(budget: float, rows: int) -> dict[str, float]:
    """What their noise costs a hospital: all steps counted as Poisson samples, and each pass as a release."""
    noise, batches, steps = their_noise(budget, rows), ceil(rows / BATCH), ROUNDS * STEPS
    return {
        "poisson": epsilon(noise, Releases(0, steps, 1 / batches), DELTA),
        "passes": epsilon(noise, Releases(ceil(steps / batches)), DELTA),
    }


def main() -> None:
    """Run all budgets, print and keep."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that do not converge are left out
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    clients = load("flamby-heart", {}, seed=0)
    rows = {client.id: len(client.train) for client in clients}
    ways: tuple[Way, ...] = ("theirs", "honest")
    lines: list[dict[str, Any]] = []
    for budget, published in PUBLISHED.items():
        found = {way: [accuracy(clients, budget, way, seed) for seed in seeds] for way in ways}
        line: dict[str, Any] = {"epsilon": budget, "published": published, **found}
        if budget is not None:
            line["costs"] = {name: costs(budget, n) for name, n in rows.items()}
            line["noise"] = {name: their_noise(budget, n) for name, n in rows.items()}
        lines.append(line)
        print(budget, published, {way: f"{np.mean(of):.4f} +- {np.std(of, ddof=1):.4f}" for way, of in found.items()})
        print("  ", line.get("costs"), line.get("noise"), flush=True)
    if len(seeds) >= 10:
        FILE.write_text(json.dumps({"command": "python benchmarks/private_heart.py", "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
