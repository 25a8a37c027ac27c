"""Checkpoints as files, and the detection of damaged ones.

A checkpoint is a manifest (JSON) with the checksums of the files that it needs. Client files are shared between
checkpoints and only rewritten for clients that have changed. The last two checkpoints are kept.
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


class _DamagedFile(PerfedError):
    """An error: a file of a checkpoint differs from what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        round: the last finished round; 0 is the preparation.
        server: the server's parameter sets.
        clients: the state of each client, by id.
        progress: other values that a resumed run needs, in JSON types.
        notes: notes on damaged newer checkpoints.
        path: the run's directory.
    """

    round: int
    server: dict[str, Any]
    clients: dict[str, Any]
    progress: dict[str, Any]
    notes: list[str]
    path: Path


class CheckpointFiles:
    """A reader and writer of the checkpoints of a run, which are in the folder ``checkpoint`` of ``path``."""

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
        """Write a checkpoint; client files are only written for ``changed`` clients and clients without a file.

        Args:
            round_: the last finished round.
            server: the server's parameter sets.
            clients: the state of each client, by id.
            changed: the ids of clients whose state has changed since the last checkpoint.
            progress: other values that a resumed run needs, in JSON types.
        """
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
        self._remove_old_files()

    def _write(self, name: str, data: bytes) -> dict[str, str]:
        write_atomic(self.checkpoints / name, data)
        return {"file": name, "sha256": hashlib.sha256(data).hexdigest()}

    def _remove_old_files(self) -> None:
        """Remove all manifests but the newest ones, and files that no manifest needs."""
        manifests = self._list_manifests()
        for old in manifests[_KEPT:]:
            old.unlink()
        needed: set[str] = set()
        for manifest in manifests[:_KEPT]:
            try:
                body = _read_manifest(manifest)
            except _DamagedFile:
                continue
            needed |= {body["server"]["file"], *(entry["file"] for entry in body["clients"].values())}
        for file in self.checkpoints.rglob("*.safetensors"):
            if str(file.relative_to(self.checkpoints)) not in needed:
                file.unlink()
        for file in self.checkpoints.rglob(".*.tmp"):
            file.unlink()

    def _list_manifests(self) -> list[Path]:
        return sorted(self.checkpoints.glob("state-*.json"), reverse=True)

    def load(
        self,
        keep: Callable[[Tree], Tree] = lambda state: state,
        find_changes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda progress: (),
    ) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; ``None`` if none was written yet.

        Args:
            keep: a function that is applied to each client's state after it has been read, for example to store it on
                disk.
            find_changes: a function that returns the files that have changed since a checkpoint, from its ``progress``.
                A checkpoint without changes is preferred to newer ones with changes.

        Raises:
            PerfedError: if checkpoints exist and all are damaged.
        """
        notes: list[str] = []
        self._damaged.clear()
        readable = []
        for manifest in self._list_manifests():
            try:
                body = _read_manifest(manifest)
                readable.append((manifest, body, find_changes(body["progress"])))
            except _DamagedFile as error:
                self._note_damage(manifest, error, notes)
        for manifest, body, changed in sorted(readable, key=lambda entry: bool(entry[2])):  # a stable sort
            try:
                server = self._read(body["server"])
                clients = {client: keep(self._read(entry)) for client, entry in body["clients"].items()}
            except _DamagedFile as error:
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

    def _note_damage(self, manifest: Path, error: _DamagedFile, notes: list[str]) -> None:
        notes.append(f"checkpoint {manifest.name} is damaged ({error}); falling back on the one before it")
        self._damaged.append(manifest)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return the round and the progress of the newest checkpoint without reading tensors; -1 and ``{}`` if none."""
        for manifest in self._list_manifests():
            with suppress(_DamagedFile):
                body = _read_manifest(manifest)
                return body["round"], body["progress"]
        return -1, {}

    @property
    def is_intact(self) -> bool:
        """Whether the newest checkpoint is undamaged, which is checked by reading all its files."""
        for manifest in self._list_manifests()[:1]:
            try:
                body = _read_manifest(manifest)
                for entry in (body["server"], *body["clients"].values()):
                    self._read_bytes(entry)
            except _DamagedFile:
                return False
        return True

    def _read(self, entry: Mapping[str, str]) -> dict[str, Any]:
        return decode(self._read_bytes(entry))

    def _read_bytes(self, entry: Mapping[str, str]) -> bytes:
        try:
            data = (self.checkpoints / entry["file"]).read_bytes()
        except OSError:
            raise _DamagedFile(f"{entry['file']} is missing") from None
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise _DamagedFile(f"{entry['file']} has changed or is truncated")
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


def read_written_files(progress: Mapping[str, Any]) -> WrittenFiles | None:
    """Return the checksums in a checkpoint's progress; ``None`` if it has none, as where no checkpoint was written."""
    files = progress.get("files")
    return None if files is None else WrittenFiles.model_validate(files)


class _Config(BaseModel):
    rounds: int | None = None


class _Progress(BaseModel):
    """The values of a checkpoint's progress that are checked when a manifest is read."""

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
            raise _DamagedFile(f"{path.name} has changed")
        body: dict[str, Any] = json.loads(outer["body"])
        _Manifest.model_validate(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, _DamagedFile):
            raise
        raise _DamagedFile(f"{path.name} is truncated or not JSON") from None
    return body
