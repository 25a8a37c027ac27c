"""A site's end of secure aggregation: the messages of a sum, and its masked reply in the place of the reply.

Secrets are in memory only: a site that is started again has dropped out of the sum that was going on. What a site
writes down keeps a server from opening two sums whose difference would be the reply of a single site:

1. for each exchange, and for each payload in all runs of the study, the sites that were asked when it first put a reply
   under masks; it takes part in no sum of the same exchange or payload for which other sites are asked;
2. for each payload, the sites of the sum that it has helped to open; it helps to open no sum of other sites;
3. the message that has opened the sum of an exchange; it answers no other message on that exchange;
4. for each payload and state that it starts from, the round in which it first replied; in a later round it replies as
   in the first one;
5. for each payload and history of its own, the histories of the other members: a hash of the payloads by which each has
   come to the state that it starts from, which it signs with its keys. It takes part in no sum of the same payload and
   history of its own in which one of these members has another history.

A sum needs more than half of the sites that were asked. Two sums of one payload that contain the same site therefore
have a site in common that has helped to open both, which by rule 2 it does only if they are of the same sites. By
rules 4 and 5 these sites either have the same histories both times, and their replies are the same, or other histories
all of them. This holds as long as fewer than ``2 threshold - asked`` of the sites collude with the server.

Where every sum is of all sites of the study, they also have the same history whenever the server follows the protocol,
and a site refuses a sum of members with different ones, whatever the payload.

Where the study has the sites' keys, a site helps to open a sum only after more than half of those that were asked have
signed whose replies are in it. Otherwise a server that names other replies to each site could open a sum of few.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from perfed import tree
from perfed.codec import encode, flatten
from perfed.engine.executor import ChunkResult, Exchange
from perfed.engine.secure_aggregation import SecureAggregation, with_loss
from perfed.errors import PerfedError, shorten_list
from perfed.maths.sums import CountedSums, Term
from perfed.sites.flower.allowed import Allowed
from perfed.sites.flower.checks import short
from perfed.sites.flower.message import pack
from perfed.sites.flower.refusal import Said, refusing
from perfed.sites.flower.store import ASKED_NOTE, SiteStore, check_sums
from perfed.sites.flower.wire import MASKED, SUM, done_header, exchange_of, payload_hash, request_hash
from perfed.tree import Tree

KINDS = ("keys", "shares", "confirm", "unmask")
"""Of messages of a sum, beside the work itself."""


class Signer(Protocol):
    """The site's signing key (:class:`perfed.sites.flower.signing.SigningKey`, which needs perfed[flower])."""

    @property
    def public(self) -> str:
        """The public key as hexadecimal digits."""

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``."""


class _Member(Protocol):
    """:class:`perfed.sites.flower.masks.Member`, which needs perfed[flower]."""

    context: bytes
    needed: int
    history: bytes

    def masked(self, values: NDArray[np.uint64], sealed: Mapping[int, bytes]) -> NDArray[np.uint64]: ...

    def shares(self, number: int, keys: Mapping[int, Any]) -> dict[int, bytes]: ...

    def unmask(self, arrived: Collection[int]) -> dict[int, bytes]: ...


@dataclass
class _Sum:
    """A sum that is going on."""

    sequence: int
    attempt: str
    asked: list[str]
    request: str
    payload: str
    context: bytes
    member: _Member
    base: int  # number of the exchange whose state the site starts from
    histories: dict[str, str] = field(default_factory=dict)  # of all members, by site
    sites: dict[int, str] = field(default_factory=dict)  # by number of the member
    public_keys: dict[int, str] = field(default_factory=dict)  # for signatures, by number
    confirmed: list[int] | None = None  # members whose replies are in the sum, as this site has signed
    replies: dict[str, bytes] = field(default_factory=dict)  # by hash of the message


class Masking:
    """What a site has of the sum that is going on.

    Args:
        secure: of the site's own study.
        site: its name.
        run: id of the run.
        allowed: what the site answers.
        store: where it writes down which sums it takes part in and has opened.
        study: hash of the study, which is the same in all its runs.
        signer: the site's signing key; needed where the study has the public keys of the sites.

    Raises:
        Refused: the study has another public key for this site, or keys of more or fewer sites than take part; or the
            notes on sums of earlier runs are missing.
    """

    def __init__(
        self,
        secure: SecureAggregation,
        site: str,
        run: str,
        allowed: Allowed,
        store: SiteStore,
        study: str,
        signer: Signer | None = None,
    ) -> None:
        self._secure, self._site, self._run, self._allowed, self._store = secure, site, run, allowed, store
        self._study, self._signer = study, signer
        with refusing(Said.SUM):
            check_sums(store.path.parent)
        if secure.keys is not None:
            with refusing(Said.SUM):
                secure.check_key(site, "" if signer is None else signer.public)
                if len(secure.keys) != allowed.clients:
                    listed = f"secure_aggregation.keys lists {len(secure.keys)}"
                    raise PerfedError(f"the server's study is of {allowed.clients} sites, and {listed}")
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
                "confirm": self._confirm,
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

    def join(self, header: Mapping[str, Any], tree: Mapping[str, Any], secure: Any) -> _Sum:
        """Return the sum that a message of work belongs to, once the sites that are asked are written down.

        Args:
            header, tree: of the message.
            secure: its field ``secure``.

        Raises:
            Refused: there is no sum, it is not the one that is going on here, the message is not the one that all
                members have agreed on, other sites were asked before for this exchange or payload, other members
                than this site start from another state than before, or the message holds too large numbers.
        """
        with refusing(Said.SUM):
            if self._allowed.discreet:
                self._check_room(tree)
            attempt = secure.get("attempt") if isinstance(secure, dict) else None
            now = self._going_on({"sequence": header["sequence"], "attempt": attempt})
            if (request_hash(header, tree), payload_hash(header, tree)) != (now.request, now.payload):
                raise PerfedError("the message is not the one that the sites' keys were made for")
            if header["base"] != now.base:
                raise PerfedError(f"it starts from exchange {header['base']}, and its keys were made for {now.base}")
            self._check_asked(now.sequence, now.payload, now.asked)
            histories = self._check_histories(now.payload, now.member, now.histories)
            # those of all runs first: where only the run's own notes are left, the others were removed
            self._store.write_note(f"payload-{self._with_study(now.payload)}", now.asked, in_all_runs=True)
            self._store.write_note(self._start_of(now.payload, now.member.history), histories, in_all_runs=True)
            self._store.write_note(f"{ASKED_NOTE}{now.sequence}", now.asked)
            return now

    def repeat_exchange(self, header: Mapping[str, Any], tree: Mapping[str, Any], state: Tree | None) -> Exchange:
        """Return the exchange of a message of work, as of the round in which the site first answered its payload.

        The order of mini-batches and the settings of a round are then the same whenever the site answers the same
        payload from the same state, and so is its reply. The round is written down. Under ``[privacy]`` states with
        numbers are the same if their histories are: whether their numbers are equal could depend on the site's rows,
        and a refusal would tell the server.

        Args:
            header, tree: of the message.
            state: that the site starts from; all states without numbers are the same.

        Raises:
            Refused: the payload was that of another exchange of the round, or of other trained domains.
        """
        exchange = exchange_of(header)
        fixed = {"index": exchange.index, "extensions": exchange.extensions, "trained": header["trained"]}
        holds_numbers = any(tensor.numel() for tensor in flatten(state or {}).values())
        with refusing(Said.STATE):
            if holds_numbers and self._allowed.discreet:
                start = f"history {self._store.history(header['base']).hex()}"
            else:
                start = hashlib.sha256(encode(state) if state is not None and holds_numbers else b"").hexdigest()
        name = f"first-{self._with_study(f'{payload_hash(header, tree)} {start}')}"
        with refusing(Said.SUM):
            first = self._store.read_note(name, in_all_runs=True)
            if first is None:
                self._store.write_note(name, {**fixed, "round": exchange.round}, in_all_runs=True)
                return exchange
            for field_name, value in fixed.items():
                if first[field_name] != value:
                    raise PerfedError(
                        f"the site has answered the same request from the same state with {field_name} "
                        f"{short(first[field_name])}; with {short(value)} its reply could differ, and those of the "
                        "other sites could be the same"
                    )
            return replace(exchange, round=first["round"])

    def continue_history(self, header: Mapping[str, Any], tree: Mapping[str, Any], *, masked: bool) -> bytes:
        """Return the hash of what leads to the state after a message of work.

        The state follows from the state before, the payload and, where no reply leaves under masks, the exchange;
        replies that do are the same in all rounds (:meth:`repeat_exchange`), and so is the state after them.
        """
        before, payload = self._store.history(header["base"]), bytes.fromhex(payload_hash(header, tree))
        settings = [] if masked else [header[name] for name in ("round", "index", "extensions", "trained")]
        return hashlib.sha256(before + payload + json.dumps(settings).encode()).digest()

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

    def _check_room(self, received: Tree) -> None:
        """Refuse numbers of which a private reply could be too large for a sum.

        The refusal of a reply would depend on the change of this site and its own share of the noise, which is less
        than the noise of a sum. This one depends on what the server has sent and on nothing else.
        """
        most = self._secure.numbers(self._allowed.clients).largest_value / 2
        for name, tensor in flatten(received).items():
            if tensor.numel() and float(tensor.double().abs().max()) > most:
                raise PerfedError(
                    f"'{name}' of the server's message holds {float(tensor.double().abs().max()):.6g}; a private reply "
                    f"under masks starts from at most {most:.6g} (fewer secure_aggregation.bits allow more)"
                )

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
        from perfed.sites.flower.masks import Member  # which needs perfed[flower]

        asked, request, allowed = header.get("asked"), header.get("request"), self._allowed
        if not isinstance(asked, list) or any(not isinstance(site, str) for site in asked):
            raise PerfedError(f"asked is {short(asked)}; names of sites are needed")
        if not 1 < len(set(asked)) == len(asked) <= allowed.clients:
            raise PerfedError(f"a sum of {len(asked)} sites; the study has {allowed.clients}, each counts once")
        if self._site not in asked:
            raise PerfedError(f"a sum of {short(asked)}, without this site")
        payload, base = header.get("payload"), header.get("base")
        sequence, attempt = header["sequence"], header["attempt"]
        if not isinstance(request, str) or not isinstance(payload, str):
            raise PerfedError(f"request and payload are {short(request)} and {short(payload)}; hashes are needed")
        if type(base) is not int or base < 0:
            raise PerfedError(f"base is {short(base)}; the number of an exchange is needed")
        self._check_asked(sequence, payload, asked)  # before any other site would take part in vain
        with refusing(Said.STATE):
            history = self._store.history(base)
        context = context_of(self._run, sequence, attempt, request, asked)
        sign = self._signer.sign if self._secure.keys is not None and self._signer is not None else _leave_unsigned
        member = Member(context, self._secure.count_required(len(asked), allowed.asked), self._site, sign, history)
        self._now = _Sum(sequence, attempt, sorted(asked), request, payload, context, member, base)
        return {"keys": member.keys.to_fields()}

    def _shares(self, header: Mapping[str, Any]) -> dict[str, Any]:
        from perfed.sites.flower.masks import Keys

        now, number = self._going_on(header), header.get("number")
        keys = {int(member): Keys.from_fields(fields) for member, fields in _texts(header.get("keys")).items()}
        sites = {member: its_keys.site for member, its_keys in keys.items()}
        if type(number) is not int or sites.get(number) != self._site:
            raise PerfedError(f"{len(keys)} members, of which this is said to be {short(number)}")
        if len({*sites.values()}) < len(sites) or not {*sites.values()} <= {*now.asked}:
            raise PerfedError(f"the members are {short(sorted(sites.values()))}; {short(now.asked)} were asked")
        self._check_signatures(now.context, keys)
        histories = {its_keys.site: its_keys.history.hex() for its_keys in keys.values()}
        self._check_histories(now.payload, now.member, histories)
        now.histories = histories
        sealed = now.member.shares(number, keys)
        now.sites = sites
        now.public_keys = {member: (self._secure.keys or {}).get(site, "") for member, site in sites.items()}
        return {"sealed": _plain(sealed)}

    def _check_signatures(self, context: bytes, keys: Mapping[int, Any]) -> None:
        """Refuse keys that are not signed by the site that they are said to be of."""
        from perfed.sites.flower.signing import is_signed

        public_keys = self._secure.keys
        if public_keys is None:
            return
        for member in keys.values():
            key = public_keys.get(member.site)
            if key is None:
                raise PerfedError(f"site '{member.site}' is not in secure_aggregation.keys of this site's study")
            if not is_signed(key, member.signature, member.signed_content(context)):
                raise PerfedError(
                    f"the keys of site '{member.site}' are not signed with its key in secure_aggregation.keys for this "
                    "sum: the server has changed them, or has sent that site another request; nothing has left"
                )

    def _confirm(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Sign whose replies are in the sum, once for each sum."""
        arrived, now = _member_numbers(header), self._going_on(header)
        if self._signer is None or (now.confirmed is not None and now.confirmed != arrived):
            raise PerfedError(f"a sum of {short(arrived)}; this site has signed one of {short(now.confirmed)}")
        self._check_opened(now, arrived)
        now.confirmed = arrived
        return {"confirmation": self._signer.sign(_confirmation(now, arrived)).hex()}

    def _unmask(self, header: Mapping[str, Any]) -> dict[str, Any]:
        arrived, now = _member_numbers(header), self._going_on(header)
        self._check_opened(now, arrived)
        if self._secure.keys is not None:
            self._check_confirmations(now, arrived, header.get("confirmations"))
        shares = now.member.unmask(arrived)
        sites = {now.sites[number] for number in arrived}
        self._store.write_note(f"opened-{self._with_study(now.payload)}", sorted(sites), in_all_runs=True)
        return {"shares": _plain(shares)}

    def _check_confirmations(self, now: _Sum, arrived: list[int], signatures: Any) -> None:
        """Refuse a sum of which too few members have signed whose replies are in it."""
        from perfed.sites.flower.masks import unhex
        from perfed.sites.flower.signing import is_signed

        content = _confirmation(now, arrived)
        signers = [
            int(number)
            for number, text in _texts(signatures).items()
            if is_signed(now.public_keys.get(int(number), ""), unhex(text, "confirmations"), content)
        ]
        if len(set(signers)) < now.member.needed:
            raise PerfedError(f"{len(signers)} members have signed for this sum; {now.member.needed} are needed")

    def _check_opened(self, now: _Sum, arrived: list[int]) -> None:
        """Refuse a sum of others than the members, or than those of an opened sum of the same payload."""
        if not {*arrived} <= now.sites.keys():
            raise PerfedError(f"a sum of {short(arrived)}; members are {short(sorted(now.sites))}")
        sites, name = {now.sites[number] for number in arrived}, f"opened-{self._with_study(now.payload)}"
        self._check_sites(name, sites, "a sum of the same payload was opened, which was of", in_all_runs=True)

    def _check_asked(self, sequence: int, payload: str, asked: Collection[str]) -> None:
        """Refuse a sum of other sites than those that were asked before for the same exchange or payload."""
        why = "the site has put a reply to the same request under masks, for which these sites were asked:"
        self._check_sites(f"{ASKED_NOTE}{sequence}", asked, why)
        self._check_sites(f"payload-{self._with_study(payload)}", asked, why, in_all_runs=True)

    def _check_sites(self, name: str, sites: Collection[str], why: str, *, in_all_runs: bool = False) -> None:
        """Refuse ``sites`` where others are written down under ``name``."""
        fixed = self._store.read_note(name, in_all_runs=in_all_runs)
        if fixed is not None and fixed != sorted(sites):
            others = "a sum of others could show one reply"
            raise PerfedError(f"a sum of {short(sorted(sites))}: {why} {short(fixed)}; {others}")

    def _check_histories(self, payload: str, member: _Member, histories: Mapping[str, str]) -> dict[str, str]:
        """Return the histories of all sites that were members with this site in sums of a payload and state.

        Args:
            payload: hash of the payload.
            member: of the sum, with the history of this site.
            histories: of all members, by site.

        Raises:
            PerfedError: a member starts from another state than before, or than the others where every sum is of all.
        """
        before = self._store.read_note(self._start_of(payload, member.history), in_all_runs=True) or {}
        if changed := sorted(site for site, history in histories.items() if before.get(site, history) != history):
            raise PerfedError(
                f"{shorten_list(changed, 3)} would start from another state than before, and this site would not: two "
                "sums of the same request could show how the reply of a single site has changed"
            )
        different = sorted(site for site, history in histories.items() if history != member.history.hex())
        if different and member.needed == self._allowed.clients:
            raise PerfedError(
                f"{shorten_list(different, 3)} would start from a state with another history than this site; every sum "
                "of the study is of all sites, and all of them have answered the same requests"
            )
        return {**before, **histories}

    def _start_of(self, payload: str, history: bytes) -> str:
        """Return the name of the note on a payload that is answered from the state with ``history``."""
        return f"start-{self._with_study(f'{payload} {history.hex()}')}"

    def _with_study(self, payload: str) -> str:
        return hashlib.sha256(f"{self._study} {payload}".encode()).hexdigest()


