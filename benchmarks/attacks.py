"""Attacks on what leaves, with and without [privacy]: which labels a client holds, and whether a row was among its own.

    python benchmarks/attacks.py [SEEDS]

Ten clients with 20 digits of three or four labels each. The attacker is the server: it keeps what comes back, and has
500 digits of its own. It is asked about each client's labels, and about its 20 rows and 20 others of the same labels.
What is said is the area under the ROC curve, the mean over clients and seeds: 0.5 is chance, 1 is certainty. The
numbers are kept in docs/results/attacks.json; what is there is not run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from usage import usage
from watching import Watch

from perfed import Evaluation, Federation, Model, Run, build_method, hidden_layer, linear, mlp
from perfed.maths.aggregate import masked_mean
from perfed.privacy.apply import make_private
from perfed.privacy.settings import Privacy
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/attacks.json"
CLIENTS, ROWS, PUBLIC, ROUNDS, SEEDS = 10, 20, 500, 5, 10
PRIVACY = Privacy(epsilon=6.0, delta=1e-3)
CLIENT = PRIVACY.model_copy(update={"unit": "client"})
TRAINING = {"optimizer": "sgd", "lr": 0.05, "batch_size": 10, "local_epochs": 5}


@dataclass(frozen=True)
class Asked:
    """What the attacker is asked about.

    Attributes:
        federation: the clients, with their own rows.
        x, y: by client, its rows and then as many others of the same labels.
        public: inputs and labels of the attacker's own.
    """

    federation: Federation
    x: dict[str, Tensor]
    y: dict[str, Tensor]
    public: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Attacked:
    """A run, and what the server saw of it.

    Attributes:
        asked: the questions.
        run: of which only a client's own model is used, where the attacker has that too.
        watch: what the server sent and got.
        private: whether it was under [privacy].
    """

    asked: Asked
    run: Run
    watch: Watch
    private: bool


def questions(seed: int) -> Asked:
    """Digits by client and label."""
    draw = np.random.default_rng([seed, 34])
    images, labels = load_digits(return_X_y=True)
    images, free = images / 16, draw.permutation(len(labels))
    public, free = free[:PUBLIC], free[PUBLIC:]
    arrays: dict[str, Any] = {}
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    for i in range(CLIENTS):
        held = draw.choice(10, int(draw.integers(3, 5)), replace=False)
        wanted = np.resize(held, ROWS)
        pair = []
        for _ in range(2):
            picked = [free[labels[free] == label][: (wanted == label).sum()] for label in held]
            taken = np.concatenate(picked)
            free = free[~np.isin(free, taken)]
            pair.append(taken)
        own, other = pair
        arrays[f"c{i}"] = {
            "x_train": images[own],
            "y_train": labels[own],
            "x_test": images[other],
            "y_test": labels[other],
        }
        both = np.concatenate(pair)
        x[f"c{i}"], y[f"c{i}"] = torch.from_numpy(images[both]), torch.from_numpy(labels[both])
    known = torch.from_numpy(images[public]), torch.from_numpy(labels[public])
    return Asked(Federation.from_arrays(arrays, num_classes=10), x, y, known)


def attacked(name: str, seed: int, privacy: Privacy | None = None, **settings: Any) -> Attacked:
    """A run of a method, watched."""
    asked, watch = questions(seed), Watch()
    method = build_method(name, {**TRAINING, **settings})
    method = method.model_copy(update={"extensions": (*method.extensions, watch)})
    if privacy is not None:
        method = make_private(method, privacy, ROUNDS, [ROWS] * CLIENTS, name=name).method
    embedding = {"embedding": mlp((64,), 32)} if "flic" in name else {}
    run = Run(
        asked.federation,
        method,
        Model(**embedding, body=hidden_layer(64), head=linear(10)),
        name=name,
        rounds=ROUNDS,
        seed=seed,
        dtype=torch.float64,
        evaluation=Evaluation(every=ROUNDS),
        plan=Plan("stacked", 0, threads=1),
    )
    run.execute()
    return Attacked(asked, run, watch, privacy is not None)


# What is guessed from what -------------------------------------------------------------------------------------


def labels_by(extension: str, entry: str) -> Callable[[Attacked], float]:
    """Labels from an entry ``(clients, classes)`` that says of each class how much of it there is."""

    def attack(of: Attacked) -> float:
        sent = of.watch.seen[-1]
        areas = []
        for row, client in enumerate(sent.ids):
            held = np.isin(np.arange(10), of.asked.y[client].numpy())
            areas.append(roc_auc_score(held, sent.replies[extension][entry][row].numpy()))
        return float(np.mean(areas))

    return attack


def labels_by_residue(of: Attacked) -> float:
    """Labels of a client from what the server sends, for an attacker who knows all that the others sent.

    Without privacy it compares the anchors with the means of the others; with it, where all weigh the same, it takes
    the others' anchors from the sum. Scores are lengths, summed over rounds.
    """
    means = [*(seen.sent["anchors"]["mean"] for seen in of.watch.seen), of.run.server.sets["anchors"]["mean"]]
    ids = of.watch.seen[0].ids
    scores = torch.zeros(len(ids), 10, dtype=torch.float64)
    for seen, (before, after) in zip(of.watch.seen, pairwise(means), strict=True):
        sent, weight = seen.replies["anchors"]["mean"], seen.replies["anchors"]["weight"]
        for row in range(len(ids)):
            rest = torch.arange(len(ids)) != row
            others = masked_mean(sent[rest], weight[rest], before)
            away = after - others
            if of.private:
                away = len(ids) * after - (len(ids) - 1) * others - before
            scores[row] += away.norm(dim=1)
    held = [np.isin(np.arange(10), of.asked.y[client].numpy()) for client in ids]
    return float(np.mean([roc_auc_score(own, row.numpy()) for own, row in zip(held, scores, strict=True)]))


def rows_by(score: Callable[[Attacked, str, Tensor, Tensor], Tensor]) -> Callable[[Attacked], float]:
    """Membership of rows by a score, higher for those that were in."""

    def attack(of: Attacked) -> float:
        own = np.arange(2 * ROWS) < ROWS
        found = [score(of, client, x, of.asked.y[client]) for client, x in of.asked.x.items()]
        return float(np.mean([roc_auc_score(own, scores.detach().numpy()) for scores in found]))

    return attack


def by_span(of: Attacked, client: str, x: Tensor, y: Tensor) -> Tensor:
    """Rows in the span of the first layer's changes, which plain SGD makes of outer products with own rows."""
    changes = []
    for seen in of.watch.seen:
        row = seen.ids.index(client)
        changes.append(seen.replies["shared"]["body.0.weight"][row] - seen.sent["shared"]["body.0.weight"])
    stacked = torch.cat(changes)
    gram = stacked.T @ stacked
    ridge = 1e-9 * torch.linalg.eigvalsh(gram)[-1] * torch.eye(len(gram), dtype=gram.dtype)
    directions = x / x.norm(dim=1, keepdim=True)
    score: Tensor = -(directions * torch.linalg.solve(gram + ridge, directions.T).T).sum(1)
    return score


