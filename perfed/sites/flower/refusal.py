"""The refusals of a site. The server receives one of a few fixed sentences; the details stay at the site."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from perfed.errors import ClientsDiverged, PerfedError


class RefusalReason(StrEnum):
    """The fixed sentences that the server may receive; none reveals rows, their number, names of classes or paths."""

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
    """The error of a site that refuses to answer a message; its text is for the site only.

    Args:
        reason: The sentence that the server receives.
        detail: The text of the error, for the site's administrator; by default the sentence for the server.
        key: The name of the setting in the site's policy that does not allow the request. The server receives the
            name, and never the value of the setting.

    Attributes:
        reason: The sentence that the server receives.
        key: The name of the setting in the site's policy; empty if the policy is not concerned.
    """

    def __init__(self, reason: RefusalReason, detail: object = None, key: str = "") -> None:
        super().__init__(" ".join(str(reason if detail is None else detail).split()))
        self.reason, self.key = reason, key

    @property
    def text_for_server(self) -> str:
        """The sentence that the server receives, with the name of the setting in the policy."""
        return f"{self.reason} ({self.key})" if self.key else str(self.reason)


@contextmanager
def refuse_as(reason: RefusalReason) -> Iterator[None]:
    """Turn exceptions in the block of a ``with`` statement into :class:`Refused` with this reason for the server.

    A :class:`Refused` keeps its own reason. Errors of the disk, of memory and of diverged training pass unchanged,
    because :func:`describe_for_server` has sentences for them.
    """
    try:
        yield
    except (Refused, OSError, MemoryError, ClientsDiverged):
        raise
    except Exception as error:
        raise Refused(reason, describe_for_site(error)) from error


def describe_for_server(error: Exception) -> str:
    """Return the sentence about an error that the server may receive."""
    kinds = (
        (ClientsDiverged, RefusalReason.DIVERGED),
        (OSError, RefusalReason.DISK),
        (MemoryError, RefusalReason.MEMORY),
    )
    if isinstance(error, Refused):
        return error.text_for_server
    return str(next((reason for kind, reason in kinds if isinstance(error, kind)), RefusalReason.FAILED))


def describe_for_site(error: Exception) -> str:
    """Return an error in one line for the site's own administrator."""
    prefix = "" if isinstance(error, PerfedError) else f"{type(error).__name__}: "
    return f"{prefix}{' '.join(str(error).split())}"
