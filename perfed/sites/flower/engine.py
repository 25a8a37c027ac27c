"""The engine for clients at real sites, which sends each task as a message and receives its result as a reply.

States stay at the sites. In place of a client's state the server stores the number of the exchange that has produced
it, and each message names the state that the site starts from. A round is therefore a transaction without a message at
its end: no later message refers to a state that was not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.data.federation import Federation
from perfed.engine.engine import Engine
from perfed.engine.evaluate import Metrics, group_of
from perfed.engine.executor import ChunkResult, ChunkTask, Exchange
from perfed.engine.initial import Initialiser
from perfed.engine.record import RoundRecord
from perfed.engine.secure_aggregation import ALWAYS, mean_loss
from perfed.engine.server import Server
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.errors import PerfedError
from perfed.maths.sums import SingleReplies, Term
from perfed.participation.invitation import Invitation, invite, take
from perfed.participation.selection import Choice
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.checks import (
    REFUSED,
    ExpectedReply,
    TensorSpec,
    TreeSpec,
    compute_norms,
    find_oversized_entry,
    find_reply_problem,
    reject_unusable,
)
from perfed.sites.flower.dry_run import rehearse_reply
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.message import unpack
from perfed.sites.flower.steps.journal_step import JournalStep
from perfed.sites.flower.steps.late_replies import LateReplies, NobodyReplied, ReplyTimes
from perfed.sites.flower.steps.masked_sums import MaskedSums
from perfed.sites.flower.sum_form import EMPTY_REPLY, SumFailed, SumLayout, make_masked_spec
from perfed.sites.flower.transport import Answer, Transport
from perfed.sites.flower.wire import (
    MEASURED,
    REPLY,
    find_metrics_problem,
    get_sequence_number,
    hash_common_request,
    hash_payload,
    pack_task,
    unpack_masked_result,
    unpack_result,
)
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan
from perfed.tree import Tree

MAX_RATIO = 1e6
"""The default of :attr:`Limits.ratio`, far above the ratios of valid replies, which differ with the number of samples
and the local progress of a site."""
_REMEDY = (
    "correct this and submit again, and the run continues where it was; 'perfed submit --at-least N' continues without "
    "a site"
)


@dataclass(frozen=True)
class Limits:
    """The limits on the time and the content of replies.

    Attributes:
        seconds: The time limit for one exchange in seconds.
        bytes: The largest size of one reply in bytes.
        ratio: The largest ratio of the norm of an entry to a reference, which is the largest of the median norm in the
            other replies, the norm of all that the site was sent, and its number of training samples; ``None`` for no
            limit.
        least: The number of replies with which rounds and evaluations that need all sites continue without the sites
            that are not connected by then or have not replied in ``seconds``; 0 if they need all sites.
    """

    seconds: float = 600.0
    bytes: int = 2**30
    ratio: float | None = MAX_RATIO
    least: int = 0


class FlowerEngine(Engine):
    """An engine that sends tasks to sites and receives their results.

    Args:
        federation: The facts about the clients, without their data.
        initialiser, plan: The arguments of :class:`~perfed.engine.engine.Engine`.
        transport: The network.
        journal: The journal, which stores the answers of each exchange on disk before the round continues.
        run: The id of the run.
        limits: The limits on the time and the content of replies.
        allowed: The list of requests that sites answer in the study; needed for masked replies.

    Attributes:
        strict: Whether an exchange outside rounds needs all sites, and does not continue without missing replies.
        list_states_to_keep: Returns, for a site, the numbers of the exchanges whose states it must keep besides the
            newest.
        times: The arrival times of the replies in the latest exchange.
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
        allowed: AllowList | None = None,
    ) -> None:
        self._masked_sums = MaskedSums()
        super().__init__(federation, initialiser, plan)
        self.strict = True
        self.list_states_to_keep: Callable[[str], Collection[int]] = lambda site: ()
        self._transport, self._journal, self._run = transport, journal, run
        self._limits = limits or Limits()
        self._specs: dict[Any, TreeSpec] = {}
        self._allowed = allowed
        self.times = ReplyTimes()
        self._journal_step = JournalStep(
            journal, self.notes, lambda exchange: exchange.lasting or bool(self._find_masked_terms(exchange))
        )
        self.steps.append(self._journal_step)
        self.evaluation_steps.append(self._journal_step)

    def make_secure_sums(self) -> ExchangeStep:
        """Return the step of secure aggregation for masked replies."""
        return self._masked_sums

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        """Yield the results of a task from the sites, or from the journal if it has their answers.

        Raises:
            PerfedError: A site that is needed has not replied in time, or its reply cannot be used.
        """
        tasks = {work.ids[0]: work for work in self.make_chunk_tasks(task)}
        if not tasks:
            return
        exchange = task.exchange
        if terms := self._find_masked_terms(exchange):
            spared = not exchange.lasting and self._limits.least > 0
            yield from self._sum_under_masks(tasks, exchange, terms, needs_all=task.invitation is None and not spared)
            return
        invitation = task.invitation or Invitation.of_all(list(tasks), strict=self.strict or exchange.lasting)
        answers = self._journal_step.answers
        if answers is None:
            least = self._limits.least if task.invitation or not exchange.lasting else 0
            answers = self._ask_sites(tasks, get_sequence_number(exchange), invitation, least)
            failed = [answer.error for answer in answers if answer.body is None]
            spared = 0 < least <= len(answers) - len(failed)
            if invitation.strict and failed and not spared:
                raise PerfedError(f"round {exchange.round}: {'; '.join(failed[:3])}; {_REMEDY}")
            self._journal_step.record_answers(answers)
        self.times.seconds, self.times.lost = _find_arrival_times(answers), _find_lost_sites(answers)
        bodies = {answer.site: answer.body for answer in answers if answer.body is not None}
        for site in sorted(invitation.choose(self.times.seconds)[0]):
            yield unpack_result(*unpack(bodies[site]))

    def _find_masked_terms(self, exchange: Exchange) -> tuple[Term, ...]:
        """Return the products of entries that are summed under masks in an exchange; none if replies are not masked."""
        return () if self._allowed is None else self._allowed.get_sum_terms(exchange)

    def _sum_under_masks(
        self, tasks: Mapping[str, ChunkTask], exchange: Exchange, terms: tuple[Term, ...], needs_all: bool
    ) -> Iterator[ChunkResult]:
        """Open the sum of the sites' masked replies and yield their results; yield nothing if the sum fails.

        Args:
            tasks: The task of each site.
            exchange: The exchange of the tasks.
            terms: The products of entries that are summed.
            needs_all: Whether the exchange needs the replies of all sites.

        Raises:
            PerfedError: All sites are needed and one is missing, or the sum of an exchange outside rounds fails.
        """
        from perfed.sites.flower.secure_sum import SecureSum  # which needs perfed[flower]

        assert self._allowed is not None and self.initialiser.secure is not None
        sequence, where = get_sequence_number(exchange), f"round {exchange.round}"
        needed = self.initialiser.secure.needed(len(tasks), self._allowed.min_sites)
        confirms = self.initialiser.secure.keys is not None
        secure = SecureSum(
            self._transport, self._journal, self._run, sequence, needed, self._limits.seconds, confirms=confirms
        )
        expected, layout = self._expect_masked_replies(tasks, sequence, terms)
        answers = self._journal_step.answers
        if answers is None:
            site, work = next(iter(tasks.items()))
            request = unpack(self._make_message(site, work, sequence))
            hashes = {"request": hash_common_request(*request), "payload": hash_payload(*request)}

            def make_message(site: str, fields: Mapping[str, Any]) -> bytes:
                return self._make_message(site, tasks[site], sequence, fields)

            bases = {site: _find_base(site, work) for site, work in tasks.items()}
            answers = secure.collect_replies(bases, hashes, make_message, expected)
            failed = [answer.error for answer in answers if answer.body is None]
            if needs_all and failed:
                raise PerfedError(f"{where}: {'; '.join(failed[:3])}; {_REMEDY}")
            self._journal_step.record_answers(answers)  # before the sum is opened
        self.times.seconds, self.times.lost = {}, _find_lost_sites(answers)
        try:
            vector = secure.open_sum(answers, len(tasks))
        except SumFailed as failure:
            if needs_all and exchange.lasting:  # a failed evaluation is left out, and the run continues
                raise PerfedError(f"{where}: {failure}; {_REMEDY}") from None
            self._add_note(f"{where} is void: {failure}")
            return
        for note in secure.notes:
            self._add_note(f"{where}: {note}")
        arrival_times = _find_arrival_times(answers)
        self.times.seconds = {site: seconds for site, seconds in arrival_times.items() if site in tasks}
        totals = layout.decode_totals(vector, self.initialiser.secure.numbers(len(self.clients)))
        self._masked_sums.totals = totals
        loss = mean_loss(*(totals[term] for term in ALWAYS))[None]
        pooled = _pool_metrics(totals, self.times.seconds)
        for answer in sorted((a for a in answers if a.site in self.times.seconds), key=lambda a: a.site):
            yield unpack_masked_result(*unpack(answer.body or b""), sequence, loss, pooled)

    def _add_note(self, line: str) -> None:
        self.notes.append(line)
        self._transport.note(line)

    def _expect_masked_replies(
        self, tasks: Mapping[str, ChunkTask], sequence: int, terms: tuple[Term, ...]
    ) -> tuple[dict[str, ExpectedReply], SumLayout]:
        """Return the expected masked reply of each site, and the layout of the masked vectors.

        Raises:
            SingleReplies: The shapes of replies differ between sites.
        """
        scalar = TensorSpec((), torch.float64)
        metrics = {REPLY + path: scalar for (path, *_) in terms if path.startswith(f"{MEASURED}/")}
        specs = {site: {**self._rehearse_reply(work), **metrics} for site, work in tasks.items()}
        layouts = {site: SumLayout.from_spec(terms, spec) for site, spec in specs.items()}
        first = next(iter(tasks))
        if odd := [site for site, layout in layouts.items() if layout != layouts[first]]:
            raise SingleReplies(f"replies whose shapes differ between sites '{odd[0]}' and '{first}'")
        self._masked_sums.spec, self._masked_sums.totals = specs[first], {}
        most, program = self._limits.bytes, tasks[first].exchange.program
        spec = make_masked_spec(layouts[first])
        return {site: ExpectedReply(self._run, sequence, program, [site], spec, most) for site in tasks}, layouts[first]

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Raise an error, because personal models stay at the sites.

        Raises:
            PerfedError: Always.
        """
        raise PerfedError(
            f"client '{ids[0]}': its personal model stays at its site; 'perfed site export' writes it there"
        )

    def _choose_chunk_size(self, members: Sequence[object]) -> int:
        return 1

    def _ask_sites(
        self, tasks: Mapping[str, ChunkTask], sequence: int, invitation: Invitation, least: int
    ) -> list[Answer]:
        """Send the tasks and return the answers when enough have arrived; unusable replies are replaced by errors."""
        messages = {site: self._make_message(site, work, sequence) for site, work in tasks.items()}
        expected = {site: self._expect_reply(work, sequence) for site, work in tasks.items()}
        answers: list[Answer] = []
        sizes: dict[str, dict[str, float]] = {}
        exchange = self._transport.exchange(messages, min(self._limits.seconds, invitation.limit), least)
        for answer in exchange:
            find_refusal = partial(self._find_refusal, tasks[answer.site])
            answers.append(_check_answer(answer, expected, sizes, find_refusal, self._is_discreet))
            if answers[-1].body is not None and invitation.enough(_find_arrival_times(answers)):
                answers = self._refuse_large_replies(answers, sizes, tasks)
                if invitation.enough(_find_arrival_times(answers)):
                    return answers
        return self._refuse_large_replies(answers, sizes, tasks)

    def _refuse_large_replies(
        self, answers: Sequence[Answer], sizes: Mapping[str, Mapping[str, float]], tasks: Mapping[str, ChunkTask]
    ) -> list[Answer]:
        """Return the answers, with an error in place of each reply that has an entry with a far too large norm."""
        ratio, checked = self._limits.ratio, list(answers)
        if ratio is None:
            return checked
        scales = {site: self._find_scale(tasks[site]) for site in sizes}
        for row, answer in enumerate(answers):
            if answer.body is not None and (problem := find_oversized_entry(answer.site, sizes, scales, ratio)):
                checked[row] = Answer(answer.site, None, f"{REFUSED}{problem} (--max-ratio)", answer.seconds)
        return checked

    def _find_scale(self, work: ChunkTask) -> float:
        """Return the scale of valid entries in the reply to ``work``, which does not depend on other replies."""
        (site,) = work.ids
        sent = compute_norms({"shared": work.shared, "row": work.rows.get(site, {})})
        return max(math.hypot(*sent.values()), len(self.clients[site].train))

    def _make_message(
        self, site: str, work: ChunkTask, sequence: int, secure: Mapping[str, Any] | None = None
    ) -> bytes:
        return pack_task(
            work, self._run, sequence, _find_base(site, work), self.list_states_to_keep(site), self.background, secure
        )

    def _expect_reply(self, work: ChunkTask, sequence: int) -> ExpectedReply:
        """Return the expected reply to ``work``, which has the form of the program's reply for a made-up client."""
        (site,) = work.ids
        spec = self._rehearse_reply(work)
        if self._allowed is not None:  # nothing is summed, so no part of the reply leaves the site
            self._masked_sums.spec, self._masked_sums.totals, spec = spec, {}, EMPTY_REPLY
        samples = None if self._is_discreet else len(self.clients[site].train)
        return ExpectedReply(self._run, sequence, work.exchange.program, [site], spec, self._limits.bytes, samples)

    @property
    def _is_discreet(self) -> bool:
        """Whether exact losses, metrics and counts stay at the sites."""
        return any(extension.discreet for extension in self.initialiser.method.extensions)

    def _find_refusal(self, work: ChunkTask, tree: Tree) -> str:
        """Return why an extension of the method refuses the reply of a site; empty if none refuses it."""
        (site,) = work.ids
        sent, reply = {**work.shared, **work.rows.get(site, {})}, tree["reply"]
        assert isinstance(reply, Mapping)
        reasons = (extension.refuses(sent, reply) for extension in self.initialiser.method.extensions)
        why = "" if self._allowed is not None else next(filter(None, reasons), "")
        return why and f"the reply of site '{site}': {why}"

    def _rehearse_reply(self, work: ChunkTask) -> TreeSpec:
        """Return the specification of the reply to ``work``, which is rehearsed once for each form of payload."""
        (site,) = work.ids
        exchange = work.exchange
        payload = flatten({"shared": work.shared, "row": work.rows.get(site, {})})
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in payload.items())
        kind = exchange.program, exchange.extensions, self.clients[site].input_shape, shapes
        if kind not in self._specs:
            self._specs[kind] = rehearse_reply(work, self.clients[site], self.background, self.initialiser)
        return self._specs[kind]


