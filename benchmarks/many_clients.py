"""Time of a round and memory with 100 to 100,000 clients of which 100 take part: the linear problem.

``python benchmarks/many_clients.py [--rounds N] [--participants N]``

FedRep-SRPFL with dynamic speeds: 100 clients are invited, of which 25, 50 and then all are used; rounds with all count.
One thread; a process of its own for each number of clients. Samples are drawn when they are used. A round should take
the same time whatever the number of clients, and memory should grow by what is known of a client and its personal
parameters.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch

from perfed.datasets import load
from perfed.engine.server import Server
from perfed.engine.setup import Setup
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.training.plan import Plan

NUMBERS = (100, 1000, 10_000, 100_000)


def measure(clients: int, participants: int, rounds: int) -> dict[str, float]:
    """Seconds to the first round, median seconds of a round, and peak memory of this process."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    federation = load("linear-domains", {"clients": clients, "deferred": True}, seed=0)
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100, "local_epochs": 5}
    setup = Setup(build_method("fedrep", {}, training), Model(body=linear(2), head=linear(1)), 0, torch.float32)
    policy = Participation(
        policy="srpfl",
        rate=min(1.0, participants / clients),
        last_round="sampled",
        srpfl={"first": max(1, participants // 4), "rule": "fixed", "stage_rounds": 5},
    )
    server = Server(federation, setup, Plan("stacked"), policy, rounds + 1, clock=Clock(speeds="dynamic"))
    server.prepare()
    started = time.perf_counter() - begun
    seconds = []
    for number in range(1, rounds + 1):
        before = time.perf_counter()
        if len(server.round(number).participants) == participants:
            seconds.append(time.perf_counter() - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"start_s": started, "round_ms": 1000 * median(seconds), "peak_mb": peak}


def main() -> None:
    """Measure each number of clients in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--clients", type=int, help="measure this number in this process and print JSON")
    options = parser.parse_args()
    if options.clients is not None:
        print(json.dumps(measure(options.clients, options.participants, options.rounds)))
        return
    print("| clients | start s | round ms | peak MB |\n|---|---|---|---|")
    for clients in NUMBERS:
        own = [sys.executable, __file__, "--clients", str(clients)]
        more = ["--rounds", str(options.rounds), "--participants", str(options.participants)]
        found = json.loads(subprocess.run([*own, *more], check=True, capture_output=True, text=True).stdout)
        print(f"| {clients} | {found['start_s']:.1f} | {found['round_ms']:.1f} | {found['peak_mb']:.0f} |")


if __name__ == "__main__":
    main()
