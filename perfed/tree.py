"""Nested dictionaries of tensors: what payloads, replies and states are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Union

import torch
from torch import Tensor

Tree = Mapping[str, Union[Tensor, "Tree"]]


def map_leaves(tree: Tree, fn: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor | Tree]:
    """Apply ``fn(name, tensor)`` to every tensor; ``name`` is the last part of its path."""
    return {
        name: fn(name, value) if isinstance(value, Tensor) else map_leaves(value, fn) for name, value in tree.items()
    }


def copy(tree: Tree) -> dict[str, Tensor | Tree]:
    """A copy that shares no memory with ``tree``."""
    return map_leaves(tree, lambda _, t: t.detach().clone(memory_format=torch.contiguous_format))


def stack(rows: Sequence[Tree]) -> dict[str, Tensor | Tree]:
    """Stack trees of one structure along a new first axis; a leaf whose shapes differ becomes a list of tensors."""
    first = rows[0]
    out: dict[str, Tensor | Tree] = {}
    for name, value in first.items():
        column = [row[name] for row in rows]
        if not isinstance(value, Tensor):
            out[name] = stack(column)  # type: ignore[arg-type]
        elif all(t.shape == value.shape for t in column):  # type: ignore[union-attr]
            out[name] = torch.stack(column)  # type: ignore[arg-type]
        else:
            out[name] = column  # type: ignore[assignment]
    return out
