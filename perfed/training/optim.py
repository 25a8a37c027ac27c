"""Optimisers for stacks of clients: torch's own fused kernels on parameters with a leading client axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from perfed.model.chain import Parameters, stage_of
from perfed.training.settings import LocalTraining

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8

Proximal = Literal["explicit", "implicit"]
"""How SGD minimises ``s / 2 |w - near|^2``: by its gradient, or by a separate step after that on the loss."""


def explicit_is_stable(lr: float, pull: float, momentum: float = 0.0) -> bool:
    """Return whether SGD converges on ``pull / 2 |w - near|^2`` by its gradient: ``lr pull < 2 (1 + momentum)``.

    With s = ``pull``, ``v <- m v + s (w - near)`` and ``w <- w - lr v``, the gap e = w - near of one step follows from
    the two before it, ``e_{t+1} = (1 + m - lr s) e_t - m e_{t-1}``. Both roots of ``z^2 - (1 + m - lr s) z + m`` lie
    inside the unit circle if and only if m, their product, is below 1 and the polynomial is positive at 1, where it is
    lr s, and at -1, where it is ``2 (1 + m) - lr s``. (The curvature of the loss, and weight decay, add to s: together
    they must stay below the bound.)
    """
    return lr * pull < 2 * (1 + momentum)


@dataclass(frozen=True)
class Group:
    """Parameters that share optimiser settings."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Optimizer:
    """The settings of ``"sgd"`` with momentum or ``"adam"`` (betas 0.9 and 0.999, eps 1e-8), both as in torch.optim."""

    kind: str
    momentum: float
    groups: tuple[Group, ...]

    @property
    def needs_memory(self) -> bool:
        """Return whether a first moment or momentum is stored."""
        return self.kind == "adam" or self.momentum != 0


