"""What is known of a client without its samples: how many there are, of what shape, of which classes and domains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from perfed.errors import PerfedError

SPLITS = ("train", "validation", "test")

Shape = tuple[int, ...]
Counts = tuple[int, ...]


@dataclass(frozen=True)
class SplitFacts:
    """What is known of the samples of one split.

    Attributes:
        samples: how many, at least 1.
        input_shape: of one input.
        target_shape: of one target; ``()`` for a label or one value.
        classes: samples of class 0, 1, ...; ``None`` where targets are values.
        domains: samples of domain 0, 1, ...; ``None`` where domains are unknown.
        events: of survival, samples with an event; else ``None``.

    Counts need not go beyond the last class or domain that occurs; zeros behind it are left away.

    Raises:
        PerfedError: no samples, a negative number, counts whose sum is not the number of samples, or more events.
    """

    samples: int
    input_shape: Shape
    target_shape: Shape = ()
    classes: Counts | None = None
    domains: Counts | None = None
    events: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or min(*self.input_shape, *self.target_shape, self.events or 0, 0) < 0:
            raise PerfedError("facts: a split has at least one sample, and no shape or number is negative")
        if self.events is not None and self.events > self.samples:
            raise PerfedError(f"facts: {self.events} samples have an event, of {self.samples}")
        for name in ("classes", "domains"):
            counts = getattr(self, name)
            if counts is None:
                continue
            if min(counts, default=0) < 0 or sum(counts) != self.samples:
                raise PerfedError(f"facts: the samples of the {name} are {sum(counts)}, not {self.samples}")
            object.__setattr__(self, name, trimmed(counts))


@dataclass(frozen=True)
class ClientFacts:
    """What a server may know of a client whose samples it does not have.

    Attributes:
        id: of the client.
        splits: "train", and "validation" and "test" where the client has them.
        feature_names: one per column of tabular inputs.
        mark: a number that changes when the samples do, as far as the one who gives the facts can say.
        held: as of :class:`perfed.data.client.Client`.

    Raises:
        PerfedError: no training samples, a split of another name, or splits whose inputs or targets differ in kind.

    Example:
        >>> facts = ClientFacts("north", {"train": SplitFacts(3, (2,), classes=(1, 2))})
        >>> ClientFacts.of_plain(facts.plain()) == facts
        True
    """

    id: str
    splits: Mapping[str, SplitFacts]
    feature_names: tuple[str, ...] | None = None
    mark: int = 0
    held: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.splits if name not in SPLITS]:
            raise PerfedError(f"client '{self.id}': facts of '{unknown[0]}'; allowed: {', '.join(SPLITS)}")
        if "train" not in self.splits:
            raise PerfedError(f"client '{self.id}' has no training data; every client needs at least one sample")

    @property
    def input_shape(self) -> Shape:
        """Of one training input."""
        return self.splits["train"].input_shape

    @property
    def nameless(self) -> ClientFacts:
        """The same with one hash of all names of inputs that clients share in their place, the same where these are."""
        if self.feature_names is None:
            return self
        shared = self.feature_names if self.held is None else self.feature_names[: len(self.held)]
        digest = hashlib.sha256(json.dumps(shared).encode()).hexdigest()[:16]
        return replace(self, feature_names=tuple(f"{digest} {number}" for number in range(len(self.feature_names))))

    def plain(self) -> dict[str, Any]:
        """The facts as values that JSON has."""
        splits = {name: _plain_split(facts) for name, facts in self.splits.items()}
        names = None if self.feature_names is None else list(self.feature_names)
        held = {} if self.held is None else {"held": list(self.held)}
        return {"id": self.id, "splits": splits, "feature_names": names, "mark": self.mark, **held}

    @classmethod
    def of_plain(cls, value: Any) -> ClientFacts:
        """The inverse of :meth:`plain`, for values that came from elsewhere.

        Raises:
            PerfedError: the values are no facts of a client; says what is wrong.
        """
        where = "facts of a client"
        more = ("held",) if isinstance(value, Mapping) and "held" in value else ()
        table = _table(value, where, ("id", "splits", "feature_names", "mark", *more))
        client = table["id"] if isinstance(table["id"], str) else _wrong(where, "id", table["id"], "a text")
        where = f"facts of client '{client}'"
        if not isinstance(table["splits"], Mapping):
            _wrong(where, "splits", table["splits"], "a table")
        splits = {str(name): _split_of(given, f"{where}: {name}") for name, given in table["splits"].items()}
        names = table["feature_names"]
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            _wrong(where, "feature_names", names, "a list of texts")
        mark, held = _whole(table["mark"], where, "mark"), table.get("held")
        if held is not None and not (isinstance(held, list) and all(isinstance(each, bool) for each in held)):
            _wrong(where, "held", held, "a list of true and false")
        return cls(client, splits, None if names is None else tuple(names), mark, None if held is None else tuple(held))


def trimmed(counts: Counts) -> Counts:
    """``counts`` without the zeros at their end."""
    last = len(counts)
    while last and counts[last - 1] == 0:
        last -= 1
    return tuple(counts[:last])


def padded(counts: Counts, number: int) -> list[int]:
    """``counts`` with zeros behind them, ``number`` in all, or as many as there are."""
    return [*counts, *([0] * (number - len(counts)))]


_LISTS = ("input_shape", "target_shape", "classes", "domains")


def _plain_split(facts: SplitFacts) -> dict[str, Any]:
    lists = {name: getattr(facts, name) for name in _LISTS}
    values = {name: None if value is None else list(value) for name, value in lists.items()}
    return {"samples": facts.samples, **values, "events": facts.events}


def _split_of(value: Any, where: str) -> SplitFacts:
    table = _table(value, where, ("samples", *_LISTS, "events"))
    lists: dict[str, Any] = {}
    for name in _LISTS:
        given = table[name]
        if given is None and not name.endswith("shape"):
            lists[name] = None
        elif isinstance(given, list):
            lists[name] = tuple(_whole(number, where, name) for number in given)
        else:
            _wrong(where, name, given, "a list of numbers")
    events = None if table["events"] is None else _whole(table["events"], where, "events")
    samples = _whole(table["samples"], where, "samples")
    try:
        return SplitFacts(samples, **lists, events=events)
    except PerfedError as error:
        raise PerfedError(f"{where}: {str(error).removeprefix('facts: ')}") from None


def _table(value: Any, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise PerfedError(f"{where}: a table with {', '.join(keys)} is needed")
    return value


def _whole(value: Any, where: str, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    return _wrong(where, name, value, "a whole number from 0 on")


def _wrong(where: str, name: str, value: Any, needed: str) -> NoReturn:
    raise PerfedError(f"{where}: {name} is {value!r:.40}; {needed} is needed")
