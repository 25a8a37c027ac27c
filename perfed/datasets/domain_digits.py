"""Digits of five origins: FedDAR's digits experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from perfed.data.files import load_images
from perfed.data.partition.shards import Indices
from perfed.datasets.options import with_defaults
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled
from perfed.errors import PerfedError

SIZE = 32
DomainName = Literal["mnist", "usps", "mnist_m_remade", "font_digits", "street_digits"]
# Height and width of the images, and whether they are in colour; the file is NAME.npz.
DOMAINS: dict[DomainName, tuple[int, bool]] = {
    "mnist": (28, False),
    "usps": (16, False),
    "mnist_m_remade": (28, True),
    "font_digits": (28, False),
    "street_digits": (32, True),
}


@pooled(
    "digit-domains",
    files=tuple(f"{name}.npz" for name in DOMAINS),
    options=with_defaults(partition="domain-mixed", clients=5, samples=500, prior="uniform"),
)
def digit_domains(seed: int, data_dir: Path | None, *, domains: list[DomainName] = list(DOMAINS)) -> Pool:  # noqa: B006
    """Digits of five origins (MNIST, USPS, MNIST-M, fonts, street photos) as domains, mixed at every client.

    Inputs are ``(3, 32, 32)`` in [-1, 1]: all images are brought to 32x32 (bilinear), grey ones repeated in each
    colour. Domains are in the order of ``domains``. They differ a hundredfold in size (60,000 to 621), hence
    ``prior = "uniform"``; a client that wants more of a domain than is left gets more of its other domains instead.
    Further options are those of :class:`perfed.datasets.options.PartitionOptions`.

    ``font_digits`` stands for FedDAR's SynthDigits, ``street_digits`` for SVHN, and MNIST-M is made anew
    (docs/data.md): numbers compare with each other, not with the paper's.

    Source: Zhong et al. 2023 (FedDAR), section 5 and appendix B.
    """
    if not domains or len(set(domains)) < len(domains):
        raise PerfedError(f"data.domains = {domains} is not allowed; it must be different names, at least one")
    read = {}
    for name in domains:
        size, colour = DOMAINS[name]
        read[name] = load_images(f"{name}.npz", data_dir, size, colour=colour)
    parts: dict[str, Any] = {}
    for split in ("train", "test"):
        parts[f"x_{split}"] = Resized([data[f"x_{split}"] for data in read.values()])
        parts[f"y_{split}"] = np.concatenate([data[f"y_{split}"] for data in read.values()])
        lengths = [len(data[f"y_{split}"]) for data in read.values()]
        parts[f"domain_{split}"] = np.repeat(np.arange(len(read)), lengths)
    return Pool(**parts, num_classes=10, class_names=tuple("0123456789"), domain_names=tuple(domains))


class Resized:
    """Images of several arrays, one behind the other, in one size and in colour; made when they are asked for.

    Args:
        parts: uint8, ``(samples, height, width)`` or ``(samples, height, width, 3)``, each of its own size.
    """

    def __init__(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __getitem__(self, index: Indices, /) -> NDArray[np.uint8]:
        """``(n, 3, 32, 32)`` uint8."""
        index = np.asarray(index)
        found = np.empty((len(index), 3, SIZE, SIZE), dtype=np.uint8)
        owner = np.searchsorted(self.ends, index, side="right")
        for number in np.unique(owner):
            rows = owner == number
            part = self.parts[number]
            images = torch.from_numpy(part[index[rows] - (self.ends[number] - len(part))])
            images = images.permute(0, 3, 1, 2) if images.ndim == 4 else images.unsqueeze(1)
            resized = torch.nn.functional.interpolate(images.float(), size=(SIZE, SIZE), mode="bilinear")
            found[rows] = resized.round().to(torch.uint8).expand(-1, 3, -1, -1).numpy()
        return found