def _find_base(site: str, work: ChunkTask) -> int:
    """Return the number of the exchange whose state a site starts from; 0 for its initial state."""
    state: Any = work.states.get(site)
    return 0 if state is None else int(state["sequence"])


def _pool_metrics(totals: Mapping[Term, Tensor], sites: Collection[str]) -> Metrics:
    """Return the mean metrics of a group of sites from their sums; empty if no metrics were summed."""
    begin = f"{MEASURED}/"
    sums = {path.removeprefix(begin): total for (path, *_), total in totals.items() if path.startswith(begin)}
    return {group_of(sites): {name: float(total) / len(sites) for name, total in sums.items()}} if sums else {}


def _find_lost_sites(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """Return the sites without a usable reply, by the reason: "no_reply" or "refused"."""
    lost: dict[str, list[str]] = {}
    for answer in answers:
        if answer.body is None:
            lost.setdefault("refused" if answer.error.startswith(REFUSED) else "no_reply", []).append(answer.site)
    return lost


def _find_arrival_times(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the seconds until each usable reply arrived, by site."""
    return {answer.site: answer.seconds for answer in answers if answer.body is not None}


def _check_answer(
    answer: Answer,
    expected: Mapping[str, ExpectedReply],
    sizes: dict[str, dict[str, float]],
    find_refusal: Callable[[Tree], str],
    noisy: bool,
) -> Answer:
    """Return the answer, or an error in its place if its reply cannot be used.

    Args:
        answer: The answer of a site.
        expected: The expected reply of each site.
        sizes: The dictionary that receives the norms of the entries of a usable reply, by site.
        find_refusal: Returns the reason why an extension refuses a reply, or an empty text.
        noisy: Whether metrics have noise.
    """

    def find_problem(header: dict[str, Any], tree: Tree) -> str | None:
        problem = find_reply_problem(answer.site, header, tree, expected[answer.site]) or find_metrics_problem(
            header, noisy
        )
        problem = problem or find_refusal(tree)
        if not problem:
            sizes[answer.site] = compute_norms({"reply": tree["reply"]})
        return problem

    return reject_unusable(answer, find_problem)


class RealTimeServer(Server):
    """The server of a run in real time; see :class:`~perfed.engine.server.Server` for its arguments."""

    engine: FlowerEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.strict = self.selection.policy.strict

    def keep_states(self, list_states: Callable[[str], Collection[int]]) -> None:
        """Set the function that returns, for a site, the numbers of the exchanges whose states it must keep."""
        self.engine.list_states_to_keep = list_states

    @property
    def speeds(self) -> str:
        """The name of the time scale: "wall", for real time."""
        return "wall"

    def round(self, number: int, *, measure: str | None = None, keep_outputs: bool = False) -> RoundRecord:
        """Run round ``number`` (from 1), then the method's work with all clients, and return the record of the round.

        Predictions stay at the sites, whatever ``keep_outputs`` says.
        """
        invitation = invite(self.selection, number)
        if not invitation.ids:  # a policy may invite nobody
            return RoundRecord([], float("nan"))
        clients = self._make_clients(invitation.ids, number, "round", split=measure)
        late = LateReplies(invitation, clients.record, self.engine.times)
        clients.steps.insert(0, late)
        try:
            record = self._transaction(clients, self._round)
        except NobodyReplied:
            counts = clients.record.counts
            return RoundRecord([], float("nan"), seconds=late.seconds, replied=late.arrived, counts=counts)
        take(self.selection, number, late.arrived)
        return self._finish_round(record, number, Choice(record.participants, late.seconds, late.arrived))
