"""Local optimisation: the mini-batch steps of many clients at once.

The working parameters carry a leading client axis and are updated in place. A loss returns one value per client and
never mixes clients, so the gradient of the sum holds each client's own gradient, and element-wise optimisers do the
rest. Optimiser state is fresh in every fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from perfed import rng
from perfed.data.augment import CropFlip
from perfed.errors import Diverged, PerfedError
from perfed.model.chain import Chain, Parameters, stage_of
from perfed.model.stacked import Dense
from perfed.training.batches import Block, IntArray, Samples, Stream, blocks, schedule
from perfed.training.optim import Optimizer, OptimizerState, with_axes_of
from perfed.training.private import PrivateTraining
from perfed.training.step import Loss, Objective, Step, mean_loss, mean_loss_gradient
from perfed.training.steprules import DirectionStep, StepRules

_REHEARSED = 6


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
        rules: how a step departs from the optimiser's own; ``None``: not at all.
        per_domain: stages whose parameters have a domain axis.
        objective: what the plain loss is.
        steps: mini-batch steps of each client.
        stream: the sequence of mini-batches in which each client goes on; ``None``: the fit has its own shuffles.
        rows: position of each client in its cohort.
        private: how rows are kept private; ``None``: not at all.
        bf16: whether layers compute with numbers of 16 bits.
    """

    chain: Chain
    params: Parameters
    trained: tuple[str, ...]
    samples: Samples
    keys: Tensor
    optimizer: Optimizer
    loss: Loss
    batch_size: int
    steps: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    stream: Stream | None = None
    rules: StepRules | None = None
    augment: CropFlip | None = None
    per_domain: frozenset[str] = frozenset()
    objective: Objective = field(default_factory=Objective)
    start: int = 0
    raw: Tensor | None = None
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    private: PrivateTraining | None = None
    bf16: bool = False

    @property
    def clients(self) -> int:
        """Number of clients that are fitted side by side."""
        return len(self.samples.counts)

    @cached_property
    def dense(self) -> Dense | None:
        """The layers, where all are dense and the loss is the plain one: their gradients are written out."""
        plain = self.loss is mean_loss and not (self.per_domain or self.bf16)
        return Dense.of(self.chain, self.start) if plain else None

    def kind(self, label: str) -> str:
        """Names the kind of work in the plan: stages, ``label``, and the size of mini-batches if it is their own."""
        stages = sorted({stage_of(name) for name in self.trained}, key=self.chain.stages.index)
        batch = self.samples.batch_size
        precision = " in bf16" if self.bf16 else ""
        return f"fit {'+'.join(stages)}{label}" + ("" if batch is None else f" (batch {batch})") + precision

    def descend(self, state: OptimizerState, grads: Parameters, seen: Parameters) -> None:
        """The optimiser's step for the clients that are still active, of the entries ``seen``."""
        pull = self.rules.near if self.rules else None
        if pull is None:
            state.step(grads, seen=seen)
        else:
            near = {name: t[: len(state.params[name])] for name, t in pull.to.items()}
            state.step(grads, near, pull.pull, pull.proximal, seen=seen)

    def part(self, first: int, stop: int) -> Task:
        """The same fit for clients ``first..stop-1``; parameters are views."""
        begin = int(self.samples.starts[first])
        end = begin + int(self.samples.counts[first:stop].sum())
        return self.of(slice(first, stop), slice(begin, end))

    def of(self, clients: slice | IntArray, samples: slice | Tensor) -> Task:
        """The same fit for some clients, at the positions ``clients``, whose samples are at ``samples``."""
        at = clients if isinstance(clients, slice) else torch.from_numpy(clients).to(self.keys.device)
        return replace(
            self,
            params={name: tensor[at] for name, tensor in self.params.items()},
            rules=self.rules and self.rules.for_clients(at),
            samples=self.samples.take(samples, self.samples.counts[clients]),
            keys=self.keys[at],
            raw=None if self.raw is None else self.raw[samples],
            rows=self.rows[clients],
            steps=self.steps[clients],
            stream=None if self.stream is None else self.stream.of(clients),
        )


def run(task: Task) -> tuple[Tensor, IntArray]:
    """Do the steps of ``task``.

    Returns:
        Sum of the losses over steps ``(clients,)``, and the number of steps of each client.
    """
    order = np.argsort(-task.steps, kind="stable")
    if (order != np.arange(len(order))).any():
        return _run_sorted(task, order)
    sequences, steps = _sequences(task)
    total = torch.zeros(task.clients, dtype=task.samples.x.dtype, device=task.samples.x.device)
    for losses in _steps(task, sequences):
        total[: len(losses)] += losses
    return total, steps


