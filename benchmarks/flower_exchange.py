"""Seconds per exchange with three sites over Flower on this machine, with a resident worker and without one.

``python benchmarks/flower_exchange.py [EXCHANGES]`` needs ``perfed[flower]``. Each way gets a server, three SuperNodes
and a run of its own; the handler of both uses torch. The first exchange (the app is installed at the sites) is left
out. Processor time is that of all of Flower's processes: with other work on the machine, wall time says little.
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

from perfed.engine.flower.probe import Server
from perfed.engine.flower.processes import superexec, superlink
from perfed.engine.flower.submission import Submitter
from perfed.engine.flower.supernode import supervise
from perfed.engine.flower.worker import serve

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
clientapp = "exchanges.client:app"
[tool.flwr.app.config]
times = ""
exchanges = 1
"""
SERVER = """
import json
from pathlib import Path
from perfed.engine.flower.adapter import server_app

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
RESIDENT = """
from perfed.engine.flower.adapter import client_app

app = client_app()
"""
FRESH = """
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("exchange")
def exchange(message, context):
    import torch
    body = message.content["body"]["body"].data
    reply = torch.frombuffer(bytearray(body), dtype=torch.uint8).flip(0).numpy().tobytes()
    return Message(RecordDict({"body": ArrayRecord({"body": Array("uint8", (len(reply),), "bytes", reply)})}),
                   reply_to=message)

@app.query("hello")
def hello(message, context):
    import json
    said = json.dumps([context.node_config["site"], context.node_config["worker"]]).encode()
    return Message(RecordDict({"body": ArrayRecord({"body": Array("uint8", (len(said),), "bytes", said)})}),
                   reply_to=message)
"""


def reverse(request: bytes) -> bytes:
    import torch

    return torch.frombuffer(bytearray(request), dtype=torch.uint8).flip(0).numpy().tobytes()


def write_app(folder: Path, client: str) -> Path:
    (folder / "exchanges").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("server", SERVER), ("client", client)):
        (folder / "exchanges" / f"{name}.py").write_text(text)
    return folder


def measure(folder: Path, client: str, exchanges: int) -> list[float]:
    """Seconds of each exchange."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    stop = threading.Event()
    with ExitStack() as running:
        running.callback(superlink(folder, address).stop)
        running.callback(superexec(folder, address).stop)
        for site in SITES:
            (folder / site).mkdir()
            worker = folder / site / "w"
            config = {"site": site, "worker": str(worker)}
            node = (Server(address), config, folder / site, print, stop)
            for target, arguments in ((serve, (worker, reverse, stop)), (supervise, node)):
                thread = threading.Thread(target=target, args=arguments)
                thread.start()
                running.callback(thread.join)
        running.callback(stop.set)
        submitter = Submitter(folder / "home", address)
        settings = {"times": str(folder / "times"), "exchanges": exchanges}
        run = submitter.submit(write_app(folder / "app", client), settings)
        status = submitter.follow(run, lambda line: None, 600)
        if status != "finished:completed":
            raise SystemExit(f"{status}: see {folder}")
        found: list[float] = json.loads((folder / "times").read_text())
        return found


def main() -> None:
    exchanges = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for name, client in (("resident worker", RESIDENT), ("torch in every process", FRESH)):
        with TemporaryDirectory(prefix="fx") as folder:
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            times = measure(Path(folder), client, exchanges + 1)[1:]
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{name}: median {statistics.median(times):.1f} s, {min(times):.1f} to {max(times):.1f};"
                f" the whole run {time.monotonic() - began:.0f} s, {used:.0f} s of processor,"
                f" load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
