"""How near stacked training of MLPs comes to what the machine can do: single steps, and blocks for the cache.

``python benchmarks/blocks.py [--networks …] [--stacks …] [--clients …] [--optimizers …] [--json FILE]``, each with
commas between several: batches of 10, one thread, processor time. First the steps of one local epoch with SGD, for
stacks of few clients and of many, the least of turns:

* *perfed*, as it trains; *autograd*, the same with gradients that autograd finds;
* *by hand*: the same arithmetic in buffers that are kept, without mini-batches, classes or Python around it;
* *fused*: the update inside the product that is the gradient, another rounding: a bound, and no way of perfed's;
* *products*: the matrix products alone.

FLOP and bytes are counted (:func:`limits.counted`), as if no cache were there. Then rounds of Local on made rows. A row
is a number of clients in a stack: all its steps are done before the next stack begins, and ``auto`` is what
``Plan("auto")`` chose. Its bytes are those of parameters, gradients and moments, each read and written once a step
where the optimiser does. Shares are of a matrix product and of a copy here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import limits
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import perfed
from perfed.system import keep_freed_memory, peak_memory_mb
from perfed.training import fit
from perfed.training.batches import Samples
from perfed.training.optim import Group, Optimizer
from perfed.training.plan import EngineName, Plan
from perfed.training.step import Step, mean_loss

NETWORKS = {"15-64-64-20": (15, 64, 64, 20), "784-256-128-64-10": (784, 256, 128, 64, 10)}
PASSES = {"sgd": 4, "adam": 8}
"""Numbers read or written per parameter and step: gradient written and read, parameter both; Adam's moments both."""
ROWS, BATCH, EPOCHS, ROUNDS = 60, 10, 3, 4
RATE = 1e-3


class ByHand:
    """Steps of SGD on a stack of MLPs, each with the same mini-batch again; nothing is allocated.

    Attributes:
        fused: whether a gradient of weights is added to them by the product that makes it.
        update: whether anything but products is done.
    """

    def __init__(self, sizes: Sequence[int], clients: int, *, fused: bool = False, update: bool = True) -> None:
        self.fused, self.update = fused, update
        torch.manual_seed(0)
        self.weights = [torch.randn(clients, b, a) / a**0.5 for a, b in itertools.pairwise(sizes)]
        self.biases = [torch.zeros(clients, size) for size in sizes[1:]]
        self.values = [torch.randn(clients, BATCH, size) for size in sizes]
        self.grads = [torch.randn(clients, BATCH, size) for size in sizes]
        self.of_weights, self.of_biases = ([torch.zeros_like(t) for t in ts] for ts in (self.weights, self.biases))
        self.target = F.one_hot(torch.arange(BATCH) % sizes[-1], sizes[-1]).float()

    def epoch(self) -> None:
        """Take the steps of a local epoch."""
        for _ in range(ROWS // BATCH):
            self.forward()
            self.backward()
            if self.update and not self.fused:
                params, grads = [*self.weights, *self.biases], [*self.of_weights, *self.of_biases]
                torch._fused_sgd_(
                    params, grads, [], weight_decay=0.0, momentum=0.0, lr=RATE, dampening=0.0, nesterov=False,
                    maximize=False, is_first_step=False,
                )  # fmt: skip

    def forward(self) -> None:
        """Find the outputs of all layers, and the gradient of the loss by the last."""
        last = len(self.weights) - 1
        for i, (weight, bias, x) in enumerate(zip(self.weights, self.biases, self.values, strict=False)):
            out = self.values[i + 1]
            if not self.update:
                torch.bmm(x, weight.transpose(1, 2), out=out)
                continue
            torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)
            if i < last:
                out.relu_()
        if self.update:
            torch.softmax(self.values[-1], 2, out=self.grads[-1])
            self.grads[-1].sub_(self.target).mul_(1 / BATCH)

    def backward(self) -> None:
        """Find the gradients of all layers, the last first."""
        for i in reversed(range(len(self.weights))):
            weight, x, grad = self.weights[i], self.values[i], self.grads[i + 1]
            if i:
                torch.bmm(grad, weight, out=self.grads[i])
                if self.update:
                    torch.ops.aten.threshold_backward(self.grads[i], x, 0, grad_input=self.grads[i])
            if self.fused:
                torch.baddbmm(weight, grad.transpose(1, 2), x, alpha=-RATE, out=weight)
                self.biases[i].sub_(grad.sum(1), alpha=RATE)
                continue
            torch.bmm(grad.transpose(1, 2), x, out=self.of_weights[i])
            if self.update:
                torch.sum(grad, 1, out=self.of_biases[i])


def model(sizes: Sequence[int]) -> perfed.Model:
    """Return the MLP of these sizes, with ReLU after each hidden layer."""
    body = perfed.mlp(tuple(sizes[1:-2]), sizes[-2], final_activation=True)
    return perfed.Model(body=body, head=perfed.linear(sizes[-1]))


