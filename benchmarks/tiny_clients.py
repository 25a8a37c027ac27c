"""FedPAC with 1,000 clients of 50 CIFAR-10 images, 30 in a round: start, rounds, evaluation of all, peak memory.

``python benchmarks/tiny_clients.py [--rounds N] [--data-dir DIR]``; needs cifar10_jpeg.npz. The first start ever also
decodes the JPEG files, which is kept for later ones. Limits: 20 s for the start, 3 GB.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from statistics import median

from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import start

EXPERIMENT = "fedpac-cifar10-1000"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, help="folder with cifar10_jpeg.npz")
    options = parser.parse_args()
    begun = time.perf_counter()
    run = start(validate(override(find_experiment(EXPERIMENT), [], ["fedpac"])), data_dir=options.data_dir)
    run.server.prepare()
    print(f"start {time.perf_counter() - begun:.1f} s", flush=True)
    seconds = []
    for number in range(1, options.rounds + 1):
        before = time.perf_counter()
        run.server.round(number)
        seconds.append(time.perf_counter() - before)
    before = time.perf_counter()
    run.server.evaluate("test")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"round {median(seconds):.1f} s, evaluation {time.perf_counter() - before:.1f} s, peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
