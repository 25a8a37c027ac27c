"""Clients of one architecture: their data, and forward passes with parameters that have a leading client axis."""

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
from perfed.data.lazy import load_splits
from perfed.errors import PerfedError
from perfed.model.chain import Parameters, stage_of
from perfed.model.placement import PER_DOMAIN, Layout
from perfed.model.stacked import Pass, apply_module, apply_per_domain, is_thread_safe
from perfed.system import installed_version
from perfed.training.batches import Samples
from perfed.training.cox import client_cox_losses
from perfed.training.plan import Plan, describe_arithmetic
from perfed.training.step import Objective, assign_domains_in_turn, balance_classes, sample_losses
from perfed.training.trials import Trial

_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class ExchangeId:
    """The identity of the exchange in which a program runs, which is part of every random key."""

    seed: int
    round: int
    exchange: int

    def __str__(self) -> str:
        return f"round {self.round}" if self.round > 0 else "preparation before round 1"


class View:
    """n >= 1 clients of one architecture; every tensor has a leading client axis of size n.

    Attributes:
        ids: client ids, in the view's order.
        layout: the architecture of the clients.
        chain: its modules.
        model: parameters and buffers by full name ``(n, ...)``.
        places: the placement of each of them.
        task: classification, regression or survival.
        num_classes: the number C of classes; ``None`` if targets are not labels.
        num_domains: the number M of domains; 0 if domains are unknown.
        domain: ``(n, batch)`` domain ids of the inputs that :meth:`forward` is applied to; :meth:`iterate_windows` sets
            it.
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
        self._cached_features: tuple[Any, list[Tensor], Samples, Tensor] | None = None

    @property
    def n(self) -> int:
        """Return the number of clients in the view."""
        return len(self.clients)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the type of inputs and parameters."""
        return self.clients[0].train.x.dtype

    @cached_property
    def device(self) -> torch.device:
        """Return the device of the data and the parameters."""
        return self.clients[0].train.x.device

    @property
    def num_samples(self) -> Tensor:
        """Return the number of training samples per client, ``(n,)``, in the dtype of the inputs."""
        return torch.tensor([len(c.train) for c in self.clients], dtype=self.dtype, device=self.device)

    @property
    def class_counts(self) -> Tensor:
        """Return the number of training samples per client and class, ``(n, C)``."""
        if self.num_classes is None:
            raise no_labels("class counts need", self.task)
        counts = [c.train.class_counts(self.num_classes) for c in self.clients]
        return torch.tensor(counts, device=self.device).to(self.dtype)

    def objective(self, class_weights: str) -> Objective:
        """Return the settings of the plain loss, with class weights according to the setting ``class_weights``."""
        weighted = class_weights == "balanced" and self.task == "classification"
        return Objective(self.task, balance_classes(self.class_counts) if weighted else None)

    # Data --------------------------------------------------------------------------------------------------

    def samples(self, split: str = "train") -> Samples:
        """Return all samples of one split, with vectors padded to the longest; clients without the split have none."""
        if split not in self._packed:
            shapes = {c.input_shape for c in self.clients}
            width = max(s[0] for s in shapes) if len(shapes) > 1 else None
            no_rows = torch.arange(0, device=self.device)
            client_splits = ((c, c.split(split)) for c in self.clients)
            parts = [c.train.take(no_rows) if part is None else part for c, part in client_splits]
            if any(part.deferred for part in parts):
                parts = load_splits(parts)
            self._packed[split] = Samples.pack(parts, width)
        return self._packed[split]

    # Forward -----------------------------------------------------------------------------------------------

    @cached_property
    def parallel(self) -> bool:
        """Return whether several threads may work on different clients: on a CPU, with layers that threads can
        share.
        """
        return self.device.type == "cpu" and all(is_thread_safe(self.chain.get_submodule(s)) for s in self.chain.stages)

    @property
    def per_domain(self) -> frozenset[str]:
        """Return the stages that have parameters for each domain, ``(n, domains, ...)``."""
        return frozenset(stage_of(name) for name, place in self.places.items() if place == PER_DOMAIN)

    @property
    def domain_cells(self) -> Tensor:
        """Return ``client * M + domain`` of every training sample, ``(total,)``, its cell in a table of clients and
        domains.
        """
        domain = self.samples().domain
        if domain is None:
            raise PerfedError("this method needs the domain of every sample; the data do not say it")
        return self.client_of(self.samples()) * self.num_domains + domain

    @property
    def domain_counts(self) -> Tensor:
        """Return the number of training samples per client and domain, ``(n, M)``."""
        return torch.bincount(self.domain_cells, minlength=self.n * self.num_domains).view(self.n, -1).to(self.dtype)

    def forward(self, x: Tensor, *, stages: Sequence[str] | None = None, params: Parameters | None = None) -> Tensor:
        """Return the output of ``stages`` (default: all) in evaluation mode for ``x`` ``(n, batch, ...)``, without
        gradients.
        """
        stages = self.chain.stages if stages is None else tuple(stages)
        params = self.model if params is None else {**self.model, **params}
        if not stages:
            return x

        domain = self.domain

        @torch.no_grad()  # the gradient mode is local to a thread
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
        parts = [part for _, _, part in self.plan.run_chunks(path, self.n, apply, parallel=self.parallel)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def workload(self, x: Tensor, params: Parameters) -> dict[str, Any]:
        """Return, as plain values, what determines the time of work on ``x`` ``(samples, ...)`` besides threads and
        clients.
        """
        return {
            "machine": describe_arithmetic(self.device),
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

    def iterate_windows(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the samples in parts: ``x (n, width, ...)``, flat index ``(n, width)`` and validity ``(n, width)``."""
        counts = samples.counts
        row = prod(samples.x.shape[1:]) * samples.x.element_size()
        longest = int(counts.max(initial=0))
        width = max(1, min(longest, _WINDOW_BYTES // max(1, row * len(counts))))
        before = self.domain  # a method may iterate over training data during a prediction
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
        """Return the output of ``stage`` for every sample of ``split``, ``(total, ...)`` in the order of
        :meth:`samples`.
        """
        samples = self.samples(split) if isinstance(split, str) else split
        return self._features(samples, self.chain.stages.index(stage) + 1, params)

    def representation(self, split: str = "train", params: Parameters | None = None) -> Tensor:
        """Return the inputs of the head for every sample of ``split``, ``(total, ...)`` in the order of
        :meth:`samples`.
        """
        return self._features(self.samples(split), len(self.chain.stages_before("head")), params)

    def client_of(self, samples: Samples) -> Tensor:
        """Return the position in the view of the client of each sample, ``(total,)``."""
        return torch.from_numpy(np.repeat(np.arange(self.n), samples.counts)).to(self.device)

    def _features(self, samples: Samples, stages: int, params: Parameters | None) -> Tensor:
        """Return the output of the first ``stages`` stages.

        The last result is cached until a parameter in them changes.
        """
        values = {**self.model, **(params or {})}
        parameters_used = [t for name, t in values.items() if stage_of(name) in self.chain.stages[:stages]]
        # A change in place increases a tensor's version, except by a fused optimiser: training then calls
        # drop_features().
        # The cached tensors stay alive, so that their ids are not reused.
        cache_key = (stages, id(samples.x), id(samples.domain), *((id(t), t._version) for t in parameters_used))
        if self._cached_features is None or self._cached_features[0] != cache_key:
            self._cached_features = (cache_key, parameters_used, samples, self._forward_all(samples, stages, params))
        return self._cached_features[-1]

    def drop_features(self) -> None:
        """Drop the cached features, after parameters have changed."""
        self._cached_features = None

    def _forward_all(self, samples: Samples, stages: int, params: Parameters | None) -> Tensor:
        out: Tensor | None = None
        for x, index, valid in self.iterate_windows(samples):
            y = self.forward(x, stages=self.chain.stages[:stages], params=params)
            if out is None:
                out = y.new_empty((samples.x.shape[0], *y.shape[2:]))
            out[index[valid]] = y[valid]
        if out is None:
            raise PerfedError("no samples to compute features of")
        return out

    def class_means(self, stage: str | None = None) -> Tensor:
        """Return the mean output of ``stage`` (default: the mean input of the head) for each class of the training
        data.

        Returns:
            ``(n, C, k)``; zero for absent classes.
        """
        samples = self.samples()
        features = (self.representation() if stage is None else self.features(stage)).flatten(1)
        classes = self.num_classes or 0
        sums = features.new_zeros(self.n * classes, features.shape[1])
        sums.index_add_(0, self.client_of(samples) * classes + samples.y, features)
        return sums.view(self.n, classes, -1) / self.class_counts.clamp_min(1)[:, :, None]

    def apply_after(self, stage: str, z: Tensor, params: Parameters | None = None, turn: int = 0) -> Tensor:
        """Return the output of the stages after ``stage`` in evaluation mode for ``z`` ``(n, batch, ...)``, with
        gradients.

        Samples use the parameters of the domains in turn, starting from ``turn``.
        """
        run = Pass({**self.model, **(params or {})})
        domain = assign_domains_in_turn(z, run.params, self.per_domain, turn)
        for name in self.chain.stages[self.chain.stages.index(stage) + 1 :]:
            z = self._apply(name, z, run, domain)
        return z

    def losses(self, params: Parameters | None = None, split: str = "train") -> Tensor:
        """Return the mean loss of each client on ``split`` without gradients: ``(n,)``, or ``(n, bank)`` with a bank
        axis.

        Args:
            params: parameters to use in place of the working ones, ``(n, ...)`` or ``(n, bank, ...)``.
            split: the name of the split.
        """
        samples, sample_values = self.samples(split), self.sample_losses(params, split)
        total = sample_values.new_zeros(self.n, *sample_values.shape[1:]).index_add_(
            0, self.client_of(samples), sample_values
        )
        counts = torch.from_numpy(samples.counts).to(total)
        return total / counts.view(-1, *([1] * (total.ndim - 1)))

    def sample_losses(self, params: Parameters | None = None, split: str = "train") -> Tensor:
        """Return the loss of every sample of ``split`` without gradients: ``(total,)``, or ``(total, bank)`` with a
        bank axis.

        The risk sets of survival contain all samples of the client in the split.
        """
        if params and self._has_bank(params):
            size = next(iter(params.values())).shape[1]
            entries = [self.sample_losses({name: t[:, j] for name, t in params.items()}, split) for j in range(size)]
            return torch.stack(entries, dim=1)
        samples = self.samples(split)
        if self.task == "survival" and len(samples.y):
            return client_cox_losses(self._forward_all(samples, len(self.chain.stages), params), samples)
        total = samples.x.new_zeros(samples.x.shape[0])
        for x, index, valid in self.iterate_windows(samples):
            batch_losses = sample_losses(self.forward(x, params=params), samples.y[index], self.task)
            total[index[valid]] = batch_losses[valid]
        return total

    def _has_bank(self, params: Parameters) -> bool:
        name = next(iter(params))
        axes = 2 if self.places[name] == PER_DOMAIN else 1
        return params[name].ndim == self.chain.tensors()[name].ndim + axes + 1
