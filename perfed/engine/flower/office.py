"""What a post office is: connections of sites, letters to them, and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """One connection of a site.

    Attributes:
        number: the office's own number of it; a site that is started again may get another one.
        site: the name of the site.
        place: machine and folder, as far as known: two connections of one name and place are one site started again.
        since: when it was activated, as a text that sorts.
    """

    number: int
    site: str
    place: str = ""
    since: str = ""


@dataclass(frozen=True)
class Delivery:
    """A reply or an error for the letter with this number.

    Attributes:
        letter: its number.
        body: of the reply; ``None``: an error.
        error: what has happened.
        again: whether the site can answer where it is asked once more, such as when it has been started again.
    """

    letter: str
    body: bytes | None
    error: str = ""
    again: bool = False


class Office(Protocol):
    """What delivers letters; :class:`~perfed.engine.flower.post.PostTransport` calls it from one thread only."""

    def nodes(self) -> Sequence[Node]:
        """All connections that are alive."""

    def send(self, node: int, body: bytes, seconds: float) -> str:
        """Post a letter that expires after ``seconds``; its number."""

    def collect(self, letters: Sequence[str]) -> Sequence[Delivery]:
        """What has come for these letters since the last call; does not wait for more."""
