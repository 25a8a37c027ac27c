"""Samples that are read when they are used, for federations larger than memory and clients on other machines.

A run starts with only the facts about the samples (:mod:`perfed.data.facts`). The samples of a split are read from a
source when they are needed, checked and compared with the facts, and then cached up to a number of bytes.
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
"""The number of bytes of samples that a federation caches by default."""


class SplitCache:
    """A thread-safe cache of the splits used last, up to a number of bytes; a copy for another process is empty.

    Args:
        limit: the largest number of bytes. A split that is larger than the limit is not cached.

    Attributes:
        bytes: the number of bytes in the cache.
        reads: the number of splits that had to be read.
    """

    def __init__(self, limit: int = HOLD) -> None:
        if limit < 0:
            raise PerfedError(f"hold is {limit} bytes; at least 0 is needed")
        self.limit, self.bytes, self.reads = limit, 0, 0
        self._splits: OrderedDict[Hashable, Split] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Split | None:
        """Return the split that is cached under ``key``; ``None`` if there is none."""
        with self._lock:
            if key in self._splits:
                self._splits.move_to_end(key)
            return self._splits.get(key)

    def keep(self, key: Hashable, split: Split) -> None:
        """Add a split that has just been read, and remove the least recently used ones if the limit is exceeded."""
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
    """The source of the samples of a federation's clients.

    Attributes:
        read: returns the samples of each client, given the ids of clients and the name of a split ("train",
            "validation" or "test"); labels are class numbers. Other processes can read only if it can be pickled.
        num_classes, survival: the attributes of the federation.
        cache: the cache of the splits used last.
    """

    read: Callable[[Sequence[str], str], Sequence[Split]]
    num_classes: int | None = None
    survival: bool = False
    cache: SplitCache = field(default_factory=SplitCache)

    def samples(self, clients: Sequence[ClientFacts], name: str) -> list[Split]:
        """Read and check the samples of the split ``name`` of each client.

        Raises:
            PerfedError: samples cannot be read, are not valid, or contradict the facts.
        """
        try:
            splits = self.read([client.id for client in clients], name)
        except PerfedError:
            raise
        except Exception as error:
            who = f"client{'s' if len(clients) > 1 else ''} {', '.join(repr(client.id) for client in clients[:3])}"
            raise PerfedError(f"{who}: {name} samples cannot be read: {reason_of(error)}") from error
        for client, split in zip(clients, splits, strict=True):
            self._check(client, name, split)
        return list(splits)

    def _check(self, client: ClientFacts, name: str, split: Split) -> None:
        where, facts = f"client '{client.id}': {name}", client.splits[name]
        if len(split) == 0:
            raise PerfedError(f"{where} samples: there are none, but the client's facts say {facts.samples}")
        check_samples(where, split, client.feature_names, self.num_classes, self.survival)
        _check_facts(where, split.facts(self.survival), facts)

    def client(self, facts: ClientFacts) -> Client:
        """Return the client with these facts, whose samples are read when they are used."""
        splits = {name: LazySplit(self, facts, name) for name in facts.splits}
        train, test, validation = (splits.get(name) for name in ("train", "test", "validation"))
        assert train is not None
        return Client(facts.id, train, test, validation, facts.feature_names, held=facts.held)


def _check_facts(where: str, actual_facts: SplitFacts, expected_facts: SplitFacts) -> None:
    for name in ("samples", "input_shape", "target_shape", "classes", "domains", "events"):
        actual, expected = getattr(actual_facts, name), getattr(expected_facts, name)
        if actual != expected and not (name == "events" and expected is None):
            raise PerfedError(f"{where} samples have {name} = {actual}, but the client's facts say {expected}")


_SLOTS = ("source", "client", "name", "changes", "known", "itemsize")


class LazySplit(Split):
    """A split whose facts are known and whose samples are read when they are used.

    Args:
        source: the source of the samples.
        client: the facts about the client in the source.
        name: the name of the split in the source.
        changes: functions that are applied to the samples after reading, in this order.
        facts: the facts about the samples after the changes (default: those in the source).
        itemsize: the number of bytes of one value of an input after the changes.
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
        split_facts = client.splits[name] if facts is None else facts
        for slot, value in zip(_SLOTS, (source, client, name, changes, split_facts, itemsize), strict=True):
            object.__setattr__(self, slot, value)  # a split is frozen

    __slots__ = _SLOTS  # to save memory, as there may be very many
    source: Source
    client: ClientFacts
    name: str
    changes: tuple[Change, ...]
    known: SplitFacts
    itemsize: int
    sound = True  # the samples are checked when they are read

    def __reduce__(self) -> tuple[Any, ...]:
        return LazySplit, tuple(getattr(self, slot) for slot in _SLOTS)

    def loaded(self) -> Split:
        """Return the split with its samples in memory.

        Raises:
            PerfedError: for the reasons of :meth:`Source.samples`.
        """
        return load_splits([self])[0]

    @property
    def key(self) -> Hashable:
        """The key of the samples in the cache."""
        return self.client.id, self.name, self.changes

    @property
    def deferred(self) -> bool:
        """Whether the samples are read when they are used, which is true."""
        return True

    @property
    def x(self) -> Tensor:
        """The inputs, which are read on access."""
        return self.loaded().x

    @property
    def y(self) -> Tensor:
        """The targets, which are read on access."""
        return self.loaded().y

    @property
    def domain(self) -> Tensor | None:
        """The domain ids, which are read on access."""
        return self.loaded().domain if self.has_domains else None

    # Facts -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.known.samples

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.known.input_shape

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one target."""
        return self.known.target_shape

    @property
    def has_values(self) -> bool:
        """Whether targets are floating-point values rather than labels."""
        return self.known.classes is None

    @property
    def bytes(self) -> int:
        """The number of bytes of all inputs in memory."""
        return len(self) * prod(self.input_shape) * self.itemsize

    @property
    def has_domains(self) -> bool:
        """Whether the domain of every sample is known."""
        return self.known.domains is not None

    @property
    def events(self) -> int:
        """The number of samples with an event, for survival; samples are read if the facts lack it."""
        return self.loaded().events if self.known.events is None else self.known.events

    def facts(self, survival: bool = False) -> SplitFacts:
        """Return the facts about the samples."""
        return self.known

    def update_checksum(self, name: str, checksum: int) -> int:
        """Return ``checksum`` updated with the name of the split, its facts and the client's mark in the source."""
        changes = [change for change in self.changes if not isinstance(change, _To)]
        return zlib.crc32(f"{name} {self.known} {self.client.mark} {changes}".encode(), checksum)

    # Samples -----------------------------------------------------------------------------------------------

    def then(self, change: Change, facts: Callable[[SplitFacts], SplitFacts] | None = None) -> Split:
        """Return the split with a further change; without ``facts``, the samples are read now to compute them."""
        new_facts = change(self.loaded()).facts(self.source.survival) if facts is None else facts(self.known)
        return LazySplit(self.source, self.client, self.name, (*self.changes, change), new_facts, self.itemsize)

    def take(self, index: Tensor) -> Split:
        """Return the samples at the positions ``index``, after reading them."""
        return self.loaded().take(index)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Split:
        """Return the split, whose samples will be on ``device`` and in ``dtype`` when they are read."""
        changes = (*self.changes, _to(dtype, str(device)))
        return LazySplit(self.source, self.client, self.name, changes, self.known, dtype.itemsize)

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Split:
        """Return the split with the targets that ``change`` computes when they are read."""
        return self.then(_Targets(change), lambda facts: facts)


