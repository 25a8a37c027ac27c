"""Which columns all clients have, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from perfed.data.client import Client


def common_columns(clients: Iterable[Client]) -> dict[str, tuple[bool, ...]]:
    """Return of each client, which of its inputs all clients have.

    Columns are the same where their names are. Inputs without names are all the same where their shapes are, and else
    none is; so too where some clients' inputs have names and others' have none.

    Args:
        clients: of a federation.

    Returns:
        by id, one value for each number of an input, in its order.

    Example:
        >>> import torch
        >>> from perfed.data.client import Split
        >>> x, y = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
        >>> names = {"east": ("age", "weight"), "west": ("weight", "height")}
        >>> common_columns([Client(i, Split(x, y), feature_names=n) for i, n in names.items()])
        {'east': (False, True), 'west': (True, False)}
    """
    known = list(clients)
    named = [client.feature_names for client in known]
    if all(names is not None for names in named):
        sets = {names: set(names) for names in named if names is not None}
        shared = set.intersection(*sets.values())
        made = {names: tuple(name in shared for name in names) for names in sets}
        return {client.id: made[client.feature_names or ()] for client in known}
    same = all(names is None for names in named) and len({client.input_shape for client in known}) == 1
    widths = {prod(client.input_shape) for client in known}
    flags = {width: (same,) * width for width in widths}
    return {client.id: flags[prod(client.input_shape)] for client in known}


def in_order(common: Sequence[bool], names: Sequence[str] | None) -> list[int]:
    """Return where the ``common`` columns of a client are, in the order that all clients have them: by name.

    Example:
        >>> in_order((True, False, True), ("weight", "height", "age"))
        [2, 0]
    """
    found = [place for place, held in enumerate(common) if held]
    return found if names is None else sorted(found, key=lambda place: names[place])
