"""The server's end of secure aggregation: one exchange as four, of which it learns the sum of the replies alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from perfed.errors import PerfedError, shorten_list
from perfed.sites.flower.checks import ExpectedReply, find_header_problem, find_reply_problem, reject_unusable
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.masking import encode_context
from perfed.sites.flower.masks import MemberKeys, RecoveredSecrets, decode_hex, recover_secrets, unmask_sum
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.sum_form import SumFailed
from perfed.sites.flower.transport import Answer, Transport
from perfed.sites.flower.wire import MASKED, SUM, find_metrics_problem
from perfed.tree import Tree

OPENING = 5000
"""What is added to the number of an exchange for the journal's file of the shares that have opened its sum."""
CONFIRMING = 7000
"""The same of the confirmations: what sites have signed before they open a sum."""
_MEMBERS = ""  # "site" of the answer that keeps who is a member of the sum

Message = Callable[[str, Mapping[str, Any]], bytes]
"""What a site is asked to do, from its name and the field ``secure``."""


class SecureSum:
    """One exchange whose replies are summed.

    Args:
        transport: the network.
        journal: keeps masked replies before the sum is opened, and the shares that have opened it.
        run, sequence: of the exchange.
        needed: replies that make a sum.
        seconds: longest time of each of the exchanges.
        confirms: whether sites confirm whose replies are in a sum before they open it.

    Attributes:
        notes: a line for each site whose shares were wrong in a sum that was opened.
    """

    def __init__(
        self,
        transport: Transport,
        journal: Journal,
        run: str,
        sequence: int,
        needed: int,
        seconds: float,
        *,
        confirms: bool = False,
    ) -> None:
        self._transport, self._journal, self._seconds = transport, journal, seconds
        self._run, self._sequence, self._needed, self._confirms = run, sequence, needed, confirms
        self.notes: list[str] = []

    def replies(
        self,
        bases: Mapping[str, int],
        hashes: Mapping[str, str],
        message: Message,
        expected: Mapping[str, ExpectedReply],
    ) -> list[Answer]:
        """An answer for each site: its masked reply, or why it has dropped out; then one that names the members.

        Args:
            bases: of each site that is asked, the number of the exchange whose state it starts from.
            hashes: ``request`` and ``payload`` of what all are asked to do, of :mod:`perfed.sites.flower.wire`.
            message: what each is asked to do.
            expected: of the reply of each.
        """
        members, failed = list(bases), list[Answer]()
        request = {"kind": "keys", "asked": sorted(bases), **hashes}
        while True:  # until all members of an attempt have shared
            attempt = uuid4().hex[:16]
            heard = self._said({site: {**request, "base": bases[site]} for site in members}, attempt, "keys", failed)
            numbers = {site: number for number, site in enumerate(sorted(heard), start=1)}
            if len(heard) < self._needed:
                return failed
            keys = {str(numbers[site]): public_keys for site, public_keys in heard.items()}
            requests = {site: {"kind": "shares", "number": numbers[site], "keys": keys} for site in heard}
            sealed = self._said(requests, attempt, "sealed", failed)
            if len(sealed) < self._needed:
                return failed
            if len(sealed) == len(heard):
                break
            members = list(sealed)
        messages = {}
        for site in sealed:
            mine = {str(numbers[other]): of.get(str(numbers[site])) for other, of in sealed.items() if other != site}
            messages[site] = message(site, {"attempt": attempt, "sealed": mine})
        answers = [_usable(answer, expected[answer.site], attempt) for answer in self._exchange(messages)]
        context = encode_context(self._run, self._sequence, attempt, hashes["request"], [*bases]).hex()
        named = {"attempt": attempt, "numbers": numbers, "keys": keys, "context": context}
        return [*failed, *answers, Answer(_MEMBERS, pack(named, {}), "", 0.0)]

    def opened(self, answers: Sequence[Answer], asked: int) -> Tensor:
        """The sum of the masked replies in ``answers`` of ``asked`` sites, int64.

        Raises:
            SumFailed: too few replies, or too few of the sites that have replied help to open the sum.
        """
        bodies = {a.site: a.body for a in answers if a.body is not None and a.site != _MEMBERS}
        if len(bodies) < self._needed:
            gone = [answer.error for answer in answers if answer.body is None]
            left = f"{asked - len(gone)} of {asked} sites are left, and a sum needs {self._needed}"
            raise SumFailed(f"{left}: {shorten_list(gone, 3)}")
        named = unpack(next(a.body for a in answers if a.site == _MEMBERS and a.body is not None))[0]
        numbers: dict[str, int] = named["numbers"]
        keys = {int(number): MemberKeys.from_fields(fields) for number, fields in named["keys"].items()}
        recovery = self._recovery(named["attempt"], keys, numbers, bodies)
        if recovery.lacking:
            raise SumFailed(_describe_wrong_shares(keys, recovery))
        if recovery.wrong:
            self.notes.append(f"{_describe_wrong_shares(keys, recovery)}; the sum was opened without these")
        masked = {numbers[site]: unpack(body)[1][MASKED].numpy().view(np.uint64) for site, body in bodies.items()}
        total = unmask_sum(bytes.fromhex(named["context"]), keys, masked, recovery.secrets)
        return torch.from_numpy(total.view(np.int64))

    def _recovery(
        self, attempt: str, keys: Mapping[int, MemberKeys], numbers: Mapping[str, int], arrived: Collection[str]
    ) -> RecoveredSecrets:
        """Return the secrets of all who have shared; sites are asked once, whatever becomes of the server.

        They are asked until the shares of enough of them fit together.

        Raises:
            SumFailed: too few sites give shares.
        """
        members = {numbers[site] for site in arrived}
        answers, shares = self._journal.load_answers(self._sequence + OPENING), dict[int, dict[int, bytes]]()
        journaled = answers is not None
        content: dict[str, Any] = {"kind": "unmask", "arrived": sorted(members)}
        if self._confirms and not journaled:
            content["confirmations"] = self._confirmations(attempt, numbers, arrived)
        coming = answers or self._exchange(self._messages(dict.fromkeys(arrived, content), attempt))
        answers, recovery = [], None
        for answer in coming:
            answers.append(answer if journaled else _said(answer, self._run, "shares"))
            if answers[-1].body is None:
                continue
            plain = unpack(answers[-1].body)[0]["shares"]
            shares[numbers[answer.site]] = {int(other): decode_hex(text, "shares") for other, text in plain.items()}
            if len(shares) >= self._needed:
                recovery = recover_secrets(self._needed, keys, members, shares)
                if not recovery.lacking:
                    break
        if not journaled:
            self._journal.write(self._sequence + OPENING, answers)
        if recovery is None:
            raise SumFailed(f"{len(shares)} of {len(keys)} gave their shares, and a sum needs {self._needed}")
        return recovery

    def _confirmations(self, attempt: str, numbers: Mapping[str, int], arrived: Collection[str]) -> dict[str, str]:
        """Return what each site has signed of whose replies are in the sum, by number of the member.

        Raises:
            SumFailed: too few sites have.
        """
        answers = self._journal.load_answers(self._sequence + CONFIRMING)
        if answers is None:
            content = {"kind": "confirm", "arrived": sorted(numbers[site] for site in arrived)}
            messages = self._messages(dict.fromkeys(arrived, content), attempt)
            answers = [_said(answer, self._run, "confirmation") for answer in self._exchange(messages)]
            self._journal.write(self._sequence + CONFIRMING, answers)
        signed = {str(numbers[a.site]): unpack(a.body)[0]["confirmation"] for a in answers if a.body is not None}
        if len(signed) < self._needed:
            raise SumFailed(f"{len(signed)} of {len(arrived)} confirmed the sum, and it needs {self._needed}")
        return signed

    def _said(
        self, content: Mapping[str, Mapping[str, Any]], attempt: str, field: str, failed: list[Answer]
    ) -> dict[str, Any]:
        """The field of each site's reply to its message; sites without one are added to ``failed``."""
        answers = [_said(a, self._run, field) for a in self._exchange(self._messages(content, attempt))]
        failed += [answer for answer in answers if answer.body is None]
        return {a.site: unpack(a.body)[0][field] for a in answers if a.body is not None}

    def _messages(self, content: Mapping[str, Mapping[str, Any]], attempt: str) -> dict[str, bytes]:
        fields = {"run": self._run, "sequence": self._sequence, "attempt": attempt}
        return {site: pack({**found, **fields}, {}) for site, found in content.items()}

    def _exchange(self, messages: Mapping[str, bytes]) -> Iterator[Answer]:
        return self._transport.exchange(messages, self._seconds, self._needed)


