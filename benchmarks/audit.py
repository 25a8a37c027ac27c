"""Audits of [privacy] from outside: epsilon is at least so much, said from what one run lets the server see.

    python benchmarks/audit.py [SEEDS]

Each canary has a column of its own, as a rare code in a hospital's table has. A coin says for each whether it is in: a
row, or a client, that is out has zeros as inputs, which change nothing in a network without biases; that is the
neighbour of which [privacy] speaks. The auditor knows canaries, initial models and all that leaves, and scores a
canary by how far a client's changes (the server's, where clients are protected) go along the canary's own gradient. The
bound is that of Steinke, Nasr & Jagielski (2023), theorem 5.2, at 95 %. With "off" the same run has no noise, and its
budget is only said. Of FLIC there is a second audit, of its anchors alone: a canary is scored by how far the step on
its class' anchor goes along the canary's own embedding. The numbers are kept in docs/results/audit.json; what is there
is not run again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from usage import usage
from watching import Watch, along, unbiased

from perfed import Evaluation, Federation, Model, Run, build_method
from perfed.method.disclosure import Unit
from perfed.privacy.apply import make_private
from perfed.privacy.audit import Audit, guess
from perfed.privacy.settings import Privacy
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/audit.json"
DELTA, BUDGETS, SEEDS = 1e-5, (2.0, 6.0), 5
CLIP: dict[Unit, float] = {"sample": 1.0, "client": 0.01}
"""Below the norms of the canaries' gradients and changes."""
TRAINING = {"optimizer": "sgd", "lr": 0.01, "local_epochs": 1}


@dataclass(frozen=True)
class Sizes:
    """Of an audit.

    Attributes:
        clients: with digits of their own, and, where rows are protected, with canaries.
        canaries: m, in all.
        guesses: r, chosen before.
        rounds: of training.
        rows: digits of each client.
    """

    clients: int = 4
    canaries: int = 2000
    guesses: int = 400
    rounds: int = 5
    rows: int = 50


METHODS: dict[str, tuple[Unit, Sizes]] = {
    "fedavg": ("sample", Sizes()),
    "mr-mtl": ("sample", Sizes()),
    "flic-hl": ("sample", Sizes(canaries=1000, guesses=200)),
    "flic-hl anchors": ("sample", Sizes(canaries=1000, guesses=200)),
    "fedrep": ("client", Sizes(canaries=1000, guesses=200)),
}
"""Of what is audited, a method and maybe an extension of it, what is protected, and sizes."""


@dataclass(frozen=True)
class Canaries:
    """A federation with canaries.

    Attributes:
        federation: canaries that are out have zeros as inputs.
        x, y: of all canaries as if they were in, ``(m, columns)`` and ``(m,)``.
        home: id of each one's client.
        included: the coins.
    """

    federation: Federation
    x: Tensor
    y: Tensor
    home: list[str]
    included: NDArray[np.bool_]


def federation(unit: str, sizes: Sizes, seed: int) -> Canaries:
    """Digits, and canaries as rows of these clients or as clients."""
    draw, m = np.random.default_rng([seed, 33]), sizes.canaries
    images, labels = load_digits(return_X_y=True)
    order = draw.permutation(len(images))
    each = m // sizes.clients if unit == "sample" else 1
    columns = each if unit == "sample" else m
    included = draw.random(m) < 0.5
    x, y = np.zeros((m, 64 + columns)), draw.integers(0, 10, m)
    x[np.arange(m), 64 + np.arange(m) % columns] = (64 + columns) ** 0.5
    inside = x * included[:, None]
    digits = [(f"d{i}", order[i * sizes.rows : (i + 1) * sizes.rows]) for i in range(sizes.clients)]
    arrays: dict[str, Any] = {}
    home = [f"c{j:05d}" for j in range(m)]
    for i, (name, rows) in enumerate(digits):
        own = slice(i * each, (i + 1) * each) if unit == "sample" else slice(0, 0)
        home[own] = [name] * (own.stop - own.start)
        padded = np.pad(images[rows] / 16, ((0, 0), (0, columns)))
        both = {"x_train": np.concatenate([padded, inside[own]]), "y_train": np.concatenate([labels[rows], y[own]])}
        arrays[name] = {**both, "x_test": padded[:1], "y_test": labels[rows][:1]}
    if unit == "client":
        arrays |= {name: {"x_train": inside[j, None], "y_train": y[j, None]} for j, name in enumerate(home)}
    made = Federation.from_arrays(arrays, num_classes=10)
    return Canaries(made, torch.from_numpy(x), torch.from_numpy(y), home, included)


