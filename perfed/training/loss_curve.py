"""The loss of each local epoch, seen along local training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perfed.training.batches import IntArray
from perfed.training.fit import Task
from perfed.training.step import Step


class LossCurve:
    """What a cohort's :attr:`~perfed.training.cohort.Cohort.watch` is, where the loss of each local epoch is wanted.

    It sees what is fitted in one exchange, and changes nothing of it.
    """

    def __init__(self) -> None:
        self._fits: list[tuple[IntArray, Tensor]] = []

    def __call__(self, task: Task) -> Task:
        """The same fit, whose losses are noted: of a step with several gradients the first one's."""
        per_epoch = -(-task.samples.counts // task.batch_size)
        noted = torch.full((task.clients, int(task.steps.max())), torch.nan, dtype=torch.float64)
        self._fits.append((per_epoch, noted))

        def loss(step: Step) -> Tensor:
            found = task.loss(step)
            rows, at = torch.from_numpy(step.rows), step.block.first_step + step.at
            new = torch.isnan(noted[rows, at])
            noted[rows[new], at] = found.detach().cpu().double()[new]
            return found

        return replace(task, loss=loss)

    def losses(self, row: int) -> list[float]:
        """Mean loss of each epoch of the client in ``row``, extensions included, one fit after the other.

        An epoch of a client is a pass over its own samples, of fits that have no epochs too; the last may be a part.
        """
        found: list[float] = []
        for per_epoch, noted in self._fits:
            own = noted[row][~torch.isnan(noted[row])]
            found += [float(epoch.mean()) for epoch in own.split(int(per_epoch[row])) if len(epoch)]
        return found
