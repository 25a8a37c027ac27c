"""Ray workers against one process: MNIST CNN, 20 clients, FedAvg and FedRep.

``python benchmarks/ray_engine.py [--rounds 10] [--clients 20] [--workers 2]``: in every round each method is run by
one-thread Ray workers, one client per chunk, and by this process's engine with as many threads, in turns. The overhead
of a chunk is what the workers' time (wall time x workers) has beyond the chunks' own, which one of them does alone.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median

import torch

from perfed import Federation, Model, Participation, build_method, cnn, linear, load, use_workers
from perfed.engine.engine import InProcessEngine
from perfed.engine.ray.engine import RayEngine
from perfed.engine.server import Server
from perfed.engine.setup import Setup
from perfed.training.plan import Plan, use_threads

METHODS = {"fedavg": {"local_epochs": 1}, "fedrep": {"local_epochs": 10, "body_epochs": 1}}


def server_of(method: str, federation: Federation, rounds: int, plan: Plan) -> Server:
    """A server of the CNN of 16 and 32 channels, in mini-batches of 50."""
    model = Model(body=cnn((16, 32), 5, 128, padding=(0, 1), activation="leaky-relu"), head=linear(10))
    setup = Setup(build_method(method, {"lr": 0.01, "batch_size": 50, **METHODS[method]}), model, 0, torch.float32)
    engine = RayEngine if plan.engine == "ray" else InProcessEngine
    return Server(federation, setup, plan, Participation(), rounds, engine=engine)


def seconds(server: Server, number: int) -> float:
    """Of one round."""
    with use_threads(server.plan.threads):
        begin = time.perf_counter()
        server.round(number)
        return time.perf_counter() - begin


def measured(method: str, federation: Federation, rounds: int, workers: int) -> str:
    """A line on the median round of both engines, after one that warms up."""
    use_workers(workers)
    plans = {"ray": Plan("ray", chunk=1), "here": Plan("auto", threads=workers), "one": Plan("sequential", threads=1)}
    servers = {name: server_of(method, federation, rounds + 1, plan) for name, plan in plans.items()}
    with ExitStack() as held:
        for server in servers.values():
            held.enter_context(server.working())
            server.prepare()
        times = [{name: seconds(server, n) for name, server in servers.items()} for n in range(1, rounds + 2)][1:]
    ray, here, one = (median(row[name] for row in times) for name in servers)
    overhead = 1000 * (workers * ray - one) / len(federation.clients)
    return (
        f"{method}: Ray, {workers} workers {ray:.3f} s; here, {workers} threads {here:.3f} s (ratio {ray / here:.2f}); "
        f"one client at a time, 1 thread {one:.3f} s; overhead {overhead:.1f} ms per chunk and round"
    )


def main() -> None:
    """Print a line per method."""
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 10), ("clients", 20), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    federation = load("mnist", {"clients": given.clients}, seed=0)
    for method in METHODS:
        print(measured(method, federation, given.rounds, given.workers), flush=True)


if __name__ == "__main__":
    main()
