"""A site's states on its own disk: what a client was after each exchange that the server may still come back to.

State and reply of an exchange are one file, so that a site that is killed has done an exchange whole or not at all, and
a message that is sent once more gets the reply of the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from perfed.codec import decode, encode
from perfed.errors import PerfedError
from perfed.sites.flower.message import frame, unframe
from perfed.system import lock_folder, sync_folder, write_atomic
from perfed.tree import Tree

TRIES = 3
"""Payloads that an exchange may be asked with: a server that was killed may go on with the replies of other sites."""
ASKED_NOTE = "exchange-"
"""How the name of a run's note begins that says which sites were asked for a sum; its number follows."""
_SUFFIX = ".exchange"
_OPENED = ".opened"
_NOTE = ".sites"
_SUMS = ".sums"  # folder beside those of the runs, which cannot be the name of one
# File with a line for each exchange and payload: number, program, split, hash; then a tab and a checksum.
_ASKED = "asked"
_NOT_AGAIN = (
    "exchanges could be asked more often than the study allows: restore the file from a backup, or submit the study "
    "again with another --out"
)


def check_sums(path: Path) -> None:
    """Do nothing where the notes on sums of all runs below ``path`` are there, or no reply has left under masks yet.

    Raises:
        PerfedError: a run has put a reply under masks, and the notes are missing.
    """
    noted = sorted(path.glob(f"*/{ASKED_NOTE}*{_NOTE}"))
    if noted and not (path / _SUMS).is_dir():
        raise PerfedError(
            f"{path / _SUMS} is missing, where this site has written down which sums it takes part in, and run "
            f"'{noted[0].parent.name}' has put replies under masks; two sums of one payload could show the reply of a "
            "single site: restore the folder, or move those of earlier runs elsewhere and take part in a study with "
            "another seed"
        )


class Stored:
    """States and replies of one run, in the folder ``run`` below ``path``, to read, whoever writes there meanwhile.

    An exchange is called by its sequence number, from 1; 0 stands for the initial state, which is nowhere stored.

    Attributes:
        path: the run's folder.
        run: its id.
        notes: one line for each reply that was damaged, and was taken as not there.

    Raises:
        PerfedError: ``run`` cannot name a folder.
    """

    def __init__(self, path: Path, run: str) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
            raise PerfedError(f"'{run}' cannot name a run; letters, digits, '_', '-' and '.', at most 100, can")
        self.path = path / run
        self.notes: list[str] = []
        self.run = run

    def sequences(self) -> list[int]:
        """Numbers of the exchanges that are stored, in ascending order."""
        return sorted(int(file.stem) for file in self.path.glob(f"*{_SUFFIX}") if file.stem.isdecimal())

    def state(self, sequence: int) -> dict[str, Any] | None:
        """The client's state after exchange ``sequence``; ``None`` for 0, the initial one.

        Raises:
            PerfedError: names the file that is missing or damaged.
        """
        if sequence == 0:
            return None
        with self._naming_file(sequence):
            state, _ = self._read(sequence)
            return decode(state)

    def history(self, sequence: int) -> bytes:
        """Return the hash of what led to the state after exchange ``sequence``; empty for 0, the initial state.

        The number of the exchange stands for the history of a state that was stored without one.

        Raises:
            PerfedError: names the file that is missing or damaged.
        """
        if sequence == 0:
            return b""
        with self._naming_file(sequence):
            header, _ = self._unframe(sequence)
            history = header.get("history")
            return (
                hashlib.sha256(f"exchange {sequence}".encode()).digest() if history is None else bytes.fromhex(history)
            )

    @contextmanager
    def _naming_file(self, sequence: int) -> Iterator[None]:
        """Let errors name the file of an exchange."""
        try:
            yield
        except FileNotFoundError:
            raise PerfedError(f"{self._file(sequence)}: the state after exchange {sequence} is not here") from None
        except PerfedError as error:
            raise PerfedError(f"{self._file(sequence)} is damaged ({error})") from None

    def reply(self, sequence: int) -> bytes | None:
        """The reply of exchange ``sequence``; ``None`` where it was not done, or must be done again (see notes)."""
        try:
            return self._read(sequence)[1]
        except FileNotFoundError:
            return None
        except PerfedError as error:
            self.notes.append(f"{self._file(sequence)} is damaged ({error}); exchange {sequence} is done again")
            return None

    def opened(self, sequence: int) -> tuple[str, bytes] | None:
        """Hash of the message that has opened the sum of exchange ``sequence``, and the reply; ``None``: nobody has.

        Raises:
            PerfedError: the file that says so is damaged: it counts as opened.
        """
        file = self._file(sequence).with_suffix(_OPENED)
        try:
            header, reply = unframe(file.read_bytes())
            return str(header.get("asked")), reply
        except FileNotFoundError:
            return None

    def _file(self, sequence: int) -> Path:
        return self.path / f"{sequence:012d}{_SUFFIX}"

    def _read(self, sequence: int) -> tuple[bytes, bytes]:
        """Encoded state and reply.

        Raises:
            FileNotFoundError: the exchange is not stored.
            PerfedError: the file is damaged, or of another exchange or run.
        """
        header, body = self._unframe(sequence)
        return body[: header["state"]], body[header["state"] :]

    def _unframe(self, sequence: int) -> tuple[dict[str, Any], bytes]:
        header, body = unframe(self._file(sequence).read_bytes())
        found = (header.get("run"), header.get("sequence"))
        if found != (self.run, sequence):
            raise PerfedError(f"it is of exchange {found[1]} of run '{found[0]}'")
        return header, body


