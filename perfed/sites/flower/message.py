"""The conversion of messages between server and site to bytes, and the frame that messages and files share.

A frame consists of eight bytes that name the format, the SHA-256 of all following bytes, the lengths of header and body
(eight bytes each, big-endian), the header as JSON with sorted keys, and the body. The same content gives the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from perfed.codec import decode, encode
from perfed.errors import PerfedError
from perfed.tree import Tree

_FORMAT = b"perfed\x00\x01"
_DIGEST = len(_FORMAT)
_LENGTHS = _DIGEST + 32
_HEADER = _LENGTHS + 16
_MAX_HEADER = 2**24


def pack(header: Mapping[str, Any], tree: Tree) -> bytes:
    """Return a message as bytes.

    Args:
        header: A dictionary of JSON values.
        tree: A tree of tensors of any dtype, including bfloat16.

    Raises:
        PerfedError: The header contains other values or is longer than 16 MiB, or the tree has a name that cannot be
            sent (see :func:`perfed.codec.flatten`).

    Example:
        >>> import torch
        >>> unpack(pack({"round": 3}, {"weight": torch.ones(2, dtype=torch.bfloat16)}))
        ({'round': 3}, {'weight': tensor([1., 1.], dtype=torch.bfloat16)})
    """
    return frame(header, encode(tree))


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the tree of a message; the inverse of :func:`pack`.

    Raises:
        PerfedError: The bytes are not a message, or were truncated, extended or changed.
    """
    header, body = unframe(data)
    return header, decode(body)


def frame(header: Mapping[str, Any], *parts: bytes) -> bytes:
    """Return a frame with a header and a body, in which every change is detected.

    Args:
        header: A dictionary of JSON values.
        *parts: The parts of the body, which are joined.

    Raises:
        PerfedError: The header contains other values or is longer than 16 MiB.
    """
    try:
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PerfedError(f"a header must contain JSON values only: {error}") from None
    if len(text) > _MAX_HEADER:
        raise PerfedError(f"a header of {len(text)} bytes is too long; at most {_MAX_HEADER} are sent")
    content = (*(length.to_bytes(8, "big") for length in (len(text), sum(map(len, parts)))), text, *parts)
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return b"".join((_FORMAT, digest.digest(), *content))


def unframe(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the body of a frame; the inverse of :func:`frame`.

    Raises:
        PerfedError: The bytes are not a frame, or were truncated, extended or changed.
    """
    if data[:_DIGEST] != _FORMAT[: len(data)]:
        raise PerfedError(
            f"these bytes are not a message or file of this version of perfed (they begin with {data[:_DIGEST]!r})"
        )
    if len(data) < _HEADER:
        raise PerfedError(f"truncated: {len(data)} bytes, fewer than the {_HEADER} that every message has")
    header_length, body_length = (int.from_bytes(data[start : start + 8], "big") for start in (_LENGTHS, _LENGTHS + 8))
    if header_length > _MAX_HEADER:
        raise PerfedError(f"a header of {header_length} bytes is too long; at most {_MAX_HEADER} are read")
    start = _HEADER + header_length
    if len(data) != start + body_length:
        problem = "truncated" if len(data) < start + body_length else "oversized"
        raise PerfedError(f"{problem}: {len(data)} bytes, where {start + body_length} were written")
    if hashlib.sha256(memoryview(data)[_LENGTHS:]).digest() != data[_DIGEST:_LENGTHS]:
        raise PerfedError("changed: the content does not have the SHA-256 that was written with it")
    try:
        header = json.loads(data[_HEADER:start])
    except (ValueError, RecursionError) as error:
        raise PerfedError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise PerfedError(f"the header is a {type(header).__name__}; names and values are needed")
    return header, data[start:]