def _describe_wrong_shares(keys: Mapping[int, MemberKeys], recovery: RecoveredSecrets) -> str:
    """Return which sites gave wrong shares, and of whose secrets the shares do not fit together."""
    lines = [
        f"site '{keys[giver].site}' gave wrong shares of the secrets of "
        f"{shorten_list([keys[member].site for member in members], 3)}"
        for giver, members in sorted(recovery.wrong.items())
    ]
    if recovery.lacking:
        sites = shorten_list([keys[member].site for member in recovery.lacking], 3)
        lines.append(f"shares of the secrets of {sites} do not fit together, and too few came to tell whose are wrong")
    return "; ".join(lines)


def _said(answer: Answer, run: str, field: str) -> Answer:
    """The answer, or a failure in its place where its header lacks ``field``, or it holds what none should."""

    def wrong(header: dict[str, Any], tree: Tree) -> str | None:
        found = find_header_problem(header, {"site": answer.site, "run": run}) or _wrong_field(header, field)
        return f"the reply of site '{answer.site}': {found}" if found else None

    return reject_unusable(answer, wrong)


def _wrong_field(header: Mapping[str, Any], field: str) -> str | None:
    """Why the field is none of keys, sealed shares or shares."""
    value = header.get(field)
    if field == "keys":
        try:
            MemberKeys.from_fields(value)
        except PerfedError as error:
            return str(error)
        return None
    if field == "confirmation":
        return None if isinstance(value, str) else "confirmation is a text"
    good = isinstance(value, dict) and all(name.isdecimal() and isinstance(text, str) for name, text in value.items())
    return None if good else f"{field} are texts by number of member"


def _usable(answer: Answer, expected: ExpectedReply, attempt: str) -> Answer:
    """The answer, or a failure in its place where it is no masked reply of this attempt."""

    def wrong(header: dict[str, Any], tree: Tree) -> str | None:
        found = find_header_problem(header, {SUM: attempt})
        if found:
            return f"the reply of site '{answer.site}': {found}"
        return find_reply_problem(answer.site, header, tree, expected) or find_metrics_problem(header)

    return reject_unusable(answer, wrong)
