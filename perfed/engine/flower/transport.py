"""Bytes between the server and the sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What came of one message to a site.

    Attributes:
        site: its authenticated name.
        body: its reply; ``None`` where there is none.
        error: why there is none; empty otherwise.
        seconds: from sending to arrival.
    """

    site: str
    body: bytes | None
    error: str
    seconds: float
