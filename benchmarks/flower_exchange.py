"""Seconds per exchange with three sites over Flower on this machine.

``python benchmarks/flower_exchange.py [EXCHANGES]`` needs ``perfed[flower]``. A server, three sites in threads of this
process, and a run; the sites' handler uses torch. The first exchange is left out. Processor time is that of the
server's processes and this one: with other work on the machine, wall time says little.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory

from flower_server import superexec, superlink
from usage import usage

from perfed.sites.flower.node import MessageHandler, serve_messages
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.submission import Submitter

SITES = ("north", "south", "west")
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "exchanges"
version = "1.0.0"
[tool.flwr.app]
publisher = "perfed"
[tool.flwr.app.components]
serverapp = "exchanges.server:app"
clientapp = "exchanges.server:app"
[tool.flwr.app.config]
times = ""
exchanges = 1
"""
SERVER = """
import json
from pathlib import Path
from perfed.sites.flower.adapter import server_app

def main(transport, config):
    sites = ["north", "south", "west"]
    print("missing:", transport.wait_for(sites, 60), flush=True)
    times = []
    for _ in range(config["exchanges"]):
        answers = list(transport.exchange({site: bytes(100_000) for site in sites}, 120))
        print([answer.error for answer in answers if answer.error], flush=True)
        times.append(max(answer.seconds for answer in answers))
    Path(config["times"]).write_text(json.dumps(times))

app = server_app(main)
"""


def reverse(request: bytes) -> bytes:
    import torch

    return torch.frombuffer(bytearray(request), dtype=torch.uint8).flip(0).numpy().tobytes()


def write_app(folder: Path) -> Path:
    (folder / "exchanges").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("server", SERVER)):
        (folder / "exchanges" / f"{name}.py").write_text(text)
    return folder


def measure(folder: Path, exchanges: int) -> list[float]:
    """Seconds of each exchange."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    stop = threading.Event()
    with ExitStack() as running:
        running.callback(superlink(folder, address).stop)
        running.callback(superexec(folder, address).stop)
        for site in SITES:
            handler = MessageHandler(site, str(folder / site), reverse, lambda app: None, print)
            thread = threading.Thread(target=serve_messages, args=(ServerAddress(address), handler, stop))
            thread.start()
            running.callback(thread.join)
        running.callback(stop.set)
        submitter = Submitter(folder / "home", address)
        settings = {"times": str(folder / "times"), "exchanges": exchanges}
        run = submitter.submit(write_app(folder / "app"), settings)
        status = submitter.follow_log(run, lambda line: None, 600)
        if status != "finished:completed":
            raise SystemExit(f"{status}: see {folder}")
        found: list[float] = json.loads((folder / "times").read_text())
        return found


def main() -> None:
    exchanges = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with TemporaryDirectory(prefix="fx") as folder:
        began = time.monotonic()
        times = measure(Path(folder), exchanges + 1)[1:]
        used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(
            f"median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f};"
            f" the whole run {time.monotonic() - began:.0f} s, {used:.0f} s of processor, load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    usage(__doc__)
    main()
