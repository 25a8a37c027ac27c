"""Reading, folding and stacking of the replies of one exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfed import tree
from perfed.engine.executor import ChunkResult
from perfed.errors import PerfedError
from perfed.method.exchange import Fold, Replies


class ReplyCollector:
    """The replies of one exchange, collected and stacked.

    Entries named in ``folds`` are folded in the sorted order of client ids and then dropped. With folds, a reply is
    read after the replies of all previous clients have been folded, so that only one reply is in memory at a time.
    Without folds, a reply is read immediately.

    Args:
        ids: the clients that will reply.
        folds: the folds by name of the entry.
    """

    def __init__(self, ids: Sequence[str], folds: Mapping[str, Fold]) -> None:
        self._folds = folds
        self._totals: dict[str, Any] = dict.fromkeys(folds)
        self._rows: dict[str, dict[str, Any]] = {}
        self._losses: dict[str, Tensor] = {}
        self._next = sorted(ids, reverse=True)
        self._unread: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(self, result: ChunkResult) -> None:
        """Add the replies of a chunk of clients.

        Raises:
            PerfedError: a reply lacks an entry that is to be folded.
        """
        for row, client in enumerate(result.ids):
            self._losses[client] = result.losses[row]
            if self._folds:
                self._unread[client] = partial(result.reply, row)
            else:
                self._rows[client] = result.reply(row)
        while self._next and self._next[-1] in self._unread:
            self._read(self._next.pop())

    def stack(self) -> Replies:
        """Return the replies of all clients that have replied, with the totals of the folds.

        Raises:
            PerfedError: a reply lacks an entry that is to be folded.
        """
        for client in sorted(self._unread):
            self._read(client)
        ids = sorted(self._losses)
        content = tree.stack([self._rows[client] for client in ids]) if ids else {}
        losses = torch.stack([self._losses[client] for client in ids]) if ids else torch.zeros(0)
        return Replies(ids, {**content, **self._totals}, losses)

    def _read(self, client: str) -> None:
        """Read a reply and fold it into the totals."""
        reply = self._unread.pop(client)()
        for name, fold in self._folds.items():
            if name not in reply:
                raise PerfedError(f"the replies hold no '{name}' to fold; they hold: {', '.join(reply) or 'nothing'}")
            self._totals[name] = fold(self._totals[name], reply)
        self._rows[client] = {name: value for name, value in reply.items() if name not in self._folds}
