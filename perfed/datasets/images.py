"""Image data sets of FedPAC and its baselines, with every partition, and PFLlib's Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from perfed.data.augment import CropFlip
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.files import load_images, load_npz, require
from perfed.data.partition import pfllib
from perfed.data.partition.shards import Indices
from perfed.datasets.catalogue import dataset, make_client_ids
from perfed.datasets.cifar import read_jpeg_images, read_original_images
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled_dataset

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
BLACK = tuple(-mean / std for mean, std in zip(CIFAR_MEAN, CIFAR_STD, strict=True))
FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CHARACTER_GROUPS = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))


def _read_grey_images(file: str, data_dir: Path | None, class_names: tuple[str, ...]) -> Pool:
    data = load_images(file, data_dir, 28)
    return Pool(
        data["x_train"][:, None],
        data["y_train"],
        data["x_test"][:, None],
        data["y_test"],
        num_classes=10,
        mean=MNIST_MEAN,
        std=MNIST_STD,
        class_names=class_names,
    )


@pooled_dataset("mnist", files=("mnist.npz",))
def mnist(seed: int, data_dir: Path | None) -> Pool:
    """MNIST digits (28x28, 60,000 and 10,000), given to clients by a partition.

    Inputs are ``(1, 28, 28)``, bright ink on black, pixels in [0, 1] minus 0.1307 divided by 0.3081. The options are
    those of :class:`perfed.datasets.options.PartitionOptions`.

    Source: LeCun et al. 1998.
    """
    return _read_grey_images("mnist.npz", data_dir, tuple(CHARACTERS[:10]))


@pooled_dataset("fashion-mnist", files=("fashion_mnist.npz",))
def fashion_mnist(seed: int, data_dir: Path | None) -> Pool:
    """Fashion-MNIST clothes (28x28, 60,000 and 10,000), given to clients by a partition.

    Inputs are ``(1, 28, 28)``, bright on black, pixels in [0, 1] minus 0.1307 divided by 0.3081 (MNIST's numbers, as
    in FedPAC's program). The options are those of :class:`perfed.datasets.options.PartitionOptions`.

    Source: Xiao et al. 2017.
    """
    return _read_grey_images("fashion_mnist.npz", data_dir, FASHION)


@pooled_dataset("cifar10", files=("cifar10_jpeg.npz",))
def cifar10(
    seed: int, data_dir: Path | None, *, augment: bool = False, images: Literal["jpeg", "original"] = "jpeg"
) -> Pool:
    """CIFAR-10 photos (32x32 in colour, 50,000 and 10,000), given to clients by a partition.

    The images come from JPEG files (lossy) that are decoded once and stored in ``~/.cache/perfed``, or with
    ``images = "original"`` from ``cifar10_original.npz``, which has the published pixels. Inputs are
    ``(3, 32, 32)``, pixels in [0, 1] normalised per channel: mean 0.4914, 0.4822, 0.4465, standard deviation 0.2023,
    0.1994, 0.2010. ``augment``: training images are cropped at random after 4 black pixels were added on every side,
    and flipped with probability 1/2. Further options are those of
    :class:`perfed.datasets.options.PartitionOptions`.

    Source: Krizhevsky 2009.
    """
    data = read_jpeg_images(data_dir) if images == "jpeg" else read_original_images(data_dir)
    return Pool(
        data["x_train"],
        data["y_train"],
        data["x_test"],
        data["y_test"],
        num_classes=10,
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
        class_names=tuple(data["class_names"].tolist()),
        augment=CropFlip(fill=BLACK) if augment else None,
    )


@pooled_dataset("femnist62", files=("femnist62.npz",))
def femnist62(seed: int, data_dir: Path | None, *, digits: bool = False) -> Pool:
    """FEMNIST characters (28x28, 62 classes, 110 writers), pooled and given to clients by a partition.

    Classes are 0-9, A-Z, a-z; in the dominant partition the three groups are digits, upper and lower case.
    ``partition = "natural"`` makes every writer a client. Inputs are ``(1, 28, 28)``, inverted to bright ink on black,
    pixels in [0, 1] minus 0.1307 divided by 0.3081. ``digits``: only the ten digits (SRPFL's FEMNIST has ten classes).
    Further options are those of :class:`perfed.datasets.options.PartitionOptions`.

    Source: Caldas et al. 2018 (LEAF); a small stand-in for EMNIST (Cohen et al. 2017).
    """
    file = "femnist62.npz"
    data = load_images(file, data_dir, 28, ("writer",), num_classes=62)
    names = tuple(load_npz(file, data_dir, ["writer_name"])["writer_name"].tolist())
    owners = {split: data[f"writer_{split}"].astype(np.int64) for split in ("train", "test")}
    for split, column in owners.items():
        good = len(column) > 0 and column.min() >= 0 and column.max() < len(names)
        require(file, good, f"'writer_{split}' must hold positions in 'writer_name', 0..{len(names) - 1}")
    classes = 10 if digits else 62
    for split in ("train", "test"):
        is_used = data[f"y_{split}"] < classes
        owners[split] = owners[split][is_used]
        data |= {f"{name}_{split}": data[f"{name}_{split}"][is_used] for name in ("x", "y")}
    return Pool(
        255 - data["x_train"][:, None],
        data["y_train"],
        255 - data["x_test"][:, None],
        data["y_test"],
        num_classes=classes,
        mean=MNIST_MEAN,
        std=MNIST_STD,
        class_names=tuple(CHARACTERS[:classes]),
        owner_train=owners["train"],
        owner_test=owners["test"],
        owners=names,
        dominant_classes=() if digits else CHARACTER_GROUPS,
    )


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
        parts = pfllib.split_pathological(y, CLIENTS, CLASSES_PER_CLIENT)
    else:
        parts = pfllib.split_dirichlet(y, CLIENTS, CONCENTRATION)

    def split(index: Indices) -> Split:
        return Split(pool.make_inputs("train", index), torch.from_numpy(y[index]))

    clients = tuple(
        Client(id_, split(train), split(test))
        for id_, (train, test) in zip(make_client_ids(CLIENTS), parts, strict=True)
    )
    return Federation(clients, 10, class_names=FASHION)
