"""Rehearsals on made-up rows: at a site, of all that its study's server will ask; at the server, of a site's reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfed.codec import flatten
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.engine.clients import FIRST_EXCHANGE
from perfed.engine.engine import InProcessEngine
from perfed.engine.executor import Background, ChunkResult, ChunkTask, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import ALWAYS as ALWAYS_MEASURED
from perfed.engine.metrics import Scoring, chosen
from perfed.engine.rehearsal import make_up_federation
from perfed.engine.secure_aggregation import ALWAYS
from perfed.engine.server import Server
from perfed.engine.steps.secure_sums import SecureSums
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.maths.sums import Term
from perfed.method.declared import FederationInfo
from perfed.participation.settings import Participation
from perfed.rng import key, uniform
from perfed.sites.flower.allowed import AllowList, ExchangeForms, ExchangeKind, TreeForm, add_form
from perfed.sites.flower.checks import TensorSpec, make_spec
from perfed.sites.flower.wire import LOSS, MEASURED, make_reply_tree
from perfed.training.plan import Plan

_MEASURING = "personalise"  # the program after which a site's own model is measured
_ALL_ROUNDS = 50


@dataclass(frozen=True)
class ExchangeSettings:
    """What a study says of exchanges besides its method.

    Attributes:
        rounds: how many.
        sites: how many.
        domains: how many there are.
        participation: who takes part.
        split: on which sites' models are scored.
        validated: whether they are scored on validation data too.
        metrics: what is measured beside what the task always has.
        held: whether predictions may be among the classes that a site holds.
        noisy: whether the metrics on the split leave with noise, where losses and metrics stay at sites otherwise.
    """

    rounds: int
    sites: int
    domains: int = 0
    participation: Participation = field(default_factory=Participation)
    split: str = "test"
    validated: bool = False
    metrics: tuple[str, ...] = ()
    held: bool = False
    noisy: bool = False


@dataclass
class _Notes:
    """What was asked and replied so far."""

    payloads: dict[ExchangeKind, tuple[TreeForm, ...]] = field(default_factory=dict)
    replies: dict[ExchangeKind, tuple[TreeForm, ...]] = field(default_factory=dict)
    terms: dict[ExchangeKind, dict[Term, None]] = field(default_factory=dict)
    done: dict[Any, ChunkResult] = field(default_factory=dict)


class _Noting(InProcessEngine):
    """Notes every exchange; what it has done once for payloads of the same form it does not do again."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan, notes: _Notes) -> None:
        self._noted = notes
        super().__init__(federation, initialiser, plan)

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        for work in self.make_chunk_tasks(task):
            asked, noted = ExchangeKind.of(work.exchange), self._noted
            sent = [TreeForm.of({"shared": work.shared, "row": work.rows.get(i, {})}, finite=True) for i in work.ids]
            known = asked, work.ids, *(tuple(form.spec.items()) for form in sent)
            if known not in noted.done:
                done = noted.done[known] = self.executor.attempt(work)
                for row, form in enumerate([] if done.diverged else sent):
                    reply: dict[str, Any] = {"reply": done.reply(row), LOSS: done.losses[row].double()}
                    noted.payloads[asked] = add_form(noted.payloads.get(asked, ()), form)
                    noted.replies[asked] = add_form(noted.replies.get(asked, ()), TreeForm.of(reply, finite=False))
            yield noted.done[known]

    def make_secure_sums(self) -> ExchangeStep:
        """Return the step of secure aggregation, which notes the sums that the method asks for."""
        assert self.initialiser.secure is not None
        numbers = self.initialiser.secure.numbers(len(self.clients))
        return SecureSums(numbers, lambda exchange: self._noted.terms.setdefault(ExchangeKind.of(exchange), {}))


def derive_allow_list(
    client: Client, info: FederationInfo, initialiser: Initialiser, protocol: ExchangeSettings
) -> AllowList:
    """What the site with ``client`` answers in a run of its study.

    The study's server is rehearsed in this process with sites whose rows are made up, all of them taking part and few:
    the first rounds, the last, and those at which a setting of the method may begin something.

    Args:
        client: of which the shapes of inputs and targets count.
        info: of the federation.
        initialiser: method, model, seed.
        protocol: of the study.

    Raises:
        PerfedError: the method refuses such a federation, or its training diverges.
    """
    notes = _Notes()
    federation = make_up_federation(client, info, clients=protocol.sites, domains=protocol.domains)
    if initialiser.secure is not None:
        initialiser.secure.check(protocol.participation, protocol.sites, client.held is not None)
    splits = [protocol.split, *(["validation"] if protocol.validated else [])]
    splits += [] if client.split("test") is not None else ["train"]
    numbers = _rounds(initialiser, protocol.rounds)
    discreet = any(extension.discreet for extension in initialiser.method.extensions)
    names = tuple(chosen(name)[0] for name in protocol.metrics)
    noisy = tuple(dict.fromkeys((*ALWAYS_MEASURED[info.task], *names))) if protocol.noisy else ()
    summed = noisy if initialiser.secure is not None else ()
    for participation in _participations(protocol, len(federation)):
        everyone = participation.policy == "uniform" and participation.rate == 1
        engine = partial(_Noting, notes=notes)
        server = Server(
            federation, initialiser, Plan("stacked", threads=1), participation, protocol.rounds, engine=engine
        )
        server.measure(Scoring(names))
        _rehearse(server, numbers if everyone else numbers[:2], splits)
    return AllowList(
        protocol.rounds,
        protocol.sites,
        protocol.domains,
        names,
        protocol.held,
        noisy if discreet else _measured(notes, protocol.held),
        dict(_answered(notes, protocol.split, summed)),
        protocol.participation.count(protocol.sites),
        discreet,
        (_MEASURING, protocol.split) if noisy else (),
    )


