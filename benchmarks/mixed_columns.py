"""Seconds of a round of ``mixed`` with more columns than rows.

``python benchmarks/mixed_columns.py [COLUMNS ...]`` (default: 250, 500 and 1000; one thread) trains two rounds on five
sites of 60 rows and prints the seconds of the second.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from usage import usage

from perfed import Federation, Model, linear
from perfed.methods.mixed import Mixed
from perfed.testing.runs import build_server

SITES, ROWS = 5, 60


def make_federation(columns: int) -> Federation:
    """Return sites whose two classes depend on all columns."""
    generator = np.random.default_rng(0)
    slopes, clients = generator.normal(size=columns) / columns**0.5, {}
    for site in range(SITES):
        x = generator.normal(size=(ROWS, columns))
        clients[f"site-{site}"] = {
            "x_train": x,
            "y_train": (2 * x @ slopes > generator.logistic(size=ROWS)).astype(int),
        }
    return Federation.from_arrays(clients)


def main(sizes: list[int]) -> None:
    """Print the seconds of a round for each number of columns."""
    torch.set_num_threads(1)
    for columns in sizes:
        server = build_server(Mixed(), make_federation(columns), model=Model(head=linear(2)))
        server.prepare()
        server.round(1)
        started = time.perf_counter()
        server.round(2)
        print(f"{columns} columns: {time.perf_counter() - started:.2f} s a round", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main([int(columns) for columns in sys.argv[1:]] or [250, 500, 1000])