def by_means(of: Attacked, client: str, x: Tensor, y: Tensor) -> Tensor:
    """Rows whose features lie towards the class means that were sent, as seen from the attacker's own rows' means."""
    public_x, public_y = of.asked.public
    total = torch.zeros(len(x), dtype=x.dtype)
    for seen in of.watch.seen:
        row = seen.ids.index(client)
        body = {name: t[row] for name, t in seen.replies["shared"].items()}
        own, others = (_features(body, inputs, of.private) for inputs in (x, public_x))
        for label in y.unique():
            middle, spread = others[public_y == label].mean(0), others[public_y == label].std(0) + 1e-3
            towards = (seen.replies["prototypes"]["means"][row, label] - middle) / spread
            total += (y == label) * (((own - middle) / spread) @ towards)
    return total


def by_anchors(of: Attacked, client: str, x: Tensor, y: Tensor) -> Tensor:
    """Rows that are embedded near the anchor of their class; the attacker has the client's embedding too."""
    seen, (chain, _) = of.watch.seen[-1], of.run.model(client)
    anchors = seen.replies["anchors"]["mean"][seen.ids.index(client)]
    away: Tensor = (chain.get_submodule("embedding")(x) - anchors[y]).norm(dim=1)
    return -away


def by_loss(of: Attacked, client: str, x: Tensor, y: Tensor) -> Tensor:
    """Rows on which the client's own model errs least; the attacker has that model."""
    return -nn.functional.cross_entropy(of.run.predict(client, x), y, reduction="none")


