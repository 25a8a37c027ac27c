"""The run directory: what a run leaves behind, and how it is found again.

Files but ``rounds.jsonl`` are written under another name and renamed, so that a killed process never leaves half of
one. Its checkpoints are in :mod:`perfed.run.checkpoint_files`.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import BaseModel

from perfed.data.csv_text import csv_text
from perfed.data.reading import checked, read_json
from perfed.errors import PerfedError
from perfed.run.checkpoint_files import CheckpointFiles
from perfed.run.layout import FILE, Layout, current_settings, layout_of, readable_layout, written_now
from perfed.run.records import Number, Round, Summary
from perfed.system import SCRATCH, locked, sweep, write_atomic

MARKER = "comparisons.toml"
"""What every study is begun with: its kind, and what its runs are made of."""

OLD_MARKERS = {f"{kind}.toml": kind for kind in ("comparison", "search", "campaign", "leaderboard")}
"""What studies of each kind were begun with before there was one marker; they are read for one version."""

BEGINNINGS = ("config.toml", MARKER, *OLD_MARKERS)
"""What a run and a study are begun with, and resumed from."""

RESULTS = (
    *BEGINNINGS,
    "rounds.jsonl",
    "checkpoint",
    "clients.csv",
    "summary.json",
    "comparison.json",
    "grid.json",
    "chosen.toml",
    "report.html",
)
"""What is made in a directory of results: nothing new is begun in one that has any of these."""


def marker_file(path: Path) -> Path:
    """Return the file that says what the study in ``path`` is, whether it is there or not."""
    return next((path / name for name in (MARKER, *OLD_MARKERS) if (path / name).is_file()), path / MARKER)


def marker_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of the study in ``path``, and what its marker says beside it; two empty ones where none is there.

    Raises:
        PerfedError: the marker cannot be read, or is of a version whose directories are not read.
    """
    file = marker_file(path)
    if not file.is_file():
        return "", {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        kind = OLD_MARKERS.get(file.name) or content.pop("kind", None)
        if kind not in OLD_MARKERS.values():
            raise ValueError(f"kind: must be one of {', '.join(OLD_MARKERS.values())} (given: {kind!r})")
    except (OSError, ValueError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}") from None
    said = {key: content.pop(key) for key in Layout.model_fields if key in content}
    return str(kind), current_settings(content, readable_layout(path, said, file))


def write_marker(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write what :func:`marker_of` reads, in the place of an older one."""
    write_atomic(path / MARKER, tomli_w.dumps({"kind": kind, **written_now(), **content}))
    (path / f"{kind}.toml").unlink(missing_ok=True)


class _Sites(BaseModel):
    agreement: dict[str, Any]
    facts: dict[str, Any]


class _Line(Round):
    """A line of ``rounds.jsonl`` with what a run needs to go on."""

    train_loss: Number | None
    virtual_time: float
    bytes_up: int
    bytes_down: int


class RunDirectory(CheckpointFiles):
    """Reads and writes the files of one run.

    Raises:
        PerfedError: the run is of a version whose directories are not read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.layout = layout_of(path)

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Return a new run directory.

        Raises:
            PerfedError: ``path`` already holds a run, a comparison, a search or a campaign, or is not a directory.
        """
        if path.exists() and not path.is_dir():
            raise PerfedError(f"--out {path}: exists and is not a directory")
        held = [name for name in RESULTS if (path / name).exists()]
        if held:
            begun = any((path / name).exists() for name in BEGINNINGS)
            hint = f", or 'perfed resume {path}'" if begun else ""
            raise PerfedError(f"--out {path}: already holds results ({held[0]}); choose another directory{hint}")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PerfedError(f"--out {path}: cannot be made: {error.strerror}") from None
        return cls(path)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from working on the same run.

        Raises:
            PerfedError: one does.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                raise PerfedError(f"{self.path}: another process is working on this run") from None
            sweep(self.path)
            yield

    # Configuration and results -----------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Write the experiment into ``config.toml``, and who writes it into ``version.json``."""
        write_atomic(self.path / FILE, json.dumps(written_now()) + "\n")
        write_atomic(self.path / "config.toml", text)

    def read_config(self) -> str:
        """Return the experiment, as ``config.toml`` has it and this perfed means it."""
        try:
            text = (self.path / "config.toml").read_text(encoding="utf-8")
        except OSError:
            if marker_of(self.path)[0] == "comparison":
                raise PerfedError(f"{self.path}: a comparison, not a run; its runs are METHOD/seed-N in it") from None
            raise PerfedError(f"{self.path}: no run here (config.toml is missing)") from None
        except UnicodeDecodeError as error:
            raise PerfedError(f"{self.path / 'config.toml'}: is not text: {error}") from None
        try:
            settings = tomllib.loads(text)
        except tomllib.TOMLDecodeError:  # which is said where the text is parsed
            return text
        current = current_settings(settings, self.layout)
        return text if current == settings else tomli_w.dumps(current)

    @property
    def method(self) -> str:
        """The name of the method that ``config.toml`` has; empty where it has none, or is no TOML."""
        try:
            return str(tomllib.loads(self.read_config()).get("method", ""))
        except tomllib.TOMLDecodeError:
            return ""  # it is said where the configuration is read

    def abandon(self) -> None:
        """Take back the configuration of a run that could not begin, and the directory if nothing else is in it.

        Nothing happens where anything of a round or a checkpoint is there.
        """
        if (self.path / "rounds.jsonl").exists() or self.checkpoints.exists():
            return
        for name in ("config.toml", FILE):
            (self.path / name).unlink(missing_ok=True)
        for folder in self.path.glob(f"{SCRATCH}*"):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty
            self.path.rmdir()

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a line to ``rounds.jsonl``."""
        line = json.dumps(plain(record)) + "\n"
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def truncate_rounds(self, last: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Drop the lines of rounds after ``last``, and a torn last line.

        Returns:
            The records of the rounds that are left, and a note if lines before that were damaged; they are dropped too.
        """
        file = self.path / "rounds.jsonl"
        if not file.exists():
            return [], []
        kept, records, damaged = [], [], 0
        text = file.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                record = json.loads(line)
                if _Line.model_validate(record).round <= last:
                    kept.append(line + "\n")
                    loss = record["train_loss"]
                    records.append(record | {"train_loss": math.nan if loss is None else loss})  # JSON has no NaN
            except (ValueError, RecursionError):
                damaged += 1
        write_atomic(file, "".join(kept))
        damaged -= bool(text) and not text.endswith("\n")  # a killed process leaves half a line
        return records, [f"rounds.jsonl: {damaged} damaged lines dropped"] if damaged > 0 else []

    def write_clients(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write one row per client into ``clients.csv``; what is missing is an empty cell."""
        cells = (["" if _missing(v) else v for v in row] for row in rows)
        write_atomic(self.path / "clients.csv", csv_text([columns, *cells]))

    def write_holdings(self, content: Mapping[str, Any]) -> None:
        """Write ``federation.json``: who holds what."""
        write_atomic(self.path / "federation.json", json.dumps(content, separators=(",", ":")) + "\n")

    def write_sites(self, content: Mapping[str, Any]) -> None:
        """Write ``sites.json``: what a site's own model needs beside its own table."""
        write_atomic(self.path / "sites.json", json.dumps(content, separators=(",", ":")) + "\n")

    def read_sites(self) -> dict[str, Any] | None:
        """Return what :meth:`write_sites` wrote; ``None`` where nothing was, as by older runs."""
        file = self.path / "sites.json"
        return checked(_Sites, read_json(file), file).model_dump() if file.exists() else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, with which the run is finished."""
        write_atomic(self.path / "summary.json", json.dumps(plain(summary), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return the summary of a run that is finished, from ``summary.json``."""
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
        write_atomic(folder / f"round-{round_:04d}.npz", content.getvalue())

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "summary.json").exists()


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def plain(value: Any) -> Any:
    """JSON values; numbers that JSON does not have become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
