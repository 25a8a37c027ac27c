"""What messages, the journal and a checkpoint's file cost by the number of parameters: bytes and seconds.

``python benchmarks/messages.py [--check]``, one thread. A message is packed and unpacked; the journal writes down and
reads back the replies of three sites of that size; the same tree is written as a file of a checkpoint. Stacking and
averaging the replies of ten clients is given per client. A message that names all sites is packed for many sites.
Numbers are kept in ``docs/results/messages.json`` for docs/scale.md; with ``--check`` nothing is kept. Each is the
median of several goes; disk times include waiting for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from perfed.codec import encode
from perfed.datasets.catalogue import make_client_ids
from perfed.engine.collector import ReplyCollector
from perfed.engine.executor import ChunkResult
from perfed.maths.aggregate import weighted_mean
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.transport import Answer
from perfed.system import write_atomic

NAMED = (3, 1000, 100_000, 1_000_000)
NUMBERS = (10_000, 100_000, 1_000_000, 10_000_000)
SITES, GOES, CLIENTS = ("north", "south", "west"), 5, 10
KEPT = Path(__file__).parent.parent / "docs/results/messages.json"


def seconds(work: Callable[[], Any]) -> dict[str, float]:
    """Median wall and processor seconds of ``work``, after one go that warms up."""
    work()
    rows = []
    for _ in range(GOES):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        rows.append((time.perf_counter() - wall, time.process_time() - processor))
    return {"s": median(row[0] for row in rows), "cpu_s": median(row[1] for row in rows)}


def measure(parameters: int) -> dict[str, Any]:
    """All numbers of a tree of ten tensors with so many float32 numbers together."""
    tree = {f"layer{i}": torch.randn(parameters // 10) for i in range(10)}
    header = {"kind": "work", "run": "0" * 16, "sequence": 10_001, "ids": list(SITES)}
    data, ids = pack(header, tree), [f"{i:03d}" for i in range(CLIENTS)]

    content = {"shared": [tree]}

    def aggregate() -> None:
        inbox = ReplyCollector(ids, {})
        for client in ids:
            inbox.add(ChunkResult((client,), content, ({},), torch.zeros(1)))
        weighted_mean(inbox.stack().shared, torch.ones(CLIENTS))

    found: dict[str, Any] = {"parameters": parameters, "bytes": len(data)}
    found["pack"] = seconds(lambda: pack(header, tree))
    found["unpack"] = seconds(lambda: unpack(data))
    found["aggregate"] = {name: value / CLIENTS for name, value in seconds(aggregate).items()}
    with TemporaryDirectory() as folder:
        journal, answers = Journal(Path(folder) / "journal"), [Answer(site, data, "", 1.0) for site in SITES]
        found["write"] = seconds(lambda: journal.write(10_001, answers))
        found["read"] = seconds(lambda: journal.load_answers(10_001))
        found["checkpoint"] = seconds(lambda: write_atomic(Path(folder) / "server", encode(tree)))
    return found


def named(sites: int) -> dict[str, Any]:
    """Bytes and times of a message without parameters that names so many sites, as each message of a round does."""
    header = {"kind": "work", "run": "0" * 16, "sequence": 10_001, "ids": make_client_ids(sites)}
    data = pack(header, {})
    return {"sites": sites, "bytes": len(data), "pack": seconds(lambda: pack(header, {}))}


def main() -> None:
    """Print and keep the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="print, keep nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(parameters) for parameters in NUMBERS]
    for row in rows:
        print(json.dumps(row))
    if not options.check:
        content = {"command": "python benchmarks/messages.py", "load": os.getloadavg()[0], "sizes": rows}
        content["named"] = [named(sites) for sites in NAMED]
        KEPT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
