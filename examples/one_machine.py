"""A deployment on one machine: Flower's server and two sites, each a process of its own that reads its own table.

Needs the extras perfed[tables,flower]. Run: python examples/one_machine.py (one to two minutes).
Far apart, the same commands run at the sites: docs/tutorials/deploy.md has them, with TLS.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

SITES = ("north", "south")
PERFED = (sys.executable, "-m", "perfed")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_tables(folder: Path) -> None:
    """Made-up patients, a file per site."""
    rng = np.random.default_rng(0)
    for site in SITES:
        risk = rng.normal(size=80)
        age, pulse = 60 + 8 * risk + rng.normal(0, 5, 80), 75 + 6 * risk + rng.normal(0, 6, 80)
        ill = np.where(risk + rng.normal(0, 0.5, 80) > 0, "yes", "no")
        pd.DataFrame({"age": age.round(), "pulse": pulse.round(), "ill": ill}).to_csv(
            folder / f"{site}.csv", index=False
        )


def main(folder: Path) -> None:
    """Write the tables, make the deployment, start everything, and train."""
    port, running = free_port(), []
    bin_ = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": bin_ + os.pathsep + os.environ["PATH"], "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, env=environment, check=True)

    def begin(*command: str) -> None:
        log = (folder / f"log-{len(running)}.txt").open("w")
        running.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        )

    write_tables(folder)
    run(*PERFED, "init", *(f"{site}.csv" for site in SITES), "--target", "ill")
    deploy = ("deploy", "study.toml", "method=mixed", "rounds=3", "--sites", ",".join(SITES), "--tls")
    run(*PERFED, *deploy, "--superlink-port", str(port), "--out", "deployment")
    try:
        for part in ("superlink", "superexec"):
            begin("sh", f"deployment/server/{part}.sh")
        for _ in range(300):  # until the server answers
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        run("sh", "deployment/server/register.sh", *SITES)
        for site in SITES:
            own = f"deployment/sites/{site}"
            keys = ("--key", f"{own}/{site}.key", "--ca", f"{own}/ca.crt", "--study", f"{own}/study.toml")
            server = ("--server", f"127.0.0.1:{port}", "--name", site, "--consent", "yes")
            begin(*PERFED, "site", "--data", f"{site}.csv", *server, *keys)
        run(*PERFED, "submit", "deployment")
        run(*PERFED, "report", "deployment/server/run")
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
