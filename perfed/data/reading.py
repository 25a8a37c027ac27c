"""Reading of files from untrusted or damaged sources: errors are one line, and no code in the files is executed."""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from perfed.errors import PerfedError, summarise_validation_error
from perfed.system import available_memory

Checked = TypeVar("Checked")
_SEAL = "sha256"
_LONGEST = 200  # the largest number of characters of a reason


def reason_of(error: BaseException) -> str:
    """Return the message of an exception as one short line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:_LONGEST]


def read_text(file: Path, newline: str | None = None) -> str:
    """Return the content of the text file ``file``; ``newline`` is the argument of :func:`open`.

    Raises:
        PerfedError: the file cannot be read.
    """
    return decode_text(read_bytes(file), file, newline)


def read_bytes(file: Path) -> bytes:
    """Return the content of ``file``.

    Raises:
        PerfedError: the file cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise PerfedError(f"{file}: cannot be read: {reason_of(error)}") from None


def decode_text(content: bytes, file: Path, newline: str | None = None) -> str:
    """Return the content of the text file ``file`` as a string; ``newline`` as in :func:`read_text`.

    Raises:
        PerfedError: it is not UTF-8.
    """
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline=newline).read()
    except UnicodeDecodeError as error:
        raise PerfedError(f"{file}: cannot be read: {reason_of(error)}") from None


def parse_json(text: str, file: Path, line: int | None = None) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the content of ``file`` or of one of its lines.
        file: the file in error messages.
        line: the number of the line; ``None`` for the whole file.

    Raises:
        PerfedError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PerfedError(f"{file}, line {line or error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # too many digits in a number, or too deeply nested lists
        raise PerfedError(f"{_describe_place(file, line)}: not JSON: {reason_of(error)}") from None


def checked(kind: type[Checked], content: Any, file: Path, line: int | None = None) -> Checked:
    """Return ``content`` validated as ``kind``, which is any type that pydantic supports.

    Args:
        kind: the type.
        content: the content of ``file`` or of one of its lines.
        file: the file in error messages.
        line: the number of the line; ``None`` for the whole file.

    Raises:
        PerfedError: a key is missing, or a value has another type.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise PerfedError(f"{_describe_place(file, line)}: {summarise_validation_error(error, '')}") from None


def _describe_place(file: Path, line: int | None) -> str:
    """Return the name of the file, with the number of the line if it is known."""
    return f"{file}" if line is None else f"{file}, line {line}"


def read_json(file: Path, content: bytes | None = None) -> Any:
    """Return the values in a JSON file, whose ``content`` may have been read before.

    Raises:
        PerfedError: the file cannot be read, or is not valid JSON.
    """
    return parse_json(decode_text(read_bytes(file) if content is None else content, file), file)


def to_json_values(value: Any) -> Any:
    """Return ``value`` in types of JSON: infinite numbers and NaN become ``None``, objects of other types texts."""
    if isinstance(value, Mapping):
        return {str(key): to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with their SHA-256 added under the key ``sha256``, for :func:`check_seal`.

    Example:
        >>> check_seal(seal({"mean": 0.5}), Path("run.json"))
        {'mean': 0.5}
        >>> check_seal({**seal({"mean": 0.5}), "mean": 0.6}, Path("run.json"))
        Traceback (most recent call last):
        perfed.errors.PerfedError: run.json: has changed since it was written
    """
    return {**content, _SEAL: _hash_content(content)}


def check_seal(content: Any, file: Path) -> Any:
    """Return the values to which :func:`seal` was applied; content that is no dictionary unchanged.

    Raises:
        PerfedError: the values do not match the checksum, or have none; the message names ``file``.
    """
    if not isinstance(content, dict):
        return content
    values = {name: value for name, value in content.items() if name != _SEAL}
    if _hash_content(values) != content.get(_SEAL):
        raise PerfedError(f"{file}: has changed since it was written")
    return values


def _hash_content(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # with keys as JSON has them
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_arrays(
    file: Path,
    names: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    fault: str = "cannot be read",
    content: bytes | None = None,
) -> dict[str, NDArray[Any]]:
    """Return arrays of an ``.npz`` file; other arrays are not read, and pickled objects are refused.

    Args:
        file: the file.
        names: names of arrays that the file must have; ``None`` for all arrays in it.
        optional: names of arrays that it may have.
        fault: the problem that the message states if the file is not an ``.npz`` file.
        content: the content of the file, if it was read before.

    Raises:
        PerfedError: the file cannot be read, or lacks one of ``names``.
    """
    try:
        source: BinaryIO = file.open("rb") if content is None else io.BytesIO(content)
        with source as opened:
            refuse_unpacked(file, opened)
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as archive:
                requested = archive if names is None else (*names, *(name for name in optional if name in archive))
                return {name: archive[name] for name in requested}
    except PerfedError:
        raise
    except FileNotFoundError:
        raise PerfedError(f"{file}: no such file") from None
    except Exception as error:  # zipfile, zlib, struct and numpy raise different exceptions
        raise PerfedError(f"{file}: {fault}: {reason_of(error)}") from None


def refuse_unpacked(file: Path, opened: BinaryIO | None = None) -> None:
    """Raise an error for an archive that does not fit into memory, before it is unpacked.

    A small archive can expand to a very large size.

    Args:
        file: the archive.
        opened: the same file, if it is open already.

    Raises:
        PerfedError: the unpacked members need more than the available memory.
        OSError, zipfile.BadZipFile: the file is not an archive.
    """
    with zipfile.ZipFile(opened or file) as archive:
        needed = sum(member.file_size for member in archive.infolist())
    available = available_memory()
    if available is not None and needed > available:
        raise PerfedError(
            f"{file}: unpacked it needs {needed / 2**30:.3g} GiB of memory, and there are {available / 2**30:.3g}"
        )


def refuse_untrusted(file: Path, kind: str, trust: bool) -> None:
    """Raise an error before a file is read that can run code, unless the user trusts it.

    Args:
        file: the file.
        kind: the kind of the file, for the message.
        trust: whether the user allows its code to run.

    Raises:
        PerfedError: the user has not allowed it; the message says how to do so.
    """
    if not trust:
        raise PerfedError(
            f"{file}: {kind}, which can run code when it is read; --trust (trust=True in Python) reads it, if you know "
            "who made it"
        )
