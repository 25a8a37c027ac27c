"""Blocks for the cache: clients stacked a few at a time against all at once, and the share of the machine's limits.

``python benchmarks/blocks.py [--clients 100,1000] [--json FILE]`` trains Local on made rows with two networks, by SGD
and by Adam, batches of 10, one thread. A row is a number of clients in a stack: all its steps are done before the next
stack begins. It prints processor microseconds per client and step, what ``Plan("auto")`` chose, and how many GFLOP/s
and GB/s that is, beside those of a matrix product and of a copy here. Bytes are those of parameters, gradients and
moments, each read and written once a step where the optimiser does: a cache may hold some of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import limits
import numpy as np
import torch

import perfed
from perfed.training.plan import EngineName, Plan

NETWORKS = {"15-64-64-20": (15, 64, 64, 20), "784-256-128-64-10": (784, 256, 128, 64, 10)}
PASSES = {"sgd": 4, "adam": 8}
"""Numbers read or written per parameter and step: gradient written and read, parameter both; Adam's moments both."""
ROWS, BATCH, EPOCHS, ROUNDS = 60, 10, 3, 4


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def seconds(sizes: Sequence[int], optimizer: str, clients: int, plan: Plan) -> float:
    """Return processor seconds of a round of Local."""
    rng = np.random.default_rng(0)
    arrays = {}
    for i in range(clients):
        x, y = rng.normal(size=(ROWS, sizes[0])).astype(np.float32), np.arange(ROWS) % sizes[-1]
        arrays[f"{i:04d}"] = {"x_train": x, "y_train": y, "x_test": x[:5], "y_test": y[:5]}
    method = perfed.build_method(
        "local", {"lr": 1e-3, "optimizer": optimizer, "batch_size": BATCH, "local_epochs": EPOCHS}
    )
    body = perfed.mlp(tuple(sizes[1:-2]), sizes[-2], final_activation=True)
    laps = limits.Laps(clock=_processor)
    perfed.Run(
        perfed.Federation.from_arrays(arrays), method, perfed.Model(body=body, head=perfed.linear(sizes[-1])),
        rounds=ROUNDS, plan=plan, evaluation=perfed.Evaluation(every=ROUNDS + 1), callbacks=[laps],
    ).execute()  # fmt: skip
    return float(laps.seconds.min())


def main() -> None:
    """Print a table for each network and optimiser."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", default="100", help="numbers of clients, with commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    here = limits.measure()
    print(f"this machine, one thread: {here.gflops:.0f} GFLOP/s, {here.gbytes:.1f} GB/s")
    kept: list[dict[str, Any]] = []
    for clients in map(int, arguments.clients.split(",")):
        for name, sizes in NETWORKS.items():
            parameters = sum(a * b + b for a, b in itertools.pairwise(sizes))
            for optimizer, passes in PASSES.items():
                steps = clients * EPOCHS * ROWS // BATCH
                print(f"\n{clients} clients, {name}, {optimizer}: {4e-3 * parameters * passes / 2:.0f} kB a client")
                for chunk in (1, 4, 8, 32, 128, 0, None):
                    if chunk is not None and chunk >= clients:
                        continue
                    engine: EngineName = "auto" if chunk is None else "stacked"
                    plan = Plan(engine, chunk or 0, threads=1, remember=False)
                    each = seconds(sizes, optimizer, clients, plan) / steps
                    chosen = "" if chunk is not None else f" ({plan.describe()[1:]})"
                    label = "auto" if chunk is None else str(chunk or "all")
                    share = here.share(6 * parameters * BATCH, 4 * parameters * passes, each)
                    print(f"{label:>5}: {1e6 * each:7.1f} us, {share}{chosen}", flush=True)
                    kept.append(
                        {"clients": clients, "network": name, "optimizer": optimizer, "stack": label, "us": 1e6 * each}
                    )
    if arguments.json:
        command = " ".join(["python", *sys.argv])
        arguments.json.write_text(json.dumps({"command": command, "limits": here._asdict(), "rows": kept}, indent=1))


if __name__ == "__main__":
    main()
