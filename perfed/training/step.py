"""One mini-batch step of many clients, on which losses and penalties are computed, and the plain loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.data.augment import CropFlip
from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.model.chain import Chain, Parameters, stage_of
from perfed.model.stacked import Pass, apply_module, apply_per_domain
from perfed.training.batches import Block, IntArray
from perfed.training.cox import cox_losses

Loss = Callable[["Step"], Tensor]
Penalty = Loss


@dataclass(frozen=True)
class Objective:
    """The task and class weights of the plain loss.

    Attributes:
        task: cross-entropy, squared error, or the Cox partial likelihood.
        class_weights: factor of each client's samples of each class ``(n, C)``; ``None`` for 1.
    """

    task: Task = "classification"
    class_weights: Tensor | None = None


@dataclass
class Step:
    """One mini-batch step of the active clients, the argument of losses and penalties.

    Attributes:
        block, at: the mini-batch is number ``at`` of ``block``.
        params: working parameters of the active clients ``(clients, ...)`` by full name; those of other sets that
            are also trained are called ``set/name`` (see :meth:`set_parameters`).
        trained: names of the stages being trained; all other stages run in evaluation mode.
        rows: position in the cohort of each active client.
        start: number of stages already applied to the block's inputs (their features were computed once).
        raw: the inputs ``(total, ...)`` of the stages before ``start``.
        augment: random changes to the inputs.
        domains: domain ids of all samples ``(total,)``.
        marks: the marks of all samples ``(total,)``, or ``None``.
        per_domain: stages with parameters for each domain, ``(clients, domains, ...)``.
        objective: the settings of the plain loss.
        bf16: whether layers compute with numbers of 16 bits; the types of parameters and outputs do not change.
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
    augment: CropFlip | None = None
    domains: Tensor | None = None
    marks: Tensor | None = None
    per_domain: frozenset[str] = frozenset()
    objective: Objective = field(default_factory=Objective)
    bf16: bool = False
    _outputs: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def x(self) -> Tensor:
        """Return the inputs of the first stage whose output is not cached, ``(clients, batch, ...)``."""
        x = self.block.x[self.at, :, : self.width]
        return x if self.augment is None else self.augment(x, self.keys)

    @cached_property
    def y(self) -> Tensor:
        """Return the targets ``(clients, batch, ...)``; padded entries repeat a sample of the client."""
        return self.block.y[self.at, :, : self.width]

    @cached_property
    def domain(self) -> Tensor | None:
        """Return the domain ids ``(clients, batch)``, or ``None`` if domains are unknown."""
        if self.domains is None:
            return None
        return self.domains[self.block.index[self.at, :, : self.width]]

    @property
    def present_domains(self) -> Parameters:
        """Return which domains have a sample of positive weight in the mini-batch, boolean ``(clients, domains)``.

        The result is by name of each trained parameter that has values for each domain. The values of absent domains
        take no step in this mini-batch.
        """
        if not self.per_domain:
            return {}
        names = [name for name, t in self.params.items() if t.requires_grad and stage_of(name) in self.per_domain]
        if not names:
            return {}
        is_present = self.block.compute_once(
            "domains seen", lambda: self._find_present_domains(self.params[names[0]].shape[1])
        )[self.at]
        return dict.fromkeys(names, is_present)

    def _find_present_domains(self, num_domains: int) -> Tensor:
        """Return :attr:`present_domains` for all steps of the block, ``(steps, clients, domains)``."""
        assert self.domains is not None
        weight = self.block.weight
        sums = weight.new_zeros(*weight.shape[:2], num_domains)
        return sums.scatter_add_(2, self.domains[self.block.index], (weight > 0).to(weight)) > 0

    @cached_property
    def weight(self) -> Tensor:
        """Return 1 / batch size ``(clients, batch)``, times the sample's weight if there are any; 0 for padding."""
        return self.block.weight[self.at, :, : self.width]

    @cached_property
    def keys(self) -> Tensor:
        """Return the random keys of this step, int64 ``(clients,)``."""
        return self.block.keys[self.at]

    def select_rows(self, values: Tensor) -> Tensor:
        """Return the rows of a cohort tensor ``(n, ...)`` that belong to the active clients."""

        def select() -> tuple[Tensor, Tensor]:
            first = int(self.rows[0])
            if (np.diff(self.rows) == 1).all():
                return values, values[first : first + len(self.rows)]
            return values, values[torch.from_numpy(self.rows).to(values.device)]

        # The cache keeps ``values`` alive, so that its id is not reused.
        selected: Tensor = self.block.compute_once(("of", id(values)), select)[1]
        return selected

    def output(self, stage: str | None = None) -> Tensor:
        """Return the output of ``stage`` (default: the last) on the mini-batch, ``(clients, batch, ...)``.

        It is computed once.
        """
        stages = self.chain.stages
        stage = stages[-1] if stage is None else stage
        if stage not in self._outputs:
            index = stages.index(stage)
            if index < self.start - 1:
                self._outputs[stage] = self._compute_raw_output(index)
            elif index == self.start - 1:
                self._outputs[stage] = self.x
            else:
                inputs = self.x if index == 0 else self.output(stages[index - 1])
                self._outputs[stage] = self.apply(stage, inputs)
        return self._outputs[stage]

    def _compute_raw_output(self, stage_index: int) -> Tensor:
        assert self.raw is not None
        index = self.block.index[self.at, :, : self.width]
        x = self.raw.index_select(0, index.flatten()).view(*index.shape, *self.raw.shape[1:])
        for stage in self.chain.stages[: stage_index + 1]:
            x = self.apply(stage, x)
        return x

    def representation(self) -> Tensor:
        """Return the inputs of the head: the output of the stage before it, or the model's inputs, ``(clients, batch,
        ...)``.
        """
        before = self.chain.stages_before("head")
        return self.output(before[-1]) if before else self.x

    def apply(self, stage: str, x: Tensor, params: Parameters | None = None, domain: Tensor | None = None) -> Tensor:
        """Return the output of a stage, or of a module in one (``head.0``), for ``x`` ``(clients, any batch, ...)``.

        Args:
            stage: the name of the stage or module.
            x: its inputs.
            params: parameters to use in place of the working parameters.
            domain: ``(clients, any batch)``; default: the domains of the mini-batch.
        """
        if self.bf16:
            with torch.autocast(x.device.type, torch.bfloat16):
                return self._apply(stage, x, params, domain).to(x.dtype)
        return self._apply(stage, x, params, domain)

    def _apply(self, stage: str, x: Tensor, params: Parameters | None, domain: Tensor | None) -> Tensor:
        values = self.params if params is None else {**self.params, **params}
        run = Pass(values, self.keys, training=stage in self.trained)
        module = self.chain.get_submodule(stage)
        if stage not in self.per_domain:
            return apply_module(module, stage, x, run)
        domain = self.domain if domain is None else domain
        assert domain is not None
        return apply_per_domain(module, stage, x, run, domain)

    def apply_after(self, stage: str, x: Tensor) -> Tensor:
        """Return the output of all stages after ``stage`` for ``x``.

        Samples use the parameters of the domains in turn.
        """
        domain = assign_domains_in_turn(x, self.params, self.per_domain, self.block.first_step + self.at)
        for name in self.chain.stages[self.chain.stages.index(stage) + 1 :]:
            x = self.apply(name, x, domain=domain)
        return x

    def set_parameters(self, name: str) -> Parameters:
        """Return the parameters of the set ``name`` that is also trained, by full name of the parameter."""
        start = f"{name}/"
        return {n.removeprefix(start): t for n, t in self.params.items() if n.startswith(start)}

    def losses(self, outputs: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Return the plain loss of every sample of the mini-batch, ``(clients, batch)``.

        Args:
            outputs: ``(clients, batch, ...)``; default: the outputs of the model.
            weight: ``(clients, batch)``, weights of the samples in risk sets (survival); default: :attr:`weight`.
        """
        task, weights = self.objective.task, self.objective.class_weights
        outputs = self.output() if outputs is None else outputs
        losses = sample_losses(outputs, self.y, task, self.weight if weight is None else weight)
        return losses if weights is None else losses * self.select_rows(weights).gather(1, self.y)

    def for_client(self, row: int) -> Step:
        """Return the same mini-batch of the active client in ``row``."""
        block, client = self.block, slice(row, row + 1)
        client_block = Block(
            block.first_step,
            block.x[:, client],
            block.y[:, client],
            block.index[:, client],
            block.valid[:, client],
            block.weight[:, client],
            block.keys[:, client],
        )
        params = {name: tensor[client] for name, tensor in self.params.items()}
        width = client_block.widths()[self.at]
        return replace(self, block=client_block, width=width, params=params, rows=self.rows[client], _outputs={})

    def in_evaluation_mode(self, params: Parameters | None = None) -> Step:
        """Return the same mini-batch with all stages in evaluation mode, optionally with other parameters."""
        return replace(self, params={**self.params, **(params or {})}, trained=frozenset(), _outputs={})

    def with_params(self, params: Parameters) -> Step:
        """Return the same mini-batch, with the same dropout masks, with other parameters."""
        return replace(self, params={**self.params, **params}, _outputs={})


def assign_domains_in_turn(x: Tensor, params: Parameters, per_domain: frozenset[str], first: int) -> Tensor | None:
    """Return domains in turn from ``first`` on for inputs ``(clients, batch, ...)``.

    It is ``None`` without parameters per domain.

    With another ``first`` in every step, each input is combined with all domains.
    """
    if not per_domain:
        return None
    domains = next(t.shape[1] for name, t in params.items() if stage_of(name) in per_domain)
    return ((first + torch.arange(x.shape[1], device=x.device)) % domains).expand(x.shape[:2])


def add_penalties(loss: Loss, penalties: Sequence[Penalty]) -> Loss:
    """Return ``loss`` with all ``penalties`` added, in order.

    The returned function raises :class:`~perfed.errors.PerfedError` if one of them does not return one number for each
    client.
    """
    if loss is mean_loss and not penalties:
        return loss

    def compute_total(step: Step) -> Tensor:
        value = loss(step)
        _check_shape("loss", loss, value, step)
        for penalty in penalties:
            added = penalty(step)
            _check_shape("penalty", penalty, added, step)
            value = value + added
        return value

    return compute_total


def _check_shape(kind: str, function: Loss | Penalty, value: object, step: Step) -> None:
    """Raise an error if ``value`` is not one number for each client of the step."""
    clients = len(step.rows)
    if isinstance(value, Tensor) and value.shape == (clients,) and value.is_floating_point():
        return
    name = getattr(function, "__qualname__", type(function).__qualname__)
    description = (
        f"shape {tuple(value.shape)} and type {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    )
    raise PerfedError(
        f"the {kind} '{name}' must return one floating-point number for each client, a tensor of shape ({clients},) "
        f"(given: {description})"
    )


def mean_loss(step: Step) -> Tensor:
    """Return the plain loss ``(clients,)``: the mean loss of the samples in each client's mini-batch."""
    return (step.losses() * step.weight).sum(1)


def mean_loss_gradient(step: Step, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`mean_loss` for the model's ``outputs`` and its gradient by them, bit-identical to autograd's."""
    if step.objective.task == "classification" and step.objective.class_weights is None:
        y, weight, aten = step.y.flatten(), step.weight, torch.ops.aten
        logs = torch.log_softmax(outputs.flatten(0, 1), 1)
        losses, total = aten.nll_loss_forward.default(logs, y, None, 0, -100)
        grad = aten.nll_loss_backward.default(weight.flatten(), logs, y, None, 0, -100, total)
        grad = aten._log_softmax_backward_data.default(grad, logs, 1, logs.dtype)
        return (losses.view_as(weight) * weight).sum(1), grad.view_as(outputs)
    with torch.enable_grad():
        leaf = outputs.requires_grad_(True)
        losses = (step.losses(leaf) * step.weight).sum(1)
        (grad,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
    return losses.detach(), grad


def sample_losses(outputs: Tensor, y: Tensor, task: Task, weight: Tensor | None = None) -> Tensor:
    """Return the loss of every sample: cross-entropy, squared error (mean over outputs), or :func:`cox_losses`.

    Args:
        outputs: ``(n, batch, C)`` logits, ``(n, batch, ...)`` values, or ``(n, batch, 1)`` log hazards.
        y: ``(n, batch)`` labels, ``(n, batch, ...)`` values, or ``(n, batch, 2)`` times and events.
        task: the task, which determines the loss.
        weight: ``(n, batch)``, weights of the samples in the risk sets of survival; 0 for padding. Default: 1.

    Returns:
        ``(n, batch)``; only losses of survival depend on the other samples of the same row.
    """
    if task == "classification":
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    if task == "regression":
        return (outputs.flatten(2) - y.unsqueeze(-1).flatten(2)).square().mean(2)
    hazard = outputs.flatten(2).squeeze(2)
    return cox_losses(hazard, y[..., 0], y[..., 1], torch.ones_like(hazard) if weight is None else weight)


def balance_classes(counts: Tensor) -> Tensor:
    """Return weights ``n / (C_i n_c)``, with which all classes of a client have the same total weight.

    Args:
        counts: n_c, the number of samples of each client and class ``(n, C)``; their sum over classes is n.

    Returns:
        ``(n, C)``; C_i is the number of classes that occur at the client; other classes have weight 0. The weights of
        all samples sum to n, as with scikit-learn's ``class_weight="balanced"``.
    """
    occurs = counts > 0
    return torch.where(occurs, counts.sum(1, keepdim=True) / (occurs.sum(1, keepdim=True) * counts.clamp_min(1)), 0)
