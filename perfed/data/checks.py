"""Checks of a client's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from perfed.data.client import Client, Split
from perfed.data.facts import SPLITS
from perfed.data.inputs import as_tensor, check_names, column_names, domain_ids
from perfed.errors import PerfedError


def new_inputs(client: Client, x: Any, domain: Any, num_domains: int) -> tuple[Tensor, Tensor | None]:
    """Return new inputs and domain ids for a client's model as tensors, after the checks of a client's data.

    Raises:
        PerfedError: the shape or columns differ from those of the client, values are not finite, or domains are
            unknown.
    """
    where, columns = f"client '{client.id}'", column_names(x)
    if columns is not None and client.feature_names is not None:
        check_names(where, "x", columns, "its training data", client.feature_names)
    inputs = as_tensor(x, "x", client.id)
    if tuple(inputs.shape[1:]) != client.input_shape:
        raise PerfedError(f"{where} has inputs of shape {client.input_shape}, not {tuple(inputs.shape[1:])}")
    _check_inputs(f"{where}: new", inputs, client.feature_names)
    if domain is None:
        return inputs, None
    ids = domain_ids(as_tensor(domain, "domain", client.id))
    if ids.shape != (len(inputs),):
        raise PerfedError(f"{where}: new inputs and domain ids must have the same length")
    check_ids(f"{where}: new", ids, num_domains)
    return inputs, ids


def check_client(client: Client, num_classes: int | None, survival: bool = False) -> None:
    """Check that a model can be trained and tested on a client's data.

    Samples are checked only once; later checks use only their facts.

    Raises:
        PerfedError: there are no training data, lengths, shapes or types do not match, labels are unknown, or values
            are not finite; the message names the client and the split.
    """
    where = f"client '{client.id}'"
    if len(client.train) == 0:
        raise PerfedError(f"{where} has no training data; every client needs at least one sample")
    for name in SPLITS:
        split = client.split(name)
        if split is None:
            continue
        if split.has_values != client.train.has_values:
            kinds = ["values" if part.has_values else "labels" for part in (split, client.train)]
            raise PerfedError(f"{where}: {name} targets are {kinds[0]}, training targets {kinds[1]}")
        if 0 in split.input_shape:
            raise PerfedError(f"{where}: {name} inputs have shape {split.input_shape}, so no features at all")
        if split.input_shape != client.input_shape:
            raise PerfedError(
                f"{where}: {name} inputs have shape {split.input_shape}, training inputs {client.input_shape}"
            )
        if not split.sound:
            check_samples(f"{where}: {name}", split, client.feature_names, num_classes, survival)
        _check_classes(f"{where}: {name}", split, num_classes, survival)
    if client.feature_names is not None and (len(client.feature_names),) != client.input_shape:
        raise PerfedError(
            f"{where}: {len(client.feature_names)} feature names for inputs of shape {client.input_shape}"
        )


def check_samples(
    where: str, split: Split, feature_names: Sequence[str] | None, num_classes: int | None, survival: bool
) -> None:
    """Check that a model can be trained and tested on samples, and mark them as sound.

    Args:
        where: the client and the split in error messages.
        split: the samples.
        feature_names: the names of the columns, if they have names.
        num_classes: the number of classes; ``None`` if targets are values.
        survival: whether targets are times and events.

    Raises:
        PerfedError: lengths differ, values are not finite, labels are unknown, or domain ids are not valid.
    """
    x, y = split.x, split.y
    if y.shape[0] != len(split) or (split.domain is not None and split.domain.shape != (len(split),)):
        raise PerfedError(f"{where} inputs, targets and domain ids must have the same length")
    if not isfinite(split.largest):
        _check_inputs(where, x, feature_names)
    check_finite(where, y)
    if num_classes is not None:
        if y.ndim != 1:
            raise PerfedError(f"{where} labels have shape {tuple(y.shape)}; ({len(split)},) is needed")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= num_classes:
            bad = low if low < 0 else high
            raise PerfedError(f"{where} label {bad} is outside the classes 0..{num_classes - 1}")
    if survival:
        _check_survival(f"{where} targets", y)
    if split.domain is not None:
        check_ids(where, split.domain, None)
    vars(split)["sound"] = True


def check_finite(where: str, y: Tensor) -> None:
    """Raise an error if targets contain NaN or infinity."""
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise PerfedError(f"{where} targets hold NaN or infinity; targets must be finite")


def _check_classes(where: str, split: Split, num_classes: int | None, survival: bool) -> None:
    """Raise an error if the facts of a split contradict the task: values or labels, classes, and shapes."""
    if num_classes is not None and split.has_values:
        raise PerfedError(f"{where} targets are values; labels of {num_classes} classes are needed")
    if num_classes is not None and len(split.held_classes) > num_classes:
        last = len(split.held_classes) - 1
        raise PerfedError(f"{where} label {last} is outside the classes 0..{num_classes - 1}")
    if survival and (split.target_shape != (2,) or not split.has_values):
        raise PerfedError(f"{where} targets have shape {split.target_shape}; survival needs a time and an event each")


def _check_survival(where: str, y: Tensor) -> None:
    """Raise an error unless targets are pairs of a positive time and an event of 0 or 1."""
    if y.shape[1:] != (2,) or not torch.is_floating_point(y):
        needed = f"floating-point ({len(y)}, 2), times and events"
        raise PerfedError(f"{where} have shape {tuple(y.shape)}, {y.dtype}; survival needs {needed}")
    not_positive = torch.nonzero(y[:, 0] <= 0).flatten()
    not_events = torch.nonzero((y[:, 1] != 0) & (y[:, 1] != 1)).flatten()
    if len(not_positive):
        row = int(not_positive[0])
        raise PerfedError(f"{where} hold the time {float(y[row, 0]):g} in row {row}; times must be above 0")
    if len(not_events):
        row = int(not_events[0])
        raise PerfedError(f"{where} hold the event {float(y[row, 1]):g} in row {row}; allowed: 0 (censored), 1")


def _check_inputs(where: str, x: Tensor, feature_names: Sequence[str] | None) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        first = torch.nonzero(~finite)[0].tolist()
        column = ",".join(str(i) for i in first[1:])
        if feature_names is not None and len(first) == 2 and first[1] < len(feature_names):
            column += f" ('{feature_names[first[1]]}')"
        raise PerfedError(
            f"{where} inputs hold NaN or infinity in column {column}, row {first[0]}; features must be finite"
        )


def check_domains(clients: Sequence[Client], names: Sequence[str] | None) -> None:
    """Check that all samples or none have domain ids, and that the ids are valid.

    Raises:
        PerfedError: the check fails; the message names the client and the split.
    """

    # A generator, since a list of the splits of very many clients would be large.
    def iterate_splits() -> Iterator[tuple[str, str, Split]]:
        return ((c.id, name, split) for c in clients for name in SPLITS if (split := c.split(name)) is not None)

    refuse_mixed_domains((client, name, split.has_domains) for client, name, split in iterate_splits())
    samples = None
    for client, name, split in iterate_splits():
        if not split.has_domains:
            return
        last, where = len(split.held_domains or ()) - 1, f"client '{client}': {name}"
        check_range(where, 0, last, None if names is None else len(names))
        if names is None:
            samples = sum(len(split) for _, _, split in iterate_splits()) if samples is None else samples
            if last >= samples:
                problem = "ids count the domains from 0, and there are fewer samples than that"
                raise PerfedError(f"{where} domain id {last} is not allowed: {problem}")


def refuse_mixed_domains(splits: Iterable[tuple[str, str, bool]]) -> None:
    """Raise an error if only some samples have domain ids.

    Args:
        splits: the client, the name of the split, and whether its samples have domain ids.
    """
    examples = dict[bool, tuple[str, str]]()
    for client, name, has_domains in splits:
        examples.setdefault(has_domains, (client, name))
    if len(examples) == 2:
        (client, name), (other_client, other_name) = examples[False], examples[True]
        raise PerfedError(
            f"client '{client}': {name} samples without domain ids, while client '{other_client}' has them for its "
            f"{other_name} samples; all samples of all clients need one, or none"
        )


def check_ids(where: str, domain: Tensor, domains: int | None) -> None:
    """Raise an error unless domain ids are integers from 0 on, below ``domains`` if this number is known."""
    if domain.dtype != torch.int64:
        raise PerfedError(f"{where} domain ids must be integers, not {domain.dtype}")
    check_range(where, int(domain.min()), int(domain.max()), domains)


def check_range(where: str, low: int, high: int, domains: int | None) -> None:
    """Raise an error if the smallest or largest domain id, ``low`` or ``high``, is outside of 0..``domains`` - 1."""
    if low < 0 or (domains is not None and high >= domains):
        allowed = "at least 0" if domains is None else f"from 0 to {domains - 1}, as there are {domains} domains"
        raise PerfedError(f"{where} domain id {low if low < 0 else high} is not allowed; ids are {allowed}")
