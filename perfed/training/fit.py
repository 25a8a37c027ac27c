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
from perfed.training.batches import Block, IntArray, Samples, Stream, iterate_blocks, plan_batches
from perfed.training.optim import Optimizer, OptimizerState, add_axes
from perfed.training.private import PrivateTraining
from perfed.training.step import Loss, Objective, Step, mean_loss, mean_loss_gradient
from perfed.training.steprules import DirectionStep, StepRules

_TRIAL_STEPS = 6


@dataclass(frozen=True)
class Task:
    """The data, parameters and settings of one fit.

    Attributes:
        chain: the modules.
        params: working parameters and buffers ``(clients, ...)``; the trained ones are updated in place.
        trained: names of the trained parameters.
        samples: the clients' data; its ``x`` is the input of stage number ``start``.
        keys: int64 ``(clients,)`` random keys.
        loss: returns one value per client, penalties included.
        rules: rules that change the optimiser's step; ``None`` for the plain step.
        per_domain: stages whose parameters have a domain axis.
        objective: the settings of the plain loss.
        steps: number of mini-batch steps of each client.
        stream: the sequence of mini-batches that each client continues; ``None`` for new shuffles in this fit.
        rows: position of each client in its cohort.
        private: differential privacy of rows; ``None`` without it.
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
        """Return the number of clients."""
        return len(self.samples.counts)

    @cached_property
    def dense(self) -> Dense | None:
        """Return the layers if all are dense and the loss is the plain one, so that explicit gradients can be used."""
        plain = self.loss is mean_loss and not (self.per_domain or self.bf16)
        return Dense.from_chain(self.chain, self.start) if plain else None

    def kind(self, label: str) -> str:
        """Return the kind of work in the plan: stages, ``label``, precision, and the size of mini-batches if the
        samples set it.
        """
        stages = sorted({stage_of(name) for name in self.trained}, key=self.chain.stages.index)
        batch = self.samples.batch_size
        precision = " in bf16" if self.bf16 else ""
        return f"fit {'+'.join(stages)}{label}" + ("" if batch is None else f" (batch {batch})") + precision

    def take_step(self, state: OptimizerState, grads: Parameters, present: Parameters) -> None:
        """Take the optimiser's step for the active clients; entries of domains outside ``present`` stay unchanged."""
        pull = self.rules.near if self.rules else None
        if pull is None:
            state.step(grads, present=present)
        else:
            near = {name: t[: len(state.params[name])] for name, t in pull.to.items()}
            state.step(grads, near, pull.pull, pull.proximal, present=present)

    def slice_clients(self, first: int, stop: int) -> Task:
        """Return the same fit for clients ``first..stop-1``; parameters are views."""
        begin = int(self.samples.starts[first])
        end = begin + int(self.samples.counts[first:stop].sum())
        return self.select_clients(slice(first, stop), slice(begin, end))

    def select_clients(self, clients: slice | IntArray, samples: slice | Tensor) -> Task:
        """Return the same fit for the clients at the positions ``clients``, whose samples are at ``samples``."""
        position = clients if isinstance(clients, slice) else torch.from_numpy(clients).to(self.keys.device)
        return replace(
            self,
            params={name: tensor[position] for name, tensor in self.params.items()},
            rules=self.rules and self.rules.for_clients(position),
            samples=self.samples.take(samples, self.samples.counts[clients]),
            keys=self.keys[position],
            raw=None if self.raw is None else self.raw[samples],
            rows=self.rows[clients],
            steps=self.steps[clients],
            stream=None if self.stream is None else self.stream.for_clients(clients),
        )


def run_task(task: Task) -> tuple[Tensor, IntArray]:
    """Run the steps of ``task``.

    Returns:
        The sum of the losses over steps ``(clients,)``, and the number of steps of each client.
    """
    order = np.argsort(-task.steps, kind="stable")
    if (order != np.arange(len(order))).any():
        return _run_in_sorted_order(task, order)
    sequences, steps = _iterate_batches(task)
    total = torch.zeros(task.clients, dtype=task.samples.x.dtype, device=task.samples.x.device)
    for losses in _iterate_steps(task, sequences):
        total[: len(losses)] += losses
    return total, steps


def rehearse_steps(task: Task, clients: int) -> Iterator[int]:
    """Return an iterator over a few steps of the first ``clients`` clients on a copy of their parameters.

    Yields:
        The number of the clients that took the step.
    """
    part = task.slice_clients(0, clients)
    part = _sort_clients(replace(part, steps=part.steps.clip(max=_TRIAL_STEPS)), np.argsort(-part.steps, kind="stable"))
    if part.private is not None:  # nothing of these steps is released
        part = replace(part, private=replace(part.private, counter=None))
    copied = replace(part, params={name: tensor.clone() for name, tensor in part.params.items()})
    return (len(losses) for losses in _iterate_steps(copied, _iterate_batches(copied)[0]))


