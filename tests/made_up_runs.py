"""Directories of finished runs whose numbers a test chooses."""

import csv
import json

import numpy as np

from perfed.engine.evaluate import spread
from perfed.run.directory import RunDirectory


def write(
    folder,
    method,
    seed,
    values,
    *,
    metric="accuracy",
    curve=(),
    weights=None,
    rows=None,
    losses=(),
    auc=(),
    ends=None,
):
    """A finished run whose clients end with ``values``; ``ends``: what the summary has where it is not of these.

    ``rows``: that each client was tested on, 10 if not given; ``weights``: the same, which count in means.
    """
    where = folder / f"{method.replace(':', '.')}-{seed}"
    where.mkdir()
    more = "" if weights is None else '[evaluation]\nweights = "samples"\n'
    RunDirectory(where).write_config(f'method = "{method}"\nseed = {seed}\n{more}')
    tested = rows or weights or [10] * len(values)
    with (where / "clients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "n_train", "n_test", f"{metric}_before", f"{metric}_after", "rounds"])
        for number, value in enumerate(values):
            there = "" if np.isnan(value) else value
            table.writerow([f"site-{number}", 5, tested[number], there, "", 1])
    measured = {metric: spread([value for value in values if not np.isnan(value)])}
    lines = [{"round": number, "metrics": {metric: spread([mean])}} for number, mean in enumerate(curve, 1)]
    for line, loss in zip(lines, losses, strict=bool(losses)):
        line["train_loss"] = loss
    for line, area in zip(lines, auc, strict=bool(auc)):
        line["metrics"]["auc"] = spread([area])
    measured |= {"auc": spread(auc[-1:])} if auc else {}
    measured |= {} if ends is None else {name: spread([value]) for name, value in ends.items()}
    (where / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"method": method, "dataset": "made up", "seed": seed, "rounds": len(lines), "wall_seconds": 1.0}
    (where / "summary.json").write_text(json.dumps({**summary, "metrics": measured}))
    return where
