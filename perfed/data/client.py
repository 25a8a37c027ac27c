"""What one client holds, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perfed.data.inputs import as_tensor, check_names, column_names, domain_ids
from perfed.data.tables.site import SiteTable
from perfed.errors import PerfedError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, repr=False)
class Split:
    """Samples of one client: inputs, targets and, where known, domain ids.

    Attributes:
        x: inputs, ``(samples, *input_shape)``, a floating-point tensor.
        y: targets, ``(samples,)`` int64 class labels or ``(samples, ...)`` floating-point values.
        domain: ``(samples,)`` int64 domain ids, or ``None`` where domains are unknown.

    Example:
        >>> split = Split(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> len(split), split.take(torch.tensor([2, 0])).y.tolist()
        (3, [1, 0])
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    def __repr__(self) -> str:
        return f"<Split: {len(self)} samples of shape {tuple(self.x.shape[1:])}>"

    def take(self, index: Tensor) -> Split:
        """The samples at ``index`` (int64, in that order)."""
        return Split(self.x[index], self.y[index], None if self.domain is None else self.domain[index])

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Split:
        """The same samples on ``device``, with floating-point inputs and targets in ``dtype``."""
        y = self.y.to(device, dtype) if torch.is_floating_point(self.y) else self.y.to(device)
        return Split(self.x.to(device, dtype), y, None if self.domain is None else self.domain.to(device))


@dataclass(frozen=True, repr=False)
class Client:
    """One client: an id, its training data, and optionally validation and test data.

    Attributes:
        id: unique within the federation; replies are aggregated in the sorted order of ids.
        train: at least one sample.
        test: may be ``None`` or empty: the client then takes part but is not evaluated.
        validation: held-out training data for choices made at the client (early stopping, tuning).
        feature_names: one name per column for tabular inputs.
        table: what turns the site's own table into inputs, where they were made so (:meth:`Federation.from_frames`).

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
    table: SiteTable | None = None

    def __repr__(self) -> str:
        return f"<Client '{self.id}': {sizes_of([self])}, inputs of shape {self.input_shape}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return tuple(self.train.x.shape[1:])

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Client:
        """The same client, its splits :meth:`Split.to` there."""
        return replace(self, **{n: s.to(dtype, device) for n in SPLITS if (s := getattr(self, n)) is not None})

    def with_targets(self, change: Callable[[Tensor], Tensor]) -> Client:
        """The same client with other targets in every split, made of those that it has."""
        splits = {name: split for name in SPLITS if (split := getattr(self, name)) is not None}
        return replace(self, **{name: replace(split, y=change(split.y)) for name, split in splits.items()})

    def split(self, name: str) -> Split | None:
        """The split called ``name`` ("train", "validation" or "test"); ``None`` if absent or empty."""
        found: Split | None = getattr(self, name)
        return found if found is not None and len(found) > 0 else None


def sizes_of(clients: Sequence[Client]) -> str:
    """How many samples there are of each split that occurs."""
    counts = {name: sum(len(split) for c in clients if (split := c.split(name)) is not None) for name in SPLITS}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} samples"


def new_inputs(client: Client, x: Any, domain: Any, num_domains: int) -> tuple[Tensor, Tensor | None]:
    """Inputs and domain ids for a client's model, checked as its own data are.

    Raises:
        PerfedError: another shape or other columns, values that are not finite, domains that there are not.
    """
    where, columns = f"client '{client.id}'", column_names(x)
    if columns is not None and client.feature_names is not None:
        check_names(where, "x", columns, "its training data", client.feature_names)
    inputs = as_tensor(x, "x", client.id)
    if tuple(inputs.shape[1:]) != client.input_shape:
        raise PerfedError(f"{where} has inputs of shape {client.input_shape}, not {tuple(inputs.shape[1:])}")
    _check_finite(client, "new", inputs)
    if domain is None:
        return inputs, None
    ids = domain_ids(as_tensor(domain, "domain", client.id))
    if ids.shape != (len(inputs),):
        raise PerfedError(f"{where}: new inputs and domain ids must have the same length")
    check_ids(where, "new", ids, num_domains)
    return inputs, ids


def check_client(client: Client, num_classes: int | None, survival: bool = False) -> None:
    """Refuse a client's data that no model can be trained or tested on.

    Raises:
        PerfedError: no training data, lengths, shapes or types that do not fit, labels that there are not, values that
            are not finite; names the client and the split.
    """
    where = f"client '{client.id}'"
    if len(client.train) == 0:
        raise PerfedError(f"{where} has no training data; every client needs at least one sample")
    for name in SPLITS:
        split = client.split(name)
        if split is None:
            continue
        if split.y.shape[0] != len(split) or (split.domain is not None and split.domain.shape != (len(split),)):
            raise PerfedError(f"{where}: {name} inputs, targets and domain ids must have the same length")
        if torch.is_floating_point(split.y) != torch.is_floating_point(client.train.y):
            raise PerfedError(f"{where}: {name} targets are {split.y.dtype}, training targets {client.train.y.dtype}")
        if 0 in split.x.shape[1:]:
            raise PerfedError(f"{where}: {name} inputs have shape {tuple(split.x.shape[1:])}, so no features at all")
        if tuple(split.x.shape[1:]) != client.input_shape:
            raise PerfedError(
                f"{where}: {name} inputs have shape {tuple(split.x.shape[1:])}, training inputs {client.input_shape}"
            )
        _check_finite(client, name, split.x)
        if torch.is_floating_point(split.y) and not bool(torch.isfinite(split.y).all()):
            raise PerfedError(f"{where}: {name} targets hold NaN or infinity; targets must be finite")
        if num_classes is not None:
            if split.y.ndim != 1:
                shape = tuple(split.y.shape)
                raise PerfedError(f"{where}: {name} labels have shape {shape}; ({len(split)},) is needed")
            low, high = int(split.y.min()), int(split.y.max())
            if low < 0 or high >= num_classes:
                bad = low if low < 0 else high
                raise PerfedError(f"{where}: {name} label {bad} is outside the classes 0..{num_classes - 1}")
    if client.feature_names is not None and (len(client.feature_names),) != client.input_shape:
        raise PerfedError(
            f"{where}: {len(client.feature_names)} feature names for inputs of shape {client.input_shape}"
        )
    if survival:
        _check_survival(client)


def _check_survival(client: Client) -> None:
    """Targets are pairs of a time and an event."""
    for name in SPLITS:
        split = client.split(name)
        if split is None:
            continue
        where, y = f"client '{client.id}': {name} targets", split.y
        if y.shape[1:] != (2,) or not torch.is_floating_point(y):
            needed = f"floating-point ({len(split)}, 2), times and events"
            raise PerfedError(f"{where} have shape {tuple(y.shape)}, {y.dtype}; survival needs {needed}")
        early, other = torch.nonzero(y[:, 0] <= 0).flatten(), torch.nonzero((y[:, 1] != 0) & (y[:, 1] != 1)).flatten()
        if len(early):
            row = int(early[0])
            raise PerfedError(f"{where} hold the time {float(y[row, 0]):g} in row {row}; times must be above 0")
        if len(other):
            row = int(other[0])
            raise PerfedError(f"{where} hold the event {float(y[row, 1]):g} in row {row}; allowed: 0 (censored), 1")


def _check_finite(client: Client, name: str, x: Tensor) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        first = torch.nonzero(~finite)[0].tolist()
        column = ",".join(str(i) for i in first[1:])
        if client.feature_names is not None:
            column += f" ('{client.feature_names[first[1]]}')"
        raise PerfedError(
            f"client '{client.id}': {name} inputs hold NaN or infinity in column {column}, row {first[0]}; "
            "features must be finite"
        )


def check_domains(clients: Sequence[Client], names: Sequence[str] | None) -> None:
    """Refuse domain ids that only some samples have, or that there are not.

    Raises:
        PerfedError: names the client and the split.
    """
    splits = [(c, name, s) for c in clients for name in SPLITS if (s := c.split(name)) is not None]
    known = [(c, name, s.domain) for c, name, s in splits if s.domain is not None]
    if known and len(known) < len(splits):
        client, name = next((c, name) for c, name, s in splits if s.domain is None)
        other, given = known[0][:2]
        raise PerfedError(
            f"client '{client.id}': {name} samples without domain ids, while client '{other.id}' has them for its "
            f"{given} samples; all samples of all clients need one, or none"
        )
    samples = sum(len(split) for _, _, split in splits)
    for client, name, domain in known:
        check_ids(f"client '{client.id}'", name, domain, None if names is None else len(names))
        if names is None and int(domain.max()) >= samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            raise PerfedError(f"client '{client.id}': {name} domain id {int(domain.max())} is not allowed: {problem}")


def check_ids(where: str, name: str, domain: Tensor, domains: int | None) -> None:
    """Domain ids are integers from 0 on, below ``domains`` if that is known."""
    if domain.dtype != torch.int64:
        raise PerfedError(f"{where}: {name} domain ids must be integers, not {domain.dtype}")
    low, high = int(domain.min()), int(domain.max())
    if low < 0 or (domains is not None and high >= domains):
        allowed = "at least 0" if domains is None else f"from 0 to {domains - 1}, as there are {domains} domain names"
        raise PerfedError(f"{where}: {name} domain id {low if low < 0 else high} is not allowed; ids are {allowed}")
