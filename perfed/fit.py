"""Local optimisation: the mini-batch steps of many clients at once.

The working parameters carry a leading client axis and are updated in place. A loss returns one value per client and
never mixes clients, so the gradient of the sum holds each client's own gradient, and element-wise optimisers do the
rest. Optimiser state is fresh in every fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.batches import Block, IntArray, Samples, Schedule, blocks, schedule, steps_of
from perfed.layers import Pass, apply_module
from perfed.model import Chain, Parameters, stage_of
from perfed.optim import Optimizer, OptimizerState

Loss = Callable[["Step"], Tensor]
Correction = Callable[["Step", Parameters], Parameters]


@dataclass
class Step:
    """One mini-batch step of the active clients, as losses and penalties see it.

    Attributes:
        block, at: the mini-batch is number ``at`` of ``block``.
        params: working parameters of the active clients ``(clients, ...)`` by full name.
        trained: names of the stages being trained; all other stages run in evaluation mode.
        rows: position in the cohort of each active client.
        start: number of stages already applied to the block's inputs (their features were computed once).
        raw: the inputs ``(total, ...)`` that the stages before ``start`` saw.
    """

    chain: Chain
    block: Block
    at: int
    width: int
    params: Parameters
    trained: frozenset[str]
    rows: IntArray
    start: int = 0
    raw: Tensor | None = None
    _outputs: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def x(self) -> Tensor:
        """Inputs of the first stage that is not cached, ``(clients, batch, ...)``."""
        return self.block.x[self.at, :, : self.width]

    @cached_property
    def y(self) -> Tensor:
        """Targets ``(clients, batch, ...)``; padded entries repeat a sample of the client."""
        return self.block.y[self.at, :, : self.width]

    @cached_property
    def weight(self) -> Tensor:
        """``(clients, batch)``: 1 / batch size for samples, 0 for padding; sums to one per client."""
        return self.block.weight[self.at, :, : self.width]

    @cached_property
    def keys(self) -> Tensor:
        """Randomness of this step, int64 ``(clients,)``."""
        return self.block.keys[self.at]

    def of(self, values: Tensor) -> Tensor:
        """The rows of a cohort tensor ``(n, ...)`` that belong to the active clients."""

        def select() -> tuple[Tensor, Tensor]:
            first = int(self.rows[0])
            if (np.diff(self.rows) == 1).all():
                return values, values[first : first + len(self.rows)]
            return values, values[torch.from_numpy(self.rows).to(values.device)]

        # The cache keeps ``values`` alive, so that its id stays its own.
        selected: Tensor = self.block.cached(("of", id(values)), select)[1]
        return selected

    def output(self, stage: str | None = None) -> Tensor:
        """Output of ``stage`` (default: the last) on the mini-batch, ``(clients, batch, ...)``; computed once."""
        stages = self.chain.stages
        stage = stages[-1] if stage is None else stage
        if stage not in self._outputs:
            at = stages.index(stage)
            if at < self.start - 1:
                self._outputs[stage] = self._raw_output(at)
            elif at == self.start - 1:
                self._outputs[stage] = self.x
            else:
                below = self.x if at == 0 else self.output(stages[at - 1])
                self._outputs[stage] = self.apply(stage, below)
        return self._outputs[stage]

    def _raw_output(self, at: int) -> Tensor:
        assert self.raw is not None
        index = self.block.index[self.at, :, : self.width]
        x = self.raw.index_select(0, index.flatten()).view(*index.shape, *self.raw.shape[1:])
        for stage in self.chain.stages[: at + 1]:
            x = self.apply(stage, x)
        return x

    def apply(self, stage: str, x: Tensor) -> Tensor:
        """Apply one stage with the working parameters to ``x`` ``(clients, any batch, ...)``."""
        run = Pass(self.params, self.keys, training=stage in self.trained)
        return apply_module(self.chain.get_submodule(stage), stage, x, run)

    def after(self, stage: str, x: Tensor) -> Tensor:
        """Apply all stages behind ``stage`` to ``x``."""
        for name in self.chain.stages[self.chain.stages.index(stage) + 1 :]:
            x = self.apply(name, x)
        return x


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of each client's mini-batch, ``(clients,)``."""
    logits = step.output()
    losses = F.cross_entropy(logits.flatten(0, 1), step.y.flatten(), reduction="none")
    return (losses.view(step.weight.shape) * step.weight).sum(1)


def squared_error(step: Step) -> Tensor:
    """Mean squared error of each client's mini-batch, averaged over outputs, ``(clients,)``."""
    error = (step.output().flatten(2) - step.y.unsqueeze(-1).flatten(2)).square().mean(2)
    return (error * step.weight).sum(1)