def _rehearse(server: Server, rounds: Sequence[int], splits: Sequence[str]) -> None:
    server.prepare()
    ids = server.federation.ids
    for number in rounds:
        server.round(number)
        for split in dict.fromkeys(splits):
            server.evaluate(split, round_=number)
            server.evaluate(split, round_=number, never_used=ids)
    server.settle(ids, rounds[-1])


def _answered(notes: _Notes, split: str, summed: Sequence[str]) -> Iterator[tuple[ExchangeKind, ExchangeForms]]:
    """What was noted; a round's own exchanges may end with a score of the model that they leave.

    ``summed``: metrics on the split whose sums over sites leave, and no site's own.
    """
    for asked, payloads in notes.payloads.items():
        terms = [term for term in notes.terms.get(asked, {}) if term not in ALWAYS]
        if asked.index < 0 and (asked.program, asked.measure) == (_MEASURING, split):
            terms += [(f"{MEASURED}/{name}",) for name in summed]
        answered = ExchangeForms(payloads, notes.replies[asked], (*ALWAYS, *sorted(terms)) if terms else ())
        yield asked, answered
        if not asked.preparation and 0 <= asked.index < FIRST_EXCHANGE["finish"]:
            yield replace(asked, measure=split), answered


def _measured(notes: _Notes, held: bool) -> tuple[str, ...]:
    """Names of metrics that sites told."""
    told = dict.fromkeys(n for done in notes.done.values() for found in done.metrics.values() for n in found)
    return (*told, *(f"{name}_all" for name in told if held))


def _participations(protocol: ExchangeSettings, sites: int) -> Iterator[Participation]:
    """Everyone, and fewer, as payloads may depend on who has taken part; then the study's own where that asks more."""
    own = protocol.participation
    for count in sorted({1, min(2, sites), max(1, sites - 1), sites}, reverse=True):
        yield Participation(rate=count / sites, last_round="sampled", fit_unused=own.fits_unused)
    if own.entry.policy.measures_gradient(own.policy_settings):
        yield own


def _rounds(initialiser: Initialiser, rounds: int) -> list[int]:
    """The rounds that are rehearsed: a warm-up, say, ends with a number that is a setting."""
    method = initialiser.method
    settings = [value for owner in (method, *method.extensions) for value in owner.model_dump().values()]
    named = [number for value in settings if type(value) is int for number in (value, value + 1)]
    return sorted({*range(1, min(rounds, _ALL_ROUNDS) + 1), *(n for n in named if 1 <= n <= rounds), rounds})


_EACH = 2  # samples of each class


def rehearse_reply(
    work: ChunkTask, client: Client, background: Background, initialiser: Initialiser
) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of what the site ``client`` replies to ``work``, which is done for a made-up client.

    Shapes of replies depend on classes, domains and shapes of inputs, never on the number of samples. An entry that is
    not finite for the made-up client need not be so for the real one.

    Args:
        work: that the site is asked to do, with its payload.
        client: of whom facts are known.
        background: of the federation.
        initialiser: method, model, seed.
    """
    host = LocalExecutor(
        [make_up_client(client, background, initialiser)], background, initialiser, Plan("sequential", threads=1)
    )
    done = host.run(replace(work, exchange=replace(work.exchange, measure=None), states={}))
    reply = make_reply_tree(done)
    rows = len(host.clients[client.id].train)
    finite = {name: bool(torch.isfinite(value).all()) for name, value in flatten(reply).items()}
    finite[LOSS] = False  # there is none where nothing was trained
    counts = {name: _counts(name, value, rows) for name, value in flatten(reply).items()}
    return {name: entry._replace(finite=finite[name], counts=counts[name]) for name, entry in make_spec(reply).items()}


def _counts(name: str, value: Tensor, rows: int) -> bool:
    """Whether an entry holds numbers of samples: it is called so, and of a client with ``rows`` samples it does."""
    called = name.rpartition("/")[2].endswith(("num_samples", "counts"))
    return called and value.numel() > 0 and bool(((value >= 0) & (value <= rows)).all())


def make_up_client(client: Client, background: Background, initialiser: Initialiser) -> Client:
    """A client with the facts of ``client``, but two samples of each class (or four), whose inputs are 0 and 1."""
    info, train = background.info, client.train
    labels = [label for label, count in enumerate(train.held_classes) if count]
    count = _EACH * (len(labels) or 2)
    keys = key(initialiser.seed, "made up", torch.arange(count))
    size = max(1, int(torch.tensor(train.input_shape).prod()))
    x = uniform(keys, size).round().view(count, *train.input_shape).to(initialiser.dtype)
    drawn = uniform(keys, max(1, int(torch.tensor(train.target_shape).prod())), initialiser.dtype)
    y = drawn.view(count, *train.target_shape) + 0.5
    if info.task == "classification":
        y = torch.tensor(labels).repeat(_EACH)
    elif info.task == "survival":
        y[:, 1] = torch.arange(count) % 2
    domain = torch.arange(count) % info.num_domains if info.num_domains else None
    return Client(client.id, Split(x, y, domain))
