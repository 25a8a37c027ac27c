"""Images in a folder, a file of arrays per client, and a small convolutional network.

The images are scikit-learn's digits; yours are written in the same way. Run: python examples/images.py (half a minute).
"""

import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import perfed

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)  # images x channels x height x width
rng = np.random.default_rng(0)

with tempfile.TemporaryDirectory() as folder:
    for number in range(6):  # one file ID.npz per client, who knows five of the ten digits
        own = np.flatnonzero(np.isin(labels, rng.choice(10, size=5, replace=False)))
        train, test = np.split(rng.permutation(own)[:150], [50])
        np.savez(
            Path(folder) / f"camera-{number}.npz",
            x_train=images[train],
            y_train=labels[train],
            x_test=images[test],
            y_test=labels[test],
        )
    federation = perfed.Federation.from_folder(folder)
    print(federation)
    result = perfed.compare(
        federation,
        ["local", "fedavg-ft", "fedpac"],
        model={"body": {"kind": "cnn", "channels": [8], "kernel": 3, "out": 16}, "head": "linear"},
        rounds=20,
        training={"local_epochs": 5, "lr": 3e-3},
    )
    print(result.verdict)
