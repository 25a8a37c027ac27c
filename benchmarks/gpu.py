"""Stacked training on a GPU, ready to run where there is one: the figures of no GPU are known yet.

``python benchmarks/gpu.py [--device cuda] [--clients 100,1000]`` trains FedAvg, FedRep and Ditto on made rows, all
clients in each round, with an MLP and a small CNN. It prints clients trained a second, achieved GFLOP/s, and their
share of what a matrix product reaches on that device. ``--device cpu`` does the same on the processor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import limits
import numpy as np
import torch

import perfed
from perfed.errors import PerfedError
from perfed.model.chain import StageFactory
from perfed.training.plan import Plan, open_device

NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[], StageFactory]]] = {
    "MLP 784-256-128-64-10": ((784,), lambda: perfed.mlp((256, 128), 64, final_activation=True)),
    "CNN 16-32, 128": ((1, 28, 28), lambda: perfed.cnn((16, 32), 5, 128)),
}
EPOCHS = {"fedavg": {"local_epochs": 1}, "fedrep": {"local_epochs": 5, "body_epochs": 1}, "ditto": {"local_epochs": 1}}
PASSES = {"fedavg": 1.0, "fedrep": 1 + 5 / 3, "ditto": 2.0}
"""Passes, forward and backward, of the network per row and round; an epoch of the head is a forward one, a third."""
ROWS, BATCH, ROUNDS = 60, 10, 6


def flop_a_row(name: str) -> float:
    """Return what a forward and a backward pass of the network take for one row, counted by torch."""
    shape, body = NETWORKS[name]
    network = torch.nn.Sequential(made := body()(shape), torch.nn.Linear(made(torch.zeros(1, *shape)).shape[1], 10))
    return limits.counted(lambda: network(torch.randn(BATCH, *shape)).sum().backward())[0] / BATCH


def seconds(name: str, method: str, clients: int, device: str) -> float:
    """Return the median seconds of a round."""
    shape, body = NETWORKS[name]
    rng, data = np.random.default_rng(0), {}
    for i in range(clients):
        x, y = rng.normal(size=(ROWS, *shape)).astype(np.float32), np.arange(ROWS) % 10
        data[f"{i:05d}"] = {"x_train": x, "y_train": y, "x_test": x[:5], "y_test": y[:5]}
    laps = limits.Laps()
    settings = {"lr": 1e-2, "optimizer": "sgd", "batch_size": BATCH, **EPOCHS[method]}
    perfed.Run(
        perfed.Federation.from_arrays(data), perfed.build_method(method, settings),
        perfed.Model(body=body(), head=perfed.linear(10)), rounds=ROUNDS, device=device,
        plan=Plan("auto"), evaluation=perfed.Evaluation(every=ROUNDS + 1), callbacks=[laps],
    ).execute()  # fmt: skip
    return float(np.median(laps.seconds))


def main() -> int:
    """Print a line for each network, method and number of clients; 2 where the device is not there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", default="100,1000", help="numbers of clients, with commas")
    parser.add_argument("--methods", default=",".join(EPOCHS))
    arguments = parser.parse_args()
    try:
        device = open_device(arguments.device, f"--device {arguments.device}")
    except PerfedError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    most = limits.product_gflops(8192 if device.type == "cuda" else 1024, device)
    print(f"{device}: {most:.0f} GFLOP/s in a matrix product")
    for clients in map(int, arguments.clients.split(",")):
        for name in NETWORKS:
            for method in arguments.methods.split(","):
                took = seconds(name, method, clients, arguments.device)
                achieved = clients * ROWS * PASSES[method] * flop_a_row(name) / took / 1e9
                told = f"{clients / took:.0f} clients a second, {achieved:.0f} GFLOP/s ({achieved / most:.1%})"
                print(f"{clients} clients, {name}, {method}: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
