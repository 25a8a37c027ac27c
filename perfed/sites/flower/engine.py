"""Clients at sites of their own: each work goes out as a message, what was done comes back as one.

States stay at the sites. What the server keeps of a client in the place of its state is the number of the exchange that
has left it, and every message names the one that the site starts from. So a round is one transaction without a word on
its end: what was not accepted is never named again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.data.federation import Federation
from perfed.engine.clients import NobodyReplied, RoundClients, RoundRecord
from perfed.engine.engine import Engine
from perfed.engine.evaluate import Metrics, group_of
from perfed.engine.executor import ChunkResult, ChunkTask, Exchange
from perfed.engine.initial import Initialiser
from perfed.engine.secure_aggregation import ALWAYS, mean_loss
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.maths.sums import KnownSums, SingleReplies, Term, make_hidden_entries
from perfed.method.exchange import Replies
from perfed.participation.invitation import Invitation, invite, take
from perfed.participation.selection import Choice
from perfed.sites.flower.allowed import Allowed
from perfed.sites.flower.checks import REFUSED, Entry, Expected, Spec, norms, too_large, usable, wrong_reply
from perfed.sites.flower.dry_run import rehearsed
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.message import unpack
from perfed.sites.flower.sum_form import NOTHING, Form, Void, masked_spec
from perfed.sites.flower.transport import Answer, Transport
from perfed.sites.flower.wire import (
    MEASURED,
    REPLY,
    done_of,
    payload_hash,
    request_hash,
    sequence_of,
    summed_of,
    work_message,
    wrong_metrics,
)
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan
from perfed.tree import Tree

RATIO = 1e6
"""No proper reply comes near: entries differ with the number of samples, and with what a site has learnt alone."""
_WAY = "mend it and submit again, and the run goes on where it was; 'perfed submit --at-least N' goes on without a site"


@dataclass(frozen=True)
class Limits:
    """What the server does not wait for, and does not take.

    Attributes:
        seconds: longest time that one exchange may take.
        bytes: of one reply.
        ratio: of the norm of one entry to the median of the others' in the same exchange, to that of all that the site
            was sent, or to its number of training samples, whichever is the largest; ``None`` for any.
        least: replies with which rounds and evaluations that need every site go on, without those that are not
            connected then or have not replied in ``seconds``; 0: all of them.
    """

    seconds: float = 600.0
    bytes: int = 2**30
    ratio: float | None = RATIO
    least: int = 0


class FlowerEngine(Engine):
    """Sends work to sites and takes what they have done.

    Args:
        federation: of facts: no client's data are here.
        initialiser, plan: as in :class:`~perfed.engine.engine.Engine`.
        transport: the network.
        journal: keeps the answers of each exchange before the round goes on.
        run: id of the run.
        limits: what is not waited for, and not taken.
        allowed: what sites answer in the study; needed where replies are summed under masks.

    Attributes:
        strict: whether an exchange outside of rounds needs every site; else it does without those that do not reply.
        kept: of a site the numbers of exchanges whose states it must not forget, besides the newest.
    """

    def __init__(
        self,
        federation: Federation,
        initialiser: Initialiser,
        plan: Plan,
        *,
        transport: Transport,
        journal: Journal,
        run: str,
        limits: Limits | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        super().__init__(federation, initialiser, plan)
        self.strict = True
        self.kept: Callable[[str], Collection[int]] = lambda site: ()
        self._transport, self._journal, self._run = transport, journal, run
        self._limits = limits or Limits()
        self._specs: dict[Any, Spec] = {}
        self._allowed = allowed
        self._shown: tuple[Spec, Mapping[Term, Tensor]] = {}, {}  # entries and sums of the latest replies under masks

    def perform(self, works: Iterable[ChunkTask], invitation: Invitation | None = None) -> Iterator[ChunkResult]:
        """Ask the sites; the journal answers what has been asked before.

        Raises:
            PerfedError: a site that is needed has not replied in time, or its reply cannot be used; names it.
        """
        asked = {work.ids[0]: work for work in works}
        if not asked:
            return
        exchange = next(iter(asked.values())).exchange
        sequence = sequence_of(exchange)
        if self._allowed is not None and (terms := self._allowed.terms(exchange)):
            spared = not exchange.lasting and self._limits.least > 0
            yield from self._under_masks(asked, exchange, terms, needs_all=invitation is None and not spared)
            return
        wanted = invitation or Invitation.of_all(list(asked), strict=self.strict or exchange.lasting)
        answers = self._read_journal(sequence) if exchange.lasting else None  # others may be done again
        if answers is None:
            least = self._limits.least if invitation or not exchange.lasting else 0
            answers = self._ask(asked, sequence, wanted, least)
            failed = [answer.error for answer in answers if answer.body is None]
            spared = 0 < least <= len(answers) - len(failed)
            if wanted.strict and failed and not spared:
                raise PerfedError(f"round {exchange.round}: {'; '.join(failed[:3])}; {_WAY}")
            if exchange.lasting:
                self._journal.write(sequence, answers)
        self.arrived = _arrived(answers)
        self.lost = _lost(answers)
        bodies = {answer.site: answer.body for answer in answers if answer.body is not None}
        for site in sorted(wanted.choose(self.arrived)[0]):
            yield done_of(*unpack(bodies[site]))

    def _read_journal(self, sequence: int) -> list[Answer] | None:
        """Return the answers of an exchange that was done before; what was damaged goes into the notes of the run."""
        answers = self._journal.answers(sequence)
        self.notes += self._journal.notes
        self._journal.notes.clear()
        return answers

    def _under_masks(
        self, asked: Mapping[str, ChunkTask], exchange: Exchange, terms: tuple[Term, ...], needs_all: bool
    ) -> Iterator[ChunkResult]:
        """Ask the sites for one sum of their replies; nothing where it is void.

        Raises:
            PerfedError: a site is lacking where all are needed, or no sum comes of an exchange outside of rounds.
        """
        from perfed.sites.flower.secure_sum import SecureSum  # which needs perfed[flower]

        assert self._allowed is not None and self.initialiser.secure is not None
        sequence, where = sequence_of(exchange), f"round {exchange.round}"
        needed = self.initialiser.secure.needed(len(asked), self._allowed.asked)
        confirms = self.initialiser.secure.keys is not None
        secure = SecureSum(
            self._transport, self._journal, self._run, sequence, needed, self._limits.seconds, confirms=confirms
        )
        expected, form = self._masked(asked, sequence, terms)
        answers = self._read_journal(sequence)
        if answers is None:
            site, work = next(iter(asked.items()))
            request = unpack(self._message(site, work, sequence))
            hashes = {"request": request_hash(*request), "payload": payload_hash(*request)}
            message = lambda site, of: self._message(site, asked[site], sequence, of)  # noqa: E731
            bases = {site: _find_base(site, work) for site, work in asked.items()}
            answers = secure.replies(bases, hashes, message, expected)
            failed = [answer.error for answer in answers if answer.body is None]
            if needs_all and failed:
                raise PerfedError(f"{where}: {'; '.join(failed[:3])}; {_WAY}")
            self._journal.write(sequence, answers)
        self.lost, self.arrived = _lost(answers), {}
        try:
            vector = secure.opened(answers, len(asked))
        except Void as void:
            if needs_all and exchange.lasting:  # an evaluation is lost, and the run goes on
                raise PerfedError(f"{where}: {void}; {_WAY}") from None
            self._add_note(f"{where} is void: {void}")
            return
        for note in secure.notes:
            self._add_note(f"{where}: {note}")
        self.arrived = {site: seconds for site, seconds in _arrived(answers).items() if site in asked}
        totals = form.totals(vector, self.initialiser.secure.numbers(len(self.clients)))
        self._shown = self._shown[0], totals
        loss = mean_loss(*(totals[term] for term in ALWAYS))[None]
        pooled = _pooled(totals, self.arrived)
        for answer in sorted((a for a in answers if a.site in self.arrived), key=lambda a: a.site):
            yield summed_of(*unpack(answer.body or b""), sequence, loss, pooled)

    def _add_note(self, line: str) -> None:
        self.notes.append(line)
        self._transport.note(line)

    def _masked(
        self, asked: Mapping[str, ChunkTask], sequence: int, terms: tuple[Term, ...]
    ) -> tuple[dict[str, Expected], Form]:
        """What masked replies must be like, and what is in them.

        Raises:
            SingleReplies: replies whose shapes differ between sites.
        """
        scalar = Entry((), torch.float64)
        metrics = {REPLY + path: scalar for (path, *_) in terms if path.startswith(f"{MEASURED}/")}
        specs = {site: {**self._spec(work), **metrics} for site, work in asked.items()}
        forms = {site: Form.of(terms, spec) for site, spec in specs.items()}
        first = next(iter(asked))
        if odd := [site for site, form in forms.items() if form != forms[first]]:
            raise SingleReplies(f"replies of other shapes of site '{odd[0]}' than of site '{first}'")
        self._shown = specs[first], {}
        most, program = self._limits.bytes, asked[first].exchange.program
        spec = masked_spec(forms[first])
        return {site: Expected(self._run, sequence, program, [site], spec, most) for site in asked}, forms[first]

    def _summed(self, exchange: Exchange, ids: Sequence[str], content: dict[str, Any], losses: Tensor) -> Replies:
        """Replies of which the sums are known that sites were asked for."""
        spec, totals = self._shown
        entries = {name.removeprefix(REPLY): entry for name, entry in spec.items() if name.startswith(REPLY)}
        shapes = {path: ((len(ids), *(n or 0 for n in e.shape)), e.dtype) for path, e in entries.items()}
        return Replies(ids, make_hidden_entries(shapes, KnownSums(totals)), losses)

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """There are none here.

        Raises:
            PerfedError: always: models of their own stay at the sites.
        """
        raise PerfedError(f"client '{ids[0]}': its own model stays at its site; 'perfed site export' writes it there")

    def _size(self, members: Sequence[object]) -> int:
        return 1

    def _ask(self, asked: Mapping[str, ChunkTask], sequence: int, wanted: Invitation, least: int) -> list[Answer]:
        """Send the works and wait for as many replies as are wanted; those that cannot be used are failures."""
        messages = {site: self._message(site, work, sequence) for site, work in asked.items()}
        expected = {site: self._expected(work, sequence) for site, work in asked.items()}
        answers: list[Answer] = []
        sizes: dict[str, dict[str, float]] = {}
        exchange = self._transport.exchange(messages, min(self._limits.seconds, wanted.limit), least)
        for answer in exchange:
            refused = partial(self._refused, asked[answer.site])
            answers.append(_checked(answer, expected, sizes, refused, self._discreet))
            if answers[-1].body is not None and wanted.enough(_arrived(answers)):
                answers = self._in_proportion(answers, sizes, asked)
                if wanted.enough(_arrived(answers)):
                    return answers
        return self._in_proportion(answers, sizes, asked)

    def _in_proportion(
        self, answers: Sequence[Answer], sizes: Mapping[str, Mapping[str, float]], asked: Mapping[str, ChunkTask]
    ) -> list[Answer]:
        """The answers, with failures in the place of those that are out of all proportion; ``sizes`` are of entries."""
        ratio, checked = self._limits.ratio, list(answers)
        if ratio is None:
            return checked
        scales = {site: self._scale(asked[site]) for site in sizes}
        for row, answer in enumerate(answers):
            if answer.body is not None and (problem := too_large(answer.site, sizes, scales, ratio)):
                checked[row] = Answer(answer.site, None, f"{REFUSED}{problem} (--max-ratio)", answer.seconds)
        return checked

    def _scale(self, work: ChunkTask) -> float:
        """What entries of the reply to ``work`` may be compared with, whatever others reply."""
        (site,) = work.ids
        sent = norms({"shared": work.shared, "row": work.rows.get(site, {})})
        return max(math.hypot(*sent.values()), len(self.clients[site].train))

    def _message(self, site: str, work: ChunkTask, sequence: int, secure: Mapping[str, Any] | None = None) -> bytes:
        return work_message(work, self._run, sequence, _find_base(site, work), self.kept(site), self.background, secure)

    def _expected(self, work: ChunkTask, sequence: int) -> Expected:
        """What the reply to ``work`` must be like: what the program replies for clients that are made up."""
        (site,) = work.ids
        spec = self._spec(work)
        if self._allowed is not None:  # nothing is summed, so that nothing of the reply leaves
            self._shown, spec = (spec, {}), NOTHING
        samples = None if self._discreet else len(self.clients[site].train)
        return Expected(self._run, sequence, work.exchange.program, [site], spec, self._limits.bytes, samples)

    @property
    def _discreet(self) -> bool:
        """Whether exact losses, metrics and counts stay at the sites."""
        return any(extension.discreet for extension in self.initialiser.method.extensions)

    def _refused(self, work: ChunkTask, tree: Tree) -> str:
        """Why an extension says that the site has not done what it should have done to its reply; or nothing."""
        (site,) = work.ids
        sent, reply = {**work.shared, **work.rows.get(site, {})}, tree["reply"]
        assert isinstance(reply, Mapping)
        found = (extension.refuses(sent, reply) for extension in self.initialiser.method.extensions)
        why = "" if self._allowed is not None else next(filter(None, found), "")
        return why and f"the reply of site '{site}': {why}"

    def _spec(self, work: ChunkTask) -> Spec:
        """The entries of what the program of ``work`` replies."""
        (site,) = work.ids
        exchange = work.exchange
        payload = flatten({"shared": work.shared, "row": work.rows.get(site, {})})
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in payload.items())
        kind = exchange.program, exchange.extensions, self.clients[site].input_shape, shapes
        if kind not in self._specs:
            self._specs[kind] = rehearsed(work, self.clients[site], self.background, self.initialiser)
        return self._specs[kind]


def _find_base(site: str, work: ChunkTask) -> int:
    """Return the number of the exchange whose state a site starts from; 0 for its initial state."""
    state: Any = work.states.get(site)
    return 0 if state is None else int(state["sequence"])


def _pooled(totals: Mapping[Term, Tensor], sites: Collection[str]) -> Metrics:
    """The means of metrics over ``sites``, where their sums are known; else nothing."""
    begin = f"{MEASURED}/"
    sums = {path.removeprefix(begin): total for (path, *_), total in totals.items() if path.startswith(begin)}
    return {group_of(sites): {name: float(total) / len(sites) for name, total in sums.items()}} if sums else {}


def _lost(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """The sites whose replies did not come, and those whose replies were refused."""
    lost: dict[str, list[str]] = {}
    for answer in answers:
        if answer.body is None:
            lost.setdefault("refused" if answer.error.startswith(REFUSED) else "no_reply", []).append(answer.site)
    return lost


def _arrived(answers: Sequence[Answer]) -> dict[str, float]:
    """Seconds after which the replies came that can be used, by site."""
    return {answer.site: answer.seconds for answer in answers if answer.body is not None}


def _checked(
    answer: Answer,
    expected: Mapping[str, Expected],
    sizes: dict[str, dict[str, float]],
    refused: Callable[[Tree], str],
    noisy: bool,
) -> Answer:
    """The answer, or a failure in its place where its body cannot be used; else ``sizes`` gets the norms of entries.

    ``noisy``: metrics have noise.
    """

    def wrong(header: dict[str, Any], tree: Tree) -> str | None:
        problem = wrong_reply(answer.site, header, tree, expected[answer.site]) or wrong_metrics(header, noisy)
        problem = problem or refused(tree)
        if not problem:
            sizes[answer.site] = norms({"reply": tree["reply"]})
        return problem

    return usable(answer, wrong)


class RealTimeServer(Server):
    """A run's server where time is real; see :class:`~perfed.engine.server.Server` for its arguments."""

    engine: FlowerEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.strict = self.selection.policy.strict

    def keep(self, kept: Callable[[str], Collection[int]]) -> None:
        """Let sites not forget the states after the exchanges that ``kept`` gives the numbers of, by site."""
        self.engine.kept = kept

    @property
    def speeds(self) -> str:
        """Clients take the time that they take."""
        return "wall"

    def round(self, number: int, *, measure: str | None = None, keeps: bool = False) -> RoundRecord:
        """Round ``number`` (from 1), then the method's work with all clients after it; no word on single samples."""
        invitation = invite(self.selection, number)
        clients = RoundClients(self.engine, list(invitation.ids), number, "round", measure)
        clients.invitation = invitation
        try:
            record = self._transaction(clients, self._round)
        except NobodyReplied:
            counts = clients.record.counts
            return RoundRecord([], float("nan"), seconds=clients.seconds, replied=clients.arrived, counts=counts)
        take(self.selection, number, clients.arrived)
        return self._ended(record, number, Choice(record.participants, clients.seconds, clients.arrived))
