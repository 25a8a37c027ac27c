"""The server's journal, which stores the answers of each exchange on disk before the round continues.

A server that was killed repeats its round. It then reads the answers of finished exchanges from the journal, with the
same bytes and in the same order of arrival, and so obtains the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from perfed.errors import PerfedError
from perfed.sites.flower.message import frame, unframe
from perfed.sites.flower.transport import Answer
from perfed.system import sync_folder, write_atomic

_SUFFIX = ".answers"


class Journal:
    """The answers of a run's exchanges, in one file per exchange, for one process at a time.

    Attributes:
        path: The folder of the files.
        run: The id of the run; answers of another run are not used.
        notes: One line for each damaged file. A damaged file counts as missing: the sites are asked again, and send the
            replies that they have stored.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> answers = [Answer("north", b"reply", "", 1.5), Answer("south", None, "no answer", 30.0)]
        >>> with TemporaryDirectory() as folder:
        ...     Journal(Path(folder)).write(10_001, answers)
        ...     print(Journal(Path(folder)).load_answers(10_001) == answers, Journal(Path(folder)).load_answers(20_000))
        True None
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path, self.run = path, run
        self.notes: list[str] = []
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
        for file in path.glob(".*.tmp"):  # left by a server that was killed during a write
            file.unlink()

    def write(self, sequence: int, answers: Sequence[Answer]) -> None:
        """Write the answers of an exchange to disk, all or nothing.

        Args:
            sequence: The number of the exchange.
            answers: The answers in order of arrival, including errors.

        Raises:
            OSError: The file cannot be written, for example because the disk is full; an earlier file is unchanged.
        """
        rows = [[a.site, a.error, a.seconds, None if a.body is None else len(a.body)] for a in answers]
        bodies = [answer.body for answer in answers if answer.body is not None]
        write_atomic(
            self._answers_file(sequence), frame({"run": self.run, "sequence": sequence, "answers": rows}, *bodies)
        )
        sync_folder(self.path)

    def load_answers(self, sequence: int) -> list[Answer] | None:
        """Return the answers of exchange ``sequence`` in order of arrival; ``None`` if the sites must be asked."""
        try:
            header, body = unframe(self._answers_file(sequence).read_bytes())
            if header.get("sequence") != sequence:
                raise PerfedError(f"it is of exchange {header.get('sequence')}")
            if header.get("run") != self.run:
                raise PerfedError(f"it is of run '{header.get('run')}'")
        except FileNotFoundError:
            return None
        except (PerfedError, OSError) as error:
            self.notes.append(
                f"{self._answers_file(sequence)} is damaged ({error}); exchange {sequence} is asked again"
            )
            return None
        ends = accumulate((length or 0 for *_, length in header["answers"]), initial=0)
        return [
            Answer(site, None if length is None else body[start:end], error, seconds)
            for (site, error, seconds, length), (start, end) in zip(header["answers"], pairwise(ends), strict=True)
        ]

    def remove_before(self, sequence: int) -> None:
        """Remove the answers of all exchanges before ``sequence``, once a checkpoint contains their result."""
        for file in self.path.glob(f"*{_SUFFIX}"):
            if file.stem.isdecimal() and int(file.stem) < sequence:
                file.unlink()

    def _answers_file(self, sequence: int) -> Path:
        return self.path / f"{sequence:012d}{_SUFFIX}"