class SiteStore(Stored):
    """States and replies of one run, in the folder ``run`` below ``path``; held by this process until it is closed.

    Raises:
        PerfedError: ``run`` cannot name a folder, the folder cannot be made, or another process works on it.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, SiteStore(Path(folder), "flic-1") as store:
        ...     store.put(10_001, {"embedding": torch.ones(2)}, b"reply")
        ...     print(store.reply(10_001), store.state(10_001), store.state(0))
        b'reply' {'embedding': tensor([1., 1.])} None
    """

    def __init__(self, path: Path, run: str) -> None:
        super().__init__(path, run)
        self._held = ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(lock_folder(self.path))
            sync_folder(path)
        except BlockingIOError:
            raise PerfedError(f"{self.path}: another process is working on this site's states") from None
        except OSError as error:
            raise PerfedError(f"{self.path}: a site's states cannot be kept there: {error.strerror}") from None
        for file in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            file.unlink()
        self._asked, self._checksum = set[str](), ""
        try:
            self._read_asked()
        except PerfedError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes work on the folder."""
        self._held.close()

    def _read_asked(self) -> None:
        """Read which exchanges were asked with which content; a last line that a crash has torn is removed.

        Raises:
            PerfedError: lines are missing or have changed.
        """
        file = self.path / _ASKED
        *lines, torn = file.read_bytes().split(b"\n") if file.exists() else [b""]
        for number, line in enumerate(lines, 1):
            content, _, checksum = line.decode(errors="replace").partition("\t")
            self._checksum = _chain_checksum(self._checksum, content)
            if checksum != self._checksum:
                raise PerfedError(f"{file}: line {number} has changed; {_NOT_AGAIN}")
            self._asked.add(content)
        if torn:
            os.truncate(file, file.stat().st_size - len(torn))
        expected = 0
        for sequence in self.sequences()[-1:]:
            with suppress(PerfedError):  # a damaged exchange is done again
                expected = self._unframe(sequence)[0].get("asked", 0)
        if len(self._asked) < expected:
            raise PerfedError(f"{file}: {expected - len(self._asked)} of {expected} lines are missing; {_NOT_AGAIN}")

    def admit(self, sequence: int, content: str) -> bool:
        """Return whether an exchange may be done with this content, one of at most three, and note it on disk.

        Args:
            sequence: number of the exchange.
            content: program, split and hash of what was sent, with spaces between them.

        Raises:
            OSError: the disk is full, or the like.
        """
        line = f"{sequence} {content}"
        kind = line.rpartition(" ")[0] + " "
        if line not in self._asked and sum(known.startswith(kind) for known in self._asked) >= TRIES:
            return False
        if line not in self._asked:
            checksum = _chain_checksum(self._checksum, line)
            with (self.path / _ASKED).open("a") as file:
                file.write(f"{line}\t{checksum}\n")
                file.flush()
                os.fsync(file.fileno())  # before the exchange is stored, which counts the lines
            self._asked.add(line)
            self._checksum = checksum
        return True

    def put(self, sequence: int, state: Tree, reply: bytes, history: bytes | None = None) -> None:
        """Store an exchange that was done: on disk as a whole when this returns, not at all if it does not.

        Args:
            sequence: number of the exchange.
            state, reply: after it.
            history: hash of what led to the state, where sums need it.

        Raises:
            PerfedError: ``sequence`` is not positive, or the state cannot be written (see :mod:`perfed.codec`).
            OSError: the disk is full, or the like; what was there is still there.
        """
        if sequence < 1:
            raise PerfedError(f"exchange {sequence} cannot be stored; numbers begin with 1, and 0 is the initial state")
        encoded = encode(state)
        header = {"run": self.run, "sequence": sequence, "state": len(encoded), "asked": len(self._asked)}
        header |= {} if history is None else {"history": history.hex()}
        write_atomic(self._file(sequence), frame(header, encoded, reply))
        sync_folder(self.path)

    def open(self, sequence: int, asked: str, reply: bytes) -> None:
        """Note for good that the message with the hash ``asked`` has opened the sum of exchange ``sequence``.

        Raises:
            OSError: the disk is full, or the like.
        """
        write_atomic(self._file(sequence).with_suffix(_OPENED), frame({"asked": asked}, reply))
        sync_folder(self.path)

    def read_note(self, name: str, *, in_all_runs: bool = False) -> Any:
        """Return what :meth:`write_note` has written under ``name``; ``None`` where nothing was.

        Raises:
            PerfedError: the file is damaged.
        """
        file = self._note_file(name, in_all_runs)
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PerfedError(f"{file} is damaged ({error})") from None

    def write_note(self, name: str, content: Any, *, in_all_runs: bool = False) -> None:
        """Write a note on sums to disk, in the place of an earlier one with the same name.

        Args:
            name: of an exchange or a payload; letters, digits and hyphens.
            content: a JSON value.
            in_all_runs: whether the note is for all runs of the site, and not for this one only.

        Raises:
            OSError: the disk is full, or the like.
        """
        file = self._note_file(name, in_all_runs)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, json.dumps(content, sort_keys=True))
        sync_folder(file.parent)

    def _note_file(self, name: str, in_all_runs: bool) -> Path:
        return (self.path.parent / _SUMS if in_all_runs else self.path) / f"{name}{_NOTE}"

    def forget(self, keep: Collection[int]) -> None:
        """Remove the exchanges whose number is neither in ``keep`` nor the highest."""
        for sequence in self.sequences()[:-1]:
            if sequence not in keep:
                self._file(sequence).unlink(missing_ok=True)


def _chain_checksum(before: str, content: str) -> str:
    """Return the checksum of a line behind one with the checksum ``before``."""
    return hashlib.sha256(f"{before} {content}".encode()).hexdigest()[:16]
