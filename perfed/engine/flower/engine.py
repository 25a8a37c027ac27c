"""Clients at sites of their own: each work goes out as a message, what was done comes back as one.

States stay at the sites. What the server keeps of a client in the place of its state is the number of the exchange that
has left it, and every message names the one that the site starts from. So a round is one transaction without a word on
its end: what was not accepted is never named again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfed.codec import flatten
from perfed.data.federation import Federation
from perfed.engine.engine import Engine
from perfed.engine.flower.checks import Bounds, Expected, Spec, wrong_reply
from perfed.engine.flower.journal import Journal
from perfed.engine.flower.message import unpack
from perfed.engine.flower.rehearsal import rehearsed
from perfed.engine.flower.transport import Answer, Transport
from perfed.engine.flower.wire import done_of, sequence_of, work_message, wrong_metrics
from perfed.engine.host import Done, Work
from perfed.engine.setup import Setup
from perfed.errors import PerfedError
from perfed.participation.invitation import Invitation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan

_REFUSED = "refused: "


@dataclass(frozen=True)
class Limits:
    """What the server does not wait for, and does not take.

    Attributes:
        seconds: longest time that one exchange may take.
        bytes: of one reply.
        norm: Euclidean, of all numbers of one reply; ``None`` for any.
    """

    seconds: float = 600.0
    bytes: int = 2**30
    norm: float | None = None


class FlowerEngine(Engine):
    """Sends work to sites and takes what they have done.

    Args:
        federation: of facts: no client's data are here.
        setup, plan: as in :class:`~perfed.engine.engine.Engine`.
        transport: the network.
        journal: keeps the answers of each exchange before the round goes on.
        run: id of the run.
        limits: what is not waited for, and not taken.

    Attributes:
        strict: whether an exchange outside of rounds needs every site; else it does without those that do not reply.
        kept: of a site the numbers of exchanges whose states it must not forget, besides the newest.
    """

    def __init__(
        self,
        federation: Federation,
        setup: Setup,
        plan: Plan,
        *,
        transport: Transport,
        journal: Journal,
        run: str,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(federation, setup, plan)
        self.strict = True
        self.kept: Callable[[str], Collection[int]] = lambda site: ()
        self._transport, self._journal, self._run = transport, journal, run
        self._limits = limits or Limits()
        self._specs: dict[Any, Spec] = {}

    def perform(self, works: Iterable[Work], invitation: Invitation | None = None) -> Iterator[Done]:
        """Ask the sites; the journal answers what has been asked before.

        Raises:
            PerfedError: a site that is needed has not replied in time, or its reply cannot be used; names it.
        """
        asked = {work.ids[0]: work for work in works}
        if not asked:
            return
        exchange = next(iter(asked.values())).exchange
        sequence = sequence_of(exchange)
        wanted = invitation or Invitation.of_all(list(asked), strict=self.strict or exchange.lasting)
        answers = self._journal.answers(sequence) if exchange.lasting else None  # others may be done again
        if answers is None:
            answers = self._ask(asked, sequence, wanted)
            failed = [answer.error for answer in answers if answer.body is None]
            if wanted.strict and failed:
                raise PerfedError(f"round {exchange.round}: {'; '.join(failed[:3])}")
            if exchange.lasting:
                self._journal.write(sequence, answers)
        self.arrived = {answer.site: answer.seconds for answer in answers if answer.body is not None}
        self.lost = _lost(answers)
        bodies = {answer.site: answer.body for answer in answers if answer.body is not None}
        for site in sorted(wanted.choose(self.arrived)[0]):
            yield done_of(*unpack(bodies[site]))

    def cohorts(
        self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0, program: str = "personalise"
    ) -> Iterator[Cohort]:
        """There are none here.

        Raises:
            PerfedError: always: models of their own stay at the sites.
        """
        raise PerfedError(f"client '{ids[0]}': its own model stays at its site; 'perfed site export' writes it there")

    def _size(self, members: Sequence[object]) -> int:
        return 1

    def _ask(self, asked: Mapping[str, Work], sequence: int, wanted: Invitation) -> list[Answer]:
        """Send the works and wait for as many replies as are wanted; those that cannot be used are failures."""
        messages = {site: self._message(site, work, sequence) for site, work in asked.items()}
        expected = {site: self._expected(work, sequence) for site, work in asked.items()}
        answers: list[Answer] = []
        arrived: dict[str, float] = {}
        exchange = self._transport.exchange(messages, min(self._limits.seconds, wanted.limit))
        for answer in exchange:
            checked = _checked(answer, expected)
            answers.append(checked)
            if checked.body is not None:
                arrived[checked.site] = checked.seconds
                if wanted.enough(arrived):
                    break
        return answers

    def _message(self, site: str, work: Work, sequence: int) -> bytes:
        state: Any = work.states.get(site)
        base = 0 if state is None else int(state["sequence"])
        return work_message(work, self._run, sequence, base, self.kept(site), self.background)

    def _expected(self, work: Work, sequence: int) -> Expected:
        """What the reply to ``work`` must be like: what the program replies for clients that are made up."""
        (site,) = work.ids
        exchange = work.exchange
        payload = flatten({"shared": work.shared, "row": work.rows.get(site, {})})
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in payload.items())
        kind = exchange.program, exchange.terms, self.clients[site].input_shape, shapes
        if kind not in self._specs:
            self._specs[kind] = rehearsed(work, self.clients[site], self.background, self.setup)
        bounds = Bounds(self._limits.bytes, self._limits.norm)
        return Expected(self._run, sequence, exchange.program, [site], self._specs[kind], bounds)


def _lost(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """The sites whose replies did not come, and those whose replies were refused."""
    lost: dict[str, list[str]] = {}
    for answer in answers:
        if answer.body is None:
            lost.setdefault("refused" if answer.error.startswith(_REFUSED) else "no_reply", []).append(answer.site)
    return lost


def _checked(answer: Answer, expected: Mapping[str, Expected]) -> Answer:
    """The answer, or a failure in its place where its body cannot be used."""
    if answer.body is None:
        return answer
    try:
        header, tree = unpack(answer.body)
        if "error" in header:
            problem = f"site '{answer.site}': {str(header['error'])[:500]}"
        else:
            problem = wrong_reply(answer.site, header, tree, expected[answer.site]) or wrong_metrics(header)
            problem = f"{_REFUSED}{problem}" if problem else ""
    except PerfedError as error:
        problem = f"{_REFUSED}the reply of site '{answer.site}': {error}"
    return Answer(answer.site, None, problem, answer.seconds) if problem else answer