def _run_in_sorted_order(task: Task, order: IntArray) -> tuple[Tensor, IntArray]:
    """Run with the clients sorted by decreasing number of steps, and return results in the original order."""
    sorted_task = _sort_clients(task, order)
    losses, steps = run_task(sorted_task)
    for name in task.trained:
        task.params[name][torch.from_numpy(order).to(task.keys.device)] = sorted_task.params[name]
    back = np.argsort(order)
    return losses[torch.from_numpy(back).to(losses.device)], steps[back]


def _sort_clients(task: Task, order: IntArray) -> Task:
    starts, counts = task.samples.starts, task.samples.counts
    rows = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in order]))
    return task.select_clients(order, rows)


def _iterate_batches(task: Task) -> tuple[list[Iterator[Block]], IntArray]:
    """Return iterators over the mini-batches of each stream that the rules need, and the number of steps of each
    client.
    """
    further = range(1, task.rules.streams if task.rules else 1)
    keys = [task.keys, *(rng.key(task.keys, "stream", j) for j in further)]
    streams = [task.stream, *(task.stream and task.stream.make_independent(j) for j in further)]
    if task.private and task.private.poisson:
        return [task.private.iterate_blocks(task.samples, key, task.batch_size, task.steps) for key in keys], task.steps
    plans = [
        plan_batches(task.samples, key, batch_size=task.batch_size, steps=task.steps, stream=stream)
        for key, stream in zip(keys, streams, strict=True)
    ]
    return [iterate_blocks(plan) for plan in plans], plans[0].steps


def _iterate_steps(task: Task, sequences: Sequence[Iterator[Block]]) -> Iterator[Tensor]:
    """Run the steps one after the other, and yield the losses before each of the clients that took it."""
    # ``data`` has separate version counters: those of views are shared with the clients that another thread trains.
    trainable = {name: task.params[name].data.requires_grad_(True) for name in task.trained}
    state = OptimizerState(task.optimizer, trainable)
    params = {name: t for name, t in task.params.items() if name not in trainable} | trainable
    trained = frozenset(stage_of(name) for name in task.trained)
    for stream_blocks in zip(*sequences, strict=True):
        block = stream_blocks[0]
        active = block.clients
        rows = task.rows[:active]
        if active < next(iter(state.params.values())).shape[0]:
            state.keep_first_clients(active)
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
                for b in stream_blocks
            ]
            yield _take_step(task, state, batches)


def _take_step(task: Task, state: OptimizerState, batches: list[Step]) -> Tensor:
    """Take one step, the optimiser's or that of a rule, and return the losses before it (of the first gradient)."""
    if task.rules is None or (rule := task.rules.rule) is None:
        return _take_plain_step(task, state, batches[0])
    gradient = _Gradient(task)
    params = {name: t.detach() for name, t in state.params.items()}
    present = _find_present_domains(batches)
    new = rule.by(params, gradient, batches)
    if isinstance(rule, DirectionStep):
        task.take_step(state, new, present)
    else:
        with torch.no_grad():
            for name, tensor in state.params.items():
                tensor.copy_(
                    torch.where(add_axes(present[name], tensor), new[name], tensor) if name in present else new[name]
                )
    return batches[0].weight.new_zeros(batches[0].weight.shape[0]) if gradient.first is None else gradient.first


def _take_plain_step(task: Task, state: OptimizerState, step: Step) -> Tensor:
    """Take one step of the optimiser and return the losses before it."""
    if task.private:
        losses, grads = task.private.compute_gradients(task.loss, step, state.params, 0)
    else:
        losses, gradients = _compute_gradients(task, step, state.params)
        grads = {name: g for name, g in gradients.items() if g is not None}
    if task.rules:
        grads = task.rules.transform_gradients(step, grads)
    task.take_step(state, grads, _find_present_domains([step]))
    return losses.detach()


def _find_present_domains(batches: Sequence[Step]) -> Parameters:
    """Return the domains of per-domain parameters that have a sample in any of the mini-batches of one step."""
    present, *later_batches = (batch.present_domains for batch in batches)
    for later in later_batches:
        present = {name: which | later[name] for name, which in present.items()}
    return present


