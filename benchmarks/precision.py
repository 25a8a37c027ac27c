"""Local training with layers in bf16 beside full precision: accuracy and time of FedAvg with a CNN on Fashion-MNIST.

``python benchmarks/precision.py --data-dir DIR`` trains 20 clients of 300 images of four classes in both, three seeds.
It prints each seed's accuracy after twenty rounds of one epoch, the standard error over seeds, and processor seconds of
training. Whether bf16 pays depends on the processor: with AVX512-BF16 or AMX it does.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

import perfed
from perfed.training.plan import Plan

SEEDS, ROUNDS = 3, 20
OPTIONS = {"clients": 20, "samples": 300, "partition": "pathological", "classes_per_client": 4, "test_samples": 200}
TRAINING = {"optimizer": "sgd", "lr": 0.05, "batch_size": 50, "local_epochs": 1}


def trained(precision: str, seed: int, data_dir: Path) -> tuple[float, float]:
    """Return the accuracy of the shared model, mean over clients, and processor seconds."""
    federation = perfed.load("fashion-mnist", OPTIONS, seed=seed, data_dir=data_dir)
    method = perfed.build_method("fedavg", {**TRAINING, "precision": precision})
    model = perfed.Model(body=perfed.cnn((16, 32), 5, 128), head=perfed.linear(10))
    evaluation = perfed.Evaluation(every=ROUNDS + 1)
    run = perfed.Run(
        federation, method, model, rounds=ROUNDS, seed=seed, plan=Plan("sequential", threads=1), evaluation=evaluation
    )
    before = time.process_time()
    summary = run.execute()
    return 100 * summary["accuracy"]["mean"], time.process_time() - before


def main() -> None:
    """Print a line for each precision."""
    parser = argparse.ArgumentParser(description="layers in bf16 beside full precision")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PERFED_DATA"), help="of fashion_mnist.npz")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for precision in ("full", "bf16"):
        found = np.array([trained(precision, seed, arguments.data_dir) for seed in range(SEEDS)])
        accuracy, seconds = found.T
        error = accuracy.std(ddof=1) / SEEDS**0.5
        each = ", ".join(f"{one:.2f}" for one in accuracy)
        print(f"{precision}: {accuracy.mean():.2f} (error {error:.2f}; {each}), {seconds.sum():.0f} s", flush=True)


if __name__ == "__main__":
    main()
