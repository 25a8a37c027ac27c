"""The step of secure aggregation in a simulation, with which the server receives only sums over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfed.codec import flatten
from perfed.engine.executor import Exchange
from perfed.engine.secure_aggregation import ALWAYS, mean_loss, with_loss
from perfed.engine.steps.step import ExchangeStep, ExchangeTask
from perfed.maths.sums import CountedSums, FixedPoint, SingleReplies, Term, make_hidden_entries
from perfed.method.exchange import Replies


def refuse_folds(task: ExchangeTask) -> None:
    """Raise an error if replies of ``task`` are folded, which needs single replies.

    Raises:
        SingleReplies: the message names the entries.
    """
    if task.reduce:
        raise SingleReplies(f"{', '.join(map(repr, task.reduce))} of one client after the other")


class SecureSums(ExchangeStep):
    """The step that replaces replies by entries of which only sums over clients are known, as with masks at real sites.

    Args:
        numbers: the fixed-point format to which values are rounded before they are summed.
        note_terms: returns, for an exchange, the dictionary to which every requested sum is added.
    """

    def __init__(
        self, numbers: FixedPoint, note_terms: Callable[[Exchange], dict[Term, None]] = lambda exchange: {}
    ) -> None:
        self._numbers, self._note_terms = numbers, note_terms
        self._terms: dict[Term, None] = {}

    def send(self, task: ExchangeTask) -> ExchangeTask:
        """Return the task after checking that its replies are not folded.

        Raises:
            SingleReplies: replies are folded.
        """
        refuse_folds(task)
        self._terms = self._note_terms(task.exchange)
        return task

    def collect(self, replies: Replies) -> Replies:
        """Return replies without values of single clients; each loss is the mean of all.

        Raises:
            SingleReplies: the shapes of an entry differ between clients.
        """
        if not replies.ids:
            return replies
        _check_equal_shapes(replies.content)
        sums = CountedSums(with_loss(replies.content, replies.train_loss), self._numbers)
        sums.requested_terms = self._terms
        loss = mean_loss(*(sums.sum_term(term) for term in ALWAYS))
        shapes = {path: (value.shape, value.dtype) for path, value in flatten(replies.content).items()}
        return Replies(replies.ids, make_hidden_entries(shapes, sums), loss.expand(len(replies.ids)))


def _check_equal_shapes(content: Mapping[str, Any], path: str = "") -> None:
    for name, value in content.items():
        if isinstance(value, list):
            raise SingleReplies(f"'{path}{name}', whose shapes differ between clients")
        if isinstance(value, Mapping):
            _check_equal_shapes(value, f"{path}{name}/")
