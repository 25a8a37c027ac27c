"""A client and the splits of its samples."""

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
    """The samples of one split of a client: inputs, targets and, if known, domain ids.

    Attributes:
        x: inputs, ``(samples, *input_shape)``, a floating-point tensor.
        y: targets, ``(samples,)`` int64 class labels or ``(samples, ...)`` floating-point values.
        domain: ``(samples,)`` int64 domain ids, or ``None`` if domains are unknown.
        group: ``(samples,)`` int64 hashes of the samples' groups, equal for equal groups at all clients
            (:func:`perfed.tables.group_hashes.hash_groups`); ``None`` without groups.
        sound: whether the samples, or those from which they were derived, were checked
            (:func:`perfed.data.checks.check_samples`).

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

    # Facts, which a deferred split has without reading its samples ------------------------------------------

    @cached_property
    def known(self) -> SplitFacts:
        """The facts about the samples, without the number of events; they are computed once."""
        domains = None if self.domain is None else tuple(torch.bincount(self.domain).tolist())
        classes = None if self.has_values else tuple(torch.bincount(self.y).tolist())
        return SplitFacts(len(self), self.input_shape, self.target_shape, classes, domains)

    @cached_property
    def largest(self) -> float:
        """The largest absolute value of the inputs; not finite if an input is not."""
        low, high = torch.aminmax(self.x)
        return max(-float(low), float(high))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one target."""
        return tuple(self.y.shape[1:])

    @property
    def has_values(self) -> bool:
        """Whether targets are floating-point values rather than labels."""
        return torch.is_floating_point(self.y)

    @property
    def bytes(self) -> int:
        """The number of bytes of all inputs."""
        return self.x.numel() * self.x.element_size()

    @property
    def held_classes(self) -> Counts:
        """The number of samples of class 0, 1, ..., up to the last that occurs; empty if targets are values."""
        return self.known.classes or ()

    @property
    def has_domains(self) -> bool:
        """Whether the domain of every sample is known."""
        return self.domain is not None

    @property
    def held_domains(self) -> Counts | None:
        """The number of samples of domain 0, 1, ..., up to the last that occurs; ``None`` if domains are unknown."""
        return self.known.domains

    @property
    def events(self) -> int:
        """The number of samples with an event, for survival."""
        return int(self.y[:, 1].sum())

    def class_counts(self, classes: int) -> list[int]:
        """Return the number of samples of each of ``classes`` classes."""
        return pad_counts(self.held_classes, classes)

    def domain_counts(self, domains: int) -> list[int]:
        """Return the number of samples of each of ``domains`` domains; all are 0 if domains are unknown."""
        return pad_counts(self.held_domains or (), domains)

    def facts(self, survival: bool = False) -> SplitFacts:
        """Return the facts about the samples, with the number of events for ``survival``."""
        return replace(self.known, events=self.events) if survival else self.known

    def update_checksum(self, name: str, checksum: int) -> int:
        """Return ``checksum`` updated with the name of the split, its shape and its targets."""
        facts = f"{name} {(len(self), *self.input_shape)}".encode()
        return zlib.crc32(self.y.double().cpu().numpy().tobytes(), zlib.crc32(facts, checksum))

    # Samples -----------------------------------------------------------------------------------------------

    def loaded(self) -> Split:
        """Return the split with its samples in memory, which is the split itself."""
        return self

    @property
    def deferred(self) -> bool:
        """Whether the samples are read when they are used; see :mod:`perfed.data.lazy`."""
        return False

    def then(self, change: Callable[[Split], Split], facts: Callable[[SplitFacts], SplitFacts] | None = None) -> Split:
        """Return the split after a change of its samples, which a deferred split applies when it is read.

        Args:
            change: a function that can be pickled and returns equal samples for equal ones.
            facts: returns the facts after the change; if not given, a deferred split is read once to compute them.
        """
        changed = change(self)
        return changed if facts is None else self._keep_sound(changed, facts(self.known))

    def take(self, index: Tensor) -> Split:
        """Return the samples at the positions ``index`` (int64), in this order."""
        domain, group = (None if values is None else values[index] for values in (self.domain, self.group))
        return self._keep_sound(Split(self.x[index], self.y[index], domain, group))

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Split:
        """Return the samples on ``device``, with floating-point inputs and targets in ``dtype``."""
        y = self.y.to(device, dtype) if torch.is_floating_point(self.y) else self.y.to(device)
        split = Split(self.x.to(device, dtype), y, None if self.domain is None else self.domain.to(device), self.group)
        overflows = dtype.itemsize < self.x.dtype.itemsize and len(self) and not self.largest <= torch.finfo(dtype).max
        return split if overflows else self._keep_sound(split, vars(self).get("known"))

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Split:
        """Return the inputs with the targets that ``change`` computes, which have the same shape and kind."""
        return self._keep_sound(replace(self, y=change(self.y)), self.known if self.has_values else None)

    def with_groups(self, group: Tensor) -> Split:
        """Return the samples with the group hashes ``group``."""
        return self._keep_sound(replace(self, group=group), self.known)

    def with_facts(self, facts: SplitFacts) -> Split:
        """Return this split after setting its facts, which are then not computed any more."""
        vars(self)["known"] = facts
        return self

    def _keep_sound(self, derived: Split, facts: SplitFacts | None = None) -> Split:
        """Return ``derived`` with ``facts``, marked as sound if this split is sound and its targets are finite."""
        if self.sound and not (derived.has_values and not bool(torch.isfinite(derived.y).all())):
            vars(derived)["sound"] = True
        return derived if facts is None else derived.with_facts(facts)


