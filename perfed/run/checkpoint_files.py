"""Checkpoints as files, and what happens when one of them is damaged.

A checkpoint is a manifest (JSON) with the checksums of the files it needs; client files are shared between checkpoints
and rewritten only for clients that changed. The last two checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perfed.codec import decode, encode
from perfed.errors import PerfedError
from perfed.run.round_log import RoundChecksums
from perfed.system import write_atomic
from perfed.tree import Tree

_KEPT = 2


class _Damaged(PerfedError):
    """A file of a checkpoint is not what was written."""


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


class CheckpointFiles:
    """Reads and writes the checkpoints of the run in ``path``: the files of its folder ``checkpoint``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self._files: dict[str, dict[str, str]] = {}
        self._damaged: list[Path] = []

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
            except _Damaged:
                continue
            needed |= {body["server"]["file"], *(entry["file"] for entry in body["clients"].values())}
        for file in self.checkpoints.rglob("*.safetensors"):
            if str(file.relative_to(self.checkpoints)) not in needed:
                file.unlink()
        for file in self.checkpoints.rglob(".*.tmp"):
            file.unlink()

    def _manifests(self) -> list[Path]:
        return sorted(self.checkpoints.glob("state-*.json"), reverse=True)

    def load(
        self,
        keep: Callable[[Tree], Tree] = lambda state: state,
        find_changes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda progress: (),
    ) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; ``None`` if none was written yet.

        Args:
            keep: makes of each client's state, once it was read, what stands for it.
            find_changes: a function that returns the files that have changed since a checkpoint, from its ``progress``.
                A checkpoint without changes is preferred to newer ones with changes.

        Raises:
            PerfedError: checkpoints exist and all are damaged.
        """
        notes: list[str] = []
        self._damaged.clear()
        readable = []
        for manifest in self._manifests():
            try:
                body = _read_manifest(manifest)
                readable.append((manifest, body, find_changes(body["progress"])))
            except _Damaged as error:
                self._note_damage(manifest, error, notes)
        for manifest, body, changed in sorted(readable, key=lambda entry: bool(entry[2])):  # a stable sort
            try:
                server = self._read(body["server"])
                clients = {client: keep(self._read(entry)) for client, entry in body["clients"].items()}
            except _Damaged as error:
                self._note_damage(manifest, error, notes)
                continue
            if not changed:
                for newer, newer_body, files in readable:
                    if files and newer_body["round"] > body["round"]:
                        count_note = f" and {len(files) - 1} more files" if len(files) > 1 else ""
                        notes.append(f"{files[0]}{count_note}: damaged; the rounds after {body['round']} are repeated")
                        self._damaged.append(newer)
            self._files = dict(body["clients"])
            return Checkpoint(body["round"], server, clients, body["progress"], notes, self.path)
        if notes:
            raise PerfedError(f"{self.checkpoints}: every checkpoint is damaged: {notes[0].split(';')[0]}")
        return None

    def _note_damage(self, manifest: Path, error: _Damaged, notes: list[str]) -> None:
        notes.append(f"checkpoint {manifest.name} is damaged ({error}); falling back on the one before it")
        self._damaged.append(manifest)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Round and progress of the newest checkpoint, its tensors unread; -1 and nothing where there is none."""
        for manifest in self._manifests():
            with suppress(_Damaged):
                body = _read_manifest(manifest)
                return body["round"], body["progress"]
        return -1, {}

    @property
    def is_intact(self) -> bool:
        """Whether the newest checkpoint is undamaged, which is checked by reading all its files."""
        for manifest in self._manifests()[:1]:
            try:
                body = _read_manifest(manifest)
                for entry in (body["server"], *body["clients"].values()):
                    self._read_bytes(entry)
            except _Damaged:
                return False
        return True

    def _read(self, entry: Mapping[str, str]) -> dict[str, Any]:
        return decode(self._read_bytes(entry))

    def _read_bytes(self, entry: Mapping[str, str]) -> bytes:
        try:
            data = (self.checkpoints / entry["file"]).read_bytes()
        except OSError:
            raise _Damaged(f"{entry['file']} is missing") from None
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise _Damaged(f"{entry['file']} has changed or is truncated")
        return data


class _Entry(BaseModel):
    file: str
    sha256: str


class WrittenFiles(BaseModel):
    """The checksums of the files that a run had written at the time of a checkpoint.

    Attributes:
        rounds: the checksums of ``rounds.jsonl``.
        arrays: the SHA-256 of each file with arrays of rounds, by its path in the directory.
    """

    rounds: RoundChecksums
    arrays: dict[str, str]


def written_files(progress: Mapping[str, Any]) -> WrittenFiles | None:
    """Return the checksums in a checkpoint's progress; ``None`` if it has none, as where no checkpoint was written."""
    files = progress.get("files")
    return None if files is None else WrittenFiles.model_validate(files)


class _Config(BaseModel):
    rounds: int | None = None


class _Progress(BaseModel):
    """What is read before a run is there that it could be restored to; of others than runs nothing."""

    config: _Config = _Config()
    tally: dict[str, Any] = {}
    callbacks: dict[str, dict[str, Any]] = {}
    stopped_by: str = ""
    policy: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    notes: list[str] = []
    wall_seconds: float = 0.0
    training_seconds: float = 0.0
    files: WrittenFiles | None = None


class _Manifest(BaseModel):
    round: int
    server: _Entry
    clients: dict[str, _Entry]
    progress: _Progress


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        if hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
            raise _Damaged(f"{path.name} has changed")
        body: dict[str, Any] = json.loads(outer["body"])
        _Manifest.model_validate(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, _Damaged):
            raise
        raise _Damaged(f"{path.name} is truncated or not JSON") from None
    return body
