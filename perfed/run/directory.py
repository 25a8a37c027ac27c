"""The run directory: the files that a run writes, and how they are read and checked.

All files except ``rounds.jsonl`` are written under a temporary name and renamed, so that a killed process never leaves
a partial file. Checkpoints (:mod:`perfed.run.checkpoint_files`) contain the checksums of ``rounds.jsonl`` and of the
arrays of rounds; the checksums of all files of a finished run are in ``SHA256SUMS``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import BaseModel

from perfed.data.checksums import (
    CHECKSUMS,
    add_checksum,
    find_damage,
    hash_file,
    matches_comment,
    read_checksums,
    refuse_damage,
    set_aside,
    write_checksums,
)
from perfed.data.csv_text import csv_text
from perfed.data.reading import checked, read_json, read_text, to_json_values
from perfed.errors import PerfedError
from perfed.run.checkpoint_files import Checkpoint, CheckpointFiles, WrittenFiles, read_written_files
from perfed.run.layout import FILE, Layout, check_layout, read_layout
from perfed.run.records import Summary
from perfed.run.round_log import RoundLog, matches_checksums
from perfed.system import SCRATCH, lock_folder, remove_stale_folders, write_atomic
from perfed.tree import Tree

MARKER = "comparisons.toml"
"""The file with which every study starts: its kind, and the settings of its runs."""

KINDS = ("comparison", "search", "campaign", "leaderboard")
"""The kinds of studies."""

START_FILES = ("config.toml", MARKER)
"""The files with which runs and studies start, and from which they are resumed."""

ROUNDS = "rounds.jsonl"

RESULTS = (
    *START_FILES,
    ROUNDS,
    "checkpoint",
    "clients.csv",
    "summary.json",
    "comparison.json",
    "grid.json",
    "chosen.toml",
    "report.html",
    CHECKSUMS,
)
"""The files of a directory of results; a run is not started in a directory that contains any of them."""


def read_marker(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of the study in ``path`` and the other content of its marker; ``""`` and ``{}`` without a marker.

    Raises:
        PerfedError: if the marker cannot be read, or has another format.
    """
    file = path / MARKER
    if not file.is_file():
        return "", {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        kind = content.pop("kind", None)
        if kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)} (given: {kind!r})")
    except (OSError, ValueError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}") from None
    check_layout(path, {key: content.pop(key) for key in Layout.model_fields if key in content}, file)
    return str(kind), content


