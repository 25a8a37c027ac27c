"""A message between server and site as bytes, and the frame that messages and files share.

A frame is eight bytes that name the format, the SHA-256 of all that follows, the lengths of header and body (eight
bytes each, the highest first), the header as JSON with sorted keys, and the body. The same content gives the same
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
_LONGEST_HEADER = 2**24


def pack(header: Mapping[str, Any], tree: Tree) -> bytes:
    """A message: ``header`` holds JSON values, ``tree`` tensors of any dtype, bfloat16 among them.

    Raises:
        PerfedError: the header holds something else or is longer than 16 MiB; a name cannot be sent (see
            :func:`perfed.codec.flatten`).

    Example:
        >>> import torch
        >>> unpack(pack({"round": 3}, {"weight": torch.ones(2, dtype=torch.bfloat16)}))
        ({'round': 3}, {'weight': tensor([1., 1.], dtype=torch.bfloat16)})
    """
    return frame(header, encode(tree))


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and tree of a message that :func:`pack` has made.

    Raises:
        PerfedError: the bytes are too few, too many, changed, or no message.
    """
    header, body = unframe(data)
    return header, decode(body)


def frame(header: Mapping[str, Any], *parts: bytes) -> bytes:
    """Header and body, the latter given in parts, as bytes that show every change.

    Raises:
        PerfedError: the header holds something other than JSON values or is longer than 16 MiB.
    """
    try:
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PerfedError(f"a header holds JSON values only: {error}") from None
    if len(text) > _LONGEST_HEADER:
        raise PerfedError(f"a header of {len(text)} bytes is too long; at most {_LONGEST_HEADER} are sent")
    content = (*(length.to_bytes(8, "big") for length in (len(text), sum(map(len, parts)))), text, *parts)
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return b"".join((_FORMAT, digest.digest(), *content))


def unframe(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a :func:`frame`.

    Raises:
        PerfedError: the bytes are too few, too many, changed, or no frame.
    """
    if data[:_DIGEST] != _FORMAT[: len(data)]:
        raise PerfedError(f"these bytes are not of perfed, or of another version (they begin with {data[:_DIGEST]!r})")
    if len(data) < _HEADER:
        raise PerfedError(f"truncated: {len(data)} bytes, fewer than the {_HEADER} that every message has")
    header_length, body_length = (int.from_bytes(data[at : at + 8], "big") for at in (_LENGTHS, _LENGTHS + 8))
    if header_length > _LONGEST_HEADER:
        raise PerfedError(f"a header of {header_length} bytes is too long; at most {_LONGEST_HEADER} are read")
    start = _HEADER + header_length
    if len(data) != start + body_length:
        what = "truncated" if len(data) < start + body_length else "oversized"
        raise PerfedError(f"{what}: {len(data)} bytes, where {start + body_length} were written")
    if hashlib.sha256(memoryview(data)[_LENGTHS:]).digest() != data[_DIGEST:_LENGTHS]:
        raise PerfedError("changed: the content does not have the SHA-256 that was written with it")
    try:
        header = json.loads(data[_HEADER:start])
    except (ValueError, RecursionError) as error:
        raise PerfedError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise PerfedError(f"the header is a {type(header).__name__}; names and values are needed")
    return header, data[start:]
