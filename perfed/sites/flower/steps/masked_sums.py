"""The step of secure aggregation at real sites: replies of which the server has opened only the sums."""

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
    """Replaces masked replies by entries of which the server knows the opened sums.

    Attributes:
        spec: the entries that the replies of the latest exchange would have without masks.
        totals: the opened sums of that exchange by term.
    """

    def __init__(self) -> None:
        self.spec: TreeSpec = {}
        self.totals: Mapping[Term, Tensor] = {}

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task, if its replies are not folded.

        Raises:
            SingleReplies: they are.
        """
        refuse_folds(task)
        return task

    def collect(self, replies: Replies) -> Replies:
        """Return replies with the sums of the entries."""
        if not replies.ids:
            return replies
        entries = {name.removeprefix(REPLY): entry for name, entry in self.spec.items() if name.startswith(REPLY)}
        count = len(replies.ids)
        shapes = {path: ((count, *(n or 0 for n in e.shape)), e.dtype) for path, e in entries.items()}
        return Replies(replies.ids, make_hidden_entries(shapes, KnownSums(self.totals)), replies.train_loss)