def rehearsal(task: Task, clients: int) -> Iterator[int]:
    """A few steps of the first ``clients`` clients on a copy of their parameters, each when the next is asked for.

    Yields:
        Number of the clients that took the step.
    """
    part = task.part(0, clients)
    part = _in_order(replace(part, steps=part.steps.clip(max=_REHEARSED)), np.argsort(-part.steps, kind="stable"))
    if part.private is not None:  # nothing of these steps is released
        part = replace(part, private=replace(part.private, counter=None))
    copied = replace(part, params={name: tensor.clone() for name, tensor in part.params.items()})
    return (len(losses) for losses in _steps(copied, _sequences(copied)[0]))


def _run_sorted(task: Task, order: IntArray) -> tuple[Tensor, IntArray]:
    """Run with the clients sorted by decreasing number of steps, and put the results back in place."""
    sorted_task = _in_order(task, order)
    losses, steps = run(sorted_task)
    for name in task.trained:
        task.params[name][torch.from_numpy(order).to(task.keys.device)] = sorted_task.params[name]
    back = np.argsort(order)
    return losses[torch.from_numpy(back).to(losses.device)], steps[back]


def _in_order(task: Task, order: IntArray) -> Task:
    starts, counts = task.samples.starts, task.samples.counts
    rows = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in order]))
    return task.of(order, rows)


def _sequences(task: Task) -> tuple[list[Iterator[Block]], IntArray]:
    """The mini-batches of each stream that the rules need, and the number of steps of each client."""
    further = range(1, task.rules.streams if task.rules else 1)
    keys = [task.keys, *(rng.key(task.keys, "stream", j) for j in further)]
    streams = [task.stream, *(task.stream and task.stream.apart(j) for j in further)]
    if task.private and task.private.poisson:
        return [task.private.blocks(task.samples, key, task.batch_size, task.steps) for key in keys], task.steps
    plans = [
        schedule(task.samples, key, batch_size=task.batch_size, steps=task.steps, stream=stream)
        for key, stream in zip(keys, streams, strict=True)
    ]
    return [blocks(plan) for plan in plans], plans[0].steps


def _steps(task: Task, sequences: Sequence[Iterator[Block]]) -> Iterator[Tensor]:
    """Do one step after the other, and yield the losses before it of the clients that took it."""
    # ``data`` has versions of its own: those of views are shared with the clients that another thread trains.
    trainable = {name: task.params[name].data.requires_grad_(True) for name in task.trained}
    state = OptimizerState(task.optimizer, trainable)
    params = {name: t for name, t in task.params.items() if name not in trainable} | trainable
    trained = frozenset(stage_of(name) for name in task.trained)
    for together in zip(*sequences, strict=True):
        block = together[0]
        active = block.clients
        rows = task.rows[:active]
        if active < next(iter(state.params.values())).shape[0]:
            state.narrow(active)
            params = {name: t[:active] for name, t in params.items()} | state.params
        for at, width in enumerate(block.widths()):
            batches = [
                Step(
                    chain=task.chain,
                    block=b,
                    at=at,
                    width=width,
                    params=params,
                    trained=trained,
                    rows=rows,
                    start=task.start,
                    raw=task.raw,
                    augment=task.augment,
                    domains=task.samples.domain,
                    marks=task.samples.mark,
                    per_domain=task.per_domain,
                    objective=task.objective,
                    bf16=task.bf16,
                )
                for b in together
            ]
            yield _step(task, state, batches)


def _step(task: Task, state: OptimizerState, batches: list[Step]) -> Tensor:
    """One step, the optimiser's or a rule's; the losses before it (of the first gradient)."""
    if task.rules is None or (rule := task.rules.rule) is None:
        return _descend(task, state, batches[0])
    gradient = _Gradient(task)
    params = {name: t.detach() for name, t in state.params.items()}
    seen = _seen(batches)
    new = rule.by(params, gradient, batches)
    if isinstance(rule, DirectionStep):
        task.descend(state, new, seen)
    else:
        with torch.no_grad():
            for name, tensor in state.params.items():
                tensor.copy_(
                    torch.where(with_axes_of(seen[name], tensor), new[name], tensor) if name in seen else new[name]
                )
    return batches[0].weight.new_zeros(batches[0].weight.shape[0]) if gradient.first is None else gradient.first


