"""The server's side of an engine: which clients work together, their states, and their replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from perfed import tree
from perfed.data.client import SPLITS, Client
from perfed.data.federation import Federation
from perfed.engine.columns import filled
from perfed.engine.evaluate import Metrics, Outputs
from perfed.engine.executor import Background, ChunkResult, ChunkTask, Exchange, LocalExecutor, layouts_of
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import Scoring
from perfed.engine.secure_aggregation import ALWAYS, mean_loss, only_sums, with_loss
from perfed.engine.states import States
from perfed.errors import ClientsDiverged, PerfedError
from perfed.maths.sums import CountedSums, SingleReplies
from perfed.method.exchange import Each, Fold, Replies
from perfed.participation.invitation import Invitation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan
from perfed.tree import Tree

_COHORT_BYTES = 512 << 20
COHORT_CLIENTS = 4096  # beside tensors, a client takes about 20 kB while it works; more at once are no faster
_FAR = 1e3  # times the values of others: what no client of a healthy run sends
# Working values, received values, gradients and a moment: what a client's model takes while it trains.
_COPIES = 4


class Engine(ABC):
    """Keeps the clients' states, and lets chunks of clients run programs; where, says a subclass.

    Args:
        federation: inputs must already have the run's dtype.
        initialiser: method, model, seed.
        plan: how work is cut up.

    Attributes:
        states: committed state of each client that has one; a client without starts from its initial values.
        holder: holds committed and pending states in memory as far as ``plan.hold`` goes, and the others on disk.
        changed: clients whose committed state changed since the set was last cleared.
        scoring: what is measured of the clients' models; the engine's owner may say.
        arrived: seconds after which each reply of the latest exchange came, by id; empty where time is virtual.
        lost: clients whose replies could not be used in the latest exchange, by what happened to them.
        courses: loss of each local epoch in the latest exchange, by id, of the clients of which it is wanted.
        notes: what is to be told of the work, to which an engine adds.
    """

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        self.federation = federation
        self.initialiser = initialiser
        self.plan = plan
        self.info = initialiser.info(federation)
        self.background = Background.of(federation, self.info)
        self.clients = {client.id: client for client in federation}
        self.scoring = Scoring(scale=federation.target_scale)
        self.notes: list[str] = []
        self.states: dict[str, Tree] = {}
        self.holder = States(plan.hold, initialiser.device)
        self.changed: set[str] = set()
        self.arrived: dict[str, float] = {}
        self.lost: dict[str, list[str]] = {}
        self.courses: dict[str, list[float]] = {}
        self._pending: dict[str, Tree] = {}
        self._outlier = ""
        self._layouts = layouts_of(self.background.shapes, initialiser, plan)

    @abstractmethod
    def perform(self, works: Iterable[ChunkTask], invitation: Invitation | None = None) -> Iterator[ChunkResult]:
        """Let chunks of clients do their work; what was done, in the same order.

        ``invitation``: where time is real, which replies are enough; without one all are needed.
        """

    @abstractmethod
    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Cohorts of the clients' own models, personalised on copies, one at a time."""

    def run(
        self,
        exchange: Exchange,
        payload: Mapping[str, Any],
        ids: Sequence[str],
        reduce: Mapping[str, Fold] | None = None,
        outputs: list[Outputs] | None = None,
        invitation: Invitation | None = None,
        incoming: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _, reply: reply,
    ) -> tuple[Replies, Metrics]:
        """Run a program at ``ids``; their new states stay pending until :meth:`commit`.

        Entries named in ``reduce`` are folded in the sorted order of ids and dropped; their totals are in the replies.
        What the measured models say of every sample is appended to ``outputs``, if given. With an ``invitation``, as
        :meth:`perform` takes it, replies may be those of fewer clients. ``incoming`` gets each client's id and reply
        where it arrives, and returns what stands for it from there on.

        Returns:
            Replies in sorted id order, and each client's metrics if ``exchange.measure`` asks for them.
        """
        if reduce and self.initialiser.secure is not None:
            raise SingleReplies(f"{', '.join(map(repr, reduce))} of one client after the other")
        inbox, self.courses = ReplyCollector(ids, reduce or {}), {}
        losses: dict[str, Tensor] = {}
        metrics: Metrics = {}
        chunks = self._chunks(ids, by_id=bool(reduce))
        for done in self._sound(self._works(exchange, payload, chunks, outputs is not None), exchange, invitation):
            for row, client in enumerate(done.ids):
                inbox.add(client, partial(_arriving, done, row, exchange, incoming))
                losses[client] = done.losses[row]
            self._pending.update({client: self.holder.keep(state) for client, state in done.states.items()})
            self.courses |= done.courses
            metrics.update(done.metrics)
            if outputs is not None:
                outputs += done.outputs
        order = sorted(losses)
        found = torch.stack([losses[i] for i in order]) if order else torch.zeros(0)
        if self.initialiser.secure is not None and order:
            return self._summed(exchange, order, inbox.content(), found), metrics
        return Replies(order, self._by_holders(order, inbox.content()), found), metrics

    def _summed(self, exchange: Exchange, ids: Sequence[str], content: dict[str, Any], losses: Tensor) -> Replies:
        """Replies of which only sums are known, and the mean loss in the place of each."""
        counted = self._counted(exchange, content, losses)
        loss = mean_loss(*(counted.sum_term(term) for term in ALWAYS))
        return Replies(ids, only_sums(content, counted), loss.expand(len(ids)))

    def _counted(self, exchange: Exchange, content: Mapping[str, Any], losses: Tensor) -> CountedSums:
        """What sums up the replies of an exchange."""
        assert self.initialiser.secure is not None
        return CountedSums(with_loss(content, losses), self.initialiser.secure.numbers(len(self.clients)))

    def _by_holders(self, ids: Sequence[str], content: dict[str, Any]) -> dict[str, Any]:
        """Replies, of columns that clients share by name, in the words of those who hold them."""
        clients = [self.clients[client] for client in ids]
        if not clients or clients[0].held is None:
            return content
        uniform = "num_samples" not in content or getattr(self.initialiser.method, "average", "samples") == "uniform"
        return filled(content, clients, self.initialiser.chain(clients[0].input_shape), uniform)

    def evaluate(
        self,
        payload: Mapping[str, Any],
        ids: Sequence[str],
        split: str,
        round_: int,
        outputs: list[Outputs] | None = None,
        program: str = "personalise",
    ) -> Metrics:
        """Score each client's own model (``program``, then ``predict``) on ``split``; changes no state.

        What the models say of every sample is appended to ``outputs``, if given.
        """
        ids = [i for i in ids if self.clients[i].split(split) is not None]
        metrics: Metrics = {}
        exchange = Exchange(program, round_, -1, split)
        for done in self._sound(self._works(exchange, payload, self._chunks(ids), outputs is not None), exchange):
            metrics.update(done.metrics)
            if outputs is not None:
                outputs += done.outputs
        return metrics

    def commit(self, ids: Sequence[str]) -> None:
        """Make the pending states of ``ids`` their committed ones and drop all others."""
        used = self._pending.keys() & set(ids)
        self.states.update({client: self._pending[client] for client in sorted(used)})
        self.changed |= used
        self._pending.clear()

    def discard(self) -> None:
        """Drop all pending states."""
        self._pending.clear()

    def drain_notes(self) -> list[str]:
        """What there is to tell of how the work went since this was last asked."""
        notes = [*self.notes]
        self.notes.clear()
        return notes

    @contextmanager
    def working(self) -> Iterator[None]:
        """What the engine needs outside this process is there in this time, and let go of at its end."""
        yield

    def _sound(
        self, works: Iterable[ChunkTask], exchange: Exchange, invitation: Invitation | None = None
    ) -> Iterator[ChunkResult]:
        """What was done, all of it; then an error where anything of it is not finite.

        What one client sends spoils what all get next: so its reply is looked at before anybody learns from it.

        Raises:
            ClientsDiverged: names all clients of the exchange whose own loss or reply is not finite.
        """
        diverged: dict[str, str] = {}
        extents: dict[str, float] = {}
        for done in self.perform(works, invitation):
            if done.diverged:
                diverged |= done.diverged
                continue
            sizes = _extents(done)
            diverged |= {i: _unsound(done, row) for row, (i, size) in enumerate(sizes.items()) if not isfinite(size)}
            extents |= sizes
            yield done
        if diverged:
            found = {client: diverged[client] for client in sorted(diverged)}
            raise ClientsDiverged(exchange.place, found, self._outlier)
        if any(extents.values()):
            self._outlier = _outlier(extents)

    # Parts -------------------------------------------------------------------------------------------------

    def _works(
        self, exchange: Exchange, payload: Mapping[str, Any], chunks: Sequence[Sequence[Client]], keeps: bool
    ) -> Iterator[ChunkTask]:
        shared = {name: value for name, value in payload.items() if not isinstance(value, Each)}
        rows = {name: value.rows for name, value in payload.items() if isinstance(value, Each)}
        for chunk in chunks:
            ids = tuple(client.id for client in chunk)
            own = {i: {name: of[i] for name, of in rows.items()} for i in ids} if rows else {}
            states = {i: state for i in ids if (state := self._pending.get(i, self.states.get(i))) is not None}
            yield ChunkTask(exchange, ids, shared, own, states, self.scoring, keeps)

    def _chunks(self, ids: Sequence[str], *, by_id: bool = False) -> list[list[Client]]:
        """Clients of one architecture cut into chunks, those with more data first or in the order of ids."""
        groups: dict[str, list[Client]] = {}
        for client_id in sorted(ids):
            client = self.clients[client_id]
            groups.setdefault(self._layouts[client.input_shape].label, []).append(client)
        chunks = []
        for members in groups.values():
            if not by_id:
                members.sort(key=lambda client: (-len(client.train), client.id))
            size = self._size(members)
            chunks += [members[i : i + size] for i in range(0, len(members), size)]
        return sorted(chunks, key=lambda chunk: chunk[0].id) if by_id else chunks

    def _size(self, members: Sequence[Client]) -> int:
        """Return how many of the clients are one chunk; engines of other places say it in their own way."""
        return {"sequential": 1, "stacked": self.plan.chunk}.get(self.plan.engine, 0) or self._fitting(members)

    def _fitting(self, members: Sequence[Client]) -> int:
        """How many clients a cohort may have, by the memory of their samples and models; at least 1, at most 4096."""
        model = _COPIES * self._layouts[members[0].input_shape].size
        splits = [s for c in members for name in SPLITS if (s := c.split(name)) is not None]
        data = sum(s.bytes for s in splits) // len(members)
        return max(1, min(COHORT_CLIENTS, _COHORT_BYTES // max(1, model + data)))


def _stacked(done: ChunkResult) -> dict[str, Any]:
    """What the replies hold but what is made client by client."""
    return {name: value for name, value in done.content.items() if isinstance(value, Tensor | Mapping)}


def _extents(done: ChunkResult) -> dict[str, float]:
    """The largest absolute value in each client's reply, by id; NaN or infinite where one is not finite."""
    largest = torch.zeros(len(done.ids), dtype=torch.float64)
    for _, value in tree.iterate_leaves(_stacked(done)):
        if value.is_floating_point() and value.numel():
            flat = value.reshape(len(done.ids), -1)
            size = torch.maximum(flat.amax(1), -flat.amin(1))  # a tenth of what a norm or isfinite takes
            largest = torch.maximum(largest, size.double().cpu())
    return dict(zip(done.ids, largest.tolist(), strict=True))


def _unsound(done: ChunkResult, row: int) -> str:
    """What is wrong with a reply that holds a value which is not finite."""
    entry = next(name for name, value in tree.iterate_leaves(_stacked(done)) if not torch.isfinite(value[row]).all())
    return _told(done.ids[row], entry)


def _outlier(extents: Mapping[str, float]) -> str:
    """What to say of the reply whose values are by far the largest; nothing where there is none."""
    (first, largest), *others = sorted(extents.items(), key=lambda pair: -pair[1])[:2]
    if not others or largest < _FAR * others[0][1]:
        return ""
    return f"; before, client '{first}' sent values up to {largest:.1e}, the others up to {others[0][1]:.1e}"


def _arriving(
    done: ChunkResult, row: int, exchange: Exchange, incoming: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """What stands for one client's reply."""
    return incoming(done.ids[row], _made(done, row, exchange))


def _made(done: ChunkResult, row: int, exchange: Exchange) -> dict[str, Any]:
    """One client's reply, with what is made client by client.

    Raises:
        ClientsDiverged: something of that is not finite.
    """
    reply, client = done.reply(row), done.ids[row]
    for name, value in done.content.items():
        if not isinstance(value, Tensor | Mapping):
            for _, tensor in tree.iterate_leaves({name: reply[name]}):
                if not torch.isfinite(tensor).all():
                    raise ClientsDiverged(exchange.place, {client: _told(client, name)})
    return reply


def _told(client: str, entry: str) -> str:
    return f"the reply of client '{client}' holds values that are not finite (entry '{entry}')"


class InProcessEngine(Engine):
    """All clients in this process, clients of one architecture stacked in chunks, one chunk after the other."""

    def __init__(self, federation: Federation, initialiser: Initialiser, plan: Plan) -> None:
        super().__init__(federation, initialiser, plan)
        self.executor = LocalExecutor(federation, self.background, initialiser, plan)

    def perform(self, works: Iterable[ChunkTask], invitation: Invitation | None = None) -> Iterator[ChunkResult]:
        """One chunk after the other."""
        return map(self.executor.attempt, works)

    def cohorts(self, ids: Sequence[str], payload: Mapping[str, Any], round_: int = 0) -> Iterator[Cohort]:
        """Cohorts of the clients' own models, personalised on copies, one at a time."""
        for work in self._works(Exchange("personalise", round_, -1), payload, self._chunks(ids), keeps=False):
            yield self.executor.worked(work)[0]


class ReplyCollector:
    """The replies of one exchange; what ``folds`` names is folded in the sorted order of ids and dropped.

    A reply is handed in as a function that makes it. It is called once all clients before it were folded (without
    folds at once), and what is folded is dropped before the next call: one client's at a time exists.

    Args:
        ids: of all clients that will reply.
        folds: by name of the entry.

    Attributes:
        rows: what is left of each reply, by client id.
        totals: result of each fold, by name; ``None`` before the first reply.
    """

    def __init__(self, ids: Sequence[str], folds: Mapping[str, Fold]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.totals: dict[str, Any] = dict.fromkeys(folds)
        self._folds = folds
        self._next = sorted(ids, reverse=True)
        self._waiting: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(self, client: str, reply: Callable[[], dict[str, Any]]) -> None:
        """Hand in the reply of ``client``.

        Raises:
            PerfedError: it lacks an entry that is to be folded.
        """
        if not self._folds:
            self.rows[client] = reply()
            return
        self._waiting[client] = reply
        while self._next and self._next[-1] in self._waiting:
            first = self._next.pop()
            self.rows[first] = self._folded(self._waiting.pop(first)())

    def content(self) -> dict[str, Any]:
        """All replies stacked in the sorted order of ids, and the totals; who has not replied is left out."""
        for client in sorted(self._waiting):
            self.rows[client] = self._folded(self._waiting.pop(client)())
        order = sorted(self.rows)
        stacked = tree.stack([self.rows[i] for i in order]) if order else {}
        return {**stacked, **self.totals}

    def _folded(self, reply: dict[str, Any]) -> dict[str, Any]:
        for name, fold in self._folds.items():
            if name not in reply:
                raise PerfedError(f"the replies hold no '{name}' to fold; they hold: {', '.join(reply) or 'nothing'}")
            self.totals[name] = fold(self.totals[name], reply)
        return {name: value for name, value in reply.items() if name not in self._folds}
