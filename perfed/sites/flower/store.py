"""The states of a site on its disk: the client's state after each exchange to which the server may still return.

The state and the reply of an exchange are in one file. A site that is killed has therefore finished an exchange
completely or not at all, and a message that is sent again gets the same reply.
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

MAX_PAYLOADS = 3
"""The number of different payloads that a site accepts for one exchange. It is more than one because a server that was
killed may continue with the replies of other sites."""
ASKED_NOTE = "exchange-"
"""Prefix of the names of a run's notes that list the sites that were asked for a sum; the exchange's number follows."""
_SUFFIX = ".exchange"
_OPENING = ".opened"
_NOTE = ".sites"
_SUMS = ".sums"  # a folder beside the folders of the runs; no run can have this name
# File with a line for each exchange and payload: number, program, split, hash; then a tab and a checksum.
_REQUESTS = "asked"
_REMEDY = (
    "the server could repeat exchanges more often than the study allows: restore the file from a backup, or submit the "
    "study again with another --out"
)


def check_sums(path: Path) -> None:
    """Check that a site still has its notes on sums if a run has put a reply under masks.

    Args:
        path: The folder of all runs.

    Raises:
        PerfedError: A run has put a reply under masks, and the notes are missing.
    """
    notes = sorted(path.glob(f"*/{ASKED_NOTE}*{_NOTE}"))
    if notes and not (path / _SUMS).is_dir():
        raise PerfedError(
            f"{path / _SUMS} is missing, where this site has recorded the sums in which it took part, and run "
            f"'{notes[0].parent.name}' has put replies under masks; two sums of one payload could reveal the reply of "
            "a single site: restore the folder, or move those of earlier runs elsewhere and take part in a study with "
            "another seed"
        )


class StoredExchanges:
    """A reader of the states and replies of one run, which may be used while another process writes them.

    An exchange is identified by its number, from 1; 0 stands for the initial state, which is not stored.

    Args:
        path: The folder of all runs.
        run: The id of the run, which is the name of its folder below ``path``.

    Attributes:
        path: The folder of the run.
        run: The id of the run.
        notes: One line for each reply that is damaged and was treated as missing.

    Raises:
        PerfedError: ``run`` cannot be the name of a folder.
    """

    def __init__(self, path: Path, run: str) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
            raise PerfedError(
                f"'{run}' is not a valid id of a run; allowed are at most 100 letters, digits, '_', '-' and '.'"
            )
        self.path = path / run
        self.notes: list[str] = []
        self.run = run

    def list_sequences(self) -> list[int]:
        """Return the numbers of the stored exchanges in ascending order."""
        return sorted(int(file.stem) for file in self.path.glob(f"*{_SUFFIX}") if file.stem.isdecimal())

    def load_state(self, sequence: int) -> dict[str, Any] | None:
        """Return the client's state after exchange ``sequence``; ``None`` for 0, the initial state.

        Raises:
            PerfedError: The file of the exchange is missing or damaged.
        """
        if sequence == 0:
            return None
        with self._naming_file(sequence):
            state, _ = self._read_exchange(sequence)
            return decode(state)

    def load_history(self, sequence: int) -> bytes:
        """Return the hash of the requests that led to the state after exchange ``sequence``.

        The hash is empty for 0, the initial state. A state that was stored without a hash gets the hash of the number
        of its exchange.

        Raises:
            PerfedError: The file of the exchange is missing or damaged.
        """
        if sequence == 0:
            return b""
        with self._naming_file(sequence):
            header, _ = self._unframe_exchange(sequence)
            history = header.get("history")
            return (
                hashlib.sha256(f"exchange {sequence}".encode()).digest() if history is None else bytes.fromhex(history)
            )

    @contextmanager
    def _naming_file(self, sequence: int) -> Iterator[None]:
        """Raise the errors of the block of a ``with`` statement again with the file of the exchange."""
        try:
            yield
        except FileNotFoundError:
            raise PerfedError(
                f"{self._exchange_file(sequence)}: the state after exchange {sequence} is missing"
            ) from None
        except PerfedError as error:
            raise PerfedError(f"{self._exchange_file(sequence)} is damaged ({error})") from None

    def load_reply(self, sequence: int) -> bytes | None:
        """Return the reply of exchange ``sequence``.

        It is ``None`` if the exchange was not done, or if its file is damaged; :attr:`notes` then gets a line.
        """
        try:
            return self._read_exchange(sequence)[1]
        except FileNotFoundError:
            return None
        except PerfedError as error:
            self.notes.append(
                f"{self._exchange_file(sequence)} is damaged ({error}); exchange {sequence} is done again"
            )
            return None

    def load_opening(self, sequence: int) -> tuple[str, bytes] | None:
        """Return the hash of the message that has opened the sum of exchange ``sequence``, and the reply to it.

        Returns ``None`` if the sum was not opened.

        Raises:
            PerfedError: The file is damaged, so that the sum counts as opened.
        """
        file = self._exchange_file(sequence).with_suffix(_OPENING)
        try:
            header, reply = unframe(file.read_bytes())
            return str(header.get("asked")), reply
        except FileNotFoundError:
            return None

    def _exchange_file(self, sequence: int) -> Path:
        return self.path / f"{sequence:012d}{_SUFFIX}"

    def _read_exchange(self, sequence: int) -> tuple[bytes, bytes]:
        """Return the encoded state and the reply of an exchange.

        Raises:
            FileNotFoundError: The exchange is not stored.
            PerfedError: The file is damaged or belongs to another exchange or run.
        """
        header, body = self._unframe_exchange(sequence)
        return body[: header["state"]], body[header["state"] :]

    def _unframe_exchange(self, sequence: int) -> tuple[dict[str, Any], bytes]:
        """Return the header and the body of the file of an exchange; see :meth:`_read_exchange` for errors."""
        header, body = unframe(self._exchange_file(sequence).read_bytes())
        run, stored_sequence = header.get("run"), header.get("sequence")
        if (run, stored_sequence) != (self.run, sequence):
            raise PerfedError(f"it is of exchange {stored_sequence} of run '{run}'")
        return header, body


class SiteStore(StoredExchanges):
    """The states and replies of one run, which this process may write until the store is closed.

    Args:
        path: The folder of all runs.
        run: The id of the run, which is the name of its folder below ``path``.

    Raises:
        PerfedError: ``run`` cannot be the name of a folder, the folder cannot be created, another process is writing
            to it, or the file of requests is damaged.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, SiteStore(Path(folder), "flic-1") as store:
        ...     store.save_exchange(10_001, {"embedding": torch.ones(2)}, b"reply")
        ...     print(store.load_reply(10_001), store.load_state(10_001), store.load_state(0))
        b'reply' {'embedding': tensor([1., 1.])} None
    """

    def __init__(self, path: Path, run: str) -> None:
        super().__init__(path, run)
        self._lock = ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(lock_folder(self.path))
            sync_folder(path)
        except BlockingIOError:
            raise PerfedError(f"{self.path}: another process is working on this site's states") from None
        except OSError as error:
            raise PerfedError(f"{self.path}: a site's states cannot be stored there: {error.strerror}") from None
        for file in self.path.glob(".*.tmp"):  # left by a process that was killed during a write
            file.unlink()
        self._requests, self._checksum = set[str](), ""
        try:
            self._read_requests()
        except PerfedError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write to the folder."""
        self._lock.close()

    def _read_requests(self) -> None:
        """Read the requests that were accepted for each exchange; remove an incomplete last line after a crash.

        Raises:
            PerfedError: Lines are missing or have changed.
        """
        file = self.path / _REQUESTS
        *lines, incomplete = file.read_bytes().split(b"\n") if file.exists() else [b""]
        for number, line in enumerate(lines, 1):
            content, _, checksum = line.decode(errors="replace").partition("\t")
            self._checksum = _chain_checksum(self._checksum, content)
            if checksum != self._checksum:
                raise PerfedError(f"{file}: line {number} has changed; {_REMEDY}")
            self._requests.add(content)
        if incomplete:
            os.truncate(file, file.stat().st_size - len(incomplete))
        expected = 0
        for sequence in self.list_sequences()[-1:]:
            with suppress(PerfedError):  # a damaged exchange is done again
                expected = self._unframe_exchange(sequence)[0].get("asked", 0)
        if len(self._requests) < expected:
            raise PerfedError(f"{file}: {expected - len(self._requests)} of {expected} lines are missing; {_REMEDY}")

    def admit_request(self, sequence: int, content: str) -> bool:
        """Return whether the site may answer a request, and write an accepted request to disk.

        A site accepts at most ``MAX_PAYLOADS`` different requests of each program and split for one exchange.

        Args:
            sequence: The number of the exchange.
            content: The program, the split and the hash of the request, separated by spaces.

        Raises:
            OSError: The request cannot be written, for example because the disk is full.
        """
        line = f"{sequence} {content}"
        kind = line.rpartition(" ")[0] + " "
        if line not in self._requests and sum(request.startswith(kind) for request in self._requests) >= MAX_PAYLOADS:
            return False
        if line not in self._requests:
            checksum = _chain_checksum(self._checksum, line)
            with (self.path / _REQUESTS).open("a") as file:
                file.write(f"{line}\t{checksum}\n")
                file.flush()
                os.fsync(file.fileno())  # before the exchange is stored, whose file has the number of lines
            self._requests.add(line)
            self._checksum = checksum
        return True

    def save_exchange(self, sequence: int, state: Tree, reply: bytes, history: bytes | None = None) -> None:
        """Write a finished exchange to disk, all or nothing.

        Args:
            sequence: The number of the exchange.
            state: The client's state after the exchange.
            reply: The reply of the site.
            history: The hash of the requests that led to the state, if secure sums need it.

        Raises:
            PerfedError: ``sequence`` is not positive, or the state cannot be written (see :mod:`perfed.codec`).
            OSError: The file cannot be written, for example because the disk is full; an earlier file is unchanged.
        """
        if sequence < 1:
            raise PerfedError(f"exchange {sequence} cannot be stored; numbers begin with 1, and 0 is the initial state")
        encoded = encode(state)
        header = {"run": self.run, "sequence": sequence, "state": len(encoded), "asked": len(self._requests)}
        header |= {} if history is None else {"history": history.hex()}
        write_atomic(self._exchange_file(sequence), frame(header, encoded, reply))
        sync_folder(self.path)

    def record_opening(self, sequence: int, request: str, reply: bytes) -> None:
        """Record permanently which message has opened the sum of an exchange.

        Args:
            sequence: The number of the exchange.
            request: The hash of the message.
            reply: The reply to the message.

        Raises:
            OSError: The record cannot be written, for example because the disk is full.
        """
        write_atomic(self._exchange_file(sequence).with_suffix(_OPENING), frame({"asked": request}, reply))
        sync_folder(self.path)

    def read_note(self, name: str, *, in_all_runs: bool = False) -> Any:
        """Return the content of a note that :meth:`write_note` has written; ``None`` if there is no such note.

        Args:
            name: The name of the note.
            in_all_runs: Whether the note is shared by all runs of the site.

        Raises:
            PerfedError: The file is damaged.
        """
        file = self._note_file(name, in_all_runs)
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PerfedError(f"{file} is damaged ({error})") from None

    def write_note(self, name: str, content: Any, *, in_all_runs: bool = False) -> None:
        """Write a note on secure sums to disk, which replaces an earlier note with the same name.

        Args:
            name: The name of the note, which consists of letters, digits and hyphens.
            content: A JSON value.
            in_all_runs: Whether the note is shared by all runs of the site.

        Raises:
            OSError: The note cannot be written, for example because the disk is full.
        """
        file = self._note_file(name, in_all_runs)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, json.dumps(content, sort_keys=True))
        sync_folder(file.parent)

    def _note_file(self, name: str, in_all_runs: bool) -> Path:
        return (self.path.parent / _SUMS if in_all_runs else self.path) / f"{name}{_NOTE}"

    def remove_exchanges(self, keep: Collection[int]) -> None:
        """Remove all exchanges except the newest one and those whose number is in ``keep``."""
        for sequence in self.list_sequences()[:-1]:
            if sequence not in keep:
                self._exchange_file(sequence).unlink(missing_ok=True)


def _chain_checksum(before: str, content: str) -> str:
    """Return the checksum of a line that follows a line with the checksum ``before``."""
    return hashlib.sha256(f"{before} {content}".encode()).hexdigest()[:16]