def _compute_gradients(
    task: Task, step: Step, params: Parameters, *, twice: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the losses of a mini-batch, and their gradients by ``params``, some of the step's.

    The gradients of unused parameters are ``None``.
    """
    if task.dense is not None and not twice:
        with torch.no_grad():
            outputs = task.dense.compute_outputs(step.params, step.x)
            losses, grad = mean_loss_gradient(step, outputs[-1])
            gradients = task.dense.compute_gradients(step.params, outputs, grad, params)
        return losses, {name: gradients.get(name) for name in params}
    losses = _compute_losses(task, step)
    ones = torch.ones_like(losses)
    grads = torch.autograd.grad(losses, list(params.values()), ones, allow_unused=True, create_graph=twice)
    return losses, dict(zip(params, grads, strict=True))


def _compute_losses(task: Task, step: Step) -> Tensor:
    """Return the losses of a mini-batch ``(clients,)``.

    Raises:
        Diverged: if a matrix cannot be factorised, with the row of the client whose matrix it is.
    """
    try:
        return task.loss(step)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        for row, place in enumerate(step.rows.tolist()):
            if not _can_compute_loss(task, step.for_client(row)):
                raise Diverged(place, str(error).partition(": ")[0]) from None
        raise


def _can_compute_loss(task: Task, step: Step) -> bool:
    try:
        return bool(torch.isfinite(task.loss(step)).all())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return False


class _Gradient:
    """The gradient of a task's loss (:class:`~perfed.training.steprules.Gradient`), with the losses at its first call
    in ``first``.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.first: Tensor | None = None
        self.count = 0

    def __call__(self, params: Parameters, batch: Step) -> Parameters:
        if self.task.private:
            return self._compute_private(self.task.private, params, batch)
        leaves, gradients = self._compute_at(params, batch)
        grads = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradients.items()}
        return self.task.rules.transform_gradients(batch, grads) if self.task.rules else grads

    def _compute_private(self, private: PrivateTraining, params: Parameters, batch: Step) -> Parameters:
        losses, grads = private.compute_gradients(self.task.loss, batch, params, self.count)
        self.count += 1  # each gradient has independent noise
        if self.first is None:
            self.first = losses
        return self.task.rules.transform_gradients(batch, grads) if self.task.rules else grads

    def multiply_hessian(self, vector: Parameters, params: Parameters, batch: Step) -> Parameters:
        if self.task.private:
            raise PerfedError(
                "privacy.unit = 'sample' clips gradients of rows, and what it makes has no second derivative"
            )
        if self.task.rules and self.task.rules.transforms:
            raise PerfedError("an extension changes gradients, and what it makes of them has no second derivative")
        leaves, gradients = self._compute_at(params, batch, twice=True)
        pairs = [(g, vector[name]) for name, g in gradients.items() if g is not None and g.requires_grad]
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

    def _compute_at(
        self, params: Parameters, batch: Step, *, twice: bool = False
    ) -> tuple[Parameters, dict[str, Tensor | None]]:
        leaves = {name: t.detach().requires_grad_(True) for name, t in params.items()}
        losses, gradients = _compute_gradients(self.task, batch.with_params(leaves), leaves, twice=twice)
        if self.first is None:
            self.first = losses.detach()
        return leaves, gradients


class LossCurve:
    """A :attr:`~perfed.training.cohort.Cohort.watch` that records the loss of each local epoch.

    It records all fits of one exchange and does not change them.
    """

    def __init__(self) -> None:
        self._fits: list[tuple[IntArray, Tensor]] = []

    def __call__(self, task: Task) -> Task:
        """Return the same fit with recorded losses: for a step with several gradients that of the first."""
        per_epoch = -(-task.samples.counts // task.batch_size)
        recorded = torch.full((task.clients, int(task.steps.max())), torch.nan, dtype=torch.float64)
        self._fits.append((per_epoch, recorded))

        def record_loss(step: Step) -> Tensor:
            step_losses = task.loss(step)
            rows, step_number = torch.from_numpy(step.rows), step.block.first_step + step.at
            is_new = torch.isnan(recorded[rows, step_number])
            recorded[rows[is_new], step_number] = step_losses.detach().cpu().double()[is_new]
            return step_losses

        return replace(task, loss=record_loss)

    def losses(self, row: int) -> list[float]:
        """Return the mean loss of each epoch of the client in ``row``, extensions included, for all fits in order.

        An epoch is a pass over the client's samples, also in fits that count steps; the last one may be incomplete.
        """
        losses: list[float] = []
        for per_epoch, recorded in self._fits:
            client_losses = recorded[row][~torch.isnan(recorded[row])]
            losses += [float(epoch.mean()) for epoch in client_losses.split(int(per_epoch[row])) if len(epoch)]
        return losses
