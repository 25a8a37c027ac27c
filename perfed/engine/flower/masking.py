"""A site's end of secure aggregation: the messages of a sum, and its masked reply in the place of the reply.

Secrets are in memory alone: a site that is started again has dropped out of the sum that was going on. What it writes
down is that it has opened a sum, so that no second sum of the same exchange is ever opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from perfed import tree
from perfed.engine.executor import ChunkResult
from perfed.engine.flower.allowed import Allowed
from perfed.engine.flower.checks import short
from perfed.engine.flower.message import pack
from perfed.engine.flower.refusal import Said, refusing
from perfed.engine.flower.store import SiteStore
from perfed.engine.flower.wire import MASKED, SUM, done_header
from perfed.engine.secure_aggregation import SecureAggregation, with_loss
from perfed.errors import PerfedError
from perfed.maths.sums import CountedSums, Term

KINDS = ("keys", "shares", "unmask")
"""Of messages of a sum, beside the work itself."""


class _Member(Protocol):
    """:class:`perfed.engine.flower.masks.Member`, which needs perfed[flower]."""

    def masked(self, values: NDArray[np.uint64], sealed: Mapping[int, bytes]) -> NDArray[np.uint64]: ...

    def shares(self, number: int, keys: Mapping[int, Any]) -> dict[int, bytes]: ...

    def unmask(self, arrived: Collection[int]) -> dict[int, bytes]: ...


@dataclass
class _Sum:
    """A sum that is going on."""

    sequence: int
    attempt: str
    asked: int
    member: _Member
    replies: dict[str, bytes] = field(default_factory=dict)  # by hash of the message


class Masking:
    """What a site has of the sum that is going on.

    Args:
        secure: of the site's own study.
        site: its name.
        run: id of the run.
        allowed: what the site answers.
        store: where it writes down which sums it has opened.
    """

    def __init__(self, secure: SecureAggregation, site: str, run: str, allowed: Allowed, store: SiteStore) -> None:
        self._secure, self._site, self._run, self._allowed, self._store = secure, site, run, allowed, store
        self._now: _Sum | None = None

    def answer(self, header: Mapping[str, Any], data: bytes) -> bytes:
        """The reply to a message of the sum; to one that is sent once more that of the first time.

        Raises:
            Refused: what is not of the protocol, or a second sum of an exchange.
        """
        asked = hashlib.sha256(data).hexdigest()
        with refusing(Said.SUM):
            self._check(header)
            sequence, kind = header["sequence"], header["kind"]
            known = self._store.opened(sequence)
            if known is not None and known[0] == asked:
                return known[1]
            if known is not None:
                raise PerfedError(f"the sum of exchange {sequence} has been opened; it is not opened a second time")
            if self._now is not None and asked in self._now.replies:
                return self._now.replies[asked]
            answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
                "keys": self._keys,
                "shares": self._shares,
                "unmask": self._unmask,
            }
            found = answers[kind](header)
            fields = {"kind": kind, "site": self._site, "program": kind}
            reply = pack({**fields, **{name: header[name] for name in ("run", "sequence", "attempt")}, **found}, {})
            if kind == "unmask":
                self._store.open(sequence, asked, reply)
        assert self._now is not None
        self._now.replies[asked] = reply
        return reply

    def joined(self, sequence: int, given: Any) -> _Sum:
        """The sum that a message of work belongs to, by its field ``secure``.

        Raises:
            Refused: there is none, or it is not the one that is going on here.
        """
        with refusing(Said.SUM):
            attempt = given.get("attempt") if isinstance(given, dict) else None
            return self._going_on({"sequence": sequence, "attempt": attempt})

    def masked(self, going: _Sum, given: Mapping[str, Any], done: ChunkResult, terms: tuple[Term, ...]) -> Any:
        """The vector that leaves in the place of the reply ``done``, int64.

        Raises:
            Refused: shares that are not of the members, or values that do not fit into a sum.
        """
        with refusing(Said.SUM):
            vector = vector_of(done, terms, self._secure, self._allowed.clients)
            sealed = _numbered(given.get("sealed"))
            values = going.member.masked(vector.numpy().view(np.uint64), sealed)
        return torch.from_numpy(values.view(np.int64))

    def _check(self, header: Mapping[str, Any]) -> None:
        needed = {"run": str, "sequence": int, "attempt": str}
        for name, kind in needed.items():
            if type(header.get(name)) is not kind:
                raise PerfedError(f"the server's message: {name} is {short(header.get(name))}")
        if header["run"] != self._run:
            raise PerfedError(f"the server's message: run is {short(header['run'])}; {self._run!r} is expected")

    def _going_on(self, header: Mapping[str, Any]) -> _Sum:
        now = self._now
        if now is None or (now.sequence, now.attempt) != (header["sequence"], header["attempt"]):
            raise PerfedError(f"the sum of exchange {short(header['sequence'])} is not going on here")
        return now

    def _keys(self, header: Mapping[str, Any]) -> dict[str, Any]:
        from perfed.engine.flower.masks import Member  # which needs perfed[flower]

        asked, allowed = header.get("asked"), self._allowed
        if type(asked) is not int or not 1 < asked <= allowed.clients:
            raise PerfedError(f"a sum of {short(asked)} sites; the study has {allowed.clients}")
        context = context_of(self._run, header["sequence"], header["attempt"])
        member = Member(context, self._secure.needed(asked, allowed.asked))
        self._now = _Sum(header["sequence"], header["attempt"], asked, member)
        return {"keys": member.keys.plain()}

    def _shares(self, header: Mapping[str, Any]) -> dict[str, Any]:
        from perfed.engine.flower.masks import Keys

        now, number = self._going_on(header), header.get("number")
        keys = {int(other): Keys.of(text) for other, text in _texts(header.get("keys")).items()}
        if type(number) is not int or len(keys) > now.asked:
            raise PerfedError(f"{len(keys)} members, of which this is {short(number)}; {now.asked} were asked")
        return {"sealed": _plain(now.member.shares(number, keys))}

    def _unmask(self, header: Mapping[str, Any]) -> dict[str, Any]:
        arrived = header.get("arrived")
        if not isinstance(arrived, list) or any(type(number) is not int for number in arrived):
            raise PerfedError(f"arrived is {short(arrived)}; numbers of members are needed")
        return {"shares": _plain(self._going_on(header).member.unmask(arrived))}


def context_of(run: str, sequence: int, attempt: str) -> bytes:
    """The name of a sum, which its keys are derived with."""
    return f"{run} {sequence} {attempt}".encode()


def vector_of(done: ChunkResult, terms: tuple[Term, ...], secure: SecureAggregation, clients: int) -> torch.Tensor:
    """What one site puts into a sum, int64: its products of entries as fixed-point numbers, one after the other.

    Raises:
        PerfedError: a value that is not finite, or that does not fit.
    """
    stacked = tree.map_leaves(done.reply(0), lambda _, t: t[None])
    counted = CountedSums(with_loss(stacked, done.losses), secure.numbers(clients))
    return torch.cat([counted.encoded(term).flatten() for term in terms]).cpu()


def masked_message(vector: torch.Tensor, done: ChunkResult, header: Mapping[str, Any], attempt: str) -> bytes:
    """What a site replies to the message with ``header``: a vector that tells nothing without those of the others."""
    return pack({**done_header(done, header), SUM: attempt}, {MASKED: vector})


def without_reply(done: ChunkResult) -> ChunkResult:
    """A reply of which no sum is needed: nothing of it leaves, but what was measured."""
    return replace(done, content={}, losses=torch.full_like(done.losses, torch.nan))


def _numbered(value: Any) -> dict[int, bytes]:
    from perfed.engine.flower.masks import unhex

    return {int(other): unhex(text, "sealed shares") for other, text in _texts(value).items()}


def _texts(value: Any) -> dict[str, Any]:
    """A dictionary of a message's header, whose names are numbers of members."""
    if not isinstance(value, dict) or any(not name.isdecimal() or len(name) > 9 for name in value):
        raise PerfedError(f"members by number are needed, not {short(value)}")
    return value


def _plain(found: Mapping[int, bytes]) -> dict[str, str]:
    return {str(number): content.hex() for number, content in sorted(found.items())}
