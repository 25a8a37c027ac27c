"""The log of all messages that leave or reach a site, for its data officer; it is written before a message leaves.

The log has one line of JSON for each message or note, with the hash of the line before it, so that changed, removed or
moved lines are detected. Lines are in the order in which they were written, even if the clock was set back.
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

_MAIN_FIELDS = ("run", "round", "program")  # fields of the header that are fields of the line too
_ARRIVAL_FIELDS = ("kind", *_MAIN_FIELDS, "sequence", "measure")  # fields of the header of an arriving message
_MAX_LENGTH = 100  # characters of a value that is written unchanged


class OutgoingLog:
    """The log of messages in the file ``path``, which one process at a time may write.

    The function :func:`perfed.sites.flower.hash_chain.read_log` describes the lines. When the log is opened, a last
    line that a crash has left incomplete is removed, and a note is written; the message of that line has not left.

    Attributes:
        path: The file of the log.
        head: The hash of the last line. A copy of it elsewhere proves later that no line up to it was removed.

    Raises:
        PerfedError: Another process writes this log, or its chain is broken.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> from perfed.sites.flower.hash_chain import read_log
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
        self._latest_time = ""
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(path.parent))
            except BlockingIOError:
                raise PerfedError(f"{path}: another process is writing this log") from None
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            stack.callback(os.close, self._handle)
            sync_folder(path.parent)
            self._read_end()
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let other processes write the log."""
        self._resources.close()
        self._handle = -1  # the number may later belong to another file

    def append(self, body: bytes) -> None:
        """Write a line about the message ``body``, which is described from its bytes and may leave afterwards.

        The line is on disk when this method returns.

        Raises:
            PerfedError: ``body`` is not a message (:func:`perfed.sites.flower.message.pack`).
            OSError: The line cannot be written, for example because the disk is full; the log is unchanged.
        """
        header, tree = unpack(body)
        self._append_lines(
            {
                **{name: header.get(name) for name in _MAIN_FIELDS},
                "header": {name: value for name, value in header.items() if name not in _MAIN_FIELDS},
                "entries": [
                    {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                    for name, tensor in flatten(tree).items()
                ],
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )

    def record_arrival(self, body: bytes) -> None:
        """Write a line about the arrival of ``body``, which need not be a message and may be processed afterwards.

        Raises:
            OSError: The line cannot be written, for example because the disk is full; the log is unchanged.
        """
        try:
            header, readable = unframe(body)[0], True
        except PerfedError:
            header, readable = {}, False
        self._append_lines(
            {
                "arrived": "a message" if readable else "bytes that are no message",
                **{name: _shorten_value(header[name]) for name in _ARRIVAL_FIELDS if name in header},
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )

    def add_note(self, text: str) -> None:
        """Write a line with a note.

        Raises:
            OSError: The line cannot be written, for example because the disk is full; the log is unchanged.
        """
        self._append_lines({"note": text})

    def record_consent(self, digest: str) -> None:
        """Write a line about the administrator's consent to the data that will leave the site.

        Args:
            digest: The hash of the description of that data.

        Raises:
            OSError: The line cannot be written, for example because the disk is full; the log is unchanged.
        """
        self._append_lines({"note": f"the administrator agrees to what leaves ({digest})", "consent": digest})

    def _read_end(self) -> None:
        """Find the last intact line, and replace an incomplete line after it by a note.

        Raises:
            PerfedError: The chain is broken.
        """
        incomplete_bytes = 0
        for number, line, problem in iterate_lines(self.path):
            if problem and line.endswith(b"\n"):
                raise PerfedError(f"{self.path}: line {number} {problem}; the log is not continued: move it away first")
            if problem:
                incomplete_bytes = len(line)
            else:
                entry = json.loads(line)
                self.head, self._latest_time = entry["hash"], max(self._latest_time, entry["time"])
                self._end += len(line)
        if incomplete_bytes:
            self._append_lines(
                {
                    "note": f"a line that a crash left incomplete was removed ({incomplete_bytes} bytes); "
                    "its message has not left"
                }
            )

    def _append_lines(self, content: Mapping[str, Any]) -> None:
        """Write a line with ``content``, after a note if the clock was set back, and flush it to disk."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        entries = [content]
        if now < self._latest_time:
            entries.insert(0, {"note": f"the clock has jumped back: a line before this one says {self._latest_time}"})
        head, lines = self.head, b""
        for entry in entries:
            head, line = format_line({**entry, "time": now, "previous": head})
            lines += line
        try:
            os.ftruncate(self._handle, self._end)  # removes the remains of a failed attempt
            os.lseek(self._handle, self._end, os.SEEK_SET)
            remaining = lines
            while remaining:
                remaining = remaining[os.write(self._handle, remaining) :]
            os.fsync(self._handle)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.head, self._latest_time, self._end = head, now, self._end + len(lines)


def _shorten_value(value: Any) -> Any:
    """Return a short plain value unchanged, and the beginning of the text of any other value."""
    is_short = value is None or (isinstance(value, bool | int | str) and len(str(value)) <= _MAX_LENGTH)
    return value if is_short else shorten_repr(value, _MAX_LENGTH)
