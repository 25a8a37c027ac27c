"""What is known of a client without its samples: how many there are, of what shape, of which classes and domains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from perfed.data.names import compose_text
from perfed.errors import PerfedError, summarise_validation_error

SPLITS = ("train", "validation", "test")

_Whole = Annotated[int, Field(ge=0, lt=1 << 53)]
Shape = tuple[_Whole, ...]
Counts = tuple[_Whole, ...]


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

    __pydantic_config__ = ConfigDict(extra="forbid")

    samples: _Whole
    input_shape: Shape
    target_shape: Shape = ()
    classes: Counts | None = None
    domains: Counts | None = None
    events: _Whole | None = None

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
            object.__setattr__(self, name, trim_zeros(counts))


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

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    splits: Mapping[str, SplitFacts]
    feature_names: tuple[str, ...] | None = None
    mark: _Whole = 0
    held: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.feature_names is not None:
            object.__setattr__(self, "feature_names", tuple(map(compose_text, self.feature_names)))
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
        plain: dict[str, Any] = _FACTS.dump_python(self, mode="json")
        return {name: value for name, value in plain.items() if name != "held" or value is not None}

    @classmethod
    def of_plain(cls, values: Any, client: str | None = None) -> ClientFacts:
        """The inverse of :meth:`plain`, for values that came from elsewhere.

        Args:
            values: as they came.
            client: whose they are; ``None``: as they say themselves.

        Raises:
            PerfedError: the values are no facts of a client; says what is wrong.
        """
        said = values.get("id") if client is None and isinstance(values, Mapping) else client
        where = f"facts of client '{said}'" if isinstance(said, str) else "facts of a client"
        try:
            found = _FACTS.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise PerfedError(f"{where}: {summarise_validation_error(error, '')}".replace(": facts: ", ": ")) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise PerfedError(f"{where}: these are no plain values ({error})") from None
        return found if client is None else replace(found, id=client)


_FACTS = TypeAdapter(ClientFacts)


def trim_zeros(counts: Counts) -> Counts:
    """``counts`` without the zeros at their end."""
    last = len(counts)
    while last and counts[last - 1] == 0:
        last -= 1
    return tuple(counts[:last])


def pad_counts(counts: Counts, number: int) -> list[int]:
    """``counts`` with zeros behind them, ``number`` in all, or as many as there are."""
    return [*counts, *([0] * (number - len(counts)))]
