"""Tables of privacy in docs/results.md and docs/privacy.md, from the numbers that ``benchmarks/`` keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markdown_tables import table

FOLDER = Path(__file__).parent / "results"
EXAMPLE = Path(__file__).parent.parent / "benchmarks/private_example.toml"
SCHOOL = {"fedavg": "FedAvg", "local": "Local", "mr-mtl": "MR-MTL (lambda 1)"}
HEART_AT = "0.1"
TITLES = {"local": "Local", "fedavg-ft": "FedAvg-FT", "mr-mtl": "MR-MTL"}


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _mse(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values):.4f}".replace("0.", ".")


def _percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def school() -> str:
    """Test MSE of the schools, a column for each way of making a run."""
    kept = _kept("private-school")
    rows = [["published", *(f"{kept['published'][name]:.4f}".replace("0.", ".") for name in SCHOOL)]]
    rows += [[way, *(_mse(scores[name]) for name in SCHOOL)] for way, scores in kept["scores"].items()]
    scores = table(["test MSE", *SCHOOL.values()], rows)
    said = {"theirs": "noise, theirs", "poisson": "noise, Poisson samples", "honest": "epsilon of theirs, as passes"}
    spread = [[said[way], *(f"{value:.1f}" for value in of)] for way, of in kept["least, median, most"].items()]
    spread.append(["noise, passes", *[f"{kept['noise of passes']:.1f}"] * 3])
    schools = table(["by school", "least", "median", "most"], spread)
    return f"`python benchmarks/private_school.py`\n\n{scores}\n\n{schools}"


def centaur() -> str:
    """Distance at rest by epsilon and by dimension, and the slopes."""
    kept = _kept("centaur-linear")
    rows = [
        [f"{row['d']}", f"{row['epsilon']:g}", f"{row['noise']:.1f}", f"{np.mean(row['distances']):.4f}"]
        for row in (*kept["by epsilon"], *kept["by d"])
    ]
    said = {
        "epsilon": "of the plateau in 1 / epsilon",
        "noise": "of the plateau in the noise multiplier",
        "noise in 1 / epsilon": "of the noise multiplier in 1 / epsilon",
        "d": "of the plateau in d",
    }
    slopes = [[what, f"{kept['slopes'][name][0]:.2f} ± {kept['slopes'][name][1]:.2f}"] for name, what in said.items()]
    first = table(["d", "epsilon", "noise multiplier", "distance at rest"], rows)
    return f"`{kept['command']}`\n\n{first}\n\n{table(['slope', 'measured [95 %]'], slopes)}"


def centaur_mnist() -> str:
    """Accuracy on MNIST by epsilon, and what each method's settings were chosen from."""
    kept = _kept("centaur-mnist")
    names = {"centaur": "CENTAUR (FedRep)", "fedavg-ft": "FedAvg-FT", "local": "Local"}
    budgets = [*kept["accuracy"]["centaur"]]
    rows = []
    for name, title in names.items():
        of = kept["accuracy"][name]
        rows.append([title, *(_percent(of[budget]) if budget in of else "" for budget in budgets)])
    header = ["accuracy", *("without privacy" if budget == "none" else f"epsilon {budget}" for budget in budgets)]
    tries = []
    for name, title in names.items():
        (rate, cut), of = kept["chosen"][name], [100 * score for score in kept["tries"][name]]
        tries.append([title, f"{rate:g}", "" if name == "local" else f"{cut:g}", f"{min(of):.1f} to {max(of):.1f}"])
    seeds = len(kept["accuracy"]["local"]["none"])
    chosen = table(["chosen", "rate", "cut", f"{len(kept['tries']['local'])} tries, held-out rows"], tries)
    return f"`python benchmarks/centaur_mnist.py` ({seeds} seeds)\n\n{table(header, rows)}\n\n{chosen}"


def heart() -> str:
    """Accuracy of FedAvg by budget, and what their noise costs."""
    rows, kept = [], _kept("private-heart")
    for name, found in kept.items():
        mean, spread = found["published"]
        cells = ["none" if name == "none" else name, f"{100 * mean:.1f} ± {100 * spread:.1f}"]
        costs = [""] * 2
        if name != "none":
            costs = [
                f"{min(values):.3g} to {max(values):.3g}"
                for values in ([cost[way] for cost in found["costs"].values()] for way in ("poisson", "passes"))
            ]
        honest = "" if name == "none" else _percent(found["honest"])
        rows.append([*cells, _percent(found["theirs"]), *costs, honest])
    header = [
        "epsilon",
        "published",
        "ours, their noise",
        "epsilon of that noise, 1,500 Poisson samples",
        "passes",
        "ours, honest",
    ]
    more = kept[HEART_AT]["more seeds"]
    said = {"theirs": "ours, noise of its own for each hospital", "same": "ours, the same noise at all"}
    seeds = [[said[way], str(len(of)), _percent(of)] for way, of in more.items()]
    mean, spread = kept[HEART_AT]["published"]
    seeds.insert(0, ["published", "5", f"{100 * mean:.1f} ± {100 * spread:.1f}"])
    second = table([f"epsilon {HEART_AT}, their noise", "seeds", "accuracy"], seeds)
    return f"`python benchmarks/private_heart.py`\n\n{table(header, rows)}\n\n{second}"


def example() -> str:
    """The worked example: its file, its command, and accuracy and AUC by budget."""
    kept = _kept("private-example")
    methods = [name for name in TITLES if name in kept["rows"]["none"]]
    header = ["epsilon", "spent", *(f"{TITLES[name]}, {what}" for name in methods for what in ("accuracy", "AUC"))]
    rows = []
    for name, found in kept["rows"].items():
        cells = [_percent(found[method][metric]) for method in methods for metric in ("accuracy", "auc")]
        rows.append(["without privacy" if name == "none" else name, str(found.get("spent", "")), *cells])
    said = f"```toml\n{EXAMPLE.read_text()}```\n\n```\n{kept['command']}\n```"
    return f"{said}\n\n{table(header, rows)}"


def results() -> dict[str, str]:
    """Tables of docs/results.md by the names of their places."""
    return {
        "private school": school(),
        "centaur": centaur(),
        "centaur mnist": centaur_mnist(),
        "private heart": heart(),
    }