def _features(body: Mapping[str, Tensor], x: Tensor, private: bool) -> Tensor:
    z = nn.functional.leaky_relu(nn.functional.linear(x, body["body.0.weight"], body["body.0.bias"]))
    return z * (PRIVACY.rows / z.norm(dim=1, keepdim=True)).clamp(max=1) if private else z


FLIC, MEANS = ("flic-hl", {"optimizer": "adam", "lr": 0.003}), ("fedrep", {"extensions": ["prototypes"]})
ATTACKS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], Callable[[Attacked], float]]] = {
    "labels, from the classes of FLIC's anchors": (FLIC, FLIC, labels_by("anchors", "weight")),
    "labels, from FedPAC's class counts": (("fedpac", {}), MEANS, labels_by("prototypes", "counts")),
    "labels, from FLIC's anchors at the server, all other clients known": (FLIC, FLIC, labels_by_residue),
    "rows, from FedPAC's class means": (("fedpac", {}), MEANS, rows_by(by_means)),
    "rows, from FLIC's anchors, the embedding known": (FLIC, FLIC, rows_by(by_anchors)),
    "rows, from FedRep's body": (("fedrep", {}), ("fedrep", {}), rows_by(by_span)),
    "rows, from the loss of FedRep's own models": (("fedrep", {}), ("fedrep", {}), rows_by(by_loss)),
}
"""What is guessed, from a run without privacy and one with it: FedPAC's statistics have a mechanism as an extension."""
OF_CLIENTS = {labels_by_residue}
"""Attacks on clients, which the private run protects; in all others rows are."""


def areas(seeds: Sequence[int], names: Sequence[str] = (*ATTACKS,)) -> dict[str, dict[str, list[float]]]:
    """Area under the ROC curve of each attack by seed, without privacy ("plain") and with it ("private")."""
    found: dict[str, dict[str, list[float]]] = {name: {"plain": [], "private": []} for name in names}
    for seed in seeds:
        made: dict[str, Attacked] = {}
        for name in names:
            plain, private, attack = ATTACKS[name]
            privacy = CLIENT if attack in OF_CLIENTS else PRIVACY
            for what, (method, settings), own in (("plain", plain, None), ("private", private, privacy)):
                key = f"{method} {settings} {own}"
                if key not in made:
                    made[key] = attacked(method, seed, own, **settings)
                found[name][what].append(attack(made[key]))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half the width of its 95 % interval (Student)."""
    error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1) if len(values) > 1 else float("nan")
    return float(np.mean(values)), float(error)


def main() -> None:
    """Run what is not kept yet, print the table and keep it."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    before = json.loads(KEPT.read_text())["areas"] if KEPT.exists() else {}
    before = {name: of for name, of in before.items() if len(of["plain"]) == number}
    before |= areas(range(number), [name for name in ATTACKS if name not in before])
    found = {name: before[name] for name in ATTACKS}
    for name, of in found.items():
        cells = ("{:.3f} +- {:.3f}".format(*interval(of[what])) for what in ("plain", "private"))
        print(f"{name:68s} {'   '.join(cells)}")
    content = {"epsilon": PRIVACY.epsilon, "delta": PRIVACY.delta, "areas": found}
    KEPT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main()
