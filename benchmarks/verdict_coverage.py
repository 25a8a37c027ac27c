"""How often the verdict is wrong where no method differs from another, and how often it finds a gain, by simulation.

``python benchmarks/verdict_coverage.py [PART...]`` (half an hour on one core for all parts) simulates with the
program's own functions and keeps the shares in ``docs/results/verdict-coverage.json``; without the name of a part
(``two``, ``family``, ``unequal``, ``skewed``, ``sites``, ``sites_power``) it simulates all of them. ``python
docs/build_docs.py --render`` writes the tables of docs/results.md.

A method's value at a client with a seed is that of the client, the same for all methods, plus random effects of the
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
from perfed.engine.metrics import Metric, compute_metric
from perfed.report import load_runs, verdict
from perfed.report.against import best_reference, compare_methods
from perfed.report.paired import ClientTable
from perfed.run.directory import RunDirectory

KEPT = Path(__file__).parent.parent / "docs/results/verdict-coverage.json"
VALUE = Metric(higher_is_better=True)
SEED_EFFECTS = (0.0, 0.22, 0.35, 0.5, 1.0)
SEEDS = (1, 3, 5)
# Clients, b and e.
CLIENTS = ((3, 0.0, 1.0), (6, 0.0, 1.0), (6, 1.0, 0.3), (20, 0.0, 1.0), (20, 1.0, 1.0), (100, 0.0, 1.0))
# Models that need no federation, and federated ones.
FAMILIES = ((1, 1), (1, 3), (1, 8), (3, 5), (4, 4))
USUAL = (20, 0.35, 1.0)
# By name, the factors of all effects and those of the seeds' effects, of the reference, a first and all other methods.
UNEQUAL = {
    "the reference varies three times as much": ((3, 1, 1), (1, 1, 1)),
    "one method varies three times as much": ((1, 3, 1), (1, 1, 1)),
    "one method and the reference vary a third as much": ((1, 1, 3), (1, 1, 1)),
    "seeds of the reference vary three times as much": ((1, 1, 1), (3, 1, 1)),
    "seeds of one method vary three times as much": ((1, 1, 1), (1, 3, 1)),
    "seeds of the reference vary a third as much": ((1, 1, 1), (1 / 3, 1, 1)),
    "seeds of one method vary a third as much": ((1, 1, 1), (1, 1 / 3, 1)),
    "seeds of the reference alone vary": ((1, 1, 1), (1, 0, 0)),
    "seeds of one method alone vary": ((1, 1, 1), (0, 1, 0)),
}
# Federated methods, seeds, sites and test rows of each.
SITES = (
    *((5, seeds, 20, 50) for seeds in (1, 2, 3)),
    *((10, seeds, 20, 50) for seeds in (1, 3)),
    (5, 3, 20, 200),
    (5, 3, 6, 12),
)
SITES_POWER = tuple((federated, seeds, 20, 200) for federated in (1, 5) for seeds in (1, 2, 3, 5))
STANDARD_ERRORS = 4.0  # of a gain that is to be detected
TIES, COMPARISONS = 1000, 40
SEVERAL_TIES = 1000  # of several methods: the standard error of a share of 5 % is 0.7 %


def table(
    rng: np.random.Generator,
    methods: Sequence[str],
    seeds: int,
    a: float,
    of: tuple[int, float, float],
    factors: tuple[Sequence[float], Sequence[float]] | None = None,
    skewed: bool = False,
) -> ClientTable:
    """Return values of equal methods.

    Args:
        rng: draws them.
        methods: their names.
        seeds: their number.
        a: the standard deviation of seeds in differences between two methods.
        of: the number of clients, and the standard deviations b of clients and e of cells.
        factors: by method of all effects, and of those of the seeds.
        skewed: clients' effects are exponential in place of normal; the first method has none.
    """
    clients, b, e = of
    every, of_seeds = (np.reshape(f, (-1, 1, 1)) for f in factors or (np.ones(len(methods)), np.ones(len(methods))))
    of_clients = b * rng.normal(size=(len(methods), 1, clients)) / np.sqrt(2)
    if skewed:
        of_clients = b * (rng.exponential(size=(len(methods), 1, clients)) - 1)
        of_clients[0] = 0.0
    seed_effects = a * of_seeds * rng.normal(size=(len(methods), seeds, 1))
    cells = e * rng.normal(size=(len(methods), seeds, clients))
    values = rng.normal(size=clients) + every * (of_clients + (seed_effects + cells) / np.sqrt(2))
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
        gain = compare_methods("local", values, VALUE)["fedavg"].gain
        wrong += gain.sign != 0
        widths.append(float(gain.high or 0) - float(gain.low or 0))
    known = np.sqrt((a**2 / seeds if seeds > 1 else 0.0) + b**2 / clients + e**2 / (seeds * clients))
    return {"wrong": wrong / ties, "width": float(np.median(widths) / (2 * 1.96 * known))}


def of_family(alone: int, federated: int, seeds: int, a: float, ties: int) -> dict[str, float]:
    """How often some of several equal methods is ahead of the best of those that need no federation, or behind it, and
    how often one of them is shown to be ahead that is better by :data:`STANDARD_ERRORS`.
    """
    methods = ["local", *(f"sklearn:{n}" for n in range(1, alone)), *(f"method-{n}" for n in range(federated))]
    rng = np.random.default_rng([alone, federated, seeds, int(1000 * a)])
    shift, ahead, behind, detected = _shift(seeds, a), 0, 0, 0
    for _ in range(ties):
        values = table(rng, methods, seeds, a, USUAL)
        verdicts = compare_methods(best_reference(values, VALUE), values, VALUE)
        signs = {of.gain.sign for of in verdicts.values()}
        ahead, behind = ahead + (1 in signs), behind + (-1 in signs)
        values.of_method["method-0"] += shift
        detected += compare_methods(best_reference(values, VALUE), values, VALUE)["method-0"].gain.sign == 1
    return {"ahead": ahead / ties, "behind": behind / ties, "detected": detected / ties}


def _shift(seeds: int, a: float) -> float:
    clients, b, e = USUAL
    return float(STANDARD_ERRORS * np.sqrt(a**2 / seeds + b**2 / clients + e**2 / (seeds * clients)))


def of_unequal(kind: str, federated: int, seeds: int, a: float, ties: int) -> float:
    """Return how often some of several methods that differ only in their variances is ahead of the reference or behind.

    Args:
        kind: a key of :data:`UNEQUAL`.
        federated: the number of methods beside the reference.
        seeds: the number of seeds.
        a: the standard deviation of the seeds' effects in a difference, before the factors of ``kind``.
        ties: the number of simulated comparisons.
    """
    methods = ["local", *(f"method-{n}" for n in range(federated))]
    factors = [[first, second, *[others] * (federated - 1)] for first, second, others in UNEQUAL[kind]]
    rng, wrong = np.random.default_rng([list(UNEQUAL).index(kind), federated, seeds, int(1000 * a)]), 0
    for _ in range(ties):
        values = table(rng, methods, seeds, a, USUAL, (factors[0], factors[1]))
        wrong += any(method.gain.sign for method in compare_methods("local", values, VALUE).values())
    return wrong / ties


def of_skewed(seeds: int, clients: int, e: float, ties: int) -> dict[str, float]:
    """How often each end of the interval is wrong where the clients' effects are exponential."""
    rng, low, high = np.random.default_rng([seeds, clients, int(1000 * e)]), 0, 0
    for _ in range(ties):
        values = table(rng, ("local", "fedavg"), seeds, 0.0, (clients, 1.0, e), skewed=True)
        sign = compare_methods("local", values, VALUE)["fedavg"].gain.sign
        low, high = low + (sign > 0), high + (sign < 0)
    return {"low": low / ties, "high": high / ties}