def epoch_of(sizes: Sequence[int], clients: int) -> fit.Task:
    """Return one local epoch of so many clients, as perfed does it."""
    torch.manual_seed(0)
    chain = model(sizes).build((sizes[0],))
    params = {name: torch.stack([tensor] * clients) for name, tensor in chain.tensors().items()}
    x, y = torch.randn(clients * ROWS, sizes[0]), torch.arange(clients * ROWS) % sizes[-1]
    return fit.Task(
        chain, params, tuple(params), Samples(x, y, np.full(clients, ROWS)), torch.arange(clients),
        Optimizer("sgd", 0.0, (Group(tuple(params), RATE, 0.0),)), mean_loss, BATCH,
        steps=np.full(clients, ROWS // BATCH),
    )  # fmt: skip


def _by_autograd(step: Step) -> Tensor:
    """The plain loss, which perfed does not know to be it."""
    return mean_loss(step)


def steps(sizes: Sequence[int], clients: int, here: limits.Limits) -> Iterator[tuple[str, float, str]]:
    """Yield each way to take a step, its seconds per client and step, and its shares of the machine."""
    task = epoch_of(sizes, clients)
    ways: dict[str, Callable[[], object]] = {
        "perfed": lambda: fit.run_task(task),
        "autograd": lambda: fit.run_task(replace(task, loss=_by_autograd)),
        "by hand": ByHand(sizes, clients).epoch,
        "fused": ByHand(sizes, clients, fused=True).epoch,
        "products": ByHand(sizes, clients, update=False).epoch,
    }
    all_steps = clients * ROWS // BATCH
    counted = {name: limits.counted(way) for name, way in ways.items()}
    for name, seconds in limits.in_turns(ways, 12).items():
        flop, moved = counted[name]
        yield name, seconds / all_steps, here.share(flop, moved, seconds)


def print_steps(networks: Sequence[str], stacks: Sequence[int], here: limits.Limits) -> list[dict[str, Any]]:
    """Print single steps of all ways, and return them."""
    kept = []
    for network, clients in itertools.product(networks, stacks):
        print(f"\na step of {network}, {clients} clients stacked")
        found = list(steps(NETWORKS[network], clients, here))
        for way, each, share in found:
            print(f"{way:>9}: {1e6 * each:7.1f} us, {each / found[0][1]:.2f} of perfed's, {share}", flush=True)
            kept.append({"network": network, "stack": clients, "way": way, "us": 1e6 * each, "share": share})
    return kept


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
    laps = limits.Laps(clock=time.process_time)
    perfed.Run(
        perfed.Federation.from_arrays(arrays), method, model(sizes),
        rounds=ROUNDS, plan=plan, evaluation=perfed.Evaluation(every=ROUNDS + 1), callbacks=[laps],
    ).execute()  # fmt: skip
    return float(laps.seconds.min())


def print_rounds(
    networks: Sequence[str], clients: int, optimizers: Sequence[str], here: limits.Limits
) -> list[dict[str, Any]]:
    """Print rounds of Local in stacks of all sizes, and return them."""
    kept = []
    for name, optimizer in itertools.product(networks, optimizers):
        sizes = NETWORKS[name]
        parameters = sum(a * b + b for a, b in itertools.pairwise(sizes))
        passes, all_steps = PASSES[optimizer], clients * EPOCHS * ROWS // BATCH
        print(f"\n{clients} clients, {name}, {optimizer}: {4e-3 * parameters * passes / 2:.0f} kB a client")
        for chunk in (1, 4, 8, 32, 128, 0, None):
            if chunk is not None and chunk >= clients:
                continue
            engine: EngineName = "auto" if chunk is None else "stacked"
            plan = Plan(engine, chunk or 0, threads=1, remember=False)
            each = seconds(sizes, optimizer, clients, plan) / all_steps
            chosen = "" if chunk is not None else f" ({plan.describe()[1:]})"
            label = "auto" if chunk is None else str(chunk or "all")
            share = here.share(6 * parameters * BATCH, 4 * parameters * passes, each)
            print(f"{label:>5}: {1e6 * each:7.1f} us, {share}{chosen}", flush=True)
            kept.append({"clients": clients, "network": name, "optimizer": optimizer, "stack": label, "us": 1e6 * each})
    return kept


def main() -> None:
    """Print steps, then a table of rounds for each network and optimiser."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", default=",".join(NETWORKS), help="with commas")
    parser.add_argument("--stacks", default="1,2,4,8,16,32,100", help="of which steps are taken; empty: none")
    parser.add_argument("--clients", default="100", help="of which rounds are run; empty: none")
    parser.add_argument("--optimizers", default="sgd,adam", help="with commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    here = limits.measure(time.process_time)
    print(f"this machine, one thread: {here.gflops:.0f} GFLOP/s, {here.gbytes:.1f} GB/s")
    networks, optimizers = arguments.networks.split(","), arguments.optimizers.split(",")
    single = print_steps(networks, [int(stack) for stack in arguments.stacks.split(",") if stack], here)
    rounds: list[dict[str, Any]] = []
    for clients in filter(None, arguments.clients.split(",")):
        rounds += print_rounds(networks, int(clients), optimizers, here)
    print(f"peak memory {peak_memory_mb()} MB")
    if arguments.json:
        command = " ".join(["python", *sys.argv])
        found = {"command": command, "limits": here._asdict(), "steps": single, "rows": rounds}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
