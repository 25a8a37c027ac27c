"""Who the clients are and what they hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.augment import CropFlip
from perfed.errors import PerfedError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Samples of one client: inputs, targets and, where known, domain ids.

    Attributes:
        x: inputs, ``(samples, *input_shape)``, a floating-point tensor.
        y: targets, ``(samples,)`` int64 class labels or ``(samples, ...)`` floating-point values.
        domain: ``(samples,)`` int64 domain ids, or ``None`` where domains are unknown.
    """

    x: Tensor
    y: Tensor
    domain: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    def take(self, index: Tensor) -> Split:
        """The samples at ``index`` (int64, in that order)."""
        return Split(self.x[index], self.y[index], None if self.domain is None else self.domain[index])


@dataclass(frozen=True)
class Client:
    """One client: an id, its training data, and optionally validation and test data.

    Attributes:
        id: unique within the federation; replies are aggregated in the sorted order of ids.
        train: at least one sample.
        test: may be ``None`` or empty: the client then takes part but is not evaluated.
        validation: held-out training data for choices made at the client (early stopping, tuning).
        feature_names: one name per column for tabular inputs.
    """

    id: str
    train: Split
    test: Split | None = None
    validation: Split | None = None
    feature_names: tuple[str, ...] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return tuple(self.train.x.shape[1:])

    def split(self, name: str) -> Split | None:
        """The split called ``name`` ("train", "validation" or "test"); ``None`` if absent or empty."""
        found: Split | None = getattr(self, name)
        return found if found is not None and len(found) > 0 else None


