"""Samples that are read when they are used: federations larger than memory, and clients whose data are elsewhere.

What a run must know beforehand are facts (:mod:`perfed.data.facts`). Samples come from a source, one split of one
client at a time, are checked and compared with the facts then, and are held as long as there is room.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from perfed.data.checks import check_samples
from perfed.data.client import Client, Split
from perfed.data.facts import ClientFacts, SplitFacts
from perfed.data.federation_schema import FederationSchema
from perfed.data.reading import reason_of
from perfed.errors import PerfedError

HOLD = 256 << 20
"""Bytes of samples that a federation holds by default."""


class SplitCache:
    """The splits used last, up to a number of bytes; threads may share it, and a copy for another process is empty.

    Args:
        limit: bytes. A split that alone is larger is handed out and not held.

    Attributes:
        bytes: of what is held.
        reads: how often a split was not there and had to be read.
    """

    def __init__(self, limit: int = HOLD) -> None:
        if limit < 0:
            raise PerfedError(f"hold is {limit} bytes; at least 0 is needed")
        self.limit, self.bytes, self.reads = limit, 0, 0
        self._splits: OrderedDict[Hashable, Split] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Split | None:
        """What is held under ``key``."""
        with self._lock:
            if key in self._splits:
                self._splits.move_to_end(key)
            return self._splits.get(key)

    def keep(self, key: Hashable, split: Split) -> None:
        """Hold ``split``, which has just been read, in place of those that were not used for longest."""
        size = _size(split)
        with self._lock:
            self.reads += 1
            if size <= self.limit and key not in self._splits:
                self._splits[key] = split
                self.bytes += size
                while self.bytes > self.limit:
                    self.bytes -= _size(self._splits.popitem(last=False)[1])

    def __reduce__(self) -> tuple[type[SplitCache], tuple[int]]:
        return SplitCache, (self.limit,)


def _size(split: Split) -> int:
    return sum(t.numel() * t.element_size() for t in (split.x, split.y, split.domain) if t is not None)


Change = Callable[[Split], Split]


@dataclass(frozen=True, eq=False)
class Source:
    """Where the samples of a federation's clients come from.

    Attributes:
        read: from the ids of clients and a split's name ("train", "validation" or "test") to the samples of each;
            labels are class numbers. Can be pickled where other processes are to read.
        num_classes, survival: of the federation.
        held: what was read last.
    """

    read: Callable[[Sequence[str], str], Sequence[Split]]
    num_classes: int | None = None
    survival: bool = False
    held: SplitCache = field(default_factory=SplitCache)

    def samples(self, clients: Sequence[ClientFacts], name: str) -> list[Split]:
        """The samples of split ``name`` of each client, checked.

        Raises:
            PerfedError: they cannot be read, no model can be trained on them, or they are not what the facts say.
        """
        try:
            found = self.read([client.id for client in clients], name)
        except PerfedError:
            raise
        except Exception as error:
            who = f"client{'s' if len(clients) > 1 else ''} {', '.join(repr(client.id) for client in clients[:3])}"
            raise PerfedError(f"{who}: {name} samples cannot be read: {reason_of(error)}") from error
        for client, split in zip(clients, found, strict=True):
            self._check(client, name, split)
        return list(found)

    def _check(self, client: ClientFacts, name: str, split: Split) -> None:
        where, said = f"client '{client.id}': {name}", client.splits[name]
        if len(split) == 0:
            raise PerfedError(f"{where} samples: there are none, but the client's facts say {said.samples}")
        check_samples(where, split, client.feature_names, self.num_classes, self.survival)
        _check_facts(where, split.facts(self.survival), said)

    def client(self, facts: ClientFacts) -> Client:
        """The client that ``facts`` are of, its samples unread."""
        splits = {name: LazySplit(self, facts, name) for name in facts.splits}
        train, test, validation = (splits.get(name) for name in ("train", "test", "validation"))
        assert train is not None
        return Client(facts.id, train, test, validation, facts.feature_names, held=facts.held)


def _check_facts(where: str, found: SplitFacts, said: SplitFacts) -> None:
    for name in ("samples", "input_shape", "target_shape", "classes", "domains", "events"):
        there, known = getattr(found, name), getattr(said, name)
        if there != known and not (name == "events" and known is None):
            raise PerfedError(f"{where} samples have {name} = {there}, but the client's facts say {known}")


_SLOTS = ("source", "client", "name", "changes", "known", "itemsize")


class LazySplit(Split):
    """Samples of one client that are read when they are used; their facts are known.

    Args:
        source: where they come from.
        client: facts of the client as the source has it.
        name: of the split there.
        changes: what is made of the samples after reading, in order.
        facts: of the result (default: as they are read).
        itemsize: bytes of one input number in the result.
    """

    def __init__(
        self,
        source: Source,
        client: ClientFacts,
        name: str,
        changes: tuple[Change, ...] = (),
        facts: SplitFacts | None = None,
        itemsize: int = 4,
    ) -> None:
        known = client.splits[name] if facts is None else facts
        for slot, value in zip(_SLOTS, (source, client, name, changes, known, itemsize), strict=True):
            object.__setattr__(self, slot, value)  # a split is frozen

    __slots__ = _SLOTS  # there may be very many
    source: Source
    client: ClientFacts
    name: str
    changes: tuple[Change, ...]
    known: SplitFacts
    itemsize: int
    sound = True  # checked when they are read

    def __reduce__(self) -> tuple[Any, ...]:
        return LazySplit, tuple(getattr(self, slot) for slot in _SLOTS)

    def loaded(self) -> Split:
        """The samples in memory.

        Raises:
            PerfedError: as :meth:`Source.samples`.
        """
        return loaded([self])[0]

    @property
    def key(self) -> Hashable:
        """Under which the samples are held."""
        return self.client.id, self.name, self.changes

    @property
    def deferred(self) -> bool:
        """Yes: they are read when used."""
        return True

    @property
    def x(self) -> Tensor:
        """Inputs, which are read now."""
        return self.loaded().x

    @property
    def y(self) -> Tensor:
        """Targets, which are read now."""
        return self.loaded().y

    @property
    def domain(self) -> Tensor | None:
        """Domain ids, which are read now."""
        return self.loaded().domain if self.has_domains else None

    # Facts -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.known.samples

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.known.input_shape

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one target."""
        return self.known.target_shape

    @property
    def has_values(self) -> bool:
        """Whether targets are floating-point values, not labels."""
        return self.known.classes is None

    @property
    def bytes(self) -> int:
        """Of the inputs, once they are read."""
        return len(self) * prod(self.input_shape) * self.itemsize

    @property
    def has_domains(self) -> bool:
        """Whether the domain of every sample is known."""
        return self.known.domains is not None

    @property
    def events(self) -> int:
        """Of survival: samples with an event; read where the facts do not say."""
        return self.loaded().events if self.known.events is None else self.known.events

    def facts(self, survival: bool = False) -> SplitFacts:
        """All that is known of the samples without them."""
        return self.known

    def mark(self, where: str, before: int) -> int:
        """``before``, changed by the facts and by the mark that the source gives the client."""
        made = [change for change in self.changes if not isinstance(change, _To)]
        return zlib.crc32(f"{where} {self.known} {self.client.mark} {made}".encode(), before)

    # Samples -----------------------------------------------------------------------------------------------

    def then(self, change: Change, facts: Callable[[SplitFacts], SplitFacts] | None = None) -> Split:
        """What ``change`` makes of the samples when they are read; they are read now where ``facts`` are not given."""
        known = change(self.loaded()).facts(self.source.survival) if facts is None else facts(self.known)
        return LazySplit(self.source, self.client, self.name, (*self.changes, change), known, self.itemsize)

    def take(self, index: Tensor) -> Split:
        """The samples at ``index``, read."""
        return self.loaded().take(index)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Split:
        """The same samples on ``device`` in ``dtype``, once they are read."""
        changes = (*self.changes, _to(dtype, str(device)))
        return LazySplit(self.source, self.client, self.name, changes, self.known, dtype.itemsize)

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Split:
        """The same inputs with other targets of the same shape and kind, made when they are read."""
        return self.then(_Targets(change), lambda facts: facts)


