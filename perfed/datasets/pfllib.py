"""Fashion-MNIST as PFLlib's published tables have it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.files import load_images
from perfed.data.partition import pfllib
from perfed.data.partition.shards import Indices
from perfed.datasets.catalogue import client_ids, dataset
from perfed.datasets.images import FASHION
from perfed.datasets.pool import Pool

CLIENTS, CLASSES_PER_CLIENT, CONCENTRATION = 20, 2, 0.1


@dataset("pfllib-fashion", files=("fashion_mnist.npz",))
def pfllib_fashion(
    seed: int, data_dir: Path | None, *, partition: Literal["pathological", "dirichlet"] = "pathological"
) -> Federation:
    """Fashion-MNIST at 20 clients, cut as for PFLlib's published tables, sample by sample.

    ``pathological``: two classes each; ``dirichlet``: Dir(0.1) shares of every class. All 70,000 images are pooled;
    three quarters of each client's are for training: 52,493 and 17,507. The split does not depend on the seed of a run.
    Inputs are ``(1, 28, 28)``, bright on black, pixels in [0, 1] minus 0.5 divided by 0.5.

    Source: Xiao et al. 2017; Zhang et al. 2025, PFLlib.
    """
    data = load_images("fashion_mnist.npz", data_dir, 28)
    x, y = (np.concatenate([data[f"{name}_train"], data[f"{name}_test"]]) for name in ("x", "y"))
    pool = Pool(x[:, None], y, x[:0], y[:0], num_classes=10)
    if partition == "pathological":
        parts = pfllib.pathological(y, CLIENTS, CLASSES_PER_CLIENT)
    else:
        parts = pfllib.dirichlet(y, CLIENTS, CONCENTRATION)

    def split(index: Indices) -> Split:
        return Split(pool.inputs("train", index), torch.from_numpy(y[index]))

    clients = tuple(
        Client(id_, split(train), split(test)) for id_, (train, test) in zip(client_ids(CLIENTS), parts, strict=True)
    )
    return Federation(clients, 10, class_names=FASHION)
