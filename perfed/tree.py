"""Nested dictionaries of tensors, of which payloads, replies and states consist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor

Tree = Mapping[str, Union[Tensor, "Tree"]]

SLASH = "\x1f"
"""The replacement of "/" in a name that is part of a path; no name contains it (:mod:`perfed.data.names`)."""


def path_part(name: str) -> str:
    """Return a name with "/" replaced, as a part of a path whose parts are joined by "/".

    Example:
        >>> split_path(f"{path_part('Kiel/Nord')}/{path_part('weight')}")
        ['Kiel/Nord', 'weight']
    """
    return name.replace("/", SLASH)


def split_path(path: str) -> list[str]:
    """Return the names in a path."""
    return [part.replace(SLASH, "/") for part in path.split("/")]


def map_leaves(tree: Tree, fn: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor | Tree]:
    """Apply ``fn(name, tensor)`` to every tensor; ``name`` is the last part of its path."""
    return {
        name: fn(name, value) if isinstance(value, Tensor) else map_leaves(value, fn) for name, value in tree.items()
    }


def iterate_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path: the names as :func:`path_part`, joined by "/".

    Example:
        >>> [(path, t.tolist()) for path, t in iterate_leaves({"w": torch.ones(1), "term": {"m": torch.zeros(1)}})]
        [('w', [1.0]), ('term/m', [0.0])]
    """
    for name, value in tree.items():
        if isinstance(value, Tensor):
            yield path + path_part(name), value
        else:
            yield from iterate_leaves(value, f"{path}{path_part(name)}/")


def copy_tree(tree: Tree) -> dict[str, Tensor | Tree]:
    """Return a copy that shares no memory with ``tree``."""
    return map_leaves(tree, lambda _, t: t.detach().clone(memory_format=torch.contiguous_format))


def count_bytes(value: Any) -> int:
    """Return the number of bytes of a tensor, or of all tensors in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(count_bytes(item) for item in (value if isinstance(value, list) else value.values()))


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


def stack_padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack one tree per client along a new first axis; tensors of different shapes are padded with zeros."""
    stacked: dict[str, Any] = {}
    for name, value in rows[0].items():
        column = [row[name] for row in rows]
        if not isinstance(value, Tensor):
            stacked[name] = stack_padded(column)
            continue
        shapes = {t.shape for t in column}
        if len(shapes) == 1:
            stacked[name] = torch.stack(column)
            continue
        size = [max(sizes) for sizes in zip(*shapes, strict=True)]
        out = value.new_zeros(len(rows), *size)
        for i, tensor in enumerate(column):
            _slice_corner(out[i], tensor.shape).copy_(tensor)
        stacked[name] = out
    return stacked


def select_row(stacked: Mapping[str, Any], row: int, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    """Return row ``row`` of every tensor; tensors in ``shapes`` are cut to the client's shape."""
    out: dict[str, Any] = {}
    for name, value in stacked.items():
        if not isinstance(value, Tensor):
            out[name] = select_row(value, row, shapes)
            continue
        tensor = value[row]
        shape = shapes.get(name)
        if shape is not None and tensor.shape[-len(shape) :] != shape and len(shape):
            tensor = _slice_corner(tensor, shape)
        out[name] = tensor
    return out


def _slice_corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first ``shape`` entries of the last axes, as a view."""
    for axis, size in zip(range(-len(shape), 0), shape, strict=True):
        tensor = tensor.narrow(axis, 0, size)
    return tensor