@cache
def _to(dtype: torch.dtype, device: str) -> Change:
    """One for all clients."""
    return _To(dtype, device)


@dataclass(frozen=True)
class _To:
    dtype: torch.dtype
    device: str

    def __call__(self, split: Split) -> Split:
        return split.to(self.dtype, self.device)


@dataclass(frozen=True)
class _Targets:
    change: Callable[[Tensor], Tensor]

    def __call__(self, split: Split) -> Split:
        return split.with_targets(self.change)


def loaded(splits: Sequence[Split]) -> list[Split]:
    """``splits`` with their samples in memory; what one source is to read of several clients it reads at once.

    Raises:
        PerfedError: as :meth:`Source.samples`.
    """
    found: dict[int, Split] = {}
    missing: dict[tuple[int, str], list[tuple[int, LazySplit]]] = {}
    for at, split in enumerate(splits):
        if not isinstance(split, LazySplit):
            found[at] = split
        elif (held := split.source.held.find(split.key)) is not None:
            found[at] = held
        else:
            missing.setdefault((id(split.source), split.name), []).append((at, split))
    for group in missing.values():
        source, name = group[0][1].source, group[0][1].name
        read = source.samples([split.client for _, split in group], name)
        for (at, split), samples in zip(group, read, strict=True):
            for change in split.changes:
                samples = change(samples)
            source.held.keep(split.key, samples)
            found[at] = samples
    return [found[at] for at in range(len(splits))]


def lazy_clients(
    read: Callable[[Sequence[str], str], Sequence[Split]],
    facts: Iterable[ClientFacts],
    schema: FederationSchema,
    hold: int = HOLD,
) -> tuple[Client, ...]:
    """Make the clients that ``facts`` are of, their samples unread.

    Args:
        read: see :class:`Source`; :func:`refuse_read` where samples stay at their sites.
        facts: labels counted by the schema's classes.
        schema: of the federation.
        hold: bytes of samples that are kept in memory.
    """
    number = None if schema.classes is None else len(schema.classes)
    source = Source(read, number, schema.task == "survival", SplitCache(hold))
    return tuple(source.client(known) for known in facts)


def refuse_read(clients: Sequence[str], split: str) -> NoReturn:
    """Read nothing: the samples are at a site of their own.

    Raises:
        PerfedError: always.
    """
    raise PerfedError(f"client '{clients[0]}': its data stay at the site")
