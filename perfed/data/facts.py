"""Facts about a client without its samples: their number, shapes, classes and domains."""

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
    """The facts about the samples of one split.

    Attributes:
        samples: the number of samples, at least 1.
        input_shape: the shape of one input.
        target_shape: the shape of one target; ``()`` for a label or one value.
        classes: the number of samples of class 0, 1, ...; ``None`` if targets are values.
        domains: the number of samples of domain 0, 1, ...; ``None`` if domains are unknown.
        events: for survival, the number of samples with an event; otherwise ``None``.

    Counts end with the last class or domain that occurs; zeros after it are removed.

    Raises:
        PerfedError: there are no samples, a number is negative, the sum of counts is not the number of samples, or
            there are more events than samples.
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
    """The facts about a client that a server without its samples needs.

    Attributes:
        id: the id of the client.
        splits: the facts about "train" and, if the client has them, "validation" and "test".
        feature_names: one name per column of tabular inputs.
        mark: a checksum of the samples, or any number that changes with them.
        held: see :class:`perfed.data.client.Client`.

    Raises:
        PerfedError: there are no training samples, or a split has another name.

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
        """The shape of one training input."""
        return self.splits["train"].input_shape

    @property
    def nameless(self) -> ClientFacts:
        """The facts with a hash of all names of shared inputs in place of the names.

        The hashes of two clients are equal if the names are.
        """
        if self.feature_names is None:
            return self
        shared = self.feature_names if self.held is None else self.feature_names[: len(self.held)]
        digest = hashlib.sha256(json.dumps(shared).encode()).hexdigest()[:16]
        return replace(self, feature_names=tuple(f"{digest} {number}" for number in range(len(self.feature_names))))

    def plain(self) -> dict[str, Any]:
        """Return the facts as plain JSON values."""
        values: dict[str, Any] = _FACTS.dump_python(self, mode="json")
        return {name: value for name, value in values.items() if name != "held" or value is not None}

    @classmethod
    def of_plain(cls, values: Any, client: str | None = None) -> ClientFacts:
        """Return the facts from which :meth:`plain` returned ``values``, in another process or on another machine.

        Args:
            values: the values as they were received.
            client: the id of the client; ``None`` for the id in the values.

        Raises:
            PerfedError: the values are not valid; the message describes the problem.
        """
        name = values.get("id") if client is None and isinstance(values, Mapping) else client
        where = f"facts of client '{name}'" if isinstance(name, str) else "facts of a client"
        try:
            facts = _FACTS.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise PerfedError(f"{where}: {summarise_validation_error(error, '')}".replace(": facts: ", ": ")) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise PerfedError(f"{where}: these are no plain values ({error})") from None
        return facts if client is None else replace(facts, id=client)


_FACTS = TypeAdapter(ClientFacts)


def trim_zeros(counts: Counts) -> Counts:
    """Return ``counts`` without the zeros at the end."""
    last = len(counts)
    while last and counts[last - 1] == 0:
        last -= 1
    return tuple(counts[:last])


def pad_counts(counts: Counts, number: int) -> list[int]:
    """Return ``counts`` padded with zeros to a length of ``number``; longer ones are not changed."""
    return [*counts, *([0] * (number - len(counts)))]
