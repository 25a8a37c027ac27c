"""The server's end of secure aggregation: several messages for one exchange, from which it learns only the sum."""

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
"""The offset from the number of an exchange to that of the journal's file with the shares that have opened its sum."""
CONFIRMING = 7000
"""The offset for the journal's file with the confirmations that sites sign before they open a sum."""
_MEMBERS = ""  # the "site" of the answer that stores the members of the sum

MakeMessage = Callable[[str, Mapping[str, Any]], bytes]
"""A function that returns the task message for a site, from its name and the field ``secure`` of the header."""


class SecureSum:
    """One exchange of which the server receives only the sum of the replies.

    Args:
        transport: The network.
        journal: The journal of the run, which stores the shares that have opened the sum.
        run, sequence: The id of the run and the number of the exchange.
        needed: The number of replies that a sum needs.
        seconds: The time limit in seconds for each round of messages.
        confirms: Whether sites sign the list of the members before they open the sum.

    Attributes:
        notes: One line about the sites that gave wrong shares for a sum that was opened all the same.
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

    def collect_replies(
        self,
        bases: Mapping[str, int],
        hashes: Mapping[str, str],
        make_message: MakeMessage,
        expected: Mapping[str, ExpectedReply],
    ) -> list[Answer]:
        """Exchange keys and shares, send the task, and return the masked replies.

        Args:
            bases: The number of the exchange whose state each asked site starts from, by site.
            hashes: The hashes ``request`` and ``payload`` of the task (:mod:`perfed.sites.flower.wire`).
            make_message: Returns the task message for a site.
            expected: The properties that the reply of each site must have.

        Returns:
            An answer for each site, with its masked reply or the reason why it has dropped out, and a last answer that
            stores the members of the sum. Only errors are returned if too few sites are left.
        """
        members, failed = list(bases), list[Answer]()
        request = {"kind": "keys", "asked": sorted(bases), **hashes}
        while True:  # until all members of an attempt have shared their secrets
            attempt = uuid4().hex[:16]
            requests = {site: {**request, "base": bases[site]} for site in members}
            public_keys = self._request_field(requests, attempt, "keys", failed)
            numbers = {site: number for number, site in enumerate(sorted(public_keys), start=1)}
            if len(public_keys) < self._needed:
                return failed
            keys = {str(numbers[site]): member_keys for site, member_keys in public_keys.items()}
            requests = {site: {"kind": "shares", "number": numbers[site], "keys": keys} for site in public_keys}
            sealed = self._request_field(requests, attempt, "sealed", failed)
            if len(sealed) < self._needed:
                return failed
            if len(sealed) == len(public_keys):
                break
            members = list(sealed)
        messages = {}
        for site in sealed:
            received = {
                str(numbers[sender]): shares.get(str(numbers[site]))
                for sender, shares in sealed.items()
                if sender != site
            }
            messages[site] = make_message(site, {"attempt": attempt, "sealed": received})
        answers = [
            _reject_bad_masked_reply(answer, expected[answer.site], attempt) for answer in self._exchange(messages)
        ]
        context = encode_context(self._run, self._sequence, attempt, hashes["request"], [*bases]).hex()
        header = {"attempt": attempt, "numbers": numbers, "keys": keys, "context": context}
        return [*failed, *answers, Answer(_MEMBERS, pack(header, {}), "", 0.0)]

    def open_sum(self, answers: Sequence[Answer], num_asked: int) -> Tensor:
        """Return the sum of the masked replies, int64.

        Args:
            answers: The answers from :meth:`collect_replies`.
            num_asked: The number of sites that were asked.

        Raises:
            SumFailed: There are too few replies, or too few of the sites that have replied help to open the sum.
        """
        bodies = {a.site: a.body for a in answers if a.body is not None and a.site != _MEMBERS}
        if len(bodies) < self._needed:
            errors = [answer.error for answer in answers if answer.body is None]
            counts = f"{num_asked - len(errors)} of {num_asked} sites are left, and a sum needs {self._needed}"
            raise SumFailed(f"{counts}: {shorten_list(errors, 3)}")
        header = unpack(next(a.body for a in answers if a.site == _MEMBERS and a.body is not None))[0]
        numbers: dict[str, int] = header["numbers"]
        keys = {int(number): MemberKeys.from_fields(fields) for number, fields in header["keys"].items()}
        recovery = self._recover_secrets(header["attempt"], keys, numbers, bodies)
        if recovery.lacking:
            raise SumFailed(_describe_wrong_shares(keys, recovery))
        if recovery.wrong:
            self.notes.append(f"{_describe_wrong_shares(keys, recovery)}; the sum was opened without these")
        masked = {numbers[site]: unpack(body)[1][MASKED].numpy().view(np.uint64) for site, body in bodies.items()}
        total = unmask_sum(bytes.fromhex(header["context"]), keys, masked, recovery.secrets)
        return torch.from_numpy(total.view(np.int64))

    def _recover_secrets(
        self, attempt: str, keys: Mapping[int, MemberKeys], numbers: Mapping[str, int], arrived: Collection[str]
    ) -> RecoveredSecrets:
        """Ask sites for their shares until enough shares fit together, and return the members' secrets.

        The answers are in the journal, so that a server that is restarted does not ask again.

        Args:
            attempt: The id of the attempt at the sum.
            keys: The public keys of the members, by number.
            numbers: The numbers of the members, by site.
            arrived: The sites whose masked replies have arrived.

        Raises:
            SumFailed: Too few sites reveal shares.
        """
        members = {numbers[site] for site in arrived}
        answers, shares = self._journal.load_answers(self._sequence + OPENING), dict[int, dict[int, bytes]]()
        is_journaled = answers is not None
        content: dict[str, Any] = {"kind": "unmask", "arrived": sorted(members)}
        if self._confirms and not is_journaled:
            content["confirmations"] = self._collect_confirmations(attempt, numbers, arrived)
        incoming = answers or self._exchange(self._make_messages(dict.fromkeys(arrived, content), attempt))
        answers, recovery = [], None
        for answer in incoming:
            answers.append(answer if is_journaled else _reject_bad_field(answer, self._run, "shares"))
            if answers[-1].body is None:
                continue
            texts = unpack(answers[-1].body)[0]["shares"]
            shares[numbers[answer.site]] = {int(member): decode_hex(text, "shares") for member, text in texts.items()}
            if len(shares) >= self._needed:
                recovery = recover_secrets(self._needed, keys, members, shares)
                if not recovery.lacking:
                    break
        if not is_journaled:
            self._journal.write(self._sequence + OPENING, answers)
        if recovery is None:
            raise SumFailed(f"{len(shares)} of {len(keys)} gave their shares, and a sum needs {self._needed}")
        return recovery

    def _collect_confirmations(
        self, attempt: str, numbers: Mapping[str, int], arrived: Collection[str]
    ) -> dict[str, str]:
        """Ask the sites to sign the list of the members in the sum; return the signatures by number of the member.

        Raises:
            SumFailed: Too few sites have signed.
        """
        answers = self._journal.load_answers(self._sequence + CONFIRMING)
        if answers is None:
            content = {"kind": "confirm", "arrived": sorted(numbers[site] for site in arrived)}
            messages = self._make_messages(dict.fromkeys(arrived, content), attempt)
            answers = [_reject_bad_field(answer, self._run, "confirmation") for answer in self._exchange(messages)]
            self._journal.write(self._sequence + CONFIRMING, answers)
        signed = {str(numbers[a.site]): unpack(a.body)[0]["confirmation"] for a in answers if a.body is not None}
        if len(signed) < self._needed:
            raise SumFailed(f"{len(signed)} of {len(arrived)} confirmed the sum, and it needs {self._needed}")
        return signed

    def _request_field(
        self, content: Mapping[str, Mapping[str, Any]], attempt: str, field: str, failed: list[Answer]
    ) -> dict[str, Any]:
        """Send a message to each site and return a field of each reply; add answers with an error to ``failed``."""
        answers = [
            _reject_bad_field(a, self._run, field) for a in self._exchange(self._make_messages(content, attempt))
        ]
        failed += [answer for answer in answers if answer.body is None]
        return {a.site: unpack(a.body)[0][field] for a in answers if a.body is not None}

    def _make_messages(self, content: Mapping[str, Mapping[str, Any]], attempt: str) -> dict[str, bytes]:
        fields = {"run": self._run, "sequence": self._sequence, "attempt": attempt}
        return {site: pack({**site_fields, **fields}, {}) for site, site_fields in content.items()}

    def _exchange(self, messages: Mapping[str, bytes]) -> Iterator[Answer]:
        return self._transport.exchange(messages, self._seconds, self._needed)


def _describe_wrong_shares(keys: Mapping[int, MemberKeys], recovery: RecoveredSecrets) -> str:
    """Return a line about the sites that gave wrong shares, and about the secrets that could not be recovered."""
    lines = [
        f"site '{keys[giver].site}' gave wrong shares of the secrets of "
        f"{shorten_list([keys[member].site for member in members], 3)}"
        for giver, members in sorted(recovery.wrong.items())
    ]
    if recovery.lacking:
        sites = shorten_list([keys[member].site for member in recovery.lacking], 3)
        lines.append(
            f"shares of the secrets of {sites} do not fit together, and there are too few shares to find the wrong ones"
        )
    return "; ".join(lines)


def _reject_bad_field(answer: Answer, run: str, field: str) -> Answer:
    """Return the answer, or an error in its place if ``field`` is missing from its header or invalid."""

    def find_problem(header: dict[str, Any], tree: Tree) -> str | None:
        problem = find_header_problem(header, {"site": answer.site, "run": run}) or _find_field_problem(header, field)
        return f"the reply of site '{answer.site}': {problem}" if problem else None

    return reject_unusable(answer, find_problem)


def _find_field_problem(header: Mapping[str, Any], field: str) -> str | None:
    """Return what is wrong with a field of a reply: keys, a confirmation, sealed shares or revealed shares."""
    value = header.get(field)
    if field == "keys":
        try:
            MemberKeys.from_fields(value)
        except PerfedError as error:
            return str(error)
        return None
    if field == "confirmation":
        return None if isinstance(value, str) else "confirmation must be a text"
    is_valid = isinstance(value, dict) and all(
        name.isdecimal() and isinstance(text, str) for name, text in value.items()
    )
    return None if is_valid else f"{field} must be texts by number of the member"


def _reject_bad_masked_reply(answer: Answer, expected: ExpectedReply, attempt: str) -> Answer:
    """Return the answer, or an error in its place if it is not a valid masked reply of this attempt."""

    def find_problem(header: dict[str, Any], tree: Tree) -> str | None:
        problem = find_header_problem(header, {SUM: attempt})
        if problem:
            return f"the reply of site '{answer.site}': {problem}"
        return find_reply_problem(answer.site, header, tree, expected) or find_metrics_problem(header)

    return reject_unusable(answer, find_problem)
