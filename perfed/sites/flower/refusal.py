"""What the server is told where a site does not answer: fixed sentences. Why, the site's own terminal says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from perfed.errors import ClientsDiverged, PerfedError


class RefusalReason(StrEnum):
    """All that the server may be told: no row's content, no count of rows, no name of a class, no path."""

    MESSAGE = "the site does not answer such a message; its administrator sees why"
    STUDY = "the server's study is not the one that this site was given"
    ANY_STUDY = "this site takes part in a study with [privacy] only if it was started with --study, not --any-study"
    UNFIT = "the site cannot take part in this study; its administrator sees why"
    POLICY = "the policy of this site does not allow what the study needs; its administrator sees more"
    DATA = "the site's data do not fit the study; its administrator sees why"
    JOINED = "this site has joined this run with another study or agreement; submit with another --out"
    ROWS = "the rows of this site have changed since it joined this run; its administrator sees more"
    VERSION = "this site joined this run with other versions of perfed or torch; its administrator sees which"
    AWAY = "this site is not in that run; the server must begin with the study"
    LEFT = "this site has left the study"
    BUDGET = "the privacy budget of this site is spent; its administrator sees how"
    SUM = "the site does not take part in this sum; its administrator sees why"
    STATE = "a state that the site needs is missing or damaged; its administrator sees which"
    DISK = "the site's disk cannot be written to or read; its administrator sees why"
    DIVERGED = "training diverged at this site; lower the learning rate, or let its administrator look at its data"
    MEMORY = "the site has too little memory for this"
    FAILED = "something failed at this site; its administrator sees what"


class Refused(PerfedError):
    """A site does not answer.

    Attributes:
        said: what the server is told.
        key: of the site's policy, which the server is told too; never a value.
    """

    def __init__(self, said: RefusalReason, why: object = None, key: str = "") -> None:
        super().__init__(" ".join(str(said if why is None else why).split()))
        self.said, self.key = said, key

    @property
    def told(self) -> str:
        """What the server is told, with the key."""
        return f"{self.said} ({self.key})" if self.key else str(self.said)


@contextmanager
def refuse_as(said: RefusalReason) -> Iterator[None]:
    """Let the server be told ``said`` of what is wrong here, unless what failed says otherwise itself."""
    try:
        yield
    except (Refused, OSError, MemoryError, ClientsDiverged):
        raise
    except Exception as error:
        raise Refused(said, describe_for_site(error)) from error


def describe_for_server(error: Exception) -> str:
    """What the server is told of an error."""
    kinds = (
        (ClientsDiverged, RefusalReason.DIVERGED),
        (OSError, RefusalReason.DISK),
        (MemoryError, RefusalReason.MEMORY),
    )
    if isinstance(error, Refused):
        return error.told
    return str(next((said for kind, said in kinds if isinstance(error, kind)), RefusalReason.FAILED))


def describe_for_site(error: Exception) -> str:
    """An error in one line, for the site's own administrator."""
    named = "" if isinstance(error, PerfedError) else f"{type(error).__name__}: "
    return f"{named}{' '.join(str(error).split())}"
