"""Local training with private rows against plain local training, on the MLP of the design's table of speeds.

    python benchmarks/privacy_cost.py

100 clients of 500 rows, MLP 15-64-64-20, Adam, one thread. Both by the stacked path, by turns, the median of five.
Cross-entropy alone goes layer by layer; with an extension's term (here FedProx's) each row is a client of its own.
"""

from __future__ import annotations

import statistics
import time

import torch
from usage import usage

from perfed import Federation, Model, linear, mlp
from perfed.data.client import Client, Split
from perfed.engine.initial import Initialiser
from perfed.engine.server import Server
from perfed.method.extension import Extension
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.participation.settings import Participation
from perfed.privacy.sample import SamplePrivacy
from perfed.training.plan import Plan, use_threads

CLIENTS, ROWS, ROUNDS = 100, 500, 5


def federation() -> Federation:
    """Clients with noise as inputs and labels: only time is measured."""
    torch.manual_seed(0)

    def split(rows: int) -> Split:
        return Split(torch.randn(rows, 15), torch.randint(20, (rows,)))

    return Federation(tuple(Client(f"{i:03d}", split(ROWS), split(20)) for i in range(CLIENTS)), num_classes=20)


def server(batch: int, extensions: tuple[Extension, ...], clients: Federation) -> Server:
    """A server of FedAvg with these extensions."""
    method = FedAvg(local_epochs=1, batch_size=batch, extensions=extensions)
    model = Model(body=mlp((64, 64), 64), head=linear(20))
    initialiser = Initialiser(method, model, 0, torch.float32)
    return Server(clients, initialiser, Plan("stacked", 0, threads=1), Participation(), ROUNDS)


def main() -> None:
    """Print microseconds of a client's step, private and plain, and their ratio."""
    clients = federation()
    print("batch  terms      plain us  private us  ratio")
    with use_threads(1):
        for batch in (10, 32, 100):
            for terms in ((), (Proximal(mu=0.1),)):
                pair = [
                    server(batch, (*own, *terms), clients)
                    for own in ((), (SamplePrivacy(noise=1.0, entries=("shared", "num_samples")),))
                ]
                times: list[list[float]] = [[], []]
                for one in pair:
                    one.prepare()
                    one.round(1)
                for number in range(2, 2 + ROUNDS):
                    for spent, one in zip(times, pair, strict=True):
                        before = time.perf_counter()
                        one.round(number)
                        spent.append(time.perf_counter() - before)
                steps = CLIENTS * -(-ROWS // batch)
                plain, private = (1e6 * statistics.median(spent) / steps for spent in times)
                name = "proximal" if terms else "none"
                print(f"{batch:5d}  {name:8s} {plain:9.1f}  {private:10.1f}  {private / plain:5.2f}")


if __name__ == "__main__":
    usage(__doc__)
    main()
