"""Rehearsals with made-up rows.

A site rehearses its study to derive the requests that it will answer; the server rehearses a task to derive the form of
a site's reply.
"""

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

_MEASURED_PROGRAM = "personalise"  # the program after which the personal model of a site is scored
_MAX_FIRST_ROUNDS = 50


@dataclass(frozen=True)
class ExchangeSettings:
    """The settings of a study that determine its exchanges, besides the method.

    Attributes:
        rounds: The number of rounds.
        sites: The number of sites.
        domains: The number of domains.
        participation: The policy that selects the sites of a round.
        split: The split on which the models of the sites are scored.
        validated: Whether the models are also scored on validation data.
        metrics: The names of the metrics in addition to those of the task.
        scores_held_classes: Whether predictions may be scored among the classes that a site has.
        noisy: Whether metrics on the split leave with noise, while losses and exact metrics stay at the sites.
    """

    rounds: int
    sites: int
    domains: int = 0
    participation: Participation = field(default_factory=Participation)
    split: str = "test"
    validated: bool = False
    metrics: tuple[str, ...] = ()
    scores_held_classes: bool = False
    noisy: bool = False


@dataclass
class _RehearsalRecord:
    """The payloads, replies and sums of a rehearsal so far, by the kind of exchange."""

    payloads: dict[ExchangeKind, tuple[TreeForm, ...]] = field(default_factory=dict)
    replies: dict[ExchangeKind, tuple[TreeForm, ...]] = field(default_factory=dict)
    terms: dict[ExchangeKind, dict[Term, None]] = field(default_factory=dict)
    results: dict[Any, ChunkResult] = field(default_factory=dict)


