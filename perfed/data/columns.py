"""The columns of each client, and the columns that all clients have, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from perfed.data.client import Client


@dataclass(frozen=True)
class Columns:
    """The columns of each client.

    Attributes:
        names: the names of the columns by client id; the number of values of an input if they have no names.

    Example:
        >>> Columns({"east": ("age", "weight"), "west": ("weight", "height")}).common
        {'east': (False, True), 'west': (True, False)}
    """

    names: Mapping[str, tuple[str, ...] | int]

    @classmethod
    def of_clients(cls, clients: Iterable[Client]) -> Columns:
        """Return the columns of ``clients``; of columns shared by name, a client has those in its mask ``held``."""
        return cls({client.id: _name_inputs(client) for client in clients})

    @cached_property
    def common(self) -> dict[str, tuple[bool, ...]]:
        """A mask of the inputs of each client that all clients have, by client id.

        Columns are equal if their names are. Inputs without names are equal at all clients if all have the same number
        of them; otherwise, or if only some clients have names, there are no common inputs.
        """
        kinds = dict.fromkeys(self.names.values())
        name_sets = [set(kind) for kind in kinds if isinstance(kind, tuple)]
        shared = set.intersection(*name_sets) if name_sets and len(name_sets) == len(kinds) else set()
        masks = {
            kind: (len(kinds) == 1,) * kind if isinstance(kind, int) else tuple(name in shared for name in kind)
            for kind in kinds
        }
        return {client: masks[kind] for client, kind in self.names.items()}


def _name_inputs(client: Client) -> tuple[str, ...] | int:
    """Return names of a client's inputs that are equal for shared columns; their number if they have no names."""
    number = prod(client.input_shape)
    if client.held is None:
        return client.feature_names or number
    shared = [column if has_column else None for column, has_column in enumerate(client.held)]
    columns = [*shared, *[None] * (number - len(shared))]
    return tuple(f"{client.id} {i}" if column is None else f"{column}" for i, column in enumerate(columns))


def in_order(common: Sequence[bool], names: Sequence[str] | None) -> list[int]:
    """Return the positions of the ``common`` columns of a client in the order of their names, the same at all clients.

    Example:
        >>> in_order((True, False, True), ("weight", "height", "age"))
        [2, 0]
    """
    positions = [position for position, is_common in enumerate(common) if is_common]
    return positions if names is None else sorted(positions, key=lambda position: names[position])