def audit(name: str, privacy: Privacy, sizes: Sizes, seed: int, *, switched_off: bool = False) -> tuple[Audit, float]:
    """Guesses about the canaries of one run of ``name``, whose noise may be missing, and the epsilon that it claims."""
    canaries, watch = federation(privacy.unit, sizes, seed), Watch()
    rows = [len(client.train) for client in canaries.federation]
    name, _, part = name.partition(" ")
    method = build_method(name, {**TRAINING, "batch_size": max(rows), **_own(name, max(rows))})
    method = method.model_copy(update={"extensions": (*method.extensions, watch)})
    plan = make_private(method, privacy, sizes.rounds, rows, name=name)
    private = plan.method
    if switched_off:
        first, *others = private.extensions
        private = private.model_copy(update={"extensions": (first.model_copy(update={"noise": 0.0}), *others)})
    by_client = privacy.unit == "client"
    embedding = {"embedding": unbiased(rows[0])} if name == "flic-hl" else {}
    model = Model(**embedding, body=unbiased(8 if by_client else 16, relu=True), head=unbiased(10))
    run = Run(
        canaries.federation,
        private,
        model,
        name=name,
        rounds=sizes.rounds,
        seed=seed,
        dtype=torch.float64,
        evaluation=Evaluation(every=sizes.rounds),
        plan=Plan("stacked", 0, threads=1),
    )
    initial = {i: run.model(i) for i in dict.fromkeys(canaries.home[: 1 if by_client else None])}
    run.execute()
    score = of_anchors if part else of_clients if by_client else of_rows
    scores = score(canaries, watch, initial, run.server.sets["shared"])
    return guess(scores.numpy(), canaries.included, sizes.guesses), plan.compute_spending(sizes.rounds)


def _own(name: str, rows: int) -> dict[str, Any]:
    """Settings of FLIC: its calibration would take a gradient at a label alone, and out would not be nothing.

    Anchors begin at 0: their step, Adam's first, is a sign, and away from 0 it would say less of rows.
    """
    own = {"pretrain_epochs": 1, "pretrain_batch_size": rows, "lambda2": 0.0, "anchor_std": 1e-9}
    return own if name == "flic-hl" else {}


def of_rows(canaries: Canaries, watch: Watch, initial: Any, last: Any) -> Tensor:
    """Scores of rows, from their own client's replies."""
    scores = torch.zeros(len(canaries.y), dtype=torch.float64)
    for client, (chain, params) in initial.items():
        own = torch.tensor([home == client for home in canaries.home])
        before = None
        for seen in watch.seen:
            row = seen.ids.index(client)
            reply = {name: t[row] for name, t in seen.replies["shared"].items()}
            start = before if before is not None and "num_samples" not in seen.replies else seen.sent["shared"]
            change = {name: start[name] - t for name, t in reply.items()}
            scores[own] += along(chain, {**params, **start}, change, canaries.x[own], canaries.y[own])
            before = reply  # MR-MTL's clients go on from their own
    return scores


def of_anchors(canaries: Canaries, watch: Watch, initial: Any, last: Any) -> Tensor:
    """Scores of rows, from what their own client makes of the anchors of their classes."""
    scores = torch.zeros(len(canaries.y), dtype=torch.float64)
    for client, (_, params) in initial.items():
        own = torch.tensor([home == client for home in canaries.home])
        embedded = nn.functional.normalize(canaries.x[own] @ params["embedding.weight"].T, dim=1)
        for seen in watch.seen:
            step = seen.replies["anchors"]["mean"][seen.ids.index(client)] - seen.sent["anchors"]["mean"]
            scores[own] += (step[canaries.y[own]] * embedded).sum(1)
    return scores


def of_clients(canaries: Canaries, watch: Watch, initial: Any, last: Any) -> Tensor:
    """Scores of clients, from what the server sends."""
    ((chain, params),) = initial.values()
    sent = [*(seen.sent["shared"] for seen in watch.seen), last]
    scores = torch.zeros(len(canaries.y), dtype=torch.float64)
    for start, after in pairwise(sent):
        change = {name: start[name] - after[name] for name in start}
        scores += along(chain, {**params, **start}, change, canaries.x, canaries.y)
    return scores


def main() -> None:
    """Print what is not kept yet, and keep the table."""
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
    before = json.loads(KEPT.read_text())["rows"] if KEPT.exists() else []
    kept: list[dict[str, Any]] = []
    print("method          unit    budget  noise         bound: mean, most  right of guesses")
    cases = [(budget, False) for budget in BUDGETS] + [(BUDGETS[0], True)]
    for name, (unit, sizes) in METHODS.items():
        for budget, off in cases:
            of = {"method": name, "unit": unit, "canaries": sizes.canaries, "guesses": sizes.guesses}
            of |= {"epsilon": budget, "off": off}
            if same := [row for row in before if of.items() <= row.items() and len(row["bounds"]) == len(seeds)]:
                kept += same
                continue
            privacy = Privacy(unit=unit, epsilon=budget, delta=DELTA, clip=CLIP[unit])
            found = [audit(name, privacy, sizes, seed, switched_off=off)[0] for seed in seeds]
            bounds = [one.epsilon(DELTA) for one in found]
            right = sum(one.correct for one in found) / sum(one.guesses for one in found)
            noise = "switched off" if off else "on"
            said = f"{np.mean(bounds):5.2f} {max(bounds):5.2f}  {right:.3f}"
            print(f"{name:15s} {unit:7s} {budget:6.1f}  {noise:12s}  {said}", flush=True)
            kept.append({**of, "bounds": bounds, "right": right})
    KEPT.write_text(json.dumps({"delta": DELTA, "rows": kept}, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main()
