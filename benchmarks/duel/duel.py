"""perfed beside other programs: the same federations on the same machine, in one run.

``python benchmarks/duel/duel.py --data-dir DIR --program perfed=.venv/bin/python --program fluke=VENV/bin/python …``
trains three networks with three methods in each program that is given, in turns, one thread each (Flower's simulation
has two workers), and prints a table: wall and processor milliseconds a round (the median of rounds 2 to 10), peak
memory of all its processes, the accuracy after ten rounds, and the ratio of its wall time to perfed's.

Accuracies that differ by more than noise make a row void: then the programs did not train the same thing. Noise is
what perfed's accuracies differ by with other mini-batches, of :data:`ORDERS` runs, at least :data:`NOISE`.

``--models``, ``--methods`` and the programs given say which part is run. ``--json FILE`` keeps the results and
leaves those of other parts that the file has; docs/benchmarks.md shows docs/results/duel.json.

Each program has an environment of its own, for their requirements exclude each other (perfed's needs psutil too):

* fluke: ``pip install fluke-fl psutil``
* flower: ``pip install "flwr[simulation]" torch psutil``
* pfl: ``pip install pfl torch psutil`` (FedAvg)
* fedjax: ``pip install fedjax "jax<0.4.26" "jaxlib<0.4.26" "numpy<2" "optax<0.2.3" "dm-haiku<0.0.13" "chex<0.1.87"
  "scipy<1.13" torch psutil`` (FedAvg; later versions of jax lack functions that it calls)
* pfllib: ``pip install torch h5py scikit-learn matplotlib psutil``, and a checkout of PFLlib, whose folder is the
  environment variable ``PFLLIB``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from problem import ROWS, SHAPES, Problem, make

HERE = Path(__file__).parent
PERSONAL = {"perfed", "fluke", "pfllib", "flower"}
METHODS = {"fedavg": PERSONAL | {"pfl", "fedjax"}, "fedrep": PERSONAL, "ditto": PERSONAL}
NOISE, ORDERS = 0.02, 5
"""What accuracies after ten rounds (mean over 100 clients) may always differ by; runs that say what else is noise."""


def run(
    program: str, python: str, folder: Path, threads: int, timeout: float, checkout: Path = HERE.parents[1]
) -> dict[str, Any]:
    """Run one program, perfed's from ``checkout``, on one problem; return its result with its peak memory in MB."""
    import psutil

    out = folder / f"{program}.json"
    out.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(checkout)]),
                                "OMP_NUM_THREADS": str(threads), "RAY_DEDUP_LOGS": "0"}  # fmt: skip
    command = [python, str(HERE / f"run_{program}.py"), str(folder), "--out", str(out), "--threads", str(threads)]
    with (folder / f"{program}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        peak, end = 0.0, time.monotonic() + timeout
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            if time.monotonic() > end:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
                process.wait()
                return {"error": f"not done after {timeout:.0f} s"}
            time.sleep(0.25)
    if not out.exists():
        last = Path(log.name).read_text().strip().splitlines()[-1:]
        return {"error": f"ended with code {process.returncode}: {' '.join(last)}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result | {"peak_mb": peak}


def spread(python: str, folder: Path, threads: int, timeout: float) -> float:
    """Return the standard deviation of perfed's accuracy over orders of mini-batches; 0 where a run fails."""
    problem = json.loads((folder / "problem.json").read_text())
    found: list[float] = []
    for order in range(1, ORDERS + 1):
        part = folder / f"order-{order}"
        part.mkdir()
        (part / "arrays.npz").symlink_to(folder / "arrays.npz")
        (part / "problem.json").write_text(json.dumps(problem | {"order": order}))
        done = run("perfed", python, part, threads, timeout)
        if "error" in done:
            return 0.0
        found.append(done["accuracy"])
    return statistics.stdev(found)


def _memory(pid: int) -> float:
    """Memory of a process and its children in MB, shared pages counted once (proportional set size)."""
    import psutil

    total = 0.0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in processes:
        try:
            total += process.memory_full_info().pss / 2**20
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results with ``times``, the ratio of a round's time to perfed's.

    It is None where the row is void: perfed or the program failed, or their accuracies differ by more than noise:
    two standard deviations of a difference.
    """
    ours = {(row["model"], row["method"]): row for row in results if row["program"] == "perfed"}

    def times(row: dict[str, Any]) -> float | None:
        base = ours.get((row["model"], row["method"]), {"error": "perfed was not run"})
        if "error" in base or "error" in row:
            return None
        noise = max(NOISE, 2 * 2**0.5 * base.get("spread", 0.0))
        if abs(row["accuracy"] - base["accuracy"]) > noise:
            return None
        return float(row["round"] / base["round"])

    return [row | {"times": times(row)} for row in results]


def table(results: list[dict[str, Any]]) -> str:
    """Return the table as Markdown, a row for each program and problem."""
    lines = ["| network | method | program | a round, ms | processor, ms | memory, MB | accuracy | times perfed |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in results:
        start = f"| {row['model']} | {row['method']} | {row['program']} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | | void |")
            continue
        ratio = "void" if row["times"] is None else f"{row['times']:.1f}"
        lines.append(
            f"{start} {1e3 * row['round']:.0f} | {1e3 * row['processor']:.0f} | {row['peak_mb']:.0f} | "
            f"{100 * row['accuracy']:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def keep(file: Path, results: list[dict[str, Any]]) -> None:
    """Write results to a file, in the place of those of the same programs and problems that it has."""

    def part(row: dict[str, Any]) -> tuple[str, ...]:
        return row["model"], row["method"], row["program"]

    before = json.loads(file.read_text()) if file.exists() else []
    every = {part(row): row for row in before} | {part(row): row for row in results}
    file.write_text(json.dumps(compared([*every.values()]), indent=1) + "\n")


def main() -> None:
    """Make the problems, run the programs in turns, print and keep the table."""
    parser = argparse.ArgumentParser(description="perfed beside other programs")
    parser.add_argument("--program", action="append", default=[], metavar="NAME=PYTHON", help="perfed is always run")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PERFED_DATA"), help="holds mnist.npz")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--clients", type=int, default=100, help="few lack classes, which perfed then has no outputs for"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one program and problem")
    parser.add_argument("--json", type=Path, help="keeps the results")
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        parser.error("--data-dir is needed: the folder of mnist.npz")
    programs = {"perfed": sys.executable} | dict(text.split("=", 1) for text in arguments.program)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, method in product(arguments.models.split(","), arguments.methods.split(",")):
            folder = Path(scratch) / f"{model}-{method}"
            problem = Problem(model, method, clients=arguments.clients, rows=ROWS[model], rounds=arguments.rounds)
            make(problem, folder, Path(arguments.data_dir))
            for program in [name for name in programs if name in METHODS[method]]:
                load = os.getloadavg()[0]
                done = run(program, programs[program], folder, arguments.threads, arguments.timeout)
                if program == "perfed" and "error" not in done:
                    done["spread"] = spread(programs[program], folder, arguments.threads, arguments.timeout)
                results.append({"model": model, "method": method, "program": program, "load": load} | done)
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(compared(results)))
    if arguments.json:
        keep(arguments.json, results)


if __name__ == "__main__":
    main()