class _RecordingEngine(InProcessEngine):
    """An engine that records every exchange, and reuses earlier results for payloads of the same form."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan, record: _RehearsalRecord) -> None:
        self._record = record
        super().__init__(federation, initialiser, plan)

    def perform(self, task: ExchangeTask) -> Iterator[ChunkResult]:
        record = self._record
        for work in self.make_chunk_tasks(task):
            kind = ExchangeKind.from_exchange(work.exchange)
            payloads = [
                TreeForm.from_tree({"shared": work.shared, "row": work.rows.get(client, {})}, finite=True)
                for client in work.ids
            ]
            lookup = kind, work.ids, *(tuple(form.spec.items()) for form in payloads)
            if lookup not in record.results:
                result = record.results[lookup] = self.executor.attempt(work)
                for row, form in enumerate([] if result.diverged else payloads):
                    reply: dict[str, Any] = {"reply": result.reply(row), LOSS: result.losses[row].double()}
                    record.payloads[kind] = add_form(record.payloads.get(kind, ()), form)
                    record.replies[kind] = add_form(
                        record.replies.get(kind, ()), TreeForm.from_tree(reply, finite=False)
                    )
            yield record.results[lookup]

    def make_secure_sums(self) -> ExchangeStep:
        """Return the step of secure aggregation, which records the sums that the method needs."""
        assert self.initialiser.secure is not None
        numbers = self.initialiser.secure.numbers(len(self.clients))
        return SecureSums(
            numbers, lambda exchange: self._record.terms.setdefault(ExchangeKind.from_exchange(exchange), {})
        )


def derive_allow_list(
    client: Client, info: FederationInfo, initialiser: Initialiser, settings: ExchangeSettings
) -> AllowList:
    """Return the list of all requests that a site answers in a run of its study.

    The server of the study runs in this process with sites whose rows are made up, once with all sites and with few
    sites in each round. The rehearsed rounds are the first rounds, the last round, and each round at which a setting of
    the method may start something new.

    Args:
        client: The client of the site, of which only the shapes of inputs and targets matter.
        info: The facts about the federation.
        initialiser: The method, model and seed of the study.
        settings: The further settings of the study.

    Raises:
        PerfedError: The method refuses such a federation, or its training diverges.
    """
    record = _RehearsalRecord()
    federation = make_up_federation(client, info, clients=settings.sites, domains=settings.domains)
    if initialiser.secure is not None:
        initialiser.secure.check(settings.participation, settings.sites, client.held is not None)
    splits = [settings.split, *(["validation"] if settings.validated else [])]
    splits += [] if client.split("test") is not None else ["train"]
    rounds = _list_rehearsed_rounds(initialiser, settings.rounds)
    discreet = any(extension.discreet for extension in initialiser.method.extensions)
    names = tuple(chosen(name)[0] for name in settings.metrics)
    noisy = tuple(dict.fromkeys((*ALWAYS_MEASURED[info.task], *names))) if settings.noisy else ()
    summed = noisy if initialiser.secure is not None else ()
    for participation in _list_participations(settings, len(federation)):
        everyone = participation.policy == "uniform" and participation.rate == 1
        engine = partial(_RecordingEngine, record=record)
        server = Server(
            federation, initialiser, Plan("stacked", threads=1), participation, settings.rounds, engine=engine
        )
        server.measure(Scoring(names))
        _run_rehearsal(server, rounds if everyone else rounds[:2], splits)
    return AllowList(
        settings.rounds,
        settings.sites,
        settings.domains,
        names,
        settings.scores_held_classes,
        noisy if discreet else _list_reported_metrics(record, settings.scores_held_classes),
        dict(_list_exchange_forms(record, settings.split, summed)),
        settings.participation.count(settings.sites),
        discreet,
        (_MEASURED_PROGRAM, settings.split) if noisy else (),
    )


def _run_rehearsal(server: Server, rounds: Sequence[int], splits: Sequence[str]) -> None:
    """Run the preparation, these rounds and their evaluations, and the end of a study."""
    server.prepare()
    ids = server.federation.ids
    for number in rounds:
        server.round(number)
        for split in dict.fromkeys(splits):
            server.evaluate(split, round_=number)
            server.evaluate(split, round_=number, never_used=ids)
    server.settle(ids, rounds[-1])


def _list_exchange_forms(
    record: _RehearsalRecord, split: str, summed: Sequence[str]
) -> Iterator[tuple[ExchangeKind, ExchangeForms]]:
    """Yield the forms of each kind of exchange in a rehearsal.

    Each exchange that may be the last of a round is listed a second time, with a score of the resulting model.

    Args:
        record: The record of the rehearsal.
        split: The split on which models are scored.
        summed: The names of the metrics on the split of which only sums over sites leave.
    """
    for kind, payloads in record.payloads.items():
        terms = [term for term in record.terms.get(kind, {}) if term not in ALWAYS]
        if kind.index < 0 and (kind.program, kind.measure) == (_MEASURED_PROGRAM, split):
            terms += [(f"{MEASURED}/{name}",) for name in summed]
        forms = ExchangeForms(payloads, record.replies[kind], (*ALWAYS, *sorted(terms)) if terms else ())
        yield kind, forms
        if not kind.preparation and 0 <= kind.index < FIRST_EXCHANGE["finish"]:
            yield replace(kind, measure=split), forms


def _list_reported_metrics(record: _RehearsalRecord, scores_held_classes: bool) -> tuple[str, ...]:
    """Return the names of the metrics that sites sent in a rehearsal, and of the same metrics among all classes."""
    names = dict.fromkeys(
        name for result in record.results.values() for metrics in result.metrics.values() for name in metrics
    )
    return (*names, *(f"{name}_all" for name in names if scores_held_classes))


def _list_participations(settings: ExchangeSettings, sites: int) -> Iterator[Participation]:
    """Yield participations with all sites and with fewer, and that of the study if its policy adds requests.

    Payloads may depend on the sites that have taken part so far.
    """
    participation = settings.participation
    for count in sorted({1, min(2, sites), max(1, sites - 1), sites}, reverse=True):
        yield Participation(rate=count / sites, last_round="sampled", fit_unused=participation.fits_unused)
    if participation.entry.policy.measures_gradient(participation.policy_settings):
        yield participation


def _list_rehearsed_rounds(initialiser: Initialiser, rounds: int) -> list[int]:
    """Return the first rounds, the last round, and the rounds that a setting of the method may refer to.

    For example, the setting of a warm-up is the number of the round at which it ends.
    """
    method = initialiser.method
    settings = [value for owner in (method, *method.extensions) for value in owner.model_dump().values()]
    candidates = [number for value in settings if type(value) is int for number in (value, value + 1)]
    first_rounds = range(1, min(rounds, _MAX_FIRST_ROUNDS) + 1)
    return sorted({*first_rounds, *(number for number in candidates if 1 <= number <= rounds), rounds})


_SAMPLES_PER_CLASS = 2


def rehearse_reply(
    work: ChunkTask, client: Client, background: Background, initialiser: Initialiser
) -> dict[str, TensorSpec]:
    """Return the specification of a site's reply to a task, which is done here for a made-up client.

    The shapes of replies depend on classes, domains and shapes of inputs, and never on the number of samples. An entry
    that is not finite for the made-up client need not be finite for the real client.

    Args:
        work: The task, with its payload.
        client: A client with the facts about the site.
        background: The facts about the federation.
        initialiser: The method, model and seed of the study.
    """
    host = LocalExecutor(
        [make_up_client(client, background, initialiser)], background, initialiser, Plan("sequential", threads=1)
    )
    result = host.run(replace(work, exchange=replace(work.exchange, measure=None), states={}))
    reply = make_reply_tree(result)
    rows = len(host.clients[client.id].train)
    finite = {name: bool(torch.isfinite(value).all()) for name, value in flatten(reply).items()}
    finite[LOSS] = False  # the loss is NaN if nothing was trained
    counts = {name: _is_sample_count(name, value, rows) for name, value in flatten(reply).items()}
    return {name: entry._replace(finite=finite[name], counts=counts[name]) for name, entry in make_spec(reply).items()}


def _is_sample_count(name: str, value: Tensor, rows: int) -> bool:
    """Return whether an entry contains numbers of samples, by its name and its values for a client with ``rows``."""
    has_name = name.rpartition("/")[2].endswith(("num_samples", "counts"))
    return has_name and value.numel() > 0 and bool(((value >= 0) & (value <= rows)).all())


def make_up_client(client: Client, background: Background, initialiser: Initialiser) -> Client:
    """Return a client with the facts of ``client`` and made-up samples whose inputs are 0 and 1.

    It has two samples of each class of ``client``, or four samples if there are no classes.
    """
    info, train = background.info, client.train
    labels = [label for label, count in enumerate(train.held_classes) if count]
    count = _SAMPLES_PER_CLASS * (len(labels) or 2)
    keys = key(initialiser.seed, "made up", torch.arange(count))
    size = max(1, int(torch.tensor(train.input_shape).prod()))
    x = uniform(keys, size).round().view(count, *train.input_shape).to(initialiser.dtype)
    targets = uniform(keys, max(1, int(torch.tensor(train.target_shape).prod())), initialiser.dtype)
    y = targets.view(count, *train.target_shape) + 0.5
    if info.task == "classification":
        y = torch.tensor(labels).repeat(_SAMPLES_PER_CLASS)
    elif info.task == "survival":
        y[:, 1] = torch.arange(count) % 2
    domain = torch.arange(count) % info.num_domains if info.num_domains else None
    return Client(client.id, Split(x, y, domain))
