"""What a round, a checkpoint and memory cost with 100 to 100,000 clients of which 100 take part: the linear problem.

``python benchmarks/many_clients.py [--rounds N] [--participants N] [--check]``

FedRep-SRPFL with dynamic speeds: 100 clients are invited, of which 25, 50 and then all are used; rounds with all count.
One thread; a process of its own for each number of clients. Samples are made when they are used. A round should take
the same time whatever the number of clients, and memory should grow by what is known of a client and its personal
parameters. Then all clients are evaluated, and checkpoints are written: of those that took part so far, of one more
round, and, up to 10,000, of all clients, as if all had taken part: a file each, so more only takes longer. Numbers
are kept in ``docs/results/scale.json`` for docs/scale.md and docs/benchmarks.md; with ``--check`` nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from perfed.data.reading import to_json_values
from perfed.datasets import load
from perfed.engine.initial import Initialiser
from perfed.engine.record import RoundRecord
from perfed.engine.server import Server
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.callbacks.checkpoint import save_checkpoint
from perfed.run.callbacks.results import describe_holdings
from perfed.run.directory import RunDirectory
from perfed.run.totals import RunProgress, RunTotals
from perfed.training.plan import Plan

NUMBERS = (100, 1000, 10_000, 100_000)
ALL = 10_000
KEPT = Path(__file__).parent.parent / "docs/results/scale.json"

Found = dict[str, float]


@contextmanager
def timed(found: Found, name: str) -> Iterator[None]:
    """Add wall and processor seconds of what is inside."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    found[f"{name}_s"] = time.perf_counter() - wall
    found[f"{name}_cpu_s"] = time.process_time() - processor


def built(clients: int, participants: int, rounds: int) -> Server:
    """The server, before its first round."""
    federation = load("linear-domains", {"clients": clients, "deferred": True}, seed=0)
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100, "local_epochs": 5}
    initialiser = Initialiser(
        build_method("fedrep", {}, training), Model(body=linear(2), head=linear(1)), 0, torch.float32
    )
    policy = Participation(
        policy="srpfl",
        rate=min(1.0, participants / clients),
        last_round="sampled",
        srpfl={"first": max(1, participants // 4), "rule": "fixed", "stage_rounds": 5},
    )
    server = Server(federation, initialiser, Plan("stacked"), policy, rounds + 2, clock=Clock(speeds="dynamic"))
    server.prepare()
    return server


def with_parts(server: Server, parts: dict[str, Found]) -> None:
    """Time who is chosen, and the server's copy of the states before a round, of each round."""

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*given: Any) -> Any:
            with timed(parts[name], name):
                return work(*given)

        return watching

    server.selection.choose = watched("choose", server.selection.choose)  # type: ignore[method-assign]
    server.snapshot = watched("snapshot", server.snapshot)  # type: ignore[method-assign]


def rounds_of(server: Server, participants: int, rounds: int) -> tuple[Found, RoundRecord]:
    """Median times of a round with all participants and of its parts, and the last round."""
    parts: dict[str, Found] = {"choose": {}, "snapshot": {}}
    with_parts(server, parts)
    rows: list[Found] = []
    for number in range(1, rounds + 1):
        found: Found = {}
        server.snapshot()  # as a run does
        with timed(found, "round"):
            record = server.round(number)
        if len(record.participants) == participants:
            rows.append(found | parts["choose"] | parts["snapshot"])
    return {name: median(row[name] for row in rows) for name in rows[0]}, record


def checkpoints(server: Server, progress: RunProgress, number: int) -> Found:
    """Time of the first checkpoint, of one after another round, and of one with a state of every client; bytes."""
    found: Found = {}
    with TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        for name in ("first", "next", "all"):
            if name == "next":
                progress.totals.add(server.round(number))
            if name == "all":
                if len(server.clients) > ALL:
                    break
                engine, initialiser = server.engine, server.initialiser
                engine.states = {i: initialiser.client_state(c, engine.info) for i, c in engine.clients.items()}
                engine.changed = set(engine.states)
            progress.done += 1
            with timed(found, name):
                save_checkpoint(directory, server, progress, [], 0, [], {})
            found[f"{name}_files"] = len(server.engine.states)
            newest = max(directory.checkpoints.glob("state-*.json"))
            found[f"{name}_manifest_mb"] = newest.stat().st_size / 2**20
    return found


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(clients: int, participants: int, rounds: int) -> Found:
    """All numbers of one federation; seconds are wall time, those with ``cpu`` of the processor."""
    torch.set_num_threads(1)
    found: Found = {"clients": clients}
    with timed(found, "start"):
        server = built(clients, participants, rounds)
    medians, record = rounds_of(server, participants, rounds)
    found |= medians
    found["peak_mb"] = peak_mb()
    found["bytes_down"], found["bytes_up"] = record.bytes_down, record.bytes_up
    line = {"round": rounds, "participants": record.participants, "train_loss": record.train_loss}
    found["line_bytes"] = len(json.dumps(to_json_values(line)))
    with timed(found, "holdings"):
        found["holdings_mb"] = len(json.dumps(describe_holdings(server.federation), separators=(",", ":"))) / 2**20
    with timed(found, "evaluate"):
        server.evaluate("test", round_=rounds)
    totals = RunTotals()
    totals.add(record)
    found |= checkpoints(server, RunProgress(totals), rounds + 1)
    found["peak_all_mb"] = peak_mb()
    return found


def main() -> None:
    """Measure each number of clients in a process of its own, and keep what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--clients", type=int, help="measure this number in this process and print JSON")
    parser.add_argument("--check", action="store_true", help="print, keep nothing")
    options = parser.parse_args()
    if options.clients is not None:
        print(json.dumps(measure(options.clients, options.participants, options.rounds)))
        return
    rows, loads = [], []
    for clients in NUMBERS:
        own = [sys.executable, __file__, "--clients", str(clients)]
        more = ["--rounds", str(options.rounds), "--participants", str(options.participants)]
        rows.append(json.loads(subprocess.run([*own, *more], check=True, capture_output=True, text=True).stdout))
        loads.append(os.getloadavg()[0])
        print(json.dumps(rows[-1]), f"load {loads[-1]:.1f}", flush=True)
    if not options.check:
        content = {"command": "python benchmarks/many_clients.py", "load": max(loads), "clients": rows}
        KEPT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
