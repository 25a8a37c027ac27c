"""Conversion of trees of tensors to bytes, for messages and checkpoints.

The format is safetensors (names, dtypes including bfloat16, shapes; no pickle); nested names are joined by "/", which
is replaced by :data:`perfed.tree.SLASH` in names that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from perfed.errors import PerfedError
from perfed.tree import SLASH, Tree, path_part, split_path

EMPTY = "//empty"
"""The end of the path of an empty dictionary, after another "/"."""
_RESERVED = "__metadata__"  # the key of metadata in the safetensors header
_DEEPEST = 64


def flatten(tree: Tree) -> dict[str, Tensor]:
    """Return the tensors of a tree by their paths; an empty dictionary is represented by a marker of size zero.

    Raises:
        PerfedError: if a name is empty, reserved or contains :data:`perfed.tree.SLASH`, a value is neither a tensor nor
            a dictionary, or more than 64 dictionaries are nested.
    """
    flat: dict[str, Tensor] = {}
    for name, value in tree.items():
        if not name or SLASH in name or name == _RESERVED:
            raise PerfedError(
                f"{name!r} cannot name a tensor; names are not empty, not '{_RESERVED}' and hold no U+001F"
            )
        part = path_part(name)
        if isinstance(value, Tensor):
            flat[part] = value
        elif not isinstance(value, Mapping):
            raise PerfedError(f"'{name}' is a {type(value).__name__}; only tensors and dictionaries of them are sent")
        else:
            inner = flatten(value) if value else {EMPTY: torch.zeros(0)}
            flat.update({f"{part}/{path}": tensor for path, tensor in inner.items()})
            if any(path.count("/") > _DEEPEST for path in inner):
                raise PerfedError(f"'{name}' holds more than {_DEEPEST} dictionaries inside each other")
    return flat


def unflatten(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tree from the result of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for path, tensor in sorted(flat.items()):
        marker = path.endswith(EMPTY)
        parts = split_path(path[: -len(EMPTY) - 1] if marker else path)
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, Tensor):
                raise ValueError(f"'{part}' is both a tensor and a dictionary")
        node[parts[-1]] = {} if marker else tensor
    return tree


def encode(tree: Tree) -> bytes:
    """Return the bytes of a nested dictionary of tensors; the same tree always gives the same bytes."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(flatten(tree).items())}
    # Tensors that share memory (views, expanded rows) must not be written twice as one storage.
    return bytes(save({name: tensor.clone() for name, tensor in flat.items()}))


def decode(data: bytes) -> dict[str, Any]:
    """Return the tree from the bytes of :func:`encode`, with names in sorted order.

    Raises:
        PerfedError: if the bytes are truncated or do not encode a tree.
    """
    try:
        flat = load(data)
        tree = unflatten(flat)
        if {name: t.shape for name, t in flatten(tree).items()} != {name: t.shape for name, t in flat.items()}:
            raise ValueError("no tree has these names")
        return tree
    except (
        SafetensorError,
        ValueError,
        KeyError,
        RuntimeError,
    ) as error:  # RuntimeError for sizes that overflow, and for depth
        reason = str(error).partition("\n")[0]
        raise PerfedError(f"not a tree of tensors: {reason}") from None
