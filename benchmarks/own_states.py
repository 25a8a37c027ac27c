"""Memory and time with 10,000 clients that keep a model of 93 kB each: all in memory, or beyond a bound on disk.

``python benchmarks/own_states.py [--clients N] [--rounds N] [--folder DIR]``

The linear problem, FedRep with heads of 23,251 numbers, 100 clients in a round, one epoch; one thread, a process of its
own for each bound. Memory is what the process has in use beyond what it had before the first round, after the last
round and at most until then; then all clients are evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from perfed.datasets import load
from perfed.engine.initial import Initialiser
from perfed.engine.server import Server
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.participation.settings import Participation
from perfed.system import peak_memory_mb
from perfed.training.plan import Plan

BOUNDS_MB = (100_000, 64, 0)
PARTICIPANTS = 100


def in_use_mb() -> float:
    """Memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(clients: int, rounds: int, hold_mb: int, folder: Path) -> dict[str, float]:
    """All numbers of one bound; seconds are wall time, those with ``cpu`` of the processor."""
    torch.set_num_threads(1)
    federation = load("linear-domains", {"clients": clients, "deferred": True}, seed=0)
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100, "local_epochs": 1}
    model = Model(body=linear(2), head=mlp((150, 150), 1))
    initialiser = Initialiser(build_method("fedrep", {}, training), model, 0, torch.float32)
    policy = Participation(rate=min(1.0, PARTICIPANTS / clients), last_round="sampled")
    server = Server(federation, initialiser, Plan("stacked", hold=hold_mb << 20), policy, rounds)
    server.put_states_in(folder)
    server.prepare()
    before, walls, processor = in_use_mb(), [], []
    for number in range(1, rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        server.round(number)
        walls.append(time.perf_counter() - wall)
        processor.append(time.process_time() - cpu)
    found = {
        "hold_mb": hold_mb,
        "states": len(server.engine.states),
        "round_ms": 1e3 * median(walls[-50:]),
        "round_cpu_ms": 1e3 * median(processor[-50:]),
        "more_mb": in_use_mb() - before,
        "peak_more_mb": (peak_memory_mb() or 0.0) - before,
        "disk_mb": sum(f.stat().st_blocks for f in folder.rglob("*.safetensors")) * 512 / 2**20,
    }
    wall, cpu = time.perf_counter(), time.process_time()
    server.evaluate("test", round_=rounds)
    found |= {"evaluate_s": time.perf_counter() - wall, "evaluate_cpu_s": time.process_time() - cpu}
    return found | {"peak_more_all_mb": (peak_memory_mb() or 0.0) - before}


def main() -> None:
    """Measure each bound in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--folder", help="where states go to disk; else where the system has temporary files")
    parser.add_argument("--hold", type=int, help="measure this bound in this process and print JSON")
    options = parser.parse_args()
    if options.hold is not None:
        with TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measure(options.clients, options.rounds, options.hold, Path(folder))))
        return
    for bound in BOUNDS_MB:
        own = [sys.executable, __file__, "--hold", str(bound), *sys.argv[1:]]
        found = subprocess.run(own, check=True, capture_output=True, text=True).stdout
        print(found.strip(), f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