def write_marker(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write the marker of a study of this kind, which :func:`read_marker` reads."""
    write_atomic(path / MARKER, add_checksum(tomli_w.dumps({"kind": kind, **Layout().model_dump(), **content})))


_FINAL_FILES = ("clients.csv", "federation.json", "sites.json", "summary.json")


def check_marker(path: Path) -> None:
    """Check that the marker of a study has not changed since it was written.

    Raises:
        PerfedError: if it has changed.
    """
    file = path / MARKER
    if file.is_file() and not matches_comment(read_text(file)):
        raise PerfedError(
            f"{file}: has changed since it was written; restore it, or begin the study in another directory"
        )


class _Sites(BaseModel):
    agreement: dict[str, Any]
    facts: dict[str, Any]


class RunDirectory(CheckpointFiles):
    """A reader and writer of the files of one run, which keeps the checksums of the files that it writes.

    Args:
        path: the directory.
        contents: the contents of files that were read before, by name; :meth:`read_config` and comparisons with
            checksums use them. The caller may add entries later.

    Raises:
        PerfedError: the run is of another format.
    """

    def __init__(self, path: Path, contents: Mapping[str, bytes] | None = None) -> None:
        super().__init__(path)
        self._contents = contents or {}
        self.layout = read_layout(path, self._contents.get(FILE))
        self._log = RoundLog(path / ROUNDS)
        self._arrays: dict[str, str] = {}
        self._results: dict[str, str] = {}

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Return a new run directory.

        Raises:
            PerfedError: ``path`` already holds a run, a comparison, a search or a campaign, or is not a directory.
        """
        if path.exists() and not path.is_dir():
            raise PerfedError(f"--out {path}: exists and is not a directory")
        results = [name for name in RESULTS if (path / name).exists()]
        if results:
            is_started = any((path / name).exists() for name in START_FILES)
            hint = f", or 'perfed resume {path}'" if is_started else ""
            raise PerfedError(f"--out {path}: already holds results ({results[0]}); choose another directory{hint}")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PerfedError(f"--out {path}: cannot be created: {error.strerror}") from None
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against other processes while the context is open.

        Raises:
            PerfedError: if another process works on the run.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(self.path))
            except BlockingIOError:
                raise PerfedError(f"{self.path}: another process is working on this run") from None
            remove_stale_folders(self.path)
            yield

    # Configuration and results -----------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Write the experiment to ``config.toml``, and the versions of perfed and of the format to ``version.json``."""
        self._write_result(FILE, Layout().model_dump_json() + "\n")
        self._write_result("config.toml", text)

    def read_config(self) -> str:
        """Return the experiment in ``config.toml``."""
        try:
            return self._read_bytes_of("config.toml").decode()
        except OSError:
            if read_marker(self.path)[0] == "comparison":
                raise PerfedError(f"{self.path}: a comparison, not a run; its runs are METHOD/seed-N in it") from None
            raise PerfedError(f"{self.path}: no run here (config.toml is missing)") from None
        except UnicodeDecodeError as error:
            raise PerfedError(f"{self.path / 'config.toml'}: is not text: {error}") from None

    @property
    def method(self) -> str:
        """The name of the method in ``config.toml``; empty if it has none, or is not valid TOML."""
        try:
            return str(tomllib.loads(self.read_config()).get("method", ""))
        except tomllib.TOMLDecodeError:
            return ""  # reading the configuration reports the error

    def abandon(self) -> None:
        """Remove the configuration of a run that could not start, and its directory if it is empty then.

        Nothing is removed if the directory has rounds or a checkpoint.
        """
        if (self.path / ROUNDS).exists() or self.checkpoints.exists():
            return
        for name in ("config.toml", FILE):
            (self.path / name).unlink(missing_ok=True)
        for folder in self.path.glob(f"{SCRATCH}*"):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty
            self.path.rmdir()

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a line to ``rounds.jsonl``."""
        self._log.append(to_json_values(record))

    def truncate_rounds(self, last: int) -> None:
        """Remove the lines of rounds after ``last`` that this process has written, and a partial last line."""
        self._log.truncate(last)

    # Checksums ---------------------------------------------------------------------------------------------

    @property
    def written_files(self) -> dict[str, Any]:
        """The checksums of the files with results of rounds so far, for a checkpoint."""
        return WrittenFiles(rounds=self._log.checksums, arrays=self._arrays).model_dump()

    def load_to_resume(self, keep: Callable[[Tree], Tree]) -> Checkpoint | None:
        """Return the checkpoint from which a run resumes; ``None`` if none was written yet.

        This is the newest undamaged checkpoint whose ``rounds.jsonl`` and arrays of rounds are undamaged, too; later
        rounds are repeated. If there is none, it is the newest undamaged checkpoint.

        Args:
            keep: a function that is applied to each client's state, as in :meth:`load`.

        Raises:
            PerfedError: if checkpoints exist and all are damaged.
        """
        return self.load(keep, lambda progress: self._find_changes(read_written_files(progress)))

    def restore_rounds(self, checkpoint: Checkpoint | None) -> tuple[list[dict[str, Any]], list[str]]:
        """Restore the files of a resumed run to the time of its checkpoint.

        Damaged lines and arrays are removed. The checksums of results remain, since a run writes these again at its
        end.

        Args:
            checkpoint: the checkpoint; ``None`` for a run that starts from the beginning.

        Returns:
            The records of the rounds up to the checkpoint, and notes on damage.
        """
        last, written = (
            (-1, None) if checkpoint is None else (checkpoint.round, read_written_files(checkpoint.progress))
        )
        records, notes = self._log.restore(last, None if written is None else written.rounds)
        try:
            results = {name: checksum for name, checksum in read_checksums(self.path).items() if name in _FINAL_FILES}
        except PerfedError as error:
            results = {}
            notes.append(f"{error}; it is written again at the end of the run")
        for name, problem in find_damage(self.path, results).items():
            notes.append(f"{name}: {problem}; it is written again at the end of the run")
        arrays = {} if written is None else written.arrays
        self._arrays = self._without_removed(arrays)
        for folder in sorted({name.partition("/")[0] for name in arrays if name not in self._arrays}):
            notes.append(f"{folder}/: was removed; its arrays of the rounds up to {last} are lost")
        for name, problem in find_damage(self.path, self._arrays).items():
            del self._arrays[name]
            with suppress(FileNotFoundError):
                set_aside(self.path / name)
            notes.append(f"{name}: {problem}; these arrays are lost")
        write_checksums(self.path, results)
        return records, notes

    def _find_changes(self, written: WrittenFiles | None) -> list[str]:
        """Return the files that have changed since a checkpoint."""
        if written is None:
            return []
        content = self._read_bytes_of(ROUNDS) if (self.path / ROUNDS).exists() else b""
        rounds = [] if matches_checksums(content, written.rounds) else [ROUNDS]
        return [*rounds, *find_damage(self.path, self._without_removed(written.arrays), self._contents)]

    def _read_bytes_of(self, name: str) -> bytes:
        return self._contents[name] if name in self._contents else (self.path / name).read_bytes()

    def _without_removed(self, checksums: Mapping[str, str]) -> dict[str, str]:
        """Return the checksums except those of removed folders of arrays, which users may omit from a copy."""
        folders = {name.partition("/")[0] for name in checksums if "/" in name}
        removed = {folder for folder in folders if not (self.path / folder).exists()}
        return {name: checksum for name, checksum in checksums.items() if name.partition("/")[0] not in removed}

    def find_damage(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Return the files that have changed since the run wrote them: a description of the problem by file name.

        The files of a finished run are compared with ``SHA256SUMS``, and the rounds of an unfinished one with its
        newest checkpoint.

        Args:
            names: the files to compare; ``None`` for all.

        Raises:
            PerfedError: ``SHA256SUMS`` cannot be read.
        """
        checksums = read_checksums(self.path)
        selected = {name: checksum for name, checksum in checksums.items() if names is None or name in names}
        problems = find_damage(self.path, self._without_removed(selected), self._contents)
        if names is None and ROUNDS not in checksums:
            changed = self._find_changes(read_written_files(self.newest()[1]))
            problems |= dict.fromkeys(changed, "has changed since the last checkpoint")
        return problems

    def refuse_damage(self, names: Sequence[str] | None = None) -> None:
        """Raise an error if a file has changed since the run wrote it; ``names`` as in :meth:`find_damage`.

        Raises:
            PerfedError: a file has changed; the message names it.
        """
        target = self.path if self.checkpoints.is_dir() else "the comparison to which it belongs"
        refuse_damage(self.path, self.find_damage(names), f"'perfed resume' of {target} restores what can be restored")

    def _write_result(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text)
        self._results[name] = hashlib.sha256(text.encode()).hexdigest()

    def seal(self, names: Sequence[str] = ()) -> None:
        """Write the checksums of all files of a finished run to ``SHA256SUMS``.

        The configuration of a run with checkpoints is omitted: its number of rounds may be increased later, and it is
        compared with that in the checkpoint.

        Args:
            names: further files of the directory that were not written by this object.
        """
        checksums = {name: hash_file(self.path / name) for name in names} | self._results | self._arrays
        if self.checkpoints.is_dir():
            checksums[ROUNDS] = self._log.checksums.sha256
            checksums.pop("config.toml", None)
        write_checksums(self.path, checksums)

    def write_clients(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write one row per client to ``clients.csv``; missing values become empty cells."""
        cells = (["" if _is_missing(value) else value for value in row] for row in rows)
        self._write_result("clients.csv", csv_text([columns, *cells]))

    def write_holdings(self, content: Mapping[str, Any]) -> None:
        """Write ``federation.json``, which describes the data of each client in numbers."""
        self._write_result("federation.json", json.dumps(content, separators=(",", ":")) + "\n")

    def write_sites(self, content: Mapping[str, Any]) -> None:
        """Write ``sites.json``, which a site's model needs in addition to the site's table."""
        self._write_result("sites.json", json.dumps(content, separators=(",", ":")) + "\n")

    def read_sites(self) -> dict[str, Any] | None:
        """Return the content of ``sites.json``; ``None`` if there is no such file.

        Raises:
            PerfedError: the file is damaged.
        """
        file = self.path / "sites.json"
        self.refuse_damage([file.name])
        return checked(_Sites, read_json(file), file).model_dump() if file.exists() else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, which marks the run as finished."""
        self._write_result("summary.json", json.dumps(to_json_values(summary), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return the summary of a finished run from ``summary.json``.

        Raises:
            PerfedError: the file is damaged.
        """
        content = self.check_summary()
        self.refuse_damage(["summary.json"])
        return content

    def check_summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json`` without comparison with its checksum.

        Raises:
            PerfedError: the file is not a valid summary.
        """
        file = self.path / "summary.json"
        content: dict[str, Any] = read_json(file)
        checked(Summary, content, file)
        return content

    def write_arrays(self, name: str, round_: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays of a round into ``NAME/round-NNNN.npz``."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **dict(arrays))
        file = f"round-{round_:04d}.npz"
        write_atomic(folder / file, content.getvalue())
        self._arrays[f"{name}/{file}"] = hashlib.sha256(content.getvalue()).hexdigest()

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "summary.json").exists()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
