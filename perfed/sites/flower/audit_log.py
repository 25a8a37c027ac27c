"""What leaves a site and what arrives: a log of every message, for its data officer, written before a message goes.

One line of JSON per message or note, with the hash of the line before it: a line that was changed, removed or moved
shows. Lines stand in the order in which they were written, whatever the clock said.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from perfed.codec import flatten
from perfed.errors import PerfedError
from perfed.sites.flower.checks import shorten_repr
from perfed.sites.flower.hash_chain import BEGINNING, format_line, iterate_lines
from perfed.sites.flower.message import unframe, unpack
from perfed.system import lock_folder, sync_folder

_OWN = ("run", "round", "program")  # of the header, by themselves in a line
_ASKED = ("kind", *_OWN, "sequence", "measure")  # of the header of a message that arrives
_LONGEST = 100  # characters of a value that is written as it is


class OutgoingLog:
    """The log in the file ``path``, for one process at a time; its lines: :func:`perfed.sites.flower.hash_chain.read_log`.

    A last line that a crash has torn is removed when the log is opened, and a note says so: its message has not left.

    Attributes:
        path: the file.
        head: hash of the last line. Who has noted it elsewhere can show that no later line was removed.

    Raises:
        PerfedError: another process writes this log, or it is broken; it is not continued then.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> from perfed.sites.flower.hash_chain import read
        >>> from perfed.sites.flower.message import pack
        >>> message = pack({"run": "flic-1", "round": 2, "program": "train"}, {"bias": torch.zeros(3)})
        >>> with TemporaryDirectory() as folder, OutgoingLog(Path(folder, "outgoing.jsonl")) as log:
        ...     log.append(message)
        ...     [(line["program"], line["entries"]) for line in read_log(log.path)]
        [('train', [{'dtype': 'float32', 'name': 'bias', 'shape': [3]}])]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = BEGINNING
        self._end = 0
        self._last = ""  # the latest time in the log
        with ExitStack() as held:
            try:
                held.enter_context(lock_folder(path.parent))
            except BlockingIOError:
                raise PerfedError(f"{path}: another process is writing this log") from None
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            held.callback(os.close, self._handle)
            sync_folder(path.parent)
            self._open()
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write the log."""
        self._held.close()
        self._handle = -1  # the number may become another file's

    def append(self, body: bytes) -> None:
        """Write down that the message ``body`` leaves; what is said of it is read from these very bytes.

        The line is on disk when this returns. The message may leave only then.

        Raises:
            PerfedError: ``body`` is not a message (:func:`perfed.sites.flower.message.pack`).
            OSError: the disk is full, or the like; the log is as it was.
        """
        header, tree = unpack(body)
        self._write(
            {
                **{name: header.get(name) for name in _OWN},
                "header": {name: value for name, value in header.items() if name not in _OWN},
                "entries": [
                    {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                    for name, tensor in flatten(tree).items()
                ],
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )

    def record_arrival(self, body: bytes) -> None:
        """Write down that ``body`` has arrived, whatever it is; only then may it be looked at further.

        Raises:
            OSError: the disk is full, or the like; the log is as it was.
        """
        try:
            header, readable = unframe(body)[0], True
        except PerfedError:
            header, readable = {}, False
        self._write(
            {
                "arrived": "a message" if readable else "bytes that are no message",
                **{name: _shown(header[name]) for name in _ASKED if name in header},
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )

    def add_note(self, text: str) -> None:
        """Write down what has happened otherwise.

        Raises:
            OSError: the disk is full, or the like; the log is as it was.
        """
        self._write({"note": text})

    def record_consent(self, digest: str) -> None:
        """Write down that the site's administrator agrees to what leaves, whose hash is ``digest``.

        Raises:
            OSError: as :meth:`append`.
        """
        self._write({"note": f"the administrator agrees to what leaves ({digest})", "consent": digest})

    def _open(self) -> None:
        """Find the end of the chain, and mend a torn last line."""
        torn = 0
        for number, line, problem in iterate_lines(self.path):
            if problem and line.endswith(b"\n"):
                raise PerfedError(f"{self.path}: line {number} {problem}; the log is not continued: move it away first")
            if problem:
                torn = len(line)
            else:
                entry = json.loads(line)
                self.head, self._last = entry["hash"], max(self._last, entry["time"])
                self._end += len(line)
        if torn:
            self._write({"note": f"a line that a crash had torn was removed ({torn} bytes); its message has not left"})

    def _write(self, content: Mapping[str, Any]) -> None:
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        entries = [content]
        if now < self._last:
            entries.insert(0, {"note": f"the clock has jumped back: a line before this one says {self._last}"})
        head, lines = self.head, b""
        for entry in entries:
            head, line = format_line({**entry, "time": now, "previous": head})
            lines += line
        try:
            os.ftruncate(self._handle, self._end)  # of what an attempt that failed may have left
            os.lseek(self._handle, self._end, os.SEEK_SET)
            rest = lines
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.head, self._last, self._end = head, now, self._end + len(lines)


def _shown(value: Any) -> Any:
    """``value``, or the beginning of how it is written where a sender made it long or nested."""
    plain = value is None or (isinstance(value, bool | int | str) and len(str(value)) <= _LONGEST)
    return value if plain else shorten_repr(value, _LONGEST)
