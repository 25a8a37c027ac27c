"""From originals to the file of a data set: found or downloaded, read, compared, and written whole or not at all."""

from __future__ import annotations

import csv
import errno
import hashlib
import importlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from perfed.data.originals.reading import Files
from perfed.data.originals.sources import Original, Source
from perfed.errors import PerfedError
from perfed.system import write_atomic

TRIES = 3
"""How often an address is asked."""

_SECONDS = 30  # without a byte
_KEPT = "checksums.json"
_OF_FORMATS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, pickle.UnpicklingError, struct.error, csv.Error)
_UNREADABLE = (ValueError, LookupError, TypeError, EOFError, OSError, RuntimeError, AttributeError, *_OF_FORMATS)
_OF_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
Say = Callable[[str], None]


def originals_of(
    name: str, source: Source, given: Sequence[Path], cache: Path, mirror: str = "", say: Say = print
) -> Files:
    """The originals of the source ``name``: those among ``given``, and the others from their addresses.

    Args:
        given: files, or folders and archives of them.
        cache: folder whose folder ``name`` keeps what was downloaded.
        mirror: address of a folder such as ``cache``, in place of the original addresses.
        say: is told of each file that comes.

    Raises:
        PerfedError: a file does not come whole, or is not the one that was published.
    """
    found, kept = Files(given), source.kept_with or name
    places = list(found.paths)
    if any(path.suffix == ".arff" for path in places):
        return found
    for original in source.originals:
        if not _is_given(original, found, len(source.originals)):
            places.append(_fetched(original, cache / kept, f"{mirror.rstrip('/')}/{kept}" if mirror else "", say))
        elif (path := found.path(original.name)) and original.checksum and not _fits(path, original.checksum):
            say(f"{path}: not the file that was published (another checksum); read all the same")
    return Files(places)


def unused(given: Sequence[Path], sources: Sequence[Source]) -> list[Path]:
    """Those of the files ``given`` in which no source finds an original."""
    return [
        path
        for path in given
        if path.suffix != ".arff"
        and not any(
            _is_given(original, Files([path]), len(source.originals)) or any(map(Files([path]).has, original.members))
            for source in sources
            for original in source.originals
        )
    ]


def _is_given(original: Original, files: Files, number: int) -> bool:
    """By name, by what would be inside, or because it is the one archive that is needed."""
    if files.has(original.name) or (original.members and all(map(files.has, original.members))):
        return True
    return number == 1 and not original.members and len(files.paths) == 1


def _fetched(original: Original, folder: Path, mirror: str, say: Say) -> Path:
    import pooch

    kept = _kept(folder)
    known = original.checksum or kept.get(original.name, "")
    pooch.get_logger().setLevel("ERROR")
    problems = []
    for url in [f"{mirror}/{quote(original.name)}"] if mirror else original.urls:
        keeper = pooch.create(
            path=folder, base_url="", registry={original.name: known or None}, urls={original.name: url},
            retry_if_failed=TRIES - 1,
        )  # fmt: skip
        there = (folder / original.name).is_file()
        if not there:
            say(f"{original.name}: from {url}")
        try:
            path = Path(keeper.fetch(original.name, downloader=pooch.HTTPDownloader(timeout=_SECONDS)))
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OF_DISK:
                raise PerfedError(f"{folder}: {error.strerror}") from None
            problems.append(f"{url}: {_why(error, known, folder if not original.checksum else None)}")
            continue
        if not known:
            kept[original.name] = f"sha256:{_digest_of(path, 'sha256')}"
            write_atomic(folder / _KEPT, json.dumps(kept, indent=2))
            say(f"{original.name}: {kept[original.name]} (checksum unknown: kept, the next download is compared)")
        elif not there:
            same = "published" if original.checksum else "kept"
            say(f"{original.name}: {path.stat().st_size:,} bytes, checksum as {same}")
        return path
    raise PerfedError(f"{original.name} did not come: {'; '.join(problems)}")


def _kept(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _KEPT).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise PerfedError(f"{folder / _KEPT} cannot be read; delete it") from None


def _why(error: Exception, known: str, kept_in: Path | None) -> str:
    """In one line: the innermost reason of a chain that the network's layers have made."""
    if isinstance(error, ValueError) and "hash" in str(error) and known:
        way_out = "" if kept_in is None else f", that of the first download; delete {kept_in} to take this one"
        return f"came with another checksum than {known}{way_out}"
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server says {response.status_code} {response.reason}"
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return " ".join(str(cause).split()) or type(cause).__name__


def _digest_of(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _fits(path: Path, checksum: str) -> bool:
    algorithm, _, expected = checksum.partition(":")
    return _digest_of(path, algorithm) == expected


def arrays_of(name: str, source: Source, files: Files) -> dict[str, Any]:
    """The arrays that the source ``name`` makes of its originals.

    Raises:
        PerfedError: an original is missing, damaged, or in another format.
    """
    module, _, function = source.made_by.partition(".")
    make = getattr(importlib.import_module(f"perfed.data.originals.{module}"), function)
    try:
        return dict(make(files))
    except PerfedError as error:
        raise PerfedError(f"{name}: {error}{_way_out(files)}") from None
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"the originals cannot be read ({reason}); they may be damaged"
        raise PerfedError(f"{name}: {problem}{_way_out(files)}") from None


def _way_out(files: Files) -> str:
    """What to do with downloads whose checksum nobody published: they stay, also where they are damaged."""
    folders = {path.parent for path in files.paths if (path.parent / _KEPT).is_file()}
    return "".join(f"; delete {folder} to download them again" for folder in sorted(folders))


def digest(arrays: Mapping[str, Any]) -> str:
    """SHA-256 of names, types, shapes and values, whatever file holds them.

    Example:
        >>> digest({"x": np.zeros(2)}) == digest({"x": np.zeros(3)})
        False
    """
    found = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        found.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def write(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an ``.npz`` file, whole or not at all.

    Raises:
        PerfedError: the folder cannot be made or written.
    """
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.getvalue())
    except OSError as error:
        raise PerfedError(f"{error.filename or path}: {error.strerror}") from None
