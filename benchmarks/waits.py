"""What a person waits for: comparisons, evaluations, ``perfed predict`` and ``export``, ``make run``.

``python benchmarks/waits.py [--only PART ...]`` prints wall and processor seconds with the aims. Each part makes what
it needs. ``compare``: the command with 12 short runs, beside the training time of these. ``evaluate``: an evaluation of
all clients, beside forward passes of the same rows in the same cohorts; least processor time of ten tries. ``model``:
both commands on one client's model. ``make``: what ``make run`` does after set-up. A busy machine multiplies wall
seconds; imports are the same work each time.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import limits
import numpy as np
import torch
from torch import Tensor

import perfed
from perfed.client_model.export import FORMATS
from perfed.data.csv_text import csv_text
from perfed.engine.evaluate import predict
from perfed.model.chain import StageFactory
from perfed.training.cohort import Cohort

ROOT = Path(__file__).parent.parent
EXPERIMENT = "digits-label-skew"
SHORT = ("--methods", "local,fedavg-ft,fedrep,fedpac", "--seeds", "0..2", "--engine", "stacked", "plan.threads=1")
ROWS, CLIENTS, TRIES = 200, 20, 10
NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[], StageFactory]]] = {
    "MLP 64-64-32-10": ((64,), lambda: perfed.mlp((64,), 32)),
    "CNN 16-32, 128": ((1, 28, 28), lambda: perfed.cnn((16, 32), 5, 128)),
}


def waited(*command: str) -> tuple[float, float]:
    """Run a command; return wall seconds, and processor seconds of it and its own processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def said(what: str, seconds: tuple[float, float], aim: str) -> None:
    """Print a line."""
    print(f"{what}: {seconds[0]:.1f} s ({seconds[1]:.1f} s of processor); aim {aim}", flush=True)


def compare(folder: Path) -> None:
    """Print the time of a comparison over the training time of its runs."""
    out = folder / "short"
    found = waited("perfed", "compare", EXPERIMENT, *SHORT, "--out", str(out))
    summaries = [json.loads(file.read_text()) for file in out.glob("*/*/summary.json")]
    training = sum(summary["training_seconds"] for summary in summaries)
    said(f"compare of {len(summaries)} short runs", found, f"1.3 x their training, here {1.3 * training:.1f} s")
    print(f"  {found[0] / training:.2f} x the training time of {training:.1f} s")


def evaluate(folder: Path) -> None:
    """Print the time of an evaluation over that of forward passes of the same rows."""
    torch.set_num_threads(1)
    for name, (shape, body) in NETWORKS.items():
        rng, data = np.random.default_rng(0), {}
        for i in range(CLIENTS):
            x, y = rng.normal(size=(ROWS, *shape)).astype(np.float32), np.arange(ROWS) % 10
            data[f"{i:03d}"] = {"x_train": x[:20], "y_train": y[:20], "x_test": x, "y_test": y}
        method, network = perfed.build_method("fedavg"), perfed.Model(body=body(), head=perfed.linear(10))
        run = perfed.Run(perfed.Federation.from_arrays(data), method, network, rounds=1)
        run.execute()
        whole = limits.least(partial(run.server.evaluate, "test"), TRIES, time.process_time)
        cohorts = [*run.server.own_models([*run.server.clients], 1)]
        held = [(cohort, [x for x, *_ in cohort.iterate_windows(cohort.samples("test"))]) for cohort in cohorts]
        alone = limits.least(partial(_forward, method, held), TRIES, time.process_time)
        each = f"{1e3 * whole:.1f} ms of processor, forward pass {1e3 * alone:.1f} ms"
        print(f"evaluation, {name}: {each}: {whole / alone:.2f} x; aim 1 x", flush=True)


def _forward(method: perfed.Method, held: list[tuple[Cohort, list[Tensor]]]) -> None:
    for cohort, windows in held:
        for x in windows:
            predict(method, cohort, x, [])


def model(folder: Path) -> None:
    """Print what ``predict`` and ``export`` take."""
    run, rows = folder / "one", folder / "rows.csv"
    small = ("--method", "fedpac", "rounds=2", "--engine", "stacked", "plan.threads=1", "--out", str(run))
    waited("perfed", "run", EXPERIMENT, *small)
    pixels = np.random.default_rng(0).random((50, 64))
    rows.write_text(csv_text([[f"x{j}" for j in range(64)], *pixels.tolist()]))
    site = (run / "clients.csv").read_text().splitlines()[1].split(",")[0]
    for command in (
        ("predict", str(run), str(rows), "--site", site, "--out", str(folder / "out.csv")),
        *(("export", str(run), "--site", site, "--format", kind) for kind in FORMATS),
    ):
        said(f"{command[0]}, {command[-1] if command[0] == 'export' else 'CSV'}", waited("perfed", *command), "4 s")


def make(folder: Path) -> None:
    """Print what the comparisons of ``make run`` take."""
    lines = subprocess.run(
        ["make", "--dry-run", "run", f"OUT={folder / 'made'}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()  # fmt: skip
    commands = [shlex.split(line)[1:] for line in lines if "/perfed compare " in line]
    seconds = [waited("perfed", *command) for command in commands]
    for command, each in zip(commands, seconds, strict=True):
        said(f"  {command[1]}", each, "none of its own")
    said("make run", (sum(wall for wall, _ in seconds), sum(used for _, used in seconds)), "30 s")


PARTS = {"compare": compare, "evaluate": evaluate, "model": model, "make": make}


def main() -> None:
    """Print what each part took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    for part in parser.parse_args().only:
        with TemporaryDirectory() as folder:
            PARTS[part](Path(folder))


if __name__ == "__main__":
    main()
