"""A site's end of secure aggregation: the messages of a secure sum, and the masked reply of the site.

Secrets are in memory only, so a site that is restarted has dropped out of the current sum. To keep a server from
opening two sums whose difference is the reply of a single site, a site records the following on disk:

1. for each exchange, and for each payload in all runs of the study, the sites that were asked when this site first
   masked a reply; it takes part in no sum of the same exchange or payload for which other sites are asked;
2. for each payload, the sites of the sum that it has helped to open; it helps to open no sum of other sites;
3. the message that has opened the sum of an exchange; it answers no other message about that sum;
4. for each payload and starting state, the round in which the site first replied; in a later round it gives the same
   reply;
5. for each payload and history of this site, the histories of the other members. The history of a site is a hash of the
   payloads that have led to the state that it starts from; the site signs it together with its keys. The site takes
   part in no sum of the same payload and the same own history in which one of these members has another history.

A sum needs more than half of the asked sites. Two sums of one payload that contain the same site therefore share a site
that has helped to open both, and by rule 2 it does so only if both are sums of the same sites. By rules 4 and 5 these
sites either have the same histories in both sums, and give the same replies, or all of them have other histories. This
holds as long as fewer than ``2 threshold - asked`` of the sites collude with the server.

If every sum covers all sites of the study, all sites have the same history whenever the server follows the protocol.
A site then refuses a sum of members with different histories, whatever the payload.

If the study has the public keys of the sites, a site helps to open a sum only after more than half of the asked sites
have signed the list of the sites whose replies are in it. Otherwise a server that shows each site another list could
open a sum of few sites.
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
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.checks import shorten_repr
from perfed.sites.flower.message import pack
from perfed.sites.flower.refusal import RefusalReason, refuse_as
from perfed.sites.flower.store import ASKED_NOTE, SiteStore, check_sums
from perfed.sites.flower.wire import (
    MASKED,
    SUM,
    exchange_from_header,
    hash_common_request,
    hash_payload,
    make_reply_header,
)
from perfed.tree import Tree

KINDS = ("keys", "shares", "confirm", "unmask")
"""The kinds of messages of a secure sum, besides the task message."""


class Signer(Protocol):
    """The signing key of a site (:class:`perfed.sites.flower.signing.SigningKey`, which needs perfed[flower])."""

    @property
    def public_key(self) -> str:
        """The public key as hexadecimal digits."""

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``."""


class _Member(Protocol):
    """:class:`perfed.sites.flower.masks.Member`, which needs perfed[flower]."""

    context: bytes
    needed: int
    history: bytes

    def mask_values(self, values: NDArray[np.uint64], sealed: Mapping[int, bytes]) -> NDArray[np.uint64]: ...

    def share_secrets(self, number: int, keys: Mapping[int, Any]) -> dict[int, bytes]: ...

    def reveal_shares(self, arrived: Collection[int]) -> dict[int, bytes]: ...


@dataclass
class _Sum:
    """The state of the current secure sum at a site."""

    sequence: int
    attempt: str
    asked_sites: list[str]
    request: str
    payload: str
    context: bytes
    member: _Member
    base: int  # number of the exchange whose state the site starts from
    histories: dict[str, str] = field(default_factory=dict)  # of all members, by site
    sites: dict[int, str] = field(default_factory=dict)  # names of the members by their numbers
    public_keys: dict[int, str] = field(default_factory=dict)  # for signatures, by number of the member
    confirmed: list[int] | None = None  # the members that this site has signed as those of the sum
    replies: dict[str, bytes] = field(default_factory=dict)  # by hash of the message


