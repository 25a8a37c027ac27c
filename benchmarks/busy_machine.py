"""Training beside other programs: how much longer a run takes than on an idle machine, for each engine.

``python benchmarks/busy_machine.py [--engines stacked,sequential,ray,flower] [--rounds 20] [--turns 2] [--busy 2]``
runs the same small experiment without and beside ``--busy`` processes that compute without a pause, in turns, with the
default number of threads. The time is that of the whole command, with the start of Python; with ``flower`` it is that
of ``perfed submit`` in a deployment of two sites on this machine, which run throughout. The program prints the medians
and their ratio. ``--checkout DIR`` measures another version of perfed, and ``--set plan.threads=2`` another plan.

On two cores, two busy processes leave a thread two thirds of a core, so that a ratio of 1.5 cannot be avoided. Nothing
else should be running: the load before the measurement is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

ENGINES = ("stacked", "sequential", "ray", "flower")
SITES = ("north", "south")
SERVER_SECONDS = 60.0  # that the SuperLink may take to start
TIMEOUT = 300.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class Commands:
    """Runs commands of a version of perfed in one folder.

    Args:
        folder: working directory of the commands, and place of their logs.
        checkout: root of the version's source.
    """

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder = folder
        inherited = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
        path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
        # No choice of an earlier run is taken over, so that every run also pays for its trials.
        self.environment = {**inherited, "PATH": path, "PYTHONPATH": str(checkout), "PERFED_PLANS": ""}

    def run(self, *command: str) -> float:
        """Run a command to its end and return the seconds that it took."""
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, timeout=TIMEOUT, capture_output=True, encoding="utf-8"
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return time.perf_counter() - start

    def perfed(self, *arguments: str) -> float:
        """Run a command of perfed and return the seconds that it took."""
        return self.run(sys.executable, "-m", "perfed", *arguments)

    @contextmanager
    def background(self, *command: str) -> Iterator[None]:
        """Run a command in the background until the context ends."""
        log = (self.folder / "background.log").open("a")
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run ``number`` processes that compute without a pause."""
    # Linux shares processors out among sessions (sched_autogroup_enabled), and other programs are other sessions.
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def write_tables(folder: Path) -> None:
    """Write a table of made-up patients for each site."""
    rng = np.random.default_rng(0)
    for site in SITES:
        risk = rng.normal(size=400)
        columns = [60 + 8 * risk + rng.normal(0, 5, 400), 75 + 6 * risk + rng.normal(0, 6, 400)]
        ill = np.where(risk + rng.normal(0, 0.5, 400) > 0, "yes", "no")
        rows = [f"{age:.0f},{pulse:.0f},{answer}" for age, pulse, answer in zip(*columns, ill, strict=True)]
        (folder / f"{site}.csv").write_text("\n".join(["age,pulse,ill", *rows]) + "\n")


def free_port() -> int:
    """Return a port of this machine that no program uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def deployment(commands: Commands, rounds: int, settings: list[str]) -> Iterator[None]:
    """Start a Flower server and two sites for a study of ``rounds`` rounds."""
    port = free_port()
    write_tables(commands.folder)
    commands.perfed("init", *(f"{site}.csv" for site in SITES), "--target", "ill")
    plan = ("method=fedavg", f"rounds={rounds}", "model.body={kind='mlp',hidden=[64],out=64}", *settings)
    options = ("--sites", ",".join(SITES), "--tls", "--superlink-port", str(port), "--out", "deployment")
    commands.perfed("deploy", "study.toml", *plan, *options)
    with ExitStack() as running:
        for part in ("superlink", "superexec"):
            running.enter_context(commands.background("sh", f"deployment/server/{part}.sh"))
        wait_for_server(port)
        commands.run("sh", "deployment/server/register.sh", *SITES)
        for site in SITES:
            folder = f"deployment/sites/{site}"
            keys = ("--key", f"{folder}/{site}.key", "--ca", f"{folder}/ca.crt", "--study", f"{folder}/study.toml")
            server = ("--server", f"127.0.0.1:{port}", "--name", site, "--consent", "yes")
            command = (sys.executable, "-m", "perfed", "site", "--data", f"{site}.csv", *server, *keys)
            running.enter_context(commands.background(*command))
        yield


def wait_for_server(port: int) -> None:
    """Wait until a server listens at ``port``."""
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    sys.exit(f"no server listens at port {port}")


def compare(run: Callable[[Path], float], folder: Path, turns: int, busy: int) -> tuple[float, float]:
    """Return the median seconds of ``run`` alone and beside ``busy`` busy processes, in turns."""
    seconds: dict[int, list[float]] = {0: [], busy: []}
    for turn in range(turns):
        for number in seconds:
            with busy_processes(number):
                seconds[number].append(run(folder / f"run-{turn}-{number}"))
    return median(seconds[0]), median(seconds[busy])


def measure(engine: str, arguments: argparse.Namespace) -> str:
    """Return the line of the table for ``engine``."""
    with TemporaryDirectory(prefix="busy") as place, ExitStack() as running:
        folder = Path(place)
        commands = Commands(folder, arguments.checkout.resolve())
        if engine == "flower":
            running.enter_context(deployment(commands, arguments.flower_rounds, arguments.set))

            def run(out: Path) -> float:
                return commands.perfed("submit", "deployment", "--out", str(out))

            run(folder / "first")  # the sites read their data
        else:
            options = ("--method", "fedavg", "--engine", engine, f"rounds={arguments.rounds}", *arguments.set)

            def run(out: Path) -> float:
                return commands.perfed("run", "digits-all-methods", *options, "--out", str(out))

        idle, busy = compare(run, folder, arguments.turns, arguments.busy)
    return f"| {engine} | {idle:.1f} | {busy:.1f} | {busy / idle:.2f} × |"


def main() -> None:
    """Print a line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}, with commas")
    parser.add_argument("--rounds", type=int, default=20, help="of the simulated engines")
    parser.add_argument("--flower-rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--busy", type=int, default=2, help="number of busy processes")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="another version of perfed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the experiment")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the contexts end the processes
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the measurement\n")
    print(f"| engine | alone (s) | beside {arguments.busy} busy processes (s) | ratio |\n|---|---|---|---|")
    for engine in arguments.engines.split(","):
        print(measure(engine, arguments), flush=True)


if __name__ == "__main__":
    main()
