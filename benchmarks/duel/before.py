"""Before and now: rounds of training in another checkout of perfed and in this one, in turns.

``python benchmarks/duel/before.py CHECKOUT --data-dir DIR [--turns N]`` trains the problems of the duel
(``problem.py``) in both, one thread each, and prints a table: milliseconds of a round (the median of
rounds 2 to 10) and of all ten rounds, the least of all turns each, and before over now. Both run with this
interpreter's packages. Needs psutil. With 1,000 clients a problem has three rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from duel import HERE, METHODS, run
from problem import ROWS, Problem, make

PROBLEMS = [
    *(Problem(model, method, rows=rows) for model, rows in ROWS.items() for method in METHODS),
    *(Problem(model, "fedavg", clients=1000, rounds=3) for model in ("mlp-small", "mlp-large")),
]
TIMEOUT = 600.0


def trained(checkout: Path, folder: Path) -> tuple[float, float]:
    """Return milliseconds of a round and of all, of the problem in ``folder`` trained by a checkout."""
    found = run("perfed", sys.executable, folder, 1, TIMEOUT, checkout)
    if "error" in found:
        sys.exit(f"{checkout}: {found['error']}")
    return 1e3 * found["round"], 1e3 * found["all_rounds"]


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PERFED_DATA"), help="holds mnist.npz")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = (arguments.checkout.resolve(), HERE.parents[1])
    print("| network | method | clients | a round: before | now | ratio | all rounds: before | now | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for problem in PROBLEMS:
        with TemporaryDirectory() as folder:
            make(problem, Path(folder), arguments.data_dir)
            turns = [[trained(checkout, Path(folder)) for checkout in checkouts] for _ in range(arguments.turns)]
        cells = []
        for number in (0, 1):
            before, now = (min(turn[which][number] for turn in turns) for which in (0, 1))
            cells += [f"{before:.4g}", f"{now:.4g}", f"{before / now:.2f}"]
        print(f"| {problem.model} | {problem.method} | {problem.clients} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
