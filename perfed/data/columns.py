"""Which columns clients have, and which of them all have, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from perfed.data.client import Client


@dataclass(frozen=True)
class Columns:
    """What the inputs of each client are called.

    Attributes:
        of: by id the names of its columns, or how many numbers an input has where they have no names.

    Example:
        >>> Columns({"east": ("age", "weight"), "west": ("weight", "height")}).common
        {'east': (False, True), 'west': (True, False)}
    """

    of: Mapping[str, tuple[str, ...] | int]

    @classmethod
    def of_clients(cls, clients: Iterable[Client]) -> Columns:
        """Return those of ``clients``; of inputs that come first at all of them, a client has those that it holds."""
        return cls({client.id: _inputs_of(client) for client in clients})

    @cached_property
    def common(self) -> dict[str, tuple[bool, ...]]:
        """By id, which numbers of its inputs all clients have: one value each, in their order.

        Columns are the same where their names are. Inputs without names are all the same where there are as many, and
        else none is; so too where some clients' inputs have names and others' have none.
        """
        kinds = dict.fromkeys(self.of.values())
        names = [set(kind) for kind in kinds if isinstance(kind, tuple)]
        shared = set.intersection(*names) if names and len(names) == len(kinds) else set()
        made = {
            kind: (len(kinds) == 1,) * kind if isinstance(kind, int) else tuple(name in shared for name in kind)
            for kind in kinds
        }
        return {client: made[kind] for client, kind in self.of.items()}


def _inputs_of(client: Client) -> tuple[str, ...] | int:
    number = prod(client.input_shape)
    if client.held is None:
        return client.feature_names or number
    shared = [place if held else None for place, held in enumerate(client.held)]
    own = [None] * (number - len(shared))
    return tuple(f"{client.id} {at}" if place is None else f"{place}" for at, place in enumerate([*shared, *own]))


def in_order(common: Sequence[bool], names: Sequence[str] | None) -> list[int]:
    """Return where the ``common`` columns of a client are, in the order that all clients have them: by name.

    Example:
        >>> in_order((True, False, True), ("weight", "height", "age"))
        [2, 0]
    """
    found = [place for place, held in enumerate(common) if held]
    return found if names is None else sorted(found, key=lambda place: names[place])
