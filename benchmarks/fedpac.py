"""A client's round of FedPAC against a plain loop that does the same steps: MNIST CNN, 20 clients x 600, E = 5.

``python benchmarks/fedpac.py [--threads N] [--data-dir DIR]``; measured as in ``local_update.py``. The loop: statistics
of the features, one epoch of the head on features of the frozen body, five of the body with the alignment, class means.
The server's step has ``combination.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import yardstick
from local_update import Workload, _images, _print, _rounds, _server, _steps, measure, mnist
from torch import Tensor, nn

from perfed.data.client import Client
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.fedpac.fedpac import FedPAC
from perfed.model.chain import Model
from perfed.model.presets import cnn, linear

BATCH, EPOCHS, CLASSES = 50, 5, 10
SGD = yardstick.sgd(0.01, 0.5)


def class_means(features: Tensor, y: Tensor) -> Tensor:
    """``(C, d)``, zero for absent classes."""
    sums = features.new_zeros(CLASSES, features.shape[1]).index_add_(0, y, features)
    return sums / torch.bincount(y, minlength=CLASSES).clamp_min(1)[:, None]


@torch.no_grad()
def features_of(body: nn.Module, x: Tensor) -> Tensor:
    """Of all samples, a few hundred at a time."""
    return torch.cat([body(part) for part in x.split(200)])


def train_fedpac(body: nn.Module, head: nn.Module, centroids: Tensor, x: Tensor, y: Tensor) -> None:
    """One client's part of a round (FedPAC, Algorithm 1)."""
    features = features_of(body, x)
    means = class_means(features, y)
    shares = torch.bincount(y, minlength=CLASSES) / len(y)
    features.square().sum(1).mean() - (shares[:, None] * means).square().sum()
    yardstick.train_fedrep(body, head, x, y, head_epochs=1, body_epochs=0, batch=BATCH, optimizer=SGD)
    parameters = list(body.parameters())
    optimizer = SGD(parameters)
    head.requires_grad_(False)
    for _ in range(EPOCHS):
        for xb, yb in yardstick._minibatches(x, y, BATCH):
            f = body(xb)
            (F.cross_entropy(head(f), yb) + F.mse_loss(f, centroids[yb])).backward()
            yardstick._step(optimizer, parameters)
    head.requires_grad_(True)
    class_means(features_of(body, x), y)


def workload(data_dir: Path | None) -> Workload:
    """The second round, when there are centroids to align with."""
    federation = mnist(data_dir, samples=600)
    everyone = list(federation)
    model = Model(body=cnn((16, 32), 5, 128, padding=2), head=linear(CLASSES))
    method = FedPAC(
        local_epochs=EPOCHS, batch_size=BATCH, optimizer="sgd", lr=0.01, momentum=0.5, extensions=(Prototypes(),)
    )

    def train(client: Client, channels_last: bool) -> None:
        net = yardstick.cnn(28, 1, 16, 32)
        if channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train_fedpac(net[:-1], net[-1], torch.zeros(CLASSES, 128), _images(client, channels_last), client.train.y)

    server = _server(federation, method, model, 1.0, 2)
    steps = _steps(everyone, BATCH, 1 + EPOCHS)
    return Workload(
        "FedPAC 1 + 5, MNIST CNN", steps, everyone, train, server, _rounds(2, 2), ("sequential", "auto"), True
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: torch's)")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist.npz")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{'us per client-step':32}{'yardstick':>11}{'':6}{'stacked':>12}{'sequential':>12}{'auto':>12}{'ratio':>8}")
    _print(measure(workload(options.data_dir), options.threads))


if __name__ == "__main__":
    main()
