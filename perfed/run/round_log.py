"""The file ``rounds.jsonl``, which has one line per round, and its checksums, by which a resumed run detects damage."""

from __future__ import annotations

import hashlib
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import BaseModel

from perfed.data.checksums import set_aside
from perfed.run.records import Number, Round
from perfed.run.settings import Evaluation
from perfed.system import write_atomic


class RoundChecksums(BaseModel):
    """The checksums of the lines of ``rounds.jsonl`` at the time of a checkpoint.

    Attributes:
        bytes: the total length of the lines.
        sha256: the checksum of all lines together.
        crc32: the checksum of each line, in eight hexadecimal digits, by which damaged lines are identified.
    """

    bytes: int
    sha256: str
    crc32: str


class _Line(Round):
    """A line of ``rounds.jsonl`` with the values that a resumed run needs."""

    train_loss: Number | None
    virtual_time: float
    bytes_up: int
    bytes_down: int


class RoundLog:
    """Writes the lines of one run's ``rounds.jsonl`` and keeps their checksums up to date with every line.

    Args:
        file: the path of ``rounds.jsonl``.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget_lines()

    def _forget_lines(self) -> None:
        self._rounds: list[int] = []
        self._ends: list[int] = []  # byte offset of the end of each line
        self._line_checksums: list[str] = []
        self._digest = hashlib.sha256()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the line of a round."""
        line = json.dumps(record).encode() + b"\n"
        with self._file.open("ab") as file:
            file.write(line)
        self._add_line(record["round"], line)

    def _add_line(self, number: int, line: bytes) -> None:
        """Record the round, the end and the checksum of a line in memory; the file is not changed."""
        self._rounds.append(number)
        self._ends.append(len(line) + (self._ends[-1] if self._ends else 0))
        self._line_checksums.append(f"{crc32(line):08x}")
        self._digest.update(line)

    @property
    def checksums(self) -> RoundChecksums:
        """The checksums of all lines."""
        end = self._ends[-1] if self._ends else 0
        return RoundChecksums(bytes=end, sha256=self._digest.hexdigest(), crc32="".join(self._line_checksums))

    def truncate(self, last: int) -> None:
        """Remove the lines of rounds after ``last``, and a partial line that a failed write has left."""
        lines = sum(number <= last for number in self._rounds)
        if not self._file.exists():
            return
        content = self._file.read_bytes()[: self._ends[lines - 1] if lines else 0]
        os.truncate(self._file, len(content))
        del self._rounds[lines:], self._ends[lines:], self._line_checksums[lines:]
        self._digest = hashlib.sha256(content)

    def restore(self, last: int, checksums: RoundChecksums | None) -> tuple[list[dict[str, Any]], list[str]]:
        """Restore the file to the end of round ``last`` by removing later lines and damaged lines.

        The original of a damaged file is renamed (:func:`perfed.data.checksums.set_aside`).

        Args:
            last: the round of the checkpoint from which the run resumes.
            checksums: the checksums in the checkpoint; ``None`` where there is no checkpoint.

        Returns:
            The records of the rounds up to ``last``, and a list with a note if lines were damaged or records are lost.
        """
        content = self._file.read_bytes() if self._file.exists() else b""
        if checksums is not None and matches_checksums(content, checksums):
            lines, damaged, intact = _split_lines(content[: checksums.bytes]), 0, True
        else:
            lines, damaged = _select_lines(content, checksums, last)
            intact = False
        self._forget_lines()
        records = []
        for line in lines:
            record = _parse_line(line)
            if record is not None:
                self._add_line(record["round"], line)
                records.append(record)
        lost = [] if intact else find_lost_rounds(records, last)
        if content and (damaged or lost):
            set_aside(self._file)
        if content or lost:
            write_atomic(self._file, b"".join(lines))
        return records, [_describe_loss(damaged, lost)] if damaged or lost else []


def _split_lines(content: bytes) -> list[bytes]:
    """Return the complete lines, including line breaks; a partial one, which a killed process may leave, is omitted."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; ``None`` if it is damaged."""
    try:
        record: dict[str, Any] = json.loads(line)
        _Line.model_validate(record)
    except (ValueError, RecursionError):
        return None
    loss = record["train_loss"]
    return record | {"train_loss": math.nan if loss is None else loss}  # JSON has no NaN


def _select_lines(content: bytes, checksums: RoundChecksums | None, last: int) -> tuple[list[bytes], int]:
    """Return the lines with an expected checksum, and the number of damaged lines of rounds up to ``last``.

    Without ``checksums``, no line is selected.
    """
    expected = [] if checksums is None else textwrap.wrap(checksums.crc32, 8)
    selected, damaged = [], 0
    for line in _split_lines(content):
        record, checksum = _parse_line(line), f"{crc32(line):08x}"
        if record is not None and checksum in expected:
            expected = expected[expected.index(checksum) + 1 :]
            selected.append(line)
        else:
            damaged += record is None or record["round"] <= last
    return selected, damaged


def _describe_loss(damaged: int, lost: Sequence[int]) -> str:
    parts = [f"{damaged} damaged lines dropped"] if damaged else []
    if lost:
        is_lost = "record of {} is lost" if len(lost) == 1 else "records of {} are lost"
        parts.append(f"the {is_lost.format(name_rounds(lost))}; models and metrics are not affected")
    return f"rounds.jsonl: {', '.join(parts)}"


def matches_checksums(content: bytes, checksums: RoundChecksums) -> bool:
    """Return whether ``content`` begins with the lines to which the checksums belong."""
    beginning = memoryview(content)[: checksums.bytes]
    return len(beginning) == checksums.bytes and hashlib.sha256(beginning).hexdigest() == checksums.sha256


def find_lost_rounds(records: Sequence[Mapping[str, Any]], last: int) -> list[int]:
    """Return the rounds from 1 to ``last`` that have no record.

    Example:
        >>> find_lost_rounds([{"round": 1}, {"round": 4}], 5)
        [2, 3, 5]
    """
    present = {record["round"] for record in records}
    return [number for number in range(1, last + 1) if number not in present]


def was_evaluated(number: int, records: Sequence[Mapping[str, Any]], settings: Evaluation, rounds: int) -> bool:
    """Return whether round ``number`` of ``rounds``, the last one of ``records``, was evaluated.

    If its record is lost, the evaluation settings decide.
    """
    if records and records[-1]["round"] == number:
        return "metrics" in records[-1]
    return settings.is_due(number, rounds)


def name_rounds(rounds: Sequence[int]) -> str:
    """Return ascending numbers of rounds as a text in which consecutive numbers are joined to ranges.

    Example:
        >>> name_rounds([2]), name_rounds([1, 4, 5, 6])
        ('round 2', 'rounds 1, 4 to 6')
    """
    ranges: list[list[int]] = []
    for number in rounds:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"round{'s' if len(rounds) != 1 else ''} {', '.join(' to '.join(map(str, ends)) for ends in ranges)}"
