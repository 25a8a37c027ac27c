"""How often the verdict says "ahead", "behind" or "gains" where no method differs from another, by simulation.

``python benchmarks/verdict_coverage.py`` (ten minutes on one core) asks the program itself, and keeps the shares
in ``docs/results/verdict-coverage.json``; ``python docs/build_docs.py --render`` writes the tables of docs/results.md.
A method's value at a client with a seed is that of the client, the same for all methods, plus effects of its own of the
seed, of the client and of the cell, so that differences between two methods have the standard deviations a, b and e.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from usage import usage

from perfed.engine.evaluate import spread
from perfed.engine.metrics import computed, metric_of
from perfed.report import load_runs, verdict
from perfed.report.against import against, best_reference
from perfed.report.paired import ClientTable

KEPT = Path(__file__).parent.parent / "docs/results/verdict-coverage.json"
ACCURACY = metric_of("accuracy")
SEED_EFFECTS = (0.0, 0.22, 0.35, 0.5, 1.0)
SEEDS = (1, 2, 3, 5)
# Clients, b and e.
CLIENTS = ((3, 0.0, 1.0), (6, 0.0, 1.0), (6, 1.0, 0.3), (20, 0.0, 1.0), (20, 1.0, 1.0), (100, 0.0, 1.0))
# Models that need no federation, and federated ones.
FAMILIES = ((1, 5), (1, 10), (3, 5), (4, 4))
# Federated methods, seeds, sites and test rows of each.
SITES = ((5, 1, 20, 50), (10, 1, 20, 50), (5, 3, 20, 50), (10, 3, 20, 50), (5, 3, 20, 200), (5, 3, 6, 12))
TIES, COMPARISONS = 1000, 60


def table(
    rng: np.random.Generator, methods: Sequence[str], seeds: int, a: float, of: tuple[int, float, float]
) -> ClientTable:
    """Values of equal methods; ``of``: clients, b and e."""
    clients, b, e = of
    own = [
        size / np.sqrt(2) * rng.normal(size=(len(methods), *shape))
        for size, shape in ((a, (seeds, 1)), (b, (1, clients)), (e, (seeds, clients)))
    ]
    values = rng.normal(size=clients) + sum(own)
    sites = [f"site-{number}" for number in range(clients)]
    rows = np.full(clients, np.inf)
    return ClientTable(sites, list(range(seeds)), np.ones(clients), rows, dict(zip(methods, values, strict=True)))


def of_two(seeds: int, a: float, of: tuple[int, float, float], ties: int) -> dict[str, Any]:
    """How often a method is ahead of or behind an equal one, and how wide the interval is: the median over that of a
    known standard deviation. With one seed it is asked whether the interval has the gain of the very trainings.
    """
    clients, b, e = of
    rng, wrong, widths = np.random.default_rng([seeds, clients, int(1000 * a), int(1000 * b)]), 0, []
    for _ in range(ties):
        values = table(rng, ("local", "fedavg"), seeds, a if seeds > 1 else 0.0, of)
        gain = against("fedavg", "local", values, ACCURACY).gain
        wrong += gain.sign != 0
        widths.append(float(gain.high or 0) - float(gain.low or 0))
    known = np.sqrt((a**2 / seeds if seeds > 1 else 0.0) + b**2 / clients + e**2 / (seeds * clients))
    return {"wrong": wrong / ties, "width": float(np.median(widths) / (2 * 1.96 * known))}


def of_family(alone: int, federated: int, seeds: int, a: float, ties: int) -> dict[str, float]:
    """How often some of several equal methods is ahead of the best of those that need no federation, or behind it."""
    methods = ["local", *(f"sklearn:{n}" for n in range(1, alone)), *(f"method-{n}" for n in range(federated))]
    rng, ahead, behind = np.random.default_rng([alone, federated, seeds, int(1000 * a)]), 0, 0
    for _ in range(ties):
        values = table(rng, methods, seeds, a, (20, 0.35, 1.0))
        base = best_reference(values, ACCURACY)
        signs = {against(method, base, values, ACCURACY).gain.sign for method in methods if method != base}
        ahead, behind = ahead + (1 in signs), behind + (-1 in signs)
    return {"ahead": ahead / ties, "behind": behind / ties}


def of_sites(federated: int, seeds: int, sites: int, rows: int, comparisons: int) -> dict[str, float]:
    """Of methods that are right of each row with the same chance: share of sites that gain, and of comparisons in
    which one does; the same of those that are told to use a federated method.
    """
    rng, gains, some, told = np.random.default_rng([federated, seeds, sites, rows]), 0, 0, 0
    for _ in range(comparisons):
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(load_runs(list(_equal_runs(Path(folder), rng, federated, seeds, sites, rows))))
        assert found is not None
        signs = [site.gain.sign for site in found.sites if site.gain is not None]
        gains, some = gains + signs.count(1), some + (1 in signs)
        told += any(site.method != "local" for site in found.sites)
    return {"sites": gains / (sites * comparisons), "comparisons": some / comparisons, "advice": told / comparisons}


def _equal_runs(
    folder: Path, rng: np.random.Generator, federated: int, seeds: int, sites: int, rows: int
) -> Iterator[Path]:
    """Run directories of ``local`` and federated methods; rows are as hard for all, and the same with every seed."""
    chance = rng.beta(4, 1.5, (sites, rows))
    for method in ("local", *(f"method-{number}" for number in range(federated))):
        for seed in range(seeds):
            yield run(folder, method, seed, rng.random((sites, rows)) < chance)


def run(folder: Path, method: str, seed: int, right: NDArray[np.bool_]) -> Path:
    """Write a run of which ``right`` ``(sites, rows)`` says where its models are right."""
    where, (sites, rows) = folder / f"{method}-{seed}", right.shape
    (where / "predictions").mkdir(parents=True)
    y = np.arange(rows) % 2
    outputs = [np.eye(2)[np.where(own, y, 1 - y)] for own in right]
    values = [computed("accuracy", y, own) for own in outputs]
    ids = [f"site-{number:03d}" for number in range(sites)]
    np.savez(
        where / "predictions/round-0000.npz",
        ids=np.array(ids),
        counts=np.full(sites, rows),
        marks=np.arange(sites, dtype=np.uint32),
        targets=np.tile(y, sites),
        outputs=np.concatenate(outputs),
    )
    (where / "config.toml").write_text(f'method = "{method}"\nseed = {seed}\n')
    (where / "rounds.jsonl").write_text("")
    with (where / "clients.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["id", "n_train", "n_test", "accuracy_before", "accuracy_after", "rounds"])
        lines.writerows([name, rows, rows, value, "", 1] for name, value in zip(ids, values, strict=True))
    known = {"method": method, "dataset": "made up", "seed": seed, "rounds": 0, "wall_seconds": 1.0}
    measured = {"accuracy": spread([float(value or 0) for value in values])}
    (where / "summary.json").write_text(json.dumps(known | {"metrics": measured}))
    return where


def measured(ties: int = TIES, comparisons: int = COMPARISONS) -> dict[str, Any]:
    """All shares, by setting."""
    two = [
        {"seeds": seeds, "clients": of[0], "b": of[1], "e": of[2], "a": a, **of_two(seeds, a, of, ties)}
        for seeds in SEEDS
        for of in CLIENTS
        for a in (SEED_EFFECTS if seeds > 1 else (0.0,))
    ]
    print("two methods: done", file=sys.stderr)
    family = [
        {"alone": alone, "federated": n, "seeds": seeds, "a": a, **of_family(alone, n, seeds, a, ties // 2)}
        for alone, n in FAMILIES
        for seeds in SEEDS[1:]
        for a in (0.0, 0.35, 1.0)
    ]
    print("several methods: done", file=sys.stderr)
    sites = [
        {"federated": n, "seeds": seeds, "of": number, "rows": rows, **of_sites(n, seeds, number, rows, comparisons)}
        for n, seeds, number, rows in SITES
    ]
    return {"ties": ties, "comparisons": comparisons, "two": two, "family": family, "sites": sites}


if __name__ == "__main__":
    usage(__doc__)
    KEPT.write_text(json.dumps(measured(), indent=1) + "\n")
