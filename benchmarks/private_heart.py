"""FLamby's Heart under privacy of rows: FedAvg at its budgets, under its accounting and an honest one.

``python benchmarks/private_heart.py``

Their protocol: one linear layer to a logit, 15 rounds of 100 mini-batches of 4, SGD with rate .001, gradients of rows
cut to 1.1, delta 1e-4. Their program (owkin/FLamby, ``strategies/utils.py``) asks Opacus for the noise of 15 *epochs*
of Poisson samples. It then takes 1,500 steps, 30 passes in Cleveland and 188 in Switzerland, of its shuffled loader.
It seeds the noise of the four hospitals alike, so that all draw the same: "same" does so too, at epsilon .1 over twenty
seeds. Published figures are the means of the four hospitals' accuracies over seeds 42 to 46 (their result file).
Numbers are kept in ``docs/results/private-heart.json``; what is there is not run again.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from noise_by_client import NoiseByClient, privately_by_client, rdp_noise
from usage import usage

from perfed import Federation, Model, Run, build_method
from perfed.datasets import load
from perfed.model.presets import logit
from perfed.privacy.accountant import Releases, compute_epsilon
from perfed.privacy.sample import SamplePrivacy
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
SEEDS = range(5)
ROUNDS, STEPS, BATCH, CLIP, DELTA = 15, 100, 4, 1.1, 1e-4
TRAINING = {"optimizer": "sgd", "lr": 1e-3, "batch_size": BATCH, "local_steps": STEPS, "local_epochs": 1}
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]  # Opacus' own
Way = Literal["theirs", "same", "honest"]
MORE, MORE_AT = range(20), 0.1


@cache
def their_noise(budget: float, rows: int) -> float:
    """The noise multiplier that Opacus finds for 15 epochs of Poisson samples with one over the number of batches."""
    batches = ceil(rows / BATCH)
    return rdp_noise(budget, DELTA, 1 / batches, ROUNDS * batches, ORDERS)


@cache
def honest_noise(budget: float, rows: int) -> float:
    """The noise multiplier of all 1,500 Poisson samples, and of the number of rows."""
    return rdp_noise(budget, DELTA, BATCH / rows, ROUNDS * STEPS, ORDERS, whole=1)


def accuracy(clients: Federation, budget: float | None, way: Way, seed: int) -> float:
    """Mean accuracy of the four hospitals after the last round."""
    method, rows = build_method("fedavg", TRAINING), {client.id: len(client.train) for client in clients}
    if budget is not None and way != "honest":
        noises = {i: their_noise(budget, n) for i, n in rows.items()}
        factors = {i: BATCH / int(n / ceil(n / BATCH)) for i, n in rows.items()}  # Opacus divides sums by this integer
        method = privately_by_client(method, NoiseByClient(clip=CLIP, by_id=noises, factors=factors, one=way == "same"))
    elif budget is not None:
        noise = max(honest_noise(budget, n) for n in rows.values())
        own = SamplePrivacy(clip=CLIP, noise=noise, poisson=True, entries=("shared", "num_samples"))
        method = method.model_copy(update={"extensions": (own,)})
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
        "poisson": compute_epsilon(noise, Releases(0, steps, 1 / batches), DELTA),
        "passes": compute_epsilon(noise, Releases(ceil(steps / batches)), DELTA),
    }


def main() -> None:
    """Run the budgets that are not kept yet."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that do not converge are left out
    clients = load("flamby-heart", {}, seed=0)
    rows = {client.id: len(client.train) for client in clients}
    ways: tuple[Way, ...] = ("theirs", "honest")
    kept: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for budget, published in PUBLISHED.items():
        name = "none" if budget is None else f"{budget:g}"
        if name in kept:
            continue
        found: dict[str, Any] = {way: [accuracy(clients, budget, way, seed) for seed in SEEDS] for way in ways}
        if budget is not None:
            found["costs"] = {hospital: costs(budget, n) for hospital, n in rows.items()}
        kept[name] = {"published": published, **found}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, published, *(f"{way} {np.mean(found[way]):.4f}" for way in ways), found.get("costs"), flush=True)
    more: dict[str, list[float]] = kept[f"{MORE_AT:g}"].setdefault("more seeds", {})
    pair: tuple[Way, ...] = ("theirs", "same")
    for way in pair:
        of = more.setdefault(way, [])
        for seed in MORE[len(of) :]:
            of.append(accuracy(clients, MORE_AT, way, seed))
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{way}, {len(of)} seeds: {np.mean(of):.4f} +- {np.std(of, ddof=1):.4f}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
