"""Samples of a data set before they are given to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.augment import CropFlip
from perfed.data.partition.shards import Indices
from perfed.datasets.shift import rotate


class OnDemand(Protocol):
    """Inputs that are made when they are asked for: those at the positions ``index``, as an array."""

    def __getitem__(self, index: Indices, /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Pool:
    """Samples of a data set before they are given to clients; a field per split where two are named.

    Attributes:
        x_train, x_test: ``(samples, channels, height, width)`` uint8 images, or ``(samples, ...)`` float32 features;
            or something that gives these for some positions, where only part of the samples will be used.
        y_train, y_test: ``(samples,)`` int64 classes.
        num_classes: C.
        mean, std: per channel, of pixels in [0, 1]; not used for features.
        class_names: C names, if known.
        owner_train, owner_test: ``(samples,)`` position in ``owners``; ``None`` if there are no owners.
        owners: their names, in the order that clients have in the natural partition.
        domain_train, domain_test: ``(samples,)`` position in ``domain_names``; ``None`` if domains are not known.
        domain_names: M names of the domains.
        dominant_classes: of each group, by default; empty for consecutive groups.
        augment: random changes to the images of every training mini-batch.
        words: where inputs are token ids, what the ids from 2 on stand for.
    """

    x_train: NDArray[Any] | OnDemand
    y_train: Indices
    x_test: NDArray[Any] | OnDemand
    y_test: Indices
    num_classes: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    class_names: tuple[str, ...] | None = None
    owner_train: Indices | None = None
    owner_test: Indices | None = None
    owners: tuple[str, ...] = ()
    domain_train: Indices | None = None
    domain_test: Indices | None = None
    domain_names: tuple[str, ...] = ()
    dominant_classes: tuple[tuple[int, ...], ...] = ()
    augment: CropFlip | None = None
    words: tuple[str, ...] | None = None

    def inputs(self, split: str, index: Indices, degrees: float = 0.0) -> Tensor:
        """Float32 inputs of some samples: images turned and normalised, features as they are."""
        chosen = torch.from_numpy(getattr(self, f"x_{split}")[index])
        if chosen.dtype != torch.uint8:
            return chosen if degrees == 0 else rotate(chosen, degrees)
        images = chosen.float().div_(255)
        if degrees:
            images = rotate(images, degrees)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return images.sub_(mean).div_(std)
