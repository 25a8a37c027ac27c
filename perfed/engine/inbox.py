"""Where replies arrive: in whatever order they come, folded in the sorted order of client ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfed import tree
from perfed.errors import PerfedError
from perfed.method.exchange import Fold


class Inbox:
    """The replies of one exchange; what ``folds`` names is folded in the sorted order of ids and dropped.

    A reply is handed in as a function that makes it. It is called once all clients before it were folded (without
    folds at once), and what is folded is dropped before the next call: one client's at a time exists.

    Args:
        ids: of all clients that will reply.
        folds: by name of the entry.

    Attributes:
        rows: what is left of each reply, by client id.
        totals: result of each fold, by name; ``None`` before the first reply.
    """

    def __init__(self, ids: Sequence[str], folds: Mapping[str, Fold]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.totals: dict[str, Any] = dict.fromkeys(folds)
        self._folds = folds
        self._next = sorted(ids, reverse=True)
        self._waiting: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(self, client: str, reply: Callable[[], dict[str, Any]]) -> None:
        """Hand in the reply of ``client``.

        Raises:
            PerfedError: it lacks an entry that is to be folded.
        """
        if not self._folds:
            self.rows[client] = reply()
            return
        self._waiting[client] = reply
        while self._next and self._next[-1] in self._waiting:
            first = self._next.pop()
            self.rows[first] = self._folded(self._waiting.pop(first)())

    def content(self) -> dict[str, Any]:
        """All replies stacked in the sorted order of ids, and the totals."""
        order = sorted(self.rows)
        stacked = tree.stack([self.rows[i] for i in order]) if order else {}
        return {**stacked, **self.totals}

    def _folded(self, reply: dict[str, Any]) -> dict[str, Any]:
        for name, fold in self._folds.items():
            if name not in reply:
                raise PerfedError(f"the replies hold no '{name}' to fold; they hold: {', '.join(reply) or 'nothing'}")
            self.totals[name] = fold(self.totals[name], reply)
        return {name: value for name, value in reply.items() if name not in self._folds}