class Preprocessing(Protocol):
    """The preprocessing that turns the rows of a site's table into inputs, as clients use it."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the site from which inputs are computed."""

    @property
    def constant(self) -> tuple[str, ...]:
        """The names of columns that are left out because all training rows have the same value."""

    @property
    def columns_there(self) -> frozenset[str]:
        """The names of the columns that are used, and of constant columns."""

    def with_domain_input(self) -> Preprocessing:
        """Return the preprocessing with the domain as a further input."""


@dataclass(frozen=True, repr=False)
class Client:
    """A client: an id, training data, and optionally validation and test data.

    Attributes:
        id: the id, which is unique in the federation; replies are aggregated in the sorted order of ids.
        train: the training data, with at least one sample.
        test: the test data; if it is ``None`` or empty, the client takes part in training but is not evaluated.
        validation: held-out training data for choices made at the client (early stopping, tuning).
        feature_names: one name per column for tabular inputs.
        table: the preprocessing of the site's table if its data come from one (:func:`perfed.tables.site.table_of`).
        held: if the first inputs are columns that clients share by name, a mask of those that the client has; the
            inputs of the others are 0. ``None`` otherwise.
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
        """The shape of one input, without the sample axis."""
        return self.train.input_shape

    def facts(self, survival: bool = False) -> ClientFacts:
        """Return the facts about the client that a server without its samples needs.

        :meth:`Federation.from_source` uses them.
        """
        splits = {name: split for name in SPLITS if (split := self.split(name)) is not None}
        checksum = 0
        for name, split in splits.items():
            checksum = split.update_checksum(f"{self.id} {name}", checksum)
        split_facts = {name: split.facts(survival) for name, split in splits.items()}
        return ClientFacts(self.id, split_facts, self.feature_names, checksum, self.held)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Client:
        """Return the client with its splits on ``device`` and in ``dtype`` (:meth:`Split.to`)."""
        splits = (self.train, self.test, self.validation)
        train, test, validation = (None if split is None else split.to(dtype, device) for split in splits)
        assert train is not None
        return replace(self, train=train, test=test, validation=validation)

    def original_name(self, name: str) -> str:
        """Return a class or a feature name as the client writes it."""
        return self.originals.get(name, name)

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Client:
        """Return the client with the targets that ``change`` computes, in every split."""
        splits = {name: split for name in SPLITS if (split := getattr(self, name)) is not None}
        return replace(self, **{name: split.with_targets(change) for name, split in splits.items()})

    def split(self, name: str) -> Split | None:
        """Return the split called ``name`` ("train", "validation" or "test"); ``None`` if it is absent or empty."""
        split: Split | None = getattr(self, name)
        return split if split is not None and len(split) > 0 else None


def sizes_of(clients: Sequence[Client]) -> str:
    """Return a text with the number of samples of each split that is not empty."""
    counts = {name: sum(len(split) for c in clients if (split := c.split(name)) is not None) for name in SPLITS}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} samples"
