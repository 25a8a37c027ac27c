"""The step of secure aggregation at real sites, in which the server knows only the sums of replies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from perfed.engine.steps.secure_sums import refuse_folds
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.maths.sums import KnownSums, Term, make_hidden_entries
from perfed.method.exchange import Replies
from perfed.sites.flower.checks import TreeSpec
from perfed.sites.flower.wire import REPLY


class MaskedSums(ExchangeStep):
    """The step that replaces masked replies by entries whose sums over sites are known, and whose values are not.

    Attributes:
        spec: The entries that the replies of the latest exchange would have without masks.
        totals: The opened sums of that exchange, by product of entries.
    """

    def __init__(self) -> None:
        self.spec: TreeSpec = {}
        self.totals: Mapping[Term, Tensor] = {}

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task unchanged, if it does not fold single replies.

        Raises:
            SingleReplies: The task folds single replies.
        """
        refuse_folds(task)
        return task

    def collect(self, replies: Replies) -> Replies:
        """Return replies whose entries give only the opened sums."""
        if not replies.ids:
            return replies
        entries = {name.removeprefix(REPLY): entry for name, entry in self.spec.items() if name.startswith(REPLY)}
        count = len(replies.ids)
        shapes = {path: ((count, *(n or 0 for n in e.shape)), e.dtype) for path, e in entries.items()}
        return Replies(replies.ids, make_hidden_entries(shapes, KnownSums(self.totals)), replies.train_loss)