class Masking:
    """The part of a site in secure aggregation, with the state of the current sum.

    Args:
        secure: The settings of secure aggregation in the site's own copy of the study.
        site: The name of the site.
        run: The id of the run.
        allowed: The list of all requests that the site answers.
        store: The store in which the site records the sums that it takes part in and has opened.
        study: The hash of the study, which is the same in all its runs.
        signer: The site's signing key; needed if the study has the public keys of the sites.

    Raises:
        Refused: The study has another public key for this site, its number of keys is not its number of sites, or the
            notes on the sums of earlier runs are missing.
    """

    def __init__(
        self,
        secure: SecureAggregation,
        site: str,
        run: str,
        allowed: AllowList,
        store: SiteStore,
        study: str,
        signer: Signer | None = None,
    ) -> None:
        self._secure, self._site, self._run, self._allowed, self._store = secure, site, run, allowed, store
        self._study, self._signer = study, signer
        with refuse_as(RefusalReason.SUM):
            check_sums(store.path.parent)
        if secure.keys is not None:
            with refuse_as(RefusalReason.SUM):
                secure.check_key(site, "" if signer is None else signer.public_key)
                if len(secure.keys) != allowed.clients:
                    listed = f"secure_aggregation.keys lists {len(secure.keys)}"
                    raise PerfedError(f"the server's study has {allowed.clients} sites, and {listed}")
        self._current: _Sum | None = None

    def answer(self, header: Mapping[str, Any], data: bytes) -> bytes:
        """Return the reply to a message of a secure sum; a message that is sent again gets the same reply.

        Args:
            header: The header of the message, whose kind is one of :data:`KINDS`.
            data: The bytes of the message.

        Raises:
            Refused: The message does not follow the protocol, or asks for a second sum of an exchange.
        """
        digest = hashlib.sha256(data).hexdigest()
        with refuse_as(RefusalReason.SUM):
            self._check_header(header)
            sequence, kind = header["sequence"], header["kind"]
            opening = self._store.load_opening(sequence)
            if opening is not None and opening[0] == digest:
                return opening[1]
            if opening is not None:
                raise PerfedError(f"the sum of exchange {sequence} has been opened; it is not opened a second time")
            if self._current is not None and digest in self._current.replies:
                return self._current.replies[digest]
            handlers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
                "keys": self._make_keys,
                "shares": self._make_shares,
                "confirm": self._confirm_members,
                "unmask": self._reveal_shares,
            }
            content = handlers[kind](header)
            fields = {"kind": kind, "site": self._site, "program": kind}
            reply = pack({**fields, **{name: header[name] for name in ("run", "sequence", "attempt")}, **content}, {})
            if kind == "unmask":
                self._store.record_opening(sequence, digest, reply)
        assert self._current is not None
        self._current.replies[digest] = reply
        return reply

    def join_sum(self, header: Mapping[str, Any], tree: Mapping[str, Any], secure: Any) -> _Sum:
        """Return the current sum for a task message, after the asked sites and their histories are on disk.

        Args:
            header, tree: The header and the tree of the message.
            secure: The field ``secure`` of the header.

        Raises:
            Refused: The message does not belong to the current sum or is not the one that all members have agreed on,
                other sites were asked before for this exchange or payload, another member starts from another state
                than before while this site does not, or the message contains too large numbers.
        """
        with refuse_as(RefusalReason.SUM):
            if self._allowed.discreet:
                self._check_magnitudes(tree)
            attempt = secure.get("attempt") if isinstance(secure, dict) else None
            current = self._get_current_sum({"sequence": header["sequence"], "attempt": attempt})
            if (hash_common_request(header, tree), hash_payload(header, tree)) != (current.request, current.payload):
                raise PerfedError("the message is not the one for which the sites created their keys")
            if header["base"] != current.base:
                raise PerfedError(
                    f"it starts from exchange {header['base']}, and its keys were created for {current.base}"
                )
            self._check_asked_sites(current.sequence, current.payload, current.asked_sites)
            histories = self._check_histories(current.payload, current.member, current.histories)
            # First the notes for all runs: check_sums takes a note of the run alone for lost notes of all runs.
            self._store.write_note(
                f"payload-{self._hash_with_study(current.payload)}", current.asked_sites, in_all_runs=True
            )
            self._store.write_note(
                self._history_note_name(current.payload, current.member.history), histories, in_all_runs=True
            )
            self._store.write_note(f"{ASKED_NOTE}{current.sequence}", current.asked_sites)
            return current

    def repeat_exchange(self, header: Mapping[str, Any], tree: Mapping[str, Any], state: Tree | None) -> Exchange:
        """Return the exchange of a task message with the number of the round in which the site first got its payload.

        The order of mini-batches and the settings of a round are then the same whenever the site answers the same
        payload from the same state, and so is its reply. The round is recorded on disk. Under ``[privacy]`` two states
        with numbers count as equal if their histories are equal: whether their numbers are equal could depend on the
        site's rows, and a refusal would reveal it to the server.

        Args:
            header, tree: The header and the tree of the message.
            state: The state that the site starts from; all states without numbers count as equal.

        Raises:
            Refused: The payload was that of another exchange of the round, or of other trained domains.
        """
        exchange = exchange_from_header(header)
        fixed = {"index": exchange.index, "extensions": exchange.extensions, "trained": header["trained"]}
        has_numbers = any(tensor.numel() for tensor in flatten(state or {}).values())
        with refuse_as(RefusalReason.STATE):
            if has_numbers and self._allowed.discreet:
                start = f"history {self._store.load_history(header['base']).hex()}"
            else:
                start = hashlib.sha256(encode(state) if state is not None and has_numbers else b"").hexdigest()
        name = f"first-{self._hash_with_study(f'{hash_payload(header, tree)} {start}')}"
        with refuse_as(RefusalReason.SUM):
            first = self._store.read_note(name, in_all_runs=True)
            if first is None:
                self._store.write_note(name, {**fixed, "round": exchange.round}, in_all_runs=True)
                return exchange
            for field_name, value in fixed.items():
                if first[field_name] != value:
                    raise PerfedError(
                        f"the site has answered the same request from the same state with {field_name} "
                        f"{shorten_repr(first[field_name])}; with {shorten_repr(value)} its reply could differ, and "
                        "those of the other sites could be the same"
                    )
            return replace(exchange, round=first["round"])

    def continue_history(self, header: Mapping[str, Any], tree: Mapping[str, Any], *, masked: bool) -> bytes:
        """Return the history of the state after a task message, as a hash.

        The state follows from the state before, the payload and, if the reply is not masked, the exchange. Masked
        replies are the same in all rounds (:meth:`repeat_exchange`), and so is the state after them.

        Args:
            header, tree: The header and the tree of the message.
            masked: Whether the reply is masked.
        """
        before, payload = self._store.load_history(header["base"]), bytes.fromhex(hash_payload(header, tree))
        settings = [] if masked else [header[name] for name in ("round", "index", "extensions", "trained")]
        return hashlib.sha256(before + payload + json.dumps(settings).encode()).digest()

    def mask_reply(
        self, current: _Sum, secure: Mapping[str, Any], result: ChunkResult, terms: tuple[Term, ...]
    ) -> torch.Tensor:
        """Return the masked vector that replaces the reply of a result, int64.

        Args:
            current: The current sum.
            secure: The field ``secure`` of the task message, with the sealed shares of the other members.
            result: The result of the task.
            terms: The products of entries that are summed.

        Raises:
            Refused: The shares are not those of the members, or a value does not fit into a sum.
        """
        with refuse_as(RefusalReason.SUM):
            vector = encode_reply(result, terms, self._secure, self._allowed.clients)
            sealed = _decode_sealed_shares(secure.get("sealed"))
            values = current.member.mask_values(vector.numpy().view(np.uint64), sealed)
        return torch.from_numpy(values.view(np.int64))

    def _check_magnitudes(self, received: Tree) -> None:
        """Refuse a message whose numbers are so large that a private reply might not fit into a sum.

        A refusal of the reply itself would depend on the update of this site and on its own share of the noise, which
        is less than the noise of the sum. This refusal depends only on what the server has sent.
        """
        most = self._secure.numbers(self._allowed.clients).largest_value / 2
        for name, tensor in flatten(received).items():
            largest = float(tensor.double().abs().max()) if tensor.numel() else 0.0
            if largest > most:
                raise PerfedError(
                    f"'{name}' of the server's message contains {largest:.6g}; a private reply under masks starts from "
                    f"at most {most:.6g} (fewer secure_aggregation.bits allow more)"
                )

    def _check_header(self, header: Mapping[str, Any]) -> None:
        """Refuse a message that does not name the run of this site, an exchange and an attempt."""
        needed = {"run": str, "sequence": int, "attempt": str}
        for name, kind in needed.items():
            if type(header.get(name)) is not kind:
                raise PerfedError(f"the server's message: {name} is {shorten_repr(header.get(name))}")
        if header["run"] != self._run:
            raise PerfedError(f"the server's message: run is {shorten_repr(header['run'])}; {self._run!r} is expected")

    def _get_current_sum(self, header: Mapping[str, Any]) -> _Sum:
        """Return the current sum; refuse a message of another exchange or attempt."""
        current = self._current
        if current is None or (current.sequence, current.attempt) != (header["sequence"], header["attempt"]):
            raise PerfedError(f"the sum of exchange {shorten_repr(header['sequence'])} is not in progress at this site")
        return current

    def _make_keys(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Start a new sum and return the site's public keys for it."""
        from perfed.sites.flower.masks import Member  # which needs perfed[flower]

        asked, request, allowed = header.get("asked"), header.get("request"), self._allowed
        if not isinstance(asked, list) or any(not isinstance(site, str) for site in asked):
            raise PerfedError(f"asked is {shorten_repr(asked)}; names of sites are needed")
        if not 1 < len(set(asked)) == len(asked) <= allowed.clients:
            raise PerfedError(f"a sum of {len(asked)} sites; the study has {allowed.clients}, each counts once")
        if self._site not in asked:
            raise PerfedError(f"a sum of {shorten_repr(asked)}, without this site")
        payload, base = header.get("payload"), header.get("base")
        sequence, attempt = header["sequence"], header["attempt"]
        if not isinstance(request, str) or not isinstance(payload, str):
            raise PerfedError(
                f"request and payload are {shorten_repr(request)} and {shorten_repr(payload)}; hashes are needed"
            )
        if type(base) is not int or base < 0:
            raise PerfedError(f"base is {shorten_repr(base)}; the number of an exchange is needed")
        self._check_asked_sites(sequence, payload, asked)  # before the other sites work on the sum in vain
        with refuse_as(RefusalReason.STATE):
            history = self._store.load_history(base)
        context = encode_context(self._run, sequence, attempt, request, asked)
        sign = self._signer.sign if self._secure.keys is not None and self._signer is not None else _leave_unsigned
        member = Member(context, self._secure.count_required(len(asked), allowed.min_sites), self._site, sign, history)
        self._current = _Sum(sequence, attempt, sorted(asked), request, payload, context, member, base)
        return {"keys": member.keys.to_fields()}

    def _make_shares(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sealed shares of the site's secrets for the other members, whose keys are in the message."""
        from perfed.sites.flower.masks import MemberKeys

        current, number = self._get_current_sum(header), header.get("number")
        keys = {
            int(member): MemberKeys.from_fields(fields)
            for member, fields in _check_member_table(header.get("keys")).items()
        }
        sites = {member: member_keys.site for member, member_keys in keys.items()}
        if type(number) is not int or sites.get(number) != self._site:
            raise PerfedError(f"number is {shorten_repr(number)}, which is not this site among the {len(keys)} members")
        if len({*sites.values()}) < len(sites) or not {*sites.values()} <= {*current.asked_sites}:
            members = shorten_repr(sorted(sites.values()))
            raise PerfedError(f"the members are {members}; {shorten_repr(current.asked_sites)} were asked")
        self._check_signatures(current.context, keys)
        histories = {member_keys.site: member_keys.history.hex() for member_keys in keys.values()}
        self._check_histories(current.payload, current.member, histories)
        current.histories = histories
        sealed = current.member.share_secrets(number, keys)
        current.sites = sites
        current.public_keys = {member: (self._secure.keys or {}).get(site, "") for member, site in sites.items()}
        return {"sealed": _encode_shares(sealed)}

    def _check_signatures(self, context: bytes, keys: Mapping[int, Any]) -> None:
        """Refuse keys without a valid signature of the site that they are said to belong to."""
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

    def _confirm_members(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Sign the list of the members whose replies are in the sum; a sum has only one such list."""
        arrived, current = _read_member_numbers(header), self._get_current_sum(header)
        if self._signer is None or (current.confirmed is not None and current.confirmed != arrived):
            signed = shorten_repr(current.confirmed)
            raise PerfedError(f"a sum of {shorten_repr(arrived)}; this site has signed one of {signed}")
        self._check_members(current, arrived)
        current.confirmed = arrived
        return {"confirmation": self._signer.sign(_encode_confirmation(current, arrived)).hex()}

    def _reveal_shares(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shares that open the sum of the members whose replies have arrived."""
        arrived, current = _read_member_numbers(header), self._get_current_sum(header)
        self._check_members(current, arrived)
        if self._secure.keys is not None:
            self._check_confirmations(current, arrived, header.get("confirmations"))
        shares = current.member.reveal_shares(arrived)
        sites = {current.sites[number] for number in arrived}
        self._store.write_note(f"opened-{self._hash_with_study(current.payload)}", sorted(sites), in_all_runs=True)
        return {"shares": _encode_shares(shares)}

    def _check_confirmations(self, current: _Sum, arrived: list[int], signatures: Any) -> None:
        """Refuse to open a sum whose list of members too few members have signed."""
        from perfed.sites.flower.masks import decode_hex
        from perfed.sites.flower.signing import is_signed

        content = _encode_confirmation(current, arrived)
        signers = [
            int(number)
            for number, text in _check_member_table(signatures).items()
            if is_signed(current.public_keys.get(int(number), ""), decode_hex(text, "confirmations"), content)
        ]
        if len(set(signers)) < current.member.needed:
            raise PerfedError(f"{len(signers)} members have signed for this sum; {current.member.needed} are needed")

    def _check_members(self, current: _Sum, arrived: list[int]) -> None:
        """Refuse to open a sum of sites that are not members, or not those of an opened sum of the same payload."""
        if not {*arrived} <= current.sites.keys():
            members = shorten_repr(sorted(current.sites))
            raise PerfedError(f"a sum of {shorten_repr(arrived)}; members are {members}")
        sites = {current.sites[number] for number in arrived}
        name = f"opened-{self._hash_with_study(current.payload)}"
        self._check_recorded_sites(name, sites, "an opened sum of the same payload was a sum of", in_all_runs=True)

    def _check_asked_sites(self, sequence: int, payload: str, sites: Collection[str]) -> None:
        """Refuse a sum for which other sites are asked than before for the same exchange or payload."""
        why = "this site has masked a reply to the same request, for which these sites were asked:"
        self._check_recorded_sites(f"{ASKED_NOTE}{sequence}", sites, why)
        self._check_recorded_sites(f"payload-{self._hash_with_study(payload)}", sites, why, in_all_runs=True)

    def _check_recorded_sites(self, name: str, sites: Collection[str], why: str, *, in_all_runs: bool = False) -> None:
        """Refuse ``sites`` if the note ``name`` lists other sites; ``why`` introduces the listed sites in the error."""
        recorded = self._store.read_note(name, in_all_runs=in_all_runs)
        if recorded is not None and recorded != sorted(sites):
            raise PerfedError(
                f"a sum of {shorten_repr(sorted(sites))}: {why} {shorten_repr(recorded)}; a sum of other sites could "
                "reveal a single reply"
            )

    def _check_histories(self, payload: str, member: _Member, histories: Mapping[str, str]) -> dict[str, str]:
        """Return the recorded histories of the other sites for a payload and history of this site, with the new ones.

        Args:
            payload: The hash of the payload.
            member: The member of the sum at this site, with the history of this site.
            histories: The histories of all members, by site.

        Raises:
            PerfedError: A member starts from another state than before, or the members start from different states
                although every sum covers all sites.
        """
        before = self._store.read_note(self._history_note_name(payload, member.history), in_all_runs=True) or {}
        if changed := sorted(site for site, history in histories.items() if before.get(site, history) != history):
            raise PerfedError(
                f"{shorten_list(changed, 3)} would start from another state than before, and this site would not: two "
                "sums of the same request could show how the reply of a single site has changed"
            )
        different = sorted(site for site, history in histories.items() if history != member.history.hex())
        if different and member.needed == self._allowed.clients:
            raise PerfedError(
                f"{shorten_list(different, 3)} would start from a state with another history than this site; every sum "
                "of the study covers all sites, and all of them have answered the same requests"
            )
        return {**before, **histories}

    def _history_note_name(self, payload: str, history: bytes) -> str:
        """Return the name of the note with the histories of other sites, for a payload and a history of this site."""
        return f"start-{self._hash_with_study(f'{payload} {history.hex()}')}"

    def _hash_with_study(self, payload: str) -> str:
        return hashlib.sha256(f"{self._study} {payload}".encode()).hexdigest()


def encode_context(run: str, sequence: int, attempt: str, request: str, asked: Sequence[str]) -> bytes:
    """Return the context of a sum, from which all its keys are derived.

    Args:
        run: The id of the run.
        sequence: The number of the exchange.
        attempt: The id of the attempt at the sum.
        request: The hash of the request.
        asked: The names of the asked sites.
    """
    return json.dumps([run, sequence, attempt, request, sorted(asked)]).encode()


def encode_reply(result: ChunkResult, terms: tuple[Term, ...], secure: SecureAggregation, clients: int) -> torch.Tensor:
    """Return the vector of one site for a sum, int64: its products of entries as fixed-point numbers, concatenated.

    Raises:
        PerfedError: A value is not finite or does not fit.
    """
    stacked = tree.map_leaves(result.reply(0), lambda _, t: t[None])
    counted = CountedSums(with_loss(stacked, result.losses), secure.numbers(clients))
    return torch.cat([counted.encode(term).flatten() for term in terms]).cpu()


def pack_masked_reply(vector: torch.Tensor, result: ChunkResult, header: Mapping[str, Any], attempt: str) -> bytes:
    """Return the masked reply to the message with ``header``.

    Args:
        vector: The masked vector, which reveals nothing without the vectors of the other sites.
        result: The result of the task.
        header: The header of the message.
        attempt: The id of the attempt at the sum.
    """
    return pack({**make_reply_header(result, header), SUM: attempt}, {MASKED: vector})


def drop_reply(result: ChunkResult) -> ChunkResult:
    """Return the result without its reply and loss, of which no sum is needed; its metrics stay."""
    return replace(result, content={}, losses=torch.full_like(result.losses, torch.nan))


def _decode_sealed_shares(value: Any) -> dict[int, bytes]:
    from perfed.sites.flower.masks import decode_hex

    return {int(member): decode_hex(text, "sealed shares") for member, text in _check_member_table(value).items()}


def _read_member_numbers(header: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the members whose replies have arrived at the server, in ascending order."""
    arrived = header.get("arrived")
    if not isinstance(arrived, list) or any(type(number) is not int for number in arrived):
        raise PerfedError(f"arrived is {shorten_repr(arrived)}; numbers of members are needed")
    return sorted({*arrived})


def _encode_confirmation(current: _Sum, arrived: Sequence[int]) -> bytes:
    """Return the list of members that a site signs before a sum is opened."""
    return json.dumps(["arrived", current.member.context.hex(), list(arrived)]).encode()


def _leave_unsigned(content: bytes) -> bytes:
    return b""


def _check_member_table(value: Any) -> dict[str, Any]:
    """Return a field of a header unchanged; refuse it if it is not a dictionary by numbers of members."""
    if not isinstance(value, dict) or any(not name.isdecimal() or len(name) > 9 for name in value):
        raise PerfedError(f"members by number are needed, not {shorten_repr(value)}")
    return value


def _encode_shares(shares: Mapping[int, bytes]) -> dict[str, str]:
    return {str(number): content.hex() for number, content in sorted(shares.items())}
