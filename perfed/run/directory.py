"""The run directory: what a run leaves behind, and how it is found again.

Files but ``rounds.jsonl`` are written under another name and renamed, so that a killed process never leaves half of
one. A checkpoint is a manifest (JSON) with the checksums of the files it needs; client files are shared between
checkpoints and rewritten only for clients that changed. The last two checkpoints are kept.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.codec import decode, encode
from perfed.errors import PerfedError
from perfed.machine import locked
from perfed.tree import Tree

_KEPT = 2
_RESULTS = (
    "config.toml",
    "comparison.toml",
    "rounds.jsonl",
    "checkpoint",
    "clients.csv",
    "summary.json",
    "comparison.json",
    "search.toml",
    "grid.json",
    "chosen.toml",
    "report.html",
)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after a round.

    Attributes:
        round: the last finished round; 0 is the preparation.
        server: the server's parameter sets.
        clients: client id -> committed state.
        progress: what else the run needs to go on, JSON values.
        notes: what was wrong with newer checkpoints, if anything.
        path: the run's directory.
    """

    round: int
    server: dict[str, Any]
    clients: dict[str, Any]
    progress: dict[str, Any]
    notes: list[str]
    path: Path


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self._files: dict[str, dict[str, str]] = {}
        self._damaged: list[Path] = []

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new run directory.

        Raises:
            PerfedError: ``path`` already holds a run, a comparison or a search, or is not a directory.
        """
        if path.exists() and not path.is_dir():
            raise PerfedError(f"--out {path}: exists and is not a directory")
        held = [name for name in _RESULTS if (path / name).exists()]
        if held:
            begun = any((path / name).exists() for name in ("config.toml", "comparison.toml", "search.toml"))
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
            yield

    # Configuration and results -----------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Write ``config.toml``."""
        write_atomic(self.path / "config.toml", text)

    def read_config(self) -> str:
        """Content of ``config.toml``."""
        try:
            return (self.path / "config.toml").read_text(encoding="utf-8")
        except OSError:
            raise PerfedError(f"{self.path}: no run here (config.toml is missing)") from None
        except UnicodeDecodeError as error:
            raise PerfedError(f"{self.path / 'config.toml'}: is not text: {error}") from None

    def abandon(self) -> None:
        """Take back the configuration of a run that could not begin, and the directory if nothing else is in it.

        Nothing happens where anything of a round or a checkpoint is there.
        """
        if (self.path / "rounds.jsonl").exists() or self.checkpoints.exists():
            return
        (self.path / "config.toml").unlink(missing_ok=True)
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
                if record["round"] <= last:
                    kept.append(line + "\n")
                    records.append(record)
            except (json.JSONDecodeError, KeyError, TypeError):
                damaged += 1
        write_atomic(file, "".join(kept))
        damaged -= bool(text) and not text.endswith("\n")  # a killed process leaves half a line
        return records, [f"rounds.jsonl: {damaged} damaged lines dropped"] if damaged > 0 else []

    def write_clients(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write ``clients.csv``."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *(["" if _missing(v) else v for v in row] for row in rows)])
        write_atomic(self.path / "clients.csv", text.getvalue())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        write_atomic(self.path / "summary.json", json.dumps(plain(summary), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Content of ``summary.json``."""
        try:
            content: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PerfedError(f"{self.path / 'summary.json'}: cannot be read: {error}") from None
        if not isinstance(content, dict) or not {"method", "metrics", "notes"} <= content.keys():
            raise PerfedError(f"{self.path / 'summary.json'}: is not the summary of a run")
        return content

    def write_arrays(self, name: str, round_: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write ``NAME/round-NNNN.npz``."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **dict(arrays))
        write_atomic(folder / f"round-{round_:04d}.npz", content.getvalue())

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "summary.json").exists()

    # Checkpoints -------------------------------------------------------------------------------------------

    def save(
        self,
        round_: int,
        server: Tree,
        clients: Mapping[str, Tree],
        changed: AbstractSet[str],
        progress: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; client files only for ``changed`` clients and those never written."""
        folder = self.checkpoints / "clients"
        folder.mkdir(parents=True, exist_ok=True)
        for damaged in self._damaged:  # they must not count among the last two
            damaged.unlink(missing_ok=True)
        self._damaged.clear()
        order = {client: index for index, client in enumerate(sorted(clients))}
        for client, state in clients.items():
            if client in changed or client not in self._files:
                name = f"clients/{order[client]:06d}@{round_:06d}.safetensors"
                self._files[client] = self._write(name, encode(state))
        manifest = {
            "round": round_,
            "server": self._write(f"server-{round_:06d}.safetensors", encode(server)),
            "clients": {client: self._files[client] for client in clients},
            "progress": progress,  # as it is: NaN and infinity come back from Python's JSON
        }
        body = json.dumps(manifest)
        digest = hashlib.sha256(body.encode()).hexdigest()
        write_atomic(self.checkpoints / f"state-{round_:06d}.json", json.dumps({"sha256": digest, "body": body}))
        self._clean()

    def _write(self, name: str, data: bytes) -> dict[str, str]:
        write_atomic(self.checkpoints / name, data)
        return {"file": name, "sha256": hashlib.sha256(data).hexdigest()}

    def _clean(self) -> None:
        """Remove all but the newest manifests, and files that no manifest needs."""
        manifests = self._manifests()
        for old in manifests[_KEPT:]:
            old.unlink()
        needed: set[str] = set()
        for manifest in manifests[:_KEPT]:
            try:
                body = _read_manifest(manifest)
            except PerfedError:
                continue
            needed |= {body["server"]["file"], *(entry["file"] for entry in body["clients"].values())}
        for file in self.checkpoints.rglob("*.safetensors"):
            if str(file.relative_to(self.checkpoints)) not in needed:
                file.unlink()
        for file in self.checkpoints.rglob(".*.tmp"):
            file.unlink()

    def _manifests(self) -> list[Path]:
        return sorted(self.checkpoints.glob("state-*.json"), reverse=True)

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; ``None`` if none was written yet.

        Raises:
            PerfedError: checkpoints exist and all are damaged.
        """
        notes: list[str] = []
        self._damaged.clear()
        for manifest in self._manifests():
            try:
                body = _read_manifest(manifest)
                server = decode(self._read(body["server"]))
                clients = {client: decode(self._read(entry)) for client, entry in body["clients"].items()}
            except PerfedError as error:
                notes.append(f"checkpoint {manifest.name} is damaged ({error}); falling back on the one before it")
                self._damaged.append(manifest)
                continue
            self._files = dict(body["clients"])
            return Checkpoint(body["round"], server, clients, body["progress"], notes, self.path)
        if notes:
            raise PerfedError(f"{self.checkpoints}: every checkpoint is damaged: {notes[0].split(';')[0]}")
        return None

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Round and progress of the newest checkpoint, its tensors unread; -1 and nothing where there is none."""
        for manifest in self._manifests():
            with suppress(PerfedError):
                body = _read_manifest(manifest)
                return body["round"], body["progress"]
        return -1, {}

    def _read(self, entry: Mapping[str, str]) -> bytes:
        try:
            data = (self.checkpoints / entry["file"]).read_bytes()
        except OSError:
            raise PerfedError(f"{entry['file']} is missing") from None
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise PerfedError(f"{entry['file']} has changed or is truncated")
        return data


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        if hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
            raise PerfedError(f"{path.name} has changed")
        body: dict[str, Any] = json.loads(outer["body"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise PerfedError(f"{path.name} is truncated or not JSON") from None
    return body


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