class OptimizerState:
    """Optimiser state of a stack of clients, all at the same step count.

    If parameters have an axis of entries after that of the clients and not all entries take part in a step
    (``present``), every entry has a separate step count, as if each had a separate optimiser.
    """

    def __init__(self, spec: Optimizer, params: Parameters) -> None:
        self.spec = spec
        self.params = params
        self.first = {name: torch.zeros_like(t) for name, t in params.items()} if spec.needs_memory else {}
        self.second = {name: torch.zeros_like(t) for name, t in params.items()} if spec.kind == "adam" else {}
        device = next(iter(params.values())).device
        self.counters = {name: torch.zeros((), device=device) for name in params}
        self.counts: dict[str, Tensor] = {}  # (clients, entries), in place of the counter

    def keep_first_clients(self, clients: int) -> None:
        """Drop all but the first ``clients`` clients."""
        for table in (self.params, self.first, self.second, self.counts):
            for name, tensor in table.items():
                table[name] = tensor[:clients].detach()
        for tensor in self.params.values():
            tensor.requires_grad_(True)

    @torch.no_grad()
    def step(
        self,
        grads: Parameters,
        near: Parameters | None = None,
        pull: float = 0.0,
        proximal: Proximal = "explicit",
        present: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Update :attr:`params` in place by one step, with ``pull / 2 |w - near|^2`` added to the loss.

        The explicit step adds the gradient ``s (w - near)`` of the term, s = ``pull``, to that of the loss. If SGD
        would diverge by it (:func:`explicit_is_stable`), or ``proximal`` is "implicit", SGD takes the implicit step on
        the term after its step on the loss, ``w <- (w + r s near) / (1 + r s)``, which is stable for any s. The rate r
        is the length of a step for a constant gradient: lr, and lr / (1 - m) with momentum m, so that the fixed point
        is that of loss and term together. Adam always adds the gradient, since its steps have a bounded length.

        Args:
            grads: gradients of the loss.
            near: the values to which some of the parameters are pulled.
            pull: s.
            proximal: the step that SGD takes on the term.
            present: boolean ``(clients, entries)`` by name of the parameters that have entries, the same names in every
                step; entries at which it is false take no step: values, moments and step counts stay unchanged.
        """
        copies = self._copy_entries(present or {})
        near = near if near and pull else {}
        for group in self.spec.groups:
            pulled = [name for name in group.names if name in near]
            implicit = bool(pulled) and self._uses_implicit_step(group, pull, proximal)
            if pulled and not implicit:
                grads = grads | {name: self._add_pull(grads.get(name), name, near[name], pull) for name in pulled}
            names = [name for name in group.names if name in grads]
            if self.spec.kind == "adam":
                for name in filter(self.counts.__contains__, names):
                    self._step_adam_by_entry(name, grads[name], group)
                names = [name for name in names if name not in self.counts]
            if names:
                # The fused kernels walk memory in order: a transposed gradient would be applied to the wrong entries.
                params, g = [self.params[n] for n in names], [grads[n].contiguous() for n in names]
                if self.spec.kind == "adam":
                    first, second = [self.first[n] for n in names], [self.second[n] for n in names]
                    _step_adam(params, g, first, second, [self.counters[n] for n in names], group)
                else:
                    self._step_sgd(names, params, g, group)
            if implicit:
                rate = pull * group.lr / (1 - self.spec.momentum)
                for name in pulled:
                    self.params[name].lerp_(near[name], rate / (1 + rate))
        for tensor, old, which in copies:
            tensor.copy_(torch.where(which, tensor, old))

    def _add_pull(self, grad: Tensor | None, name: str, near: Tensor, pull: float) -> Tensor:
        """Return ``grad + pull (w - near)`` in a new tensor."""
        term = (self.params[name] - near).mul_(pull)
        return term if grad is None else term.add_(grad)

    def _copy_entries(self, present: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return what a step may change of the parameters in ``present``: each tensor, a copy, and the entries to
        change.
        """
        copies = []
        for name, which in present.items():
            self.counts.setdefault(name, torch.zeros_like(which, dtype=self.params[name].dtype))
            tables = (self.params, self.first, self.second, self.counts)
            copies += [(t, t.clone(), add_axes(which, t)) for table in tables if (t := table.get(name)) is not None]
        return copies

    def _step_adam_by_entry(self, name: str, grad: Tensor, group: Group) -> None:
        """Take one step of Adam with a separate step count for every entry of the parameter."""
        param, first, second, count = (t[name] for t in (self.params, self.first, self.second, self.counts))
        count += 1
        steps = add_axes(count, param)
        grad = grad.add(param, alpha=group.weight_decay)
        first.lerp_(grad, 1 - _BETA_1)
        second.mul_(_BETA_2).addcmul_(grad, grad, value=1 - _BETA_2)
        # 1 - beta^t, exact also in float32.
        root = (second / -torch.expm1(steps * log(_BETA_2))).sqrt_().add_(_EPS)
        param.addcdiv_(first / -torch.expm1(steps * log(_BETA_1)), root, value=-group.lr)

    def _uses_implicit_step(self, group: Group, pull: float, proximal: Proximal) -> bool:
        stable = explicit_is_stable(group.lr, pull, self.spec.momentum)
        return self.spec.kind == "sgd" and (proximal == "implicit" or not stable)

    def _step_sgd(self, names: list[str], params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        # The buffers are initialised with zero, so that the first step uses the plain gradient, as with dampening 0.
        buffers = [self.first.get(n) for n in names]
        settings: dict[str, Any] = {"weight_decay": group.weight_decay, "momentum": self.spec.momentum, "lr": group.lr}
        settings |= {"dampening": 0.0, "nesterov": False, "maximize": False}
        if _FUSED_SGD is None or params[0].device.type != "cpu":
            sgd(params, grads, buffers, fused=True, has_sparse_grad=False, **settings)
        else:  # calling the kernel directly avoids the checks around it
            _FUSED_SGD(params, grads, buffers if self.first else [], is_first_step=False, **settings)


def add_axes(entries: Tensor, tensor: Tensor) -> Tensor:
    """Return ``entries`` ``(clients, entries)`` with as many axes as ``tensor`` ``(clients, entries, ...)``."""
    return entries.view(*entries.shape, *([1] * (tensor.ndim - entries.ndim)))


def _step_adam(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counters: list[Tensor],
    group: Group,
) -> None:
    """Take one step of torch's fused Adam.

    On CPUs its kernel is called directly, if available, which saves 30 us of checks.
    """
    lr, decay = group.lr, group.weight_decay
    if _FUSED_ADAM is None or params[0].device.type != "cpu":
        settings: dict[str, Any] = {"beta1": _BETA_1, "beta2": _BETA_2, "lr": lr, "weight_decay": decay, "eps": _EPS}
        adam(params, grads, first, second, [], counters, fused=True, amsgrad=False, maximize=False, **settings)
        return
    counter = counters[0]
    counter += 1
    _FUSED_ADAM(
        params, grads, first, second, [], [counter] * len(params),
        lr=lr, beta1=_BETA_1, beta2=_BETA_2, weight_decay=decay, eps=_EPS, amsgrad=False, maximize=False,
    )  # fmt: skip


_FUSED_ADAM: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
_FUSED_SGD: Callable[..., None] | None = getattr(torch, "_fused_sgd_", None)


def build_optimizer(ranks: Mapping[str, int], settings: LocalTraining) -> Optimizer:
    """Return the local optimiser of ``settings``, with parameters grouped by learning rate and weight decay.

    Args:
        ranks: the number of axes of each parameter, by name, without that of the clients. Parameters with one axis,
            biases and norms, only decay with ``settings.decay = "all"``.
        settings: the settings of local training.
    """
    grouped: dict[tuple[float, float], list[str]] = {}
    for name, rank in ranks.items():
        stage = stage_of(name)
        decay = settings.weight_decay_of(stage) if settings.decay == "all" or rank > 1 else 0.0
        grouped.setdefault((settings.lr_of(stage), decay), []).append(name)
    groups = tuple(Group(tuple(names), rate, decay) for (rate, decay), names in grouped.items())
    return Optimizer(settings.optimizer, settings.momentum, groups)