@cache
def _to(dtype: torch.dtype, device: str) -> Change:
    """Return the conversion, one object for all clients."""
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


def load_splits(splits: Sequence[Split]) -> list[Split]:
    """Return ``splits`` with their samples in memory; a source reads all missing clients in one call.

    Raises:
        PerfedError: for the reasons of :meth:`Source.samples`.
    """
    loaded: dict[int, Split] = {}
    missing: dict[tuple[int, str], list[tuple[int, LazySplit]]] = {}
    for position, split in enumerate(splits):
        if not isinstance(split, LazySplit):
            loaded[position] = split
        elif (cached := split.source.cache.find(split.key)) is not None:
            loaded[position] = cached
        else:
            missing.setdefault((id(split.source), split.name), []).append((position, split))
    for group in missing.values():
        source, name = group[0][1].source, group[0][1].name
        read = source.samples([split.client for _, split in group], name)
        for (position, split), samples in zip(group, read, strict=True):
            for change in split.changes:
                samples = change(samples)
            source.cache.keep(split.key, samples)
            loaded[position] = samples
    return [loaded[position] for position in range(len(splits))]


def lazy_clients(
    read: Callable[[Sequence[str], str], Sequence[Split]],
    facts: Iterable[ClientFacts],
    schema: FederationSchema,
    hold: int = HOLD,
) -> tuple[Client, ...]:
    """Return the clients with these facts, whose samples are read when they are used.

    Args:
        read: see :class:`Source`; :func:`refuse_read` if samples stay at their sites.
        facts: the facts about each client, with samples counted by the classes of the schema.
        schema: the schema of the federation.
        hold: the number of bytes of samples that are cached in memory.
    """
    number = None if schema.classes is None else len(schema.classes)
    source = Source(read, number, schema.task == "survival", SplitCache(hold))
    return tuple(source.client(client_facts) for client_facts in facts)


def refuse_read(clients: Sequence[str], split: str) -> NoReturn:
    """Raise an error, since the samples stay at their site.

    Raises:
        PerfedError: always.
    """
    raise PerfedError(f"client '{clients[0]}': its data stay at the site")
