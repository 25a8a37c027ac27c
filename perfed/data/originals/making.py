"""The conversion of originals to the file of a data set: downloading, reading, comparing and writing it atomically."""

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
"""Number of attempts for an address."""

_SECONDS = 30  # of waiting for a byte
_CHECKSUMS = "checksums.json"
_FORMAT_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, pickle.UnpicklingError, struct.error, csv.Error)
_UNREADABLE = (ValueError, LookupError, TypeError, EOFError, OSError, RuntimeError, AttributeError, *_FORMAT_ERRORS)
_DISK_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
Say = Callable[[str], None]


def collect_originals(
    name: str, source: Source, local_paths: Sequence[Path], cache: Path, mirror: str = "", say: Say = print
) -> Files:
    """Return the originals of the source ``name``: those among ``local_paths``, and the others from their addresses.

    Args:
        name: the name of the source.
        source: the source.
        local_paths: files, or folders and archives of them.
        cache: the folder whose subfolder ``name`` stores downloads.
        mirror: the address of a folder such as ``cache``, in place of the original addresses.
        say: is called with a line for each downloaded file.

    Raises:
        PerfedError: if a file is incomplete, or is not the published one.
    """
    files, folder_name = Files(local_paths), source.shared_with or name
    paths = list(files.paths)
    if any(path.suffix == ".arff" for path in paths):
        return files
    for original in source.originals:
        if not _is_available(original, files, len(source.originals)):
            paths.append(
                _download_original(
                    original, cache / folder_name, f"{mirror.rstrip('/')}/{folder_name}" if mirror else "", say
                )
            )
        elif (path := files.path(original.name)) and original.checksum and not _has_checksum(path, original.checksum):
            say(f"{path}: not the file that was published (another checksum); read all the same")
    return Files(paths)


def find_unused(local_paths: Sequence[Path], sources: Sequence[Source]) -> list[Path]:
    """Return the files among ``local_paths`` in which no source finds an original."""
    return [
        path
        for path in local_paths
        if path.suffix != ".arff"
        and not any(
            _is_available(original, Files([path]), len(source.originals))
            or any(map(Files([path]).has, original.members))
            for source in sources
            for original in source.originals
        )
    ]


def _is_available(original: Original, files: Files, number: int) -> bool:
    """Return whether an original is available by name, by its members, or as the only archive."""
    if files.has(original.name) or (original.members and all(map(files.has, original.members))):
        return True
    return number == 1 and not original.members and len(files.paths) == 1


def _download_original(original: Original, folder: Path, mirror: str, say: Say) -> Path:
    import pooch

    checksums = _read_checksums(folder)
    checksum = original.checksum or checksums.get(original.name, "")
    pooch.get_logger().setLevel("ERROR")
    problems = []
    for url in [f"{mirror}/{quote(original.name)}"] if mirror else original.urls:
        downloader = pooch.create(
            path=folder, base_url="", registry={original.name: checksum or None}, urls={original.name: url},
            retry_if_failed=TRIES - 1,
        )  # fmt: skip
        exists = (folder / original.name).is_file()
        if not exists:
            say(f"{original.name}: from {url}")
        try:
            path = Path(downloader.fetch(original.name, downloader=pooch.HTTPDownloader(timeout=_SECONDS)))
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise PerfedError(f"{folder}: {error.strerror}") from None
            problems.append(f"{url}: {_explain_failure(error, checksum, folder if not original.checksum else None)}")
            continue
        if not checksum:
            checksums[original.name] = f"sha256:{_hash_file(path, 'sha256')}"
            write_atomic(folder / _CHECKSUMS, json.dumps(checksums, indent=2))
            say(f"{original.name}: {checksums[original.name]} (checksum unknown: kept, the next download is compared)")
        elif not exists:
            origin = "published" if original.checksum else "kept"
            say(f"{original.name}: {path.stat().st_size:,} bytes, checksum as {origin}")
        return path
    raise PerfedError(f"{original.name} did not come: {'; '.join(problems)}")


def _read_checksums(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise PerfedError(f"{folder / _CHECKSUMS} cannot be read; delete it") from None


def _explain_failure(error: Exception, checksum: str, folder: Path | None) -> str:
    """Return the innermost reason of a chain of exceptions in one line."""
    if isinstance(error, ValueError) and "hash" in str(error) and checksum:
        way_out = "" if folder is None else f", that of the first download; delete {folder} to take this one"
        return f"came with another checksum than {checksum}{way_out}"
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server says {response.status_code} {response.reason}"
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return " ".join(str(cause).split()) or type(cause).__name__


def _hash_file(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _has_checksum(path: Path, checksum: str) -> bool:
    algorithm, _, expected = checksum.partition(":")
    return _hash_file(path, algorithm) == expected


def convert_originals(name: str, source: Source, files: Files) -> dict[str, Any]:
    """Return the arrays that the source ``name`` converts from its originals.

    Raises:
        PerfedError: if an original is missing, damaged, or in another format.
    """
    module, _, function = source.converter.partition(".")
    convert = getattr(importlib.import_module(f"perfed.data.originals.{module}"), function)
    try:
        return dict(convert(files))
    except PerfedError as error:
        raise PerfedError(f"{name}: {error}{_suggest_deletion(files)}") from None
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"the originals cannot be read ({reason}); they may be damaged"
        raise PerfedError(f"{name}: {problem}{_suggest_deletion(files)}") from None


def _suggest_deletion(files: Files) -> str:
    """Return the advice to delete downloads without published checksums, which may be damaged."""
    folders = {path.parent for path in files.paths if (path.parent / _CHECKSUMS).is_file()}
    return "".join(f"; delete {folder} to download them again" for folder in sorted(folders))


def hash_arrays(arrays: Mapping[str, Any]) -> str:
    """Return the SHA-256 of names, types, shapes and values, independently of the file format.

    Example:
        >>> hash_arrays({"x": np.zeros(2)}) == hash_arrays({"x": np.zeros(3)})
        False
    """
    sha256 = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        sha256.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an ``.npz`` file atomically.

    Raises:
        PerfedError: if the folder cannot be created or written.
    """
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.getvalue())
    except OSError as error:
        raise PerfedError(f"{error.filename or path}: {error.strerror}") from None