def context_of(run: str, sequence: int, attempt: str, request: str, asked: Sequence[str]) -> bytes:
    """Return what names a sum, its request and the sites that are asked; all its keys are derived with it."""
    return json.dumps([run, sequence, attempt, request, sorted(asked)]).encode()


def vector_of(done: ChunkResult, terms: tuple[Term, ...], secure: SecureAggregation, clients: int) -> torch.Tensor:
    """What one site puts into a sum, int64: its products of entries as fixed-point numbers, one after the other.

    Raises:
        PerfedError: a value that is not finite, or that does not fit.
    """
    stacked = tree.map_leaves(done.reply(0), lambda _, t: t[None])
    counted = CountedSums(with_loss(stacked, done.losses), secure.numbers(clients))
    return torch.cat([counted.encode(term).flatten() for term in terms]).cpu()


def masked_message(vector: torch.Tensor, done: ChunkResult, header: Mapping[str, Any], attempt: str) -> bytes:
    """What a site replies to the message with ``header``: a vector that tells nothing without those of the others."""
    return pack({**done_header(done, header), SUM: attempt}, {MASKED: vector})


def without_reply(done: ChunkResult) -> ChunkResult:
    """A reply of which no sum is needed: nothing of it leaves, but what was measured."""
    return replace(done, content={}, losses=torch.full_like(done.losses, torch.nan))


