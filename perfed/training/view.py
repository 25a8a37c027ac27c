"""Clients of one architecture: their data, and forward passes with their parameters, a client axis in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.data.client import Client
from perfed.data.labels import Task, no_labels
from perfed.data.lazy import loaded
from perfed.errors import PerfedError
from perfed.model.chain import Parameters, stage_of
from perfed.model.placement import PER_DOMAIN, Layout
from perfed.model.stacked import Pass, apply_module, apply_per_domain, is_thread_safe
from perfed.system import installed_version
from perfed.training.batches import Samples
from perfed.training.cox import client_cox_losses
from perfed.training.plan import Plan, arithmetic
from perfed.training.step import Objective, balanced, by_turns, sample_losses
from perfed.training.trials import Trial

_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class ExchangeId:
    """Which exchange a program runs in; part of every random key."""

    seed: int
    round: int
    exchange: int

    def __str__(self) -> str:
        return f"round {self.round}" if self.round > 0 else "preparation before round 1"


class View:
    """n >= 1 clients of one architecture; every tensor has a leading client axis of size n.

    Attributes:
        ids: client ids, in the view's order.
        layout: the architecture that they have in common.
        chain: its modules.
        model: parameters and buffers by full name ``(n, ...)``.
        places: where each of them lives.
        task: classification, regression or survival.
        num_classes: ``None`` where targets are no labels.
        num_domains: M; 0 where domains are unknown.
        domain: ``(n, batch)`` domain ids of the inputs that :meth:`forward` is applied to; :meth:`windows` sets it.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        layout: Layout,
        model: Parameters,
        *,
        plan: Plan,
        task: Task,
        num_classes: int | None,
        num_domains: int = 0,
    ) -> None:
        self.clients = list(clients)
        self.layout = layout
        self.chain = layout.chain
        self.places = layout.places
        self.model = model
        self.plan = plan
        self.task = task
        self.num_classes = num_classes
        self.num_domains = num_domains
        self.ids = [c.id for c in self.clients]
        self.domain: Tensor | None = None
        self._packed: dict[str, Samples] = {}
        self._kept: tuple[Any, list[Tensor], Samples, Tensor] | None = None

    @property
    def n(self) -> int:
        """Number of clients in the view."""
        return len(self.clients)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of inputs and parameters."""
        return self.clients[0].train.x.dtype

    @cached_property
    def device(self) -> torch.device:
        """Where the data and the parameters are."""
        return self.clients[0].train.x.device

    @property
    def num_samples(self) -> Tensor:
        """Training samples per client, ``(n,)``, in the dtype of the inputs."""
        return torch.tensor([len(c.train) for c in self.clients], dtype=self.dtype, device=self.device)

    @property
    def class_counts(self) -> Tensor:
        """Training samples per client and class, ``(n, C)``."""
        if self.num_classes is None:
            raise no_labels("class counts need", self.task)
        counts = [c.train.class_counts(self.num_classes) for c in self.clients]
        return torch.tensor(counts, device=self.device).to(self.dtype)

    def objective(self, class_weights: str) -> Objective:
        """What the plain loss is, with classes weighed as the setting ``class_weights`` says."""
        weighted = class_weights == "balanced" and self.task == "classification"
        return Objective(self.task, balanced(self.class_counts) if weighted else None)

    # Data --------------------------------------------------------------------------------------------------

    def samples(self, split: str = "train") -> Samples:
        """All samples of one split, vectors padded to the cohort's longest; clients without it have none."""
        if split not in self._packed:
            shapes = {c.input_shape for c in self.clients}
            width = max(s[0] for s in shapes) if len(shapes) > 1 else None
            none = torch.arange(0, device=self.device)
            own = ((c, c.split(split)) for c in self.clients)
            parts = [c.train.take(none) if part is None else part for c, part in own]
            if any(part.deferred for part in parts):
                parts = loaded(parts)
            self._packed[split] = Samples.pack(parts, width)
        return self._packed[split]

    # Forward -----------------------------------------------------------------------------------------------

    @cached_property
    def parallel(self) -> bool:
        """Whether several threads may work on different clients: on a CPU, with layers that threads can share."""
        return self.device.type == "cpu" and all(is_thread_safe(self.chain.get_submodule(s)) for s in self.chain.stages)

    @property
    def per_domain(self) -> frozenset[str]:
        """Stages that have parameters for each domain, ``(n, domains, ...)``."""
        return frozenset(stage_of(name) for name, place in self.places.items() if place == PER_DOMAIN)

    @property
    def domain_cells(self) -> Tensor:
        """``client M + domain`` of every training sample, ``(total,)``: its cell in a table of clients and domains."""
        domain = self.samples().domain
        if domain is None:
            raise PerfedError("this method needs the domain of every sample; the data do not say it")
        return self.client_of(self.samples()) * self.num_domains + domain

    @property
    def domain_counts(self) -> Tensor:
        """Training samples per client and domain, ``(n, M)``."""
        return torch.bincount(self.domain_cells, minlength=self.n * self.num_domains).view(self.n, -1).to(self.dtype)

    def forward(self, x: Tensor, *, stages: Sequence[str] | None = None, params: Parameters | None = None) -> Tensor:
        """Apply ``stages`` (default: all) in evaluation mode to ``x`` ``(n, batch, ...)``, without gradients."""
        stages = self.chain.stages if stages is None else tuple(stages)
        params = self.model if params is None else {**self.model, **params}
        if not stages:
            return x

        domain = self.domain

        @torch.no_grad()  # which is each thread's own affair
        def apply(first: int, stop: int) -> Tensor:
            inputs = x[first:stop]
            run = Pass({name: t[first:stop] for name, t in params.items() if stage_of(name) in stages})
            for stage in stages:
                inputs = self._apply(stage, inputs, run, None if domain is None else domain[first:stop])
            return inputs

        def begin(chunk: int) -> Iterator[int]:
            while True:
                apply(0, chunk)
                yield chunk

        kind = f"forward {'+'.join(stages)}{self.layout.label}"
        trial = Trial(begin, self.n, partial(self.workload, x[0], params))
        stackable = self.layout.unstackable is None
        path = self.plan.path(kind, self.n, trial, stackable=stackable, parallel=self.parallel)
        parts = [part for _, _, part in self.plan.spread(path, self.n, apply, parallel=self.parallel)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def workload(self, x: Tensor, params: Parameters) -> dict[str, Any]:
        """What the time of work on ``x`` ``(samples, ...)`` depends on beside threads and clients, as plain values."""
        return {
            "machine": arithmetic(self.device),
            "perfed": installed_version(),
            "model": repr(self.chain),
            "parameters": {name: list(tensor.shape[1:]) for name, tensor in sorted(params.items())},
            "inputs": [str(x.dtype), *x.shape[1:]],
        }

    def _apply(self, stage: str, x: Tensor, run: Pass, domain: Tensor | None) -> Tensor:
        module = self.chain.get_submodule(stage)
        if stage not in self.per_domain:
            return apply_module(module, stage, x, run)
        assert domain is not None
        return apply_per_domain(module, stage, x, run, domain)

    def windows(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples as ``x (n, width, ...)``, flat index ``(n, width)`` and validity ``(n, width)``, a part at a time."""
        counts = samples.counts
        row = prod(samples.x.shape[1:]) * samples.x.element_size()
        longest = int(counts.max(initial=0))
        width = max(1, min(longest, _WINDOW_BYTES // max(1, row * len(counts))))
        before = self.domain  # a method may look at its training data in the middle of a prediction
        for begin in range(0, longest, width):
            position = np.arange(begin, min(begin + width, longest))
            valid = position < counts[:, None]
            flat = np.where(valid, samples.starts[:, None] + position, 0)
            index = torch.from_numpy(flat).to(samples.x.device)
            x = samples.x.index_select(0, index.flatten()).view(*index.shape, *samples.x.shape[1:])
            self.domain = None if samples.domain is None else samples.domain[index]
            yield x, index, torch.from_numpy(valid).to(samples.x.device)
        self.domain = before

    def features(self, stage: str, split: str | Samples = "train", params: Parameters | None = None) -> Tensor:
        """Output of ``stage`` for every sample of ``split``, ``(total, ...)`` in the order of :meth:`samples`."""
        samples = self.samples(split) if isinstance(split, str) else split
        return self._features(samples, self.chain.stages.index(stage) + 1, params)

    def representation(self, split: str = "train", params: Parameters | None = None) -> Tensor:
        """What the head gets, for every sample of ``split``: ``(total, ...)`` in the order of :meth:`samples`."""
        return self._features(self.samples(split), len(self.chain.stages_before("head")), params)

    def client_of(self, samples: Samples) -> Tensor:
        """Position in the view of the client that each sample belongs to, ``(total,)``."""
        return torch.from_numpy(np.repeat(np.arange(self.n), samples.counts)).to(self.device)

    def _features(self, samples: Samples, stages: int, params: Parameters | None) -> Tensor:
        """Output of the first ``stages`` stages; the last result is kept until a parameter under it changes."""
        values = {**self.model, **(params or {})}
        used = [t for name, t in values.items() if stage_of(name) in self.chain.stages[:stages]]
        # A change in place raises a tensor's version, except by a fused optimiser: local training forgets by itself.
        # The kept tensors stay alive, so that their ids stay theirs.
        mark = (stages, id(samples.x), id(samples.domain), *((id(t), t._version) for t in used))
        if self._kept is None or self._kept[0] != mark:
            self._kept = (mark, used, samples, self._forward_all(samples, stages, params))
        return self._kept[-1]

    def forget(self) -> None:
        """Drop kept features: parameters have changed."""
        self._kept = None

    def _forward_all(self, samples: Samples, stages: int, params: Parameters | None) -> Tensor:
        out: Tensor | None = None
        for x, index, valid in self.windows(samples):
            y = self.forward(x, stages=self.chain.stages[:stages], params=params)
            if out is None:
                out = y.new_empty((samples.x.shape[0], *y.shape[2:]))
            out[index[valid]] = y[valid]
        if out is None:
            raise PerfedError("no samples to compute features of")
        return out

    def class_means(self, stage: str | None = None) -> Tensor:
        """Mean output of ``stage`` (default: of what the head gets) for each class of the training data.

        Returns:
            ``(n, C, k)``; zero for absent classes.
        """
        samples = self.samples()
        features = (self.representation() if stage is None else self.features(stage)).flatten(1)
        classes = self.num_classes or 0
        sums = features.new_zeros(self.n * classes, features.shape[1])
        sums.index_add_(0, self.client_of(samples) * classes + samples.y, features)
        return sums.view(self.n, classes, -1) / self.class_counts.clamp_min(1)[:, :, None]

    def after(self, stage: str, z: Tensor, params: Parameters | None = None, turn: int = 0) -> Tensor:
        """Apply the stages behind ``stage`` in evaluation mode to ``z`` ``(n, batch, ...)``, with gradients.

        Parameters per domain are taken by turns, from ``turn`` on.
        """
        run = Pass({**self.model, **(params or {})})
        domain = by_turns(z, run.params, self.per_domain, turn)
        for name in self.chain.stages[self.chain.stages.index(stage) + 1 :]:
            z = self._apply(name, z, run, domain)
        return z

    def losses(self, params: Parameters | None = None, split: str = "train") -> Tensor:
        """Mean loss of each client on ``split``, forward only: ``(n,)``; with a bank axis in ``params``, ``(n, bank)``.

        Args:
            params: parameters to use in place of the working ones, ``(n, ...)`` or ``(n, bank, ...)``.
            split: which data.
        """
        samples, each = self.samples(split), self.sample_losses(params, split)
        total = each.new_zeros(self.n, *each.shape[1:]).index_add_(0, self.client_of(samples), each)
        counts = torch.from_numpy(samples.counts).to(total)
        return total / counts.view(-1, *([1] * (total.ndim - 1)))

    def sample_losses(self, params: Parameters | None = None, split: str = "train") -> Tensor:
        """Loss of every sample of ``split``, forward only: ``(total,)``; with a bank axis, ``(total, bank)``.

        Survival's risk sets are of all samples that the client has in the split.
        """
        if params and self._has_bank(params):
            size = next(iter(params.values())).shape[1]
            entries = [self.sample_losses({name: t[:, j] for name, t in params.items()}, split) for j in range(size)]
            return torch.stack(entries, dim=1)
        samples = self.samples(split)
        if self.task == "survival" and len(samples.y):
            return client_cox_losses(self._forward_all(samples, len(self.chain.stages), params), samples)
        total = samples.x.new_zeros(samples.x.shape[0])
        for x, index, valid in self.windows(samples):
            found = sample_losses(self.forward(x, params=params), samples.y[index], self.task)
            total[index[valid]] = found[valid]
        return total

    def _has_bank(self, params: Parameters) -> bool:
        name = next(iter(params))
        axes = 2 if self.places[name] == PER_DOMAIN else 1
        return params[name].ndim == self.chain.tensors()[name].ndim + axes + 1