@dataclass(frozen=True)
class Task:
    """One fit: what is trained, on what, how.

    Attributes:
        chain: the modules.
        params: working parameters and buffers ``(clients, ...)``; the trained ones are updated in place.
        trained: names of the trained parameters.
        samples: the clients' data; its ``x`` is the input of stage number ``start``.
        keys: int64 ``(clients,)``.
        loss: one value per client, penalties included.
        correct: edits gradients, given and returning ``{name: (clients, ...)}``.
        epochs, steps: length of the fit, epochs per client or steps for all; the other is ``None``.
        rows: position of each client in its cohort.
    """

    chain: Chain
    params: Parameters
    trained: tuple[str, ...]
    samples: Samples
    keys: Tensor
    optimizer: Optimizer
    loss: Loss
    batch_size: int
    epochs: IntArray | None = None
    steps: int | None = None
    correct: Correction | None = None
    start: int = 0
    raw: Tensor | None = None
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.samples.counts)

    def part(self, first: int, stop: int) -> Task:
        """The same fit for clients ``first..stop-1``; parameters are views."""
        starts = self.samples.starts
        begin = int(starts[first])
        end = begin + int(self.samples.counts[first:stop].sum())
        samples = Samples(self.samples.x[begin:end], self.samples.y[begin:end], self.samples.counts[first:stop])
        return replace(
            self,
            params={name: tensor[first:stop] for name, tensor in self.params.items()},
            samples=samples,
            keys=self.keys[first:stop],
            raw=None if self.raw is None else self.raw[begin:end],
            rows=self.rows[first:stop],
            epochs=None if self.epochs is None else self.epochs[first:stop],
        )


def run(task: Task, *, limit: int | None = None) -> tuple[Tensor, IntArray]:
    """Do the steps of ``task``, at most ``limit`` of them.

    Returns:
        Sum of the losses over steps ``(clients,)``, and the number of steps of each client.
    """
    if limit is not None and task.epochs is not None:
        task = replace(task, epochs=np.minimum(task.epochs, limit))  # an epoch has at least one step
    length = steps_of(task.samples.counts, task.batch_size, task.epochs, task.steps)
    order = np.argsort(-length, kind="stable")
    if (order != np.arange(len(order))).any():
        return _run_sorted(task, order, limit)
    plan = schedule(task.samples, task.keys, batch_size=task.batch_size, epochs=task.epochs, steps=task.steps)
    return _run(task, plan, limit), plan.steps


def _run_sorted(task: Task, order: IntArray, limit: int | None) -> tuple[Tensor, IntArray]:
    """Run with the clients sorted by decreasing number of steps, and put the results back in place."""
    index = torch.from_numpy(order).to(task.keys.device)
    starts, counts = task.samples.starts, task.samples.counts
    rows = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in order]))
    samples = Samples(task.samples.x[rows], task.samples.y[rows], counts[order])
    params = {name: tensor[index] for name, tensor in task.params.items()}
    raw = None if task.raw is None else task.raw[rows]
    sorted_task = replace(
        task,
        params=params,
        samples=samples,
        keys=task.keys[index],
        raw=raw,
        rows=task.rows[order],
        epochs=None if task.epochs is None else task.epochs[order],
    )
    losses, steps = run(sorted_task, limit=limit)
    for name in task.trained:
        task.params[name][index] = params[name]
    back = np.argsort(order)
    return losses[torch.from_numpy(back).to(losses.device)], steps[back]


def _run(task: Task, plan: Schedule, limit: int | None) -> Tensor:
    trainable = {name: task.params[name].detach().requires_grad_(True) for name in task.trained}
    state = OptimizerState(task.optimizer, trainable)
    params = {name: t for name, t in task.params.items() if name not in trainable} | trainable
    trained = frozenset(stage_of(name) for name in task.trained)
    total = torch.zeros(task.clients, dtype=task.samples.x.dtype, device=task.samples.x.device)
    ones = torch.ones_like(total)
    for block in blocks(plan, limit=limit):
        rows = task.rows[: block.clients]
        if block.clients < next(iter(state.params.values())).shape[0]:
            state.narrow(block.clients)
            params = {name: t[: block.clients] for name, t in params.items()} | state.params
        for at, width in enumerate(block.widths()):
            step = Step(task.chain, block, at, width, params, trained, rows, task.start, task.raw)
            losses = task.loss(step)
            names = list(state.params)
            inputs = [state.params[n] for n in names]
            found = torch.autograd.grad(losses, inputs, ones[: block.clients], allow_unused=True)
            grads = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            if task.correct is not None:
                grads = task.correct(step, grads)
            state.step(grads)
            total[: block.clients] += losses.detach()
    return total


def detached(task: Task) -> Task:
    """The task on a copy of its parameters: running it changes nothing."""
    return replace(task, params={name: tensor.clone() for name, tensor in task.params.items()})
