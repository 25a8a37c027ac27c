"""What one client holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from perfed.data.column import Column
from perfed.data.facts import SPLITS as SPLITS
from perfed.data.facts import ClientFacts, Counts, SplitFacts, pad_counts
from perfed.data.names import compose_text, find_originals


@dataclass(frozen=True, repr=False)
class Split:
    """Samples of one client: inputs, targets and, where known, domain ids.

    Attributes:
        x: inputs, ``(samples, *input_shape)``, a floating-point tensor.
        y: targets, ``(samples,)`` int64 class labels or ``(samples, ...)`` floating-point values.
        domain: ``(samples,)`` int64 domain ids, or ``None`` where domains are unknown.
        group: ``(samples,)`` int64 hashes of the samples' groups, equal for equal groups at all clients
            (:func:`perfed.tables.group_hashes.hash_groups`); ``None`` without groups.
        sound: whether the samples were checked (:func:`perfed.data.checks.check_samples`), or made of such.

    Example:
        >>> split = Split(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> len(split), split.take(torch.tensor([2, 0])).y.tolist()
        (3, [1, 0])
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None
    group: Tensor | None = None
    sound: bool = field(default=False, init=False, compare=False)

    def __len__(self) -> int:
        return self.x.shape[0]

    def __repr__(self) -> str:
        return f"<Split: {len(self)} samples of shape {self.input_shape}>"

    # Facts, which a deferred split knows without reading -----------------------------------------------------

    @cached_property
    def known(self) -> SplitFacts:
        """All that is known of the samples without them, counted once; of survival without events."""
        domains = None if self.domain is None else tuple(torch.bincount(self.domain).tolist())
        classes = None if self.has_values else tuple(torch.bincount(self.y).tolist())
        return SplitFacts(len(self), self.input_shape, self.target_shape, classes, domains)

    @cached_property
    def largest(self) -> float:
        """Largest absolute value of the inputs; not finite where one of them is not."""
        low, high = torch.aminmax(self.x)
        return max(-float(low), float(high))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one target."""
        return tuple(self.y.shape[1:])

    @property
    def has_values(self) -> bool:
        """Whether targets are floating-point values, not labels."""
        return torch.is_floating_point(self.y)

    @property
    def bytes(self) -> int:
        """Bytes of all inputs together."""
        return self.x.numel() * self.x.element_size()

    @property
    def held_classes(self) -> Counts:
        """Samples of class 0, 1, ..., up to the last that occurs; nothing where targets are values."""
        return self.known.classes or ()

    @property
    def has_domains(self) -> bool:
        """Whether the domain of every sample is known."""
        return self.domain is not None

    @property
    def held_domains(self) -> Counts | None:
        """Samples of domain 0, 1, ..., up to the last that occurs; ``None`` where domains are unknown."""
        return self.known.domains

    @property
    def events(self) -> int:
        """Of survival: samples with an event."""
        return int(self.y[:, 1].sum())

    def class_counts(self, classes: int) -> list[int]:
        """Samples of each of ``classes`` classes."""
        return pad_counts(self.held_classes, classes)

    def domain_counts(self, domains: int) -> list[int]:
        """Samples of each of ``domains`` domains; all 0 where they are unknown."""
        return pad_counts(self.held_domains or (), domains)

    def facts(self, survival: bool = False) -> SplitFacts:
        """All that is known of the samples without them."""
        return replace(self.known, events=self.events) if survival else self.known

    def mark(self, where: str, before: int) -> int:
        """``before``, changed by ``where`` the samples are, their shape and their targets."""
        facts = f"{where} {(len(self), *self.input_shape)}".encode()
        return zlib.crc32(self.y.double().cpu().numpy().tobytes(), zlib.crc32(facts, before))

    # Samples -----------------------------------------------------------------------------------------------

    def loaded(self) -> Split:
        """The split with its samples in memory: itself."""
        return self

    @property
    def deferred(self) -> bool:
        """Whether the samples are read when they are used; see :mod:`perfed.data.lazy`."""
        return False

    def then(self, change: Callable[[Split], Split], facts: Callable[[SplitFacts], SplitFacts] | None = None) -> Split:
        """What ``change`` makes of the samples; of a deferred split when they are read.

        Args:
            change: can be pickled, and gives equal samples for equal ones.
            facts: what becomes of them, where that is known; otherwise a deferred split is read once for them.
        """
        made = change(self)
        return made if facts is None else self._vouch(made, facts(self.known))

    def take(self, index: Tensor) -> Split:
        """The samples at ``index`` (int64, in that order)."""
        domain, group = (None if known is None else known[index] for known in (self.domain, self.group))
        return self._vouch(Split(self.x[index], self.y[index], domain, group))

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Split:
        """The same samples on ``device``, with floating-point inputs and targets in ``dtype``."""
        y = self.y.to(device, dtype) if torch.is_floating_point(self.y) else self.y.to(device)
        made = Split(self.x.to(device, dtype), y, None if self.domain is None else self.domain.to(device), self.group)
        narrow = dtype.itemsize < self.x.dtype.itemsize and len(self) and not self.largest <= torch.finfo(dtype).max
        return made if narrow else self._vouch(made, vars(self).get("known"))

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Split:
        """The same inputs with other targets of the same shape and kind, made of those that there are."""
        return self._vouch(replace(self, y=change(self.y)), self.known if self.has_values else None)

    def with_groups(self, group: Tensor) -> Split:
        """Return the samples with the group hashes ``group``."""
        return self._vouch(replace(self, group=group), self.known)

    def with_facts(self, facts: SplitFacts) -> Split:
        """The same samples, which need not be counted any more."""
        vars(self)["known"] = facts
        return self

    def _vouch(self, made: Split, facts: SplitFacts | None = None) -> Split:
        """``made`` of these samples in a way that keeps them sound, with what is known of it."""
        if self.sound and not (made.has_values and not bool(torch.isfinite(made.y).all())):
            vars(made)["sound"] = True
        return made if facts is None else made.with_facts(facts)


class Preprocessing(Protocol):
    """The preprocessing that turns the rows of a site's table into inputs, as far as clients need to know it."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the site that enter."""

    @property
    def constant(self) -> tuple[str, ...]:
        """The names of columns that do not enter because all training rows hold the same value."""

    @property
    def columns_there(self) -> frozenset[str]:
        """The names of the columns that enter or would if they were not constant."""

    def with_domain_input(self) -> Preprocessing:
        """Return the preprocessing with the domain as a further input."""


@dataclass(frozen=True, repr=False)
class Client:
    """One client: an id, its training data, and optionally validation and test data.

    Attributes:
        id: unique within the federation; replies are aggregated in the sorted order of ids.
        train: at least one sample.
        test: may be ``None`` or empty: the client then takes part but is not evaluated.
        validation: held-out training data for choices made at the client (early stopping, tuning).
        feature_names: one name per column for tabular inputs.
        table: the preprocessing of the site's table if its data come from one (:func:`perfed.tables.site.table_of`).
        held: where the first inputs mean the same at all clients, by the names of columns, which of these the client
            has; those that it lacks are 0. ``None`` otherwise.
        originals: the client's spelling of each class and feature name whose composed form
            (:func:`perfed.data.names.compose_text`) differs from it, by the composed form.

    Example:
        >>> split = Split(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> client = Client("clinic", split, test=split)
        >>> client.input_shape, client.split("validation")
        ((3,), None)
    """

    id: str
    train: Split
    test: Split | None = None
    validation: Split | None = None
    feature_names: tuple[str, ...] | None = None
    table: Preprocessing | None = None
    held: tuple[bool, ...] | None = None
    originals: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.feature_names is not None and (originals := find_originals(self.feature_names)):
            object.__setattr__(self, "originals", {**self.originals, **originals})
            object.__setattr__(self, "feature_names", tuple(map(compose_text, self.feature_names)))

    def __repr__(self) -> str:
        return f"<Client '{self.id}': {sizes_of([self])}, inputs of shape {self.input_shape}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return self.train.input_shape

    def facts(self, survival: bool = False) -> ClientFacts:
        """All that a server may know of the client without its samples; see :meth:`Federation.from_source`."""
        splits = {name: split for name in SPLITS if (split := self.split(name)) is not None}
        mark = 0
        for name, split in splits.items():
            mark = split.mark(f"{self.id} {name}", mark)
        known = {name: split.facts(survival) for name, split in splits.items()}
        return ClientFacts(self.id, known, self.feature_names, mark, self.held)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Client:
        """The same client, its splits :meth:`Split.to` there."""
        splits = (self.train, self.test, self.validation)
        train, test, validation = (None if split is None else split.to(dtype, device) for split in splits)
        assert train is not None
        return replace(self, train=train, test=test, validation=validation)

    def original_name(self, name: str) -> str:
        """Return a class or a feature name as the client writes it."""
        return self.originals.get(name, name)

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Client:
        """The same client with other targets in every split, made of those that it has."""
        splits = {name: split for name in SPLITS if (split := getattr(self, name)) is not None}
        return replace(self, **{name: split.with_targets(change) for name, split in splits.items()})

    def split(self, name: str) -> Split | None:
        """The split called ``name`` ("train", "validation" or "test"); ``None`` if absent or empty."""
        found: Split | None = getattr(self, name)
        return found if found is not None and len(found) > 0 else None


def sizes_of(clients: Sequence[Client]) -> str:
    """How many samples there are of each split that occurs."""
    counts = {name: sum(len(split) for c in clients if (split := c.split(name)) is not None) for name in SPLITS}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} samples"
