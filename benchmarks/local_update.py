"""Local training in perfed against the yardstick: the same steps on the same data, in one process.

``python benchmarks/local_update.py [--threads N] [--data-dir DIR] [--json FILE] [--only WORD]`` prints one row per
workload: microseconds per client and mini-batch step of the yardstick's loop (its better thread count and memory
layout), of perfed with all clients stacked, one client at a time, and as ``Plan("auto")`` chooses; then the
yardstick's time over the time of perfed's best. Both sides take turns and the fastest of a few runs counts. perfed's
time is that of whole exchanges: collecting and keeping the clients' states, the server's step and the reply are in it.

Shortened: 20 epochs of FLIC's pre-training in place of 100 (2 where perfed runs one client at a time), 5 of its 49
rounds with a tenth of the clients, 300 training images per client. "paper protocol" adds the parts up as the paper
has them: 100 epochs of pre-training, 49 rounds of 10 clients, one round of all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import limits
import numpy as np
import torch
import yardstick
from torch import Tensor, nn

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.files import load_npz
from perfed.datasets import load
from perfed.engine.initial import Initialiser
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedrep import FedRep
from perfed.methods.flic import Anchors, FLICClass
from perfed.methods.local import Local
from perfed.model.chain import Model
from perfed.model.presets import cnn, linear, mlp
from perfed.participation.settings import Participation
from perfed.training.plan import EngineName, Plan

TOY = "toy-noisy-features"
PRETRAIN_EPOCHS, PAPER_PRETRAIN_EPOCHS = 20, 100
ROUNDS, PAPER_ROUNDS = 5, 50
FedTrain = Callable[[Server], None]
TrainClient = Callable[[Client, bool], None]


@dataclass
class Workload:
    """The same work for both sides.

    Attributes:
        steps: client-steps of one run.
        clients: whom the yardstick trains, in order; a client may come several times.
        train: the yardstick's training of one client, its data in channels_last or not.
        server: a fresh server of perfed under a plan.
        work: what perfed does with it.
        short: the work for one client at a time and its client-steps, where the full work would take too long.
    """

    name: str
    steps: int
    clients: list[Client]
    train: TrainClient
    server: Callable[[Plan], Server]
    work: FedTrain
    engines: tuple[EngineName, ...] = ("stacked", "sequential", "auto")
    images: bool = False
    short: tuple[Callable[[Plan], Server], FedTrain, int] | None = None
    repeats: int = 2


@dataclass
class Row:
    """Microseconds per client-step; ``ratio`` is the yardstick's time over that of perfed's best.

    ``share`` is what perfed's best makes of the machine, by the arithmetic of the first engine.
    """

    workload: str
    client_steps: int
    yardstick_us: float
    yardstick_threads: int
    yardstick_channels_last: bool
    perfed_us: dict[str, float] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)
    share: str = ""

    @property
    def best(self) -> str:
        """perfed's fastest engine."""
        return min(self.perfed_us, key=self.perfed_us.__getitem__)

    @property
    def ratio(self) -> float:
        """How many times faster than the yardstick."""
        return self.yardstick_us / self.perfed_us[self.best]


# ------------------------------------------------------------------------------------------ measuring


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _yardstick_run(work: Workload, clients: list[Client], channels_last: bool) -> float:
    def run() -> None:
        for client in clients:
            work.train(client, channels_last)

    return _seconds(run)