def of_sites(federated: int, seeds: int, sites: int, rows: int, comparisons: int) -> dict[str, float]:
    """Of methods that are right of each row with the same chance: share of sites that gain, and of comparisons in
    which one does; the same of those that are told to use a federated method.
    """
    rng, gains, some, told = np.random.default_rng([federated, seeds, sites, rows]), 0, 0, 0
    for _ in range(comparisons):
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(load_runs(list(_runs(Path(folder), rng, federated, seeds, sites, rows))))
        assert found is not None
        signs = [site.gain.sign for site in found.sites if site.gain is not None]
        gains, some = gains + signs.count(1), some + (1 in signs)
        told += any(site.method != "local" for site in found.sites)
    return {"sites": gains / (sites * comparisons), "comparisons": some / comparisons, "advice": told / comparisons}


def of_sites_power(federated: int, seeds: int, sites: int, rows: int, comparisons: int) -> float:
    """Share of the sites that are shown to gain, where one method is better by :data:`STANDARD_ERRORS` at each."""
    rng, gains = np.random.default_rng([federated, seeds, sites, rows, 1]), 0
    better = STANDARD_ERRORS * np.sqrt(2 * 0.6 * 0.4 / (rows * seeds))
    for _ in range(comparisons):
        with tempfile.TemporaryDirectory() as folder:
            found = verdict(load_runs(list(_runs(Path(folder), rng, federated, seeds, sites, rows, better))))
        assert found is not None
        gains += sum(site.gain is not None and site.gain.sign == 1 for site in found.sites)
    return gains / (sites * comparisons)


