"""Samples of a data set before they are given to clients, and what else can differ between groups of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.augment import CropFlip
from perfed.data.partition.shards import Indices, make_generator
from perfed.errors import PerfedError


def draw_label_permutations(num_classes: int, num_groups: int, *, seed: int) -> Indices:
    """Return one permutation of the classes per group: a sample of class y gets the label ``result[group, y]``.

    Permutations of two groups differ as long as there are enough of them.

    Returns:
        ``(num_groups, num_classes)`` int64.

    Source: Xu et al. 2023 (ICLR), "concept shift".
    """
    rng = make_generator(seed, "label permutations")
    permutations: list[tuple[int, ...]] = []
    for _ in range(num_groups):
        permutation = tuple(rng.permutation(num_classes).tolist())
        while permutation in permutations and len(permutations) < math.factorial(num_classes):
            permutation = tuple(rng.permutation(num_classes).tolist())
        permutations.append(permutation)
    return np.array(permutations, dtype=np.int64)


def rotate_images(images: Tensor, degrees: float) -> Tensor:
    """Return images rotated counter-clockwise about their centre; pixels from outside the image are 0.

    Args:
        images: ``(n, channels, height, width)`` floating point.
        degrees: multiples of 90 (of 180 where height and width differ) move pixels, others interpolate bilinearly.

    Returns:
        The same shape.

    Raises:
        PerfedError: if the inputs are not images.
    """
    if images.ndim != 4:
        raise PerfedError(f"rotations need images (channels, height, width), not inputs {tuple(images.shape[1:])}")
    height, width = images.shape[-2:]
    turns = degrees / 90
    if turns == int(turns) and (height == width or int(turns) % 2 == 0):
        return torch.rot90(images, int(turns), dims=(-2, -1))
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # The source of a pixel of the result, in coordinates from -1 to 1 with y downwards.
    source = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], dtype=images.dtype)
    grid = torch.nn.functional.affine_grid(source.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", align_corners=False)


class LazyInputs(Protocol):
    """Inputs that are computed on access: ``inputs[index]`` returns those at the positions ``index`` as an array."""

    def __getitem__(self, index: Indices, /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Pool:
    """The samples of a data set before their distribution to clients, with separate fields for both splits.

    Attributes:
        x_train, x_test: ``(samples, channels, height, width)`` uint8 images, or ``(samples, ...)`` float32 features;
            or an object that returns them for some positions, if only a part of the samples is used.
        y_train, y_test: ``(samples,)`` int64 classes.
        num_classes: C.
        mean, std: per channel, of pixels in [0, 1]; not used for features.
        class_names: C names, if known.
        owner_train, owner_test: ``(samples,)`` position in ``owners``; ``None`` if there are no owners.
        owners: their names, in the order that clients have in the natural partition.
        domain_train, domain_test: ``(samples,)`` position in ``domain_names``; ``None`` if domains are not known.
        domain_names: M names of the domains.
        dominant_classes: the default dominant classes of each group; empty for consecutive groups.
        augment: random changes to the images of every training mini-batch.
        words: if inputs are token ids, the words with the ids from 2 on.
    """

    x_train: NDArray[Any] | LazyInputs
    y_train: Indices
    x_test: NDArray[Any] | LazyInputs
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

    def make_inputs(self, split: str, index: Indices, degrees: float = 0.0) -> Tensor:
        """Return float32 inputs of some samples: images rotated and normalised, features unchanged."""
        samples = torch.from_numpy(getattr(self, f"x_{split}")[index])
        if samples.dtype != torch.uint8:
            return samples if degrees == 0 else rotate_images(samples, degrees)
        images = samples.float().div_(255)
        if degrees:
            images = rotate_images(images, degrees)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return images.sub_(mean).div_(std)
