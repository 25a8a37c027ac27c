"""Random changes to the images of a mini-batch, keyed by client and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed import rng


@dataclass(frozen=True)
class CropFlip:
    """Random crop after padding and random horizontal flip, each image its own: the usual CIFAR-10 augmentation.

    Attributes:
        padding: pixels added on every side before a crop of the original size; 0 for none.
        flip: mirror an image with probability 1/2.
        fill: value of the added pixels, per channel or for all, e.g. that of black.
    """

    padding: int = 4
    flip: bool = True
    fill: tuple[float, ...] = (0.0,)

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Apply to images.

        Args:
            x: ``(clients, batch, channels, height, width)``.
            keys: int64 ``(clients,)``, randomness of this step.

        Returns:
            The same shape. The result for an image does not depend on the size of the batch.
        """
        clients, batch, _, height, width = x.shape
        draw = rng.uniform(rng.key(keys, "augment"), batch * 3, torch.float64).view(clients, batch, 3)
        shift = (draw[:, :, :2] * (2 * self.padding + 1)).long() - self.padding
        rows = torch.arange(height, device=x.device) + shift[:, :, :1]
        columns = torch.arange(width, device=x.device)
        mirrored = (draw[:, :, 2:] < 0.5) & self.flip
        columns = torch.where(mirrored, columns.flip(0), columns) + shift[:, :, 1:]
        inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
        flat = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
        index = flat.flatten(2).unsqueeze(2).expand(-1, -1, x.shape[2], -1)
        moved = x.flatten(3).gather(3, index).view(x.shape)
        fill = torch.tensor(self.fill, dtype=x.dtype, device=x.device).view(-1, 1, 1)
        return torch.where(inside.unsqueeze(2), moved, fill)