def _runs(
    folder: Path, rng: np.random.Generator, federated: int, seeds: int, sites: int, rows: int, better: float = 0.0
) -> Iterator[Path]:
    """Write runs of ``local`` and federated methods; rows are as hard for all, and the same with every seed.

    With ``better``, the first federated method is right more often by so much, and each row is as hard as the others.
    """
    chance = np.full((sites, rows), 0.6) if better else rng.beta(4, 1.5, (sites, rows))
    for method in ("local", *(f"method-{number}" for number in range(federated))):
        more = better if method == "method-0" else 0.0
        for seed in range(seeds):
            yield run(folder, method, seed, rng.random((sites, rows)) < chance + more)


def run(folder: Path, method: str, seed: int, right: NDArray[np.bool_]) -> Path:
    """Write a run of which ``right`` ``(sites, rows)`` says where its models are right."""
    where, (sites, rows) = folder / f"{method}-{seed}", right.shape
    (where / "predictions").mkdir(parents=True)
    y = np.arange(rows) % 2
    outputs = [np.eye(2)[np.where(own, y, 1 - y)] for own in right]
    values = [compute_metric("accuracy", y, own) for own in outputs]
    ids = [f"site-{number:03d}" for number in range(sites)]
    np.savez(
        where / "predictions/round-0000.npz",
        ids=np.array(ids),
        counts=np.full(sites, rows),
        marks=np.arange(sites, dtype=np.uint32),
        targets=np.tile(y, sites),
        outputs=np.concatenate(outputs),
    )
    RunDirectory(where).write_config(f'method = "{method}"\nseed = {seed}\n')
    (where / "rounds.jsonl").write_text("")
    with (where / "clients.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["id", "n_train", "n_test", "accuracy_before", "accuracy_after", "rounds"])
        lines.writerows([name, rows, rows, value, "", 1] for name, value in zip(ids, values, strict=True))
    known = {"method": method, "dataset": "made up", "seed": seed, "rounds": 0, "wall_seconds": 1.0}
    measured = {"accuracy": spread([float(value or 0) for value in values])}
    (where / "summary.json").write_text(json.dumps(known | {"metrics": measured}))
    return where


def _simulate_two() -> list[dict[str, Any]]:
    return [
        {"seeds": seeds, "clients": of[0], "b": of[1], "e": of[2], "a": a, **of_two(seeds, a, of, TIES)}
        for seeds in SEEDS
        for of in CLIENTS
        for a in (SEED_EFFECTS if seeds > 1 else (0.0,))
    ]


def _simulate_family() -> list[dict[str, Any]]:
    return [
        {"alone": alone, "federated": n, "seeds": seeds, "a": a, **of_family(alone, n, seeds, a, SEVERAL_TIES)}
        for alone, n in FAMILIES
        for seeds in SEEDS[1:]
        for a in (0.0, 0.35, 1.0)
    ]


def _simulate_unequal() -> list[dict[str, Any]]:
    return [
        {"kind": kind, "federated": n, "seeds": 3, "a": a, "wrong": of_unequal(kind, n, 3, a, SEVERAL_TIES)}
        for kind in UNEQUAL
        for n in (3, 8)
        for a in (0.35, 1.0)
    ]


def _simulate_skewed() -> list[dict[str, Any]]:
    return [
        {"seeds": seeds, "clients": clients, "e": 0.3, **of_skewed(seeds, clients, 0.3, TIES)}
        for seeds in SEEDS
        for clients in (3, 6, 20, 100)
    ]


def _simulate_sites() -> list[dict[str, Any]]:
    return [
        {"federated": n, "seeds": seeds, "of": number, "rows": rows, **of_sites(n, seeds, number, rows, COMPARISONS)}
        for n, seeds, number, rows in SITES
    ]


def _simulate_sites_power() -> list[dict[str, Any]]:
    return [
        {"federated": n, "seeds": seeds, "of": of, "rows": rows, "detected": of_sites_power(n, seeds, of, rows, 10)}
        for n, seeds, of, rows in SITES_POWER
    ]


PARTS = {
    "two": _simulate_two,
    "family": _simulate_family,
    "unequal": _simulate_unequal,
    "skewed": _simulate_skewed,
    "sites": _simulate_sites,
    "sites_power": _simulate_sites_power,
}


def main(*names: str) -> None:
    """Simulate the named parts, or all of them, and write the shares of each part as soon as they are known."""
    if unknown := set(names) - set(PARTS):
        sys.exit(f"unknown part: {', '.join(sorted(unknown))}; parts are: {', '.join(PARTS)}")
    for name in names or PARTS:
        rows = PARTS[name]()
        shares = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        shares |= {"ties": TIES, "several_ties": SEVERAL_TIES, "comparisons": COMPARISONS, name: rows}
        KEPT.write_text(json.dumps(shares, indent=1) + "\n")
        print(f"{name}: done", file=sys.stderr)


if __name__ == "__main__":
    usage(__doc__)
    main(*sys.argv[1:])
