"""What can differ between groups of clients besides their classes: the meaning of labels, the angle of images."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from perfed.data.partition.shards import Indices, generator
from perfed.errors import PerfedError


def label_permutations(num_classes: int, num_groups: int, *, seed: int) -> Indices:
    """One permutation of the classes per group: a sample of class y is given the label ``result[group, y]``.

    Permutations of two groups differ as long as there are enough of them.

    Returns:
        ``(num_groups, num_classes)`` int64.

    Source: Xu et al. 2023 (ICLR), "concept shift".
    """
    rng = generator(seed, "label permutations")
    drawn: list[tuple[int, ...]] = []
    for _ in range(num_groups):
        fresh = tuple(rng.permutation(num_classes).tolist())
        while fresh in drawn and len(drawn) < math.factorial(num_classes):
            fresh = tuple(rng.permutation(num_classes).tolist())
        drawn.append(fresh)
    return np.array(drawn, dtype=np.int64)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre; what comes in from outside is 0.

    Args:
        images: ``(n, channels, height, width)`` floating point.
        degrees: multiples of 90 (of 180 where height and width differ) move pixels, others interpolate bilinearly.

    Returns:
        The same shape.

    Raises:
        PerfedError: not images.
    """
    if images.ndim != 4:
        raise PerfedError(f"rotations need images (channels, height, width), not inputs {tuple(images.shape[1:])}")
    height, width = images.shape[-2:]
    turns = degrees / 90
    if turns == int(turns) and (height == width or int(turns) % 2 == 0):
        return torch.rot90(images, int(turns), dims=(-2, -1))
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # Where a pixel of the result comes from, in coordinates from -1 to 1 with y downwards.
    source = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], dtype=images.dtype)
    grid = torch.nn.functional.affine_grid(source.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", align_corners=False)
