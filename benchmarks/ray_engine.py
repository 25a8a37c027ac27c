"""Ray workers against one process: MNIST CNN, 20 clients, FedAvg and FedRep.

``python benchmarks/ray_engine.py [--rounds 10] [--clients 20] [--workers 2] [--chunk 1]``: in every round each method
is run by one-thread Ray workers, in chunks of so many clients, and by this process's engine with as many threads, in
turns. The overhead is that of a round in which nobody trains: everything is sent and comes back, by the same workers.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from math import ceil
from statistics import median

import limits
import ray
import torch

from perfed import Federation, Model, Participation, build_method, cnn, linear, load, use_workers
from perfed.engine.engine import InProcessEngine
from perfed.engine.initial import Initialiser
from perfed.engine.ray.engine import RayEngine
from perfed.engine.server import Server
from perfed.training.plan import Plan, use_threads

METHODS = {"fedavg": {"local_epochs": 1}, "fedrep": {"local_epochs": 10, "body_epochs": 1}}
IDLE = {"fedavg": {"local_epochs": 0}, "fedrep": {"local_epochs": 0, "body_epochs": 0}}


def server_of(method: str, epochs: dict[str, int], federation: Federation, rounds: int, plan: Plan) -> Server:
    """A server of the CNN of 16 and 32 channels, in mini-batches of 50."""
    model = Model(body=cnn((16, 32), 5, 128, padding=(0, 1), activation="leaky-relu"), head=linear(10))
    initialiser = Initialiser(build_method(method, {"lr": 0.01, "batch_size": 50, **epochs}), model, 0, torch.float32)
    engine = RayEngine if plan.engine == "ray" else InProcessEngine
    return Server(federation, initialiser, plan, Participation(), rounds, engine=engine)


def seconds(server: Server, number: int) -> float:
    """Of one round."""
    with use_threads(server.plan.threads):
        begin = time.perf_counter()
        server.round(number)
        return time.perf_counter() - begin


def measured(method: str, federation: Federation, rounds: int, workers: int, chunk: int) -> str:
    """A line on the median round of both engines, after one that warms up."""
    use_workers(workers)
    ways = (
        (METHODS, Plan("ray", chunk=chunk)),
        (METHODS, Plan("auto", threads=workers)),
        (IDLE, Plan("ray", chunk=chunk)),
    )
    servers = [server_of(method, epochs[method], federation, rounds + 1, plan) for epochs, plan in ways]
    with ExitStack() as held:
        ray.init(address="local", num_cpus=2 * workers, include_dashboard=False, logging_level="ERROR")
        held.callback(ray.shutdown)
        for server in servers:
            held.enter_context(server.working())
            server.prepare()
        times = [[seconds(server, number) for server in servers] for number in range(1, rounds + 2)]
    on_ray, here, idle = (median(column) for column in zip(*times[1:], strict=True))
    plain = server_of(method, METHODS[method], federation, 1, Plan("sequential", threads=1))
    plain.prepare()
    share = limits.measure().share(*limits.counted(lambda: plain.round(1)), min(on_ray, here))
    chunks = ceil(len(federation.clients) / chunk)
    return (
        f"{method}: a round {on_ray:.3f} s with {workers} Ray workers, {here:.3f} s here with {workers} threads "
        f"(ratio {on_ray / here:.2f}); overhead {1000 * idle / chunks:.1f} ms per chunk and round; "
        f"the faster: {share}"
    )


def main() -> None:
    """Print a line per method."""
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 10), ("clients", 20), ("workers", 2), ("chunk", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    federation = load("mnist", {"clients": given.clients}, seed=0)
    for method in METHODS:
        print(measured(method, federation, given.rounds, given.workers, given.chunk), flush=True)


if __name__ == "__main__":
    main()