def _descend(task: Task, state: OptimizerState, step: Step) -> Tensor:
    """One step of the optimiser; the losses before it."""
    if task.private:
        losses, grads = task.private.gradients(task.loss, step, state.params, 0)
    else:
        losses, found = _gradients(task, step, state.params)
        grads = {name: g for name, g in found.items() if g is not None}
    if task.rules:
        grads = task.rules.transformed(step, grads)
    task.descend(state, grads, _seen([step]))
    return losses.detach()


def _seen(batches: Sequence[Step]) -> Parameters:
    """Which entries of the trained parameters per domain see a sample in any of the mini-batches of one step."""
    first, *others = (batch.seen for batch in batches)
    for other in others:
        first = {name: which | other[name] for name, which in first.items()}
    return first


def _gradients(
    task: Task, step: Step, params: Parameters, *, twice: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The losses of a mini-batch, and their gradients by ``params``, which are among the step's; None where unused."""
    if task.dense is not None and not twice:
        with torch.no_grad():
            outputs = task.dense.outputs(step.params, step.x)
            losses, grad = mean_loss_gradient(step, outputs[-1])
            written = task.dense.gradients(step.params, outputs, grad, params)
        return losses, {name: written.get(name) for name in params}
    losses = _losses(task, step)
    ones = torch.ones_like(losses)
    grads = torch.autograd.grad(losses, list(params.values()), ones, allow_unused=True, create_graph=twice)
    return losses, dict(zip(params, grads, strict=True))


def _losses(task: Task, step: Step) -> Tensor:
    """The losses of a mini-batch ``(clients,)``; where a matrix cannot be factorised, whose it is is found out.

    Raises:
        Diverged: with that client's row.
    """
    try:
        return task.loss(step)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        for row, place in enumerate(step.rows.tolist()):
            if not _computable(task, step.alone(row)):
                raise Diverged(place, str(error).partition(": ")[0]) from None
        raise


def _computable(task: Task, step: Step) -> bool:
    try:
        return bool(torch.isfinite(task.loss(step)).all())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return False


class _Gradient:
    """The :class:`Gradient` of a task's loss; ``first``: the losses at its first call."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.first: Tensor | None = None
        self.count = 0

    def __call__(self, params: Parameters, batch: Step) -> Parameters:
        if self.task.private:
            return self._privately(self.task.private, params, batch)
        leaves, found = self._at(params, batch)
        grads = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in found.items()}
        return self.task.rules.transformed(batch, grads) if self.task.rules else grads

    def _privately(self, private: PrivateTraining, params: Parameters, batch: Step) -> Parameters:
        losses, grads = private.gradients(self.task.loss, batch, params, self.count)
        self.count += 1  # each gradient has noise of its own
        if self.first is None:
            self.first = losses
        return self.task.rules.transformed(batch, grads) if self.task.rules else grads

    def along(self, vector: Parameters, params: Parameters, batch: Step) -> Parameters:
        if self.task.private:
            raise PerfedError(
                "privacy.unit = 'sample' clips gradients of rows, and what it makes has no second derivative"
            )
        if self.task.rules and self.task.rules.transforms:
            raise PerfedError("an extension changes gradients, and what it makes of them has no second derivative")
        leaves, found = self._at(params, batch, twice=True)
        pairs = [(g, vector[name]) for name, g in found.items() if g is not None and g.requires_grad]
        if not pairs:  # the loss is linear in the parameters
            return {n: torch.zeros_like(t) for n, t in leaves.items()}
        outputs, weights = zip(*pairs, strict=True)
        inputs = list(leaves.values())
        try:
            products = torch.autograd.grad(outputs, inputs, weights, materialize_grads=True)
        except RuntimeError as error:
            if "derivative for" not in str(error):
                raise
            raise PerfedError(f"a layer has no second derivative ({str(error).splitlines()[0]})") from None
        return dict(zip(leaves, products, strict=True))

    def _at(
        self, params: Parameters, batch: Step, *, twice: bool = False
    ) -> tuple[Parameters, dict[str, Tensor | None]]:
        leaves = {name: t.detach().requires_grad_(True) for name, t in params.items()}
        losses, found = _gradients(self.task, batch.with_params(leaves), leaves, twice=twice)
        if self.first is None:
            self.first = losses.detach()
        return leaves, found


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