def _numbered(value: Any) -> dict[int, bytes]:
    from perfed.sites.flower.masks import unhex

    return {int(other): unhex(text, "sealed shares") for other, text in _texts(value).items()}


def _member_numbers(header: Mapping[str, Any]) -> list[int]:
    """Return the members whose replies have arrived, as the server says, in ascending order."""
    arrived = header.get("arrived")
    if not isinstance(arrived, list) or any(type(number) is not int for number in arrived):
        raise PerfedError(f"arrived is {short(arrived)}; numbers of members are needed")
    return sorted({*arrived})


def _confirmation(now: _Sum, arrived: Sequence[int]) -> bytes:
    """Return what members sign before a sum is opened."""
    return json.dumps(["arrived", now.member.context.hex(), list(arrived)]).encode()


def _leave_unsigned(content: bytes) -> bytes:
    return b""


def _texts(value: Any) -> dict[str, Any]:
    """Return a dictionary of a message's header, whose names are numbers of members."""
    if not isinstance(value, dict) or any(not name.isdecimal() or len(name) > 9 for name in value):
        raise PerfedError(f"members by number are needed, not {short(value)}")
    return value


def _plain(found: Mapping[int, bytes]) -> dict[str, str]:
    return {str(number): content.hex() for number, content in sorted(found.items())}