@dataclass(frozen=True)
class Federation:
    """Clients in the sorted order of their ids.

    Attributes:
        clients: at least one; checked and sorted by id on construction.
        num_classes: number of classes C; labels are 0..C-1. ``None`` for regression.
        name: what the data set is called in reports.
        class_names: C names, if known.
        notes: facts about the data worth printing, e.g. the accuracy of the Bayes rule under ``"oracle_accuracy"``.
        domain_names: of the domains 0, 1, ... (there may be more than occur); without them reports have the numbers.
        augment: random changes to the inputs of every training mini-batch, for images.
        words: where inputs are token ids, what the ids from 2 on stand for (0: padding, 1: other words).

    Raises:
        PerfedError: no clients, duplicate ids, a client without training data, labels outside the
            classes, domain ids that are negative, beyond ``domain_names`` or missing for some samples,
            NaN or infinite inputs, mismatched lengths or shapes; names the client.
    """

    clients: tuple[Client, ...]
    num_classes: int | None
    name: str = "data"
    class_names: tuple[str, ...] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    domain_names: tuple[str, ...] | None = None
    augment: CropFlip | None = None
    words: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(sorted(self.clients, key=lambda c: c.id)))
        if not self.clients:
            raise PerfedError(f"federation '{self.name}' has no clients; at least one is needed")
        ids = [c.id for c in self.clients]
        for first, second in pairwise(ids):
            if first == second:
                raise PerfedError(f"client id '{first}' occurs twice; ids must be unique")
        for client in self.clients:
            _check_client(client, self.num_classes)
            if self.augment is not None and len(client.input_shape) != 3:
                raise PerfedError(
                    f"client '{client.id}' has inputs of shape {client.input_shape}; augmentation needs images "
                    "(channels, height, width)"
                )
        classes = self.num_classes or 0
        if self.class_names is not None and len(self.class_names) != classes:
            raise PerfedError(f"{len(self.class_names)} class names for {classes} classes; one each is needed")
        _check_domains(self)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
        *,
        num_classes: int | None = None,
        name: str = "data",
        class_names: Sequence[str] | None = None,
        domain_names: Sequence[str] | None = None,
    ) -> Federation:
        """Build a federation from numpy arrays or tensors.

        Args:
            clients: per client id (or in a list, ids then being "000", "001", ...) a mapping with
                ``x_train``, ``y_train`` and optionally ``x_validation``, ``y_validation``, ``x_test``,
                ``y_test``, ``domain_train`` (and ``_validation``, ``_test``) and ``feature_names``.
                Shapes may differ between clients. Integer targets are class labels, floating-point
                targets are regression values.
            num_classes: number of classes; for integer targets the default is the largest label + 1.
            name: what reports call the data.
            class_names: names of the classes.
            domain_names: names of the domains 0, 1, ...; M is the largest id + 1, with or without them.

        Raises:
            PerfedError: a missing or unknown key, or any fault listed for :class:`Federation`.

        Example:
            >>> import numpy as np
            >>> data = {"a": {"x_train": np.ones((4, 3)), "y_train": np.array([0, 1, 0, 1])}}
            >>> Federation.from_arrays(data).num_classes
            2
        """
        if not isinstance(clients, Mapping):
            clients = {f"{i:03d}": arrays for i, arrays in enumerate(clients)}
        built = [_client_from_arrays(str(key), arrays) for key, arrays in clients.items()]
        integer = [not torch.is_floating_point(c.train.y) for c in built]
        if any(integer) and not all(integer):
            raise PerfedError("some clients have integer targets and some floating-point ones; use one kind")
        if num_classes is None and built and integer[0]:
            largest = [int(s.y.max()) for c in built for n in SPLITS if (s := c.split(n)) is not None]
            num_classes = max(largest) + 1 if largest else None
        names = None if class_names is None else tuple(class_names)
        domains = None if domain_names is None else tuple(domain_names)
        return cls(tuple(built), num_classes, name=name, class_names=names, domain_names=domains)

    @property
    def num_domains(self) -> int:
        """Number of domains M: the largest domain id + 1; 0 where domains are unknown."""
        splits = [s for c in self.clients for name in SPLITS if (s := c.split(name)) is not None]
        return 1 + max((int(s.domain.max()) for s in splits if s.domain is not None), default=-1)

    def domains_in(self, split: str) -> list[int]:
        """Ids of the domains that the clients' ``split`` has samples of, ascending."""
        parts = (s for c in self.clients if (s := c.split(split)) is not None)
        return sorted({m for s in parts if s.domain is not None for m in s.domain.unique().tolist()})

    def domain_name(self, domain: int) -> str:
        """What the domain is called in reports."""
        return str(domain) if self.domain_names is None else self.domain_names[domain]

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)

    @property
    def ids(self) -> list[str]:
        """Client ids in sorted order."""
        return [c.id for c in self.clients]

    @cached_property
    def fingerprint(self) -> int:
        """A number that changes with the clients' ids, sizes, shapes or targets."""
        mark = 0
        for client in self.clients:
            for name in SPLITS:
                split = client.split(name)
                if split is not None:
                    facts = f"{client.id} {name} {tuple(split.x.shape)}".encode()
                    targets = split.y.double().cpu().numpy().tobytes()
                    mark = zlib.crc32(targets, zlib.crc32(facts, mark))
        return mark

    def to(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Federation:
        """The same federation on ``device``, with floating-point inputs and targets in ``dtype``."""

        def cast(split: Split | None) -> Split | None:
            if split is None:
                return None
            y = split.y.to(device, dtype) if torch.is_floating_point(split.y) else split.y.to(device)
            domain = None if split.domain is None else split.domain.to(device)
            return Split(split.x.to(device, dtype), y, domain)

        clients = tuple(
            replace(c, **{name: cast(getattr(c, name)) for name in SPLITS})  # type: ignore[arg-type]
            for c in self.clients
        )
        return replace(self, clients=clients)


def _as_tensor(value: Any, what: str, client: str) -> Tensor:
    try:
        if isinstance(value, Tensor):
            return value
        if np.asarray(value).dtype.kind in "USO":
            raise PerfedError(
                f"client '{client}': {what} holds texts or objects, not numbers; code labels as 0, 1, ... and "
                "categories as columns of numbers (scikit-learn's LabelEncoder and OneHotEncoder do)"
            )
        # Read-only arrays are copied: a tensor can be written to.
        return torch.from_numpy(np.require(np.atleast_1d(value), requirements=["C", "W"]))
    except PerfedError:
        raise
    except (TypeError, ValueError) as error:
        raise PerfedError(f"client '{client}': {what} cannot become a tensor ({str(error).splitlines()[0]})") from None


def _domain_ids(ids: Tensor) -> Tensor:
    return ids if torch.is_floating_point(ids) else ids.long()  # 0.5 is refused, not cut to 0


def _client_from_arrays(client: str, arrays: Mapping[str, Any]) -> Client:
    allowed = {f"{part}_{split}" for part in ("x", "y", "domain") for split in SPLITS} | {"feature_names"}
    for key in arrays:
        if key not in allowed:
            raise PerfedError(f"client '{client}': unknown key '{key}'; allowed: {', '.join(sorted(allowed))}")
    splits: dict[str, Split | None] = {}
    for split in SPLITS:
        x, y = arrays.get(f"x_{split}"), arrays.get(f"y_{split}")
        if (x is None) != (y is None):
            missing = f"x_{split}" if x is None else f"y_{split}"
            raise PerfedError(f"client '{client}': '{missing}' is missing")
        if x is None:
            splits[split] = None
            continue
        xt = _as_tensor(x, f"x_{split}", client)
        yt = _as_tensor(y, f"y_{split}", client)
        domain = arrays.get(f"domain_{split}")
        splits[split] = Split(
            xt if torch.is_floating_point(xt) else xt.float(),
            yt if torch.is_floating_point(yt) else yt.long(),
            None if domain is None else _domain_ids(_as_tensor(domain, f"domain_{split}", client)),
        )
    train = splits["train"]
    if train is None:
        raise PerfedError(f"client '{client}' has no training data; 'x_train' and 'y_train' are needed")
    names = arrays.get("feature_names")
    return Client(client, train, splits["test"], splits["validation"], None if names is None else tuple(names))


def _check_client(client: Client, num_classes: int | None) -> None:
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
        _check_finite(client, name, split)
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


def _check_finite(client: Client, name: str, split: Split) -> None:
    finite = torch.isfinite(split.x)
    if not bool(finite.all()):
        first = torch.nonzero(~finite)[0].tolist()
        column = ",".join(str(i) for i in first[1:])
        if client.feature_names is not None:
            column += f" ('{client.feature_names[first[1]]}')"
        raise PerfedError(
            f"client '{client.id}': {name} inputs hold NaN or infinity in column {column}, row {first[0]}; "
            "features must be finite"
        )
    if torch.is_floating_point(split.y) and not bool(torch.isfinite(split.y).all()):
        raise PerfedError(f"client '{client.id}': {name} targets hold NaN or infinity; targets must be finite")


def _check_domains(federation: Federation) -> None:
    splits = [(c, name, s) for c in federation.clients for name in SPLITS if (s := c.split(name)) is not None]
    known = [(c, name, s.domain) for c, name, s in splits if s.domain is not None]
    if known and len(known) < len(splits):
        client, name = next((c, name) for c, name, s in splits if s.domain is None)
        other, given = known[0][:2]
        raise PerfedError(
            f"client '{client.id}': {name} samples without domain ids, while client '{other.id}' has them for its "
            f"{given} samples; all samples of all clients need one, or none"
        )
    names = federation.domain_names
    allowed = "at least 0" if names is None else f"from 0 to {len(names) - 1}, as there are {len(names)} domain names"
    samples = sum(len(split) for _, _, split in splits)
    for client, name, domain in known:
        if domain.dtype != torch.int64:
            raise PerfedError(f"client '{client.id}': {name} domain ids must be integers, not {domain.dtype}")
        low, high = int(domain.min()), int(domain.max())
        if names is None and high >= samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            raise PerfedError(f"client '{client.id}': {name} domain id {high} is not allowed: {problem}")
        if low < 0 or (names is not None and high >= len(names)):
            bad = low if low < 0 else high
            raise PerfedError(f"client '{client.id}': {name} domain id {bad} is not allowed; ids are {allowed}")