def _yardstick_setting(work: Workload, threads: int) -> tuple[int, bool]:
    """The faster thread count and memory layout, found on a few clients."""
    some = work.clients[:: max(1, len(work.clients) // 5)][:5]
    seconds: dict[tuple[int, bool], float] = {}
    for count in sorted({1, threads}):
        for channels_last in (False, True) if work.images else (False,):
            torch.set_num_threads(count)
            work.train(some[0], channels_last)
            seconds[count, channels_last] = min(_yardstick_run(work, some, channels_last) for _ in range(2))
    return min(seconds, key=seconds.__getitem__)


def measure(work: Workload, threads: int) -> Row:
    """Both sides in turn, ``repeats`` times; the fastest run of each counts."""
    count, channels_last = _yardstick_setting(work, threads)
    row = Row(work.name, work.steps, float("inf"), count, channels_last)
    servers: dict[EngineName, tuple[Server, FedTrain, int]] = {}
    torch.set_num_threads(threads)
    for engine in work.engines:
        make, run, steps = work.server, work.work, work.steps
        if engine == "sequential" and work.short is not None:
            make, run, steps = work.short
        servers[engine] = make(Plan(engine, remember=False)), run, steps
        _warm_up(servers[engine][0], run)
    for repeat in range(work.repeats):
        torch.set_num_threads(count)
        seconds = _yardstick_run(work, work.clients, channels_last)
        row.yardstick_us = min(row.yardstick_us, 1e6 * seconds / work.steps)
        torch.set_num_threads(threads)
        for engine, (server, run, steps) in servers.items():
            if engine == "sequential" and repeat and not work.images:
                continue
            us = 1e6 * _seconds(lambda s=server, r=run: r(s)) / steps  # type: ignore[misc]
            row.perfed_us[engine] = min(row.perfed_us.get(engine, float("inf")), us)
    server, run, steps = servers[work.engines[0]]
    flop, moved = limits.counted(lambda: run(server))
    row.share = limits.measure().share(flop / steps, moved / steps, row.perfed_us[row.best] / 1e6)
    if "auto" in servers:
        row.plan = servers["auto"][0].engine.plan.describe()[1:]
    return row


def _warm_up(server: Server, run: FedTrain) -> None:
    """The first exchange makes initial states and lets ``Plan("auto")`` try its ways; neither is local training."""
    server.prepare()
    run(server) if server.engine.plan.engine == "auto" else server.round(1)


def machine(threads: int) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
    }


# ------------------------------------------------------------------------------------------ workloads


def _server(federation: Federation, method: Method, model: Model, rate: float, rounds: int) -> Callable[[Plan], Server]:
    def make(plan: Plan) -> Server:
        initialiser = Initialiser(method, model, 0, torch.float32)
        return Server(federation, initialiser, plan, Participation(rate=rate), rounds)

    return make


def _steps(clients: list[Client], batch: int, epochs: int) -> int:
    return epochs * sum(-(-len(client.train) // batch) for client in clients)


def _prepare(server: Server) -> None:
    server.prepare()


def _rounds(first: int, last: int) -> FedTrain:
    def work(server: Server) -> None:
        for number in range(first, last + 1):
            server.round(number)

    return work


def flic() -> list[Workload]:
    """FLIC-Class: pre-training, rounds with a tenth of the clients, and the last round with all."""
    federation = load(TOY, {}, seed=0)
    everyone, num_classes = list(federation), federation.num_classes or 0
    model = Model(embedding=mlp((64, 64), 64), head=linear(num_classes))
    anchors = 10 * torch.randn(num_classes, 64)

    def make(epochs: int, rate: float, rounds: int) -> Callable[[Plan], Server]:
        method = FLICClass(extensions=(Anchors(pretrain_epochs=epochs),))
        return _server(federation, method, model, rate, rounds)

    def pretrain(client: Client, _: bool) -> None:
        embedding = yardstick.mlp(client.input_shape[0], 64, 64, 64)
        x, y = client.train.x, client.train.y
        yardstick.pretrain_flic(embedding, anchors, x, y, epochs=PRETRAIN_EPOCHS, batch=10, optimizer=yardstick.adam())

    def local(client: Client, _: bool) -> None:
        embedding, head = yardstick.mlp(client.input_shape[0], 64, 64, 64), nn.Linear(64, num_classes)
        yardstick.train_flic(
            embedding, head, anchors, client.train.x, client.train.y,
            epochs=10, batch=100, optimizer=yardstick.adam(), lam1=1e-3, lam2=1e-3, samples=4,
        )  # fmt: skip

    rounds = make(0, 0.1, PAPER_ROUNDS)
    selection = rounds(Plan("sequential")).selection
    by_id = {client.id: client for client in everyone}
    some = [by_id[i] for number in range(1, ROUNDS + 1) for i in selection.choose(number).ids]
    pretrain_steps = _steps(everyone, 10, PRETRAIN_EPOCHS)
    short = (make(2, 0.1, PAPER_ROUNDS), _prepare, _steps(everyone, 10, 2))
    return [
        Workload(
            "FLIC-Class pre-training", pretrain_steps, everyone, pretrain, make(PRETRAIN_EPOCHS, 0.1, PAPER_ROUNDS),
            _prepare, short=short,
        ),
        Workload("FLIC-Class, 10 clients", _steps(some, 100, 10), some, local, rounds, _rounds(1, ROUNDS)),
        Workload("FLIC-Class, 100 clients", _steps(everyone, 100, 10), everyone, local, rounds, _rounds(50, 50)),
    ]  # fmt: skip


def flic_protocol(rows: list[Row]) -> Row | None:
    """The paper's protocol put together from the measured parts."""
    parts = {row.workload: row for row in rows}
    names = ("FLIC-Class pre-training", "FLIC-Class, 10 clients", "FLIC-Class, 100 clients")
    if not all(name in parts for name in names):
        return None
    pretrain, some, everyone = (parts[name] for name in names)
    share = {
        pretrain.workload: pretrain.client_steps * PAPER_PRETRAIN_EPOCHS / PRETRAIN_EPOCHS,
        some.workload: some.client_steps * (PAPER_ROUNDS - 1) / ROUNDS,
        everyone.workload: float(everyone.client_steps),
    }
    total = sum(share.values())
    row = Row("FLIC-Class, paper protocol", int(total), 0.0, pretrain.yardstick_threads, False)
    row.yardstick_us = sum(parts[name].yardstick_us * steps for name, steps in share.items()) / total
    for engine in pretrain.perfed_us:
        row.perfed_us[engine] = sum(parts[n].perfed_us[engine] * steps for n, steps in share.items()) / total
    return row


def mlps() -> list[Workload]:
    """Local and FedRep with the MLP 15-64-64-20, batch 10, all 100 clients in one round."""
    federation = load(TOY, {"noise_dims_low": 10, "noise_dims_high": 10}, seed=0)
    everyone = list(federation)
    model = Model(embedding=mlp((64,), 64, final_activation=True), head=linear(20))

    def local(client: Client, _: bool) -> None:
        net, x, y = yardstick.mlp(15, 64, 64, 20), client.train.x, client.train.y
        yardstick.train_plain(net, x, y, epochs=5, batch=10, optimizer=yardstick.adam())

    def fedrep(client: Client, _: bool) -> None:
        body, head = nn.Sequential(yardstick.mlp(15, 64, 64), nn.ReLU()), nn.Linear(64, 20)
        _fedrep(body, head, client, batch=10)

    return [
        Workload(
            "Local, MLP 15-64-64-20", _steps(everyone, 10, 5), everyone, local,
            _server(federation, Local(local_epochs=5, batch_size=10), model, 1.0, 1), _rounds(1, 1),
        ),
        Workload(
            "FedRep 10 + 1, MLP 15-64-64-20", _steps(everyone, 10, 11), everyone, fedrep,
            _server(federation, FedRep(local_epochs=10, batch_size=10), model, 1.0, 1), _rounds(1, 1),
        ),
    ]  # fmt: skip


def _fedrep(body: nn.Module, head: nn.Module, client: Client, *, batch: int, channels_last: bool = False) -> None:
    yardstick.train_fedrep(
        body, head, _images(client, channels_last), client.train.y,
        head_epochs=10, body_epochs=1, batch=batch, optimizer=yardstick.adam(),
    )  # fmt: skip


def _images(client: Client, channels_last: bool) -> Tensor:
    x = client.train.x
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def mnist(data_dir: Path | None, clients: int = 20, samples: int = 300) -> Federation:
    """Clients with as many images each, in the order of the file.

    Raises:
        PerfedError: mnist.npz is missing.
    """
    arrays = load_npz("mnist.npz", data_dir, ("x_train", "y_train"))
    x = (arrays["x_train"][: clients * samples, None] / 255.0).astype(np.float32)
    y = arrays["y_train"][: clients * samples].astype(np.int64)
    parts = {
        f"{i:03d}": {"x_train": x[i * samples :][:samples], "y_train": y[i * samples :][:samples]}
        for i in range(clients)
    }
    return Federation.from_arrays(parts, num_classes=10)


def cnns(data_dir: Path | None) -> list[Workload]:
    """FedAvg and FedRep with the CNN 16-32 (5 x 5), fc 128, on MNIST, batch 50, 20 clients."""
    federation = mnist(data_dir)
    everyone = list(federation)
    model = Model(embedding=cnn((16, 32), 5, 128, padding=2), head=linear(10))

    def network(channels_last: bool) -> nn.Sequential:
        net = yardstick.cnn(28, 1, 16, 32)
        return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[call-overload]

    def fedavg(client: Client, channels_last: bool) -> None:
        x, y = _images(client, channels_last), client.train.y
        yardstick.train_plain(network(channels_last), x, y, epochs=2, batch=50, optimizer=yardstick.adam())

    def fedrep(client: Client, channels_last: bool) -> None:
        net = network(channels_last)
        _fedrep(net[:-1], net[-1], client, batch=50, channels_last=channels_last)

    engines: tuple[EngineName, ...] = ("sequential", "auto")
    return [
        Workload(
            "FedAvg, MNIST CNN", _steps(everyone, 50, 2), everyone, fedavg,
            _server(federation, FedAvg(local_epochs=2, batch_size=50), model, 1.0, 1), _rounds(1, 1), engines, True,
        ),
        Workload(
            "FedRep 10 + 1, MNIST CNN", _steps(everyone, 50, 11), everyone, fedrep,
            _server(federation, FedRep(local_epochs=10, batch_size=50), model, 1.0, 1), _rounds(1, 1), engines, True,
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ output


def _print(row: Row) -> None:
    us = [f"{row.perfed_us[e]:12.1f}" if e in row.perfed_us else " " * 12 for e in ("stacked", "sequential", "auto")]
    setting = f"{row.yardstick_threads}{' cl' if row.yardstick_channels_last else ''}"
    print(f"{row.workload:32}{row.yardstick_us:11.1f}{setting:>6}{''.join(us)}{row.ratio:8.2f}  {row.best}", flush=True)
    if row.share:
        print(f"{'':4}{row.share}", flush=True)


def _workloads(data_dir: Path | None) -> Iterator[Workload]:
    yield from flic()
    yield from mlps()
    try:
        yield from cnns(data_dir)
    except PerfedError as error:
        print(f"MNIST rows skipped: {error}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: torch's)")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist.npz")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default="", help="only workloads whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{'us per client-step':32}{'yardstick':>11}{'':6}{'stacked':>12}{'sequential':>12}{'auto':>12}{'ratio':>8}")
    rows = []
    for work in _workloads(options.data_dir):
        if options.only in work.name:
            rows.append(measure(work, options.threads))
            _print(rows[-1])
    whole = flic_protocol(rows)
    if whole is not None:
        _print(whole)
        rows.append(whole)
    for line in dict.fromkeys(line for row in rows for line in row.plan):
        print(f"auto: {line}")
    if options.json:
        figures = [{**asdict(row), "best": row.best, "ratio": row.ratio} for row in rows]
        options.json.write_text(json.dumps({"machine": machine(options.threads), "rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
