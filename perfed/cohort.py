"""The leading-axis view of clients: what a client program works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perfed import fit as fitting
from perfed import rng
from perfed.batches import IntArray, Samples
from perfed.errors import PerfedError
from perfed.federation import Client, Split
from perfed.fit import Correction, Loss, Step, Task
from perfed.layers import Pass, apply_module
from perfed.model import Chain, Parameters, stage_of
from perfed.optim import optimizer_for
from perfed.plan import Plan, use_threads

if TYPE_CHECKING:
    from perfed.method import Method
from perfed.placement import Placement

Penalty = Callable[[Step], Tensor]

_WINDOW_BYTES = 64 << 20
_TRIAL_STEPS = 3


@dataclass(frozen=True)
class Where:
    """Which exchange a program runs in; part of every random key."""

    seed: int
    round: int
    exchange: int


class Cohort:
    """n >= 1 clients of one architecture; every tensor has a leading client axis of size n.

    Attributes:
        ids: client ids, in the cohort's order.
        chain: the modules; their own parameter values are not used.
        model: working parameters and buffers by full name ``(n, ...)``. Personal ones start from the client's state
            and are committed when the round ends; shared ones are there after :meth:`load`.
        state: the method's and terms' other parameter sets at home on the client, by name; assign to change them.
        num_classes: ``None`` for regression.
        received: the shared parameters as :meth:`load` got them.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        chain: Chain,
        places: Mapping[str, Placement],
        model: Parameters,
        state: dict[str, Any],
        *,
        method: Method,
        plan: Plan,
        where: Where,
        num_classes: int | None,
        label: str = "",
        unstackable: str | None = None,
    ) -> None:
        self.clients = list(clients)
        self.chain = chain
        self.places = places
        self.model = model
        self.state = state
        self.method = method
        self.plan = plan
        self.where = where
        self.num_classes = num_classes
        self.label = label
        self.unstackable = unstackable
        self.ids = [c.id for c in self.clients]
        self.received: Parameters = {}
        self._fits = 0
        self._packed: dict[str, Samples] = {}
        self._loss_sum = torch.zeros(self.n, dtype=torch.float64)
        self._loss_steps = torch.zeros(self.n, dtype=torch.float64)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and parameters."""
        return self.clients[0].train.x.dtype

    @property
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
            raise PerfedError("class counts need class labels; these targets are values (regression)")
        counts = [torch.bincount(c.train.y, minlength=self.num_classes) for c in self.clients]
        return torch.stack(counts).to(self.dtype)

    @property
    def train_loss(self) -> Tensor:
        """Mean loss over all training steps of this exchange, float64 ``(n,)``; NaN where none were done."""
        return self._loss_sum / self._loss_steps

    def key(self, purpose: str, *words: int) -> Tensor:
        """Randomness of this exchange for ``purpose``, int64 ``(n,)``, one key per client."""
        where = self.where
        base = rng.key(where.seed, purpose, where.round, where.exchange, *words)
        return torch.stack([rng.key(base, client) for client in self.ids]).to(self.device)

    # Parameters --------------------------------------------------------------------------------------------

    def load(self, *parameters: Mapping[str, Tensor]) -> None:
        """Copy received parameters (full name -> ``(n, ...)``) into the working model."""
        for tree in parameters:
            for name, tensor in tree.items():
                self.received[name] = tensor
                self.model[name] = tensor.clone(memory_format=torch.contiguous_format)

    def shared(self) -> Parameters:
        """The working values of the shared parameters, for a reply."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] == "shared"}

    def personal(self) -> Parameters:
        """The working values of the personal parameters."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] == "personal"}

    @property
    def personal_parameters(self) -> tuple[str, ...]:
        """Names of the trainable personal parameters: what a method trains whenever it trains its personal part."""
        return tuple(name for name in self.trainable(self.chain.stages) if self.places[name] == "personal")

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the trainable shared parameters."""
        return tuple(name for name in self.trainable(self.chain.stages) if self.places[name] == "shared")

    def trainable(self, train: str | Sequence[str]) -> tuple[str, ...]:
        """Full names of the parameters (not buffers) in ``train``, stages or full names, that are not frozen.

        Stages that the model does not have have none.
        """
        wanted = {train} if isinstance(train, str) else set(train)
        names = [name for name, _ in self.chain.named_parameters()]
        return tuple(n for n in names if (stage_of(n) in wanted or n in wanted) and self.places[n] != "frozen")

    # Data --------------------------------------------------------------------------------------------------

    def samples(self, split: str = "train") -> Samples:
        """All samples of one split, vectors padded to the cohort's longest; clients without it have none."""
        if split not in self._packed:
            shapes = {c.input_shape for c in self.clients}
            width = max(s[0] for s in shapes) if len(shapes) > 1 else None
            empty = [Split(c.train.x[:0], c.train.y[:0]) for c in self.clients]
            parts = [c.split(split) or none for c, none in zip(self.clients, empty, strict=True)]
            self._packed[split] = Samples.pack(parts, width)
        return self._packed[split]

    # Forward -----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *, stages: Sequence[str] | None = None, params: Parameters | None = None) -> Tensor:
        """Apply ``stages`` (default: all) in evaluation mode to ``x`` ``(n, batch, ...)``, without gradients."""
        stages = self.chain.stages if stages is None else tuple(stages)
        params = self.model if params is None else {**self.model, **params}
        if not stages:
            return x

        def apply(first: int, stop: int, inputs: Tensor) -> Tensor:
            run = Pass({name: t[first:stop] for name, t in params.items() if stage_of(name) in stages})
            for stage in stages:
                inputs = apply_module(self.chain.get_submodule(stage), stage, inputs, run)
            return inputs

        def trial(chunk: int) -> None:
            apply(0, chunk, x[:chunk])

        with torch.no_grad():
            kind = f"forward {'+'.join(stages)}{self.label}"
            path = self.plan.path(kind, self.n, None if self.unstackable else trial)
            with use_threads(path.threads):
                size = path.size(self.n)
                parts = [apply(i, min(i + size, self.n), x[i : i + size]) for i in range(0, self.n, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def windows(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples as ``x (n, width, ...)``, flat index ``(n, width)`` and validity ``(n, width)``, a part at a time."""
        counts = samples.counts
        row = prod(samples.x.shape[1:]) * samples.x.element_size()
        longest = int(counts.max(initial=0))
        width = max(1, min(longest, _WINDOW_BYTES // max(1, row * len(counts))))
        for begin in range(0, longest, width):
            position = np.arange(begin, min(begin + width, longest))
            valid = position < counts[:, None]
            flat = np.where(valid, samples.starts[:, None] + position, 0)
            index = torch.from_numpy(flat).to(samples.x.device)
            x = samples.x.index_select(0, index.flatten()).view(*index.shape, *samples.x.shape[1:])
            yield x, index, torch.from_numpy(valid).to(samples.x.device)

    def features(self, stage: str, split: str = "train", params: Parameters | None = None) -> Tensor:
        """Output of ``stage`` for every sample of ``split``, ``(total, ...)`` in the order of :meth:`samples`."""
        return self._features(self.samples(split), self.chain.stages.index(stage) + 1, params)

    def _features(self, samples: Samples, stages: int, params: Parameters | None) -> Tensor:
        out: Tensor | None = None
        for x, index, valid in self.windows(samples):
            y = self.forward(x, stages=self.chain.stages[:stages], params=params)
            if out is None:
                out = y.new_empty((samples.x.shape[0], *y.shape[2:]))
            out[index[valid]] = y[valid]
        if out is None:
            raise PerfedError("no samples to compute features of")
        return out

    def class_means(self, stage: str) -> Tensor:
        """Mean output of ``stage`` for each class of the training data, ``(n, C, k)``; zero for absent classes."""
        samples = self.samples()
        features = self._features(samples, self.chain.stages.index(stage) + 1, None)
        client = torch.from_numpy(np.repeat(np.arange(self.n), samples.counts)).to(features.device)
        classes = self.num_classes or 0
        sums = features.new_zeros(self.n * classes, features.shape[1])
        sums.index_add_(0, client * classes + samples.y, features)
        return sums.view(self.n, classes, -1) / self.class_counts.clamp_min(1)[:, :, None]

    def after(self, stage: str, z: Tensor, params: Parameters | None = None) -> Tensor:
        """Apply the stages behind ``stage`` in evaluation mode to ``z`` ``(n, batch, ...)``, with gradients."""
        run = Pass({**self.model, **(params or {})})
        for name in self.chain.stages[self.chain.stages.index(stage) + 1 :]:
            z = apply_module(self.chain.get_submodule(name), name, z, run)
        return z

    @property
    def steps_done(self) -> Tensor:
        """Mini-batch steps of each client in this exchange so far, float64 ``(n,)``."""
        return self._loss_steps.clone()

    def losses(self, params: Parameters | None = None, split: str = "train") -> Tensor:
        """Mean loss of each client on ``split``, forward only: ``(n,)``; with a bank axis in ``params``, ``(n, bank)``.

        Args:
            params: parameters to use in place of the working ones, ``(n, ...)`` or ``(n, bank, ...)``.
            split: which data.
        """
        if params and self._has_bank(params):
            size = next(iter(params.values())).shape[1]
            entries = [self.losses({name: t[:, j] for name, t in params.items()}, split) for j in range(size)]
            return torch.stack(entries, dim=1)
        samples = self.samples(split)
        total = torch.zeros(self.n, dtype=self.dtype, device=self.device)
        for x, index, valid in self.windows(samples):
            y = samples.y[index]
            total += (sample_losses(self.forward(x, params=params), y, self.num_classes) * valid).sum(1)
        return total / torch.from_numpy(samples.counts).to(total)

    def _has_bank(self, params: Parameters) -> bool:
        name = next(iter(params))
        return params[name].ndim == self.chain.tensors()[name].ndim + 2

    # Local optimisation ------------------------------------------------------------------------------------

    def fit(
        self,
        train: str | Sequence[str],
        *,
        epochs: int | IntArray | None = None,
        steps: int | None = None,
        params: Parameters | None = None,
        loss: Loss | None = None,
        penalties: Sequence[Penalty] = (),
        correct: Correction | None = None,
        samples: Samples | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Train some stages of each client's model on its own data, as if each client were alone.

        Optimiser, learning rates, weight decay and batch size are the method's settings. Stages that are not trained
        run in evaluation mode (no dropout, running batch-norm statistics); if all stages before the first trained one
        are untrained, their features are computed once and reused by every epoch.

        Args:
            train: a stage, or stages or full parameter names trained together; stages that the model does not have
                are skipped.
            epochs: passes over each client's data (a client does ceil(n_i / batch size) steps per epoch), the same
                for all or one number per client, or
            steps: mini-batch steps, the same number for every client.
            params: train this set ``{name: (n, ...)}`` in place of the working model, in place.
            loss: one value per client; default cross-entropy or squared error.
            penalties: added to the loss.
            correct: edits the gradients before each update.
            samples: data in place of the training split.
            batch_size: in place of the method's.

        Raises:
            PerfedError: a client's loss becomes NaN or infinite; names the round and the client.
        """
        trained = self.trainable(train)
        if (epochs is None) == (steps is None):
            raise ValueError("fit needs either epochs or steps")
        self._fits += 1
        if not trained or steps == 0 or (epochs is not None and not np.any(epochs)):
            return
        target = self.model if params is None else params
        task = self._task(trained, target, loss, penalties, samples or self.samples(), batch_size)
        per_client = None if epochs is None else np.broadcast_to(np.asarray(epochs, np.int64), (self.n,))
        task = replace(task, epochs=per_client, steps=steps, correct=correct)
        kind = "fit " + "+".join(sorted({stage_of(n) for n in trained}, key=self.chain.stages.index)) + self.label
        if batch_size is not None:
            kind += f" (batch {batch_size})"
        path = self.plan.path(kind, self.n, None if self.unstackable else lambda chunk: _trial(task, chunk))
        size = path.size(self.n)
        with use_threads(path.threads):
            for first in range(0, self.n, size):
                stop = min(first + size, self.n)
                losses, done = fitting.run(task.part(first, stop))
                self._check(losses, done, first)
                self._loss_sum[first:stop] += losses.cpu().double()
                self._loss_steps[first:stop] += torch.from_numpy(done)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Fits inside count neither for :attr:`train_loss` and :attr:`steps_done` nor for the keys of later fits.

        For trying things out on copies of parameters, as often as it takes.
        """
        before = self._fits, self._loss_sum.clone(), self._loss_steps.clone()
        try:
            yield
        finally:
            self._fits, self._loss_sum, self._loss_steps = before

    def _task(
        self,
        trained: tuple[str, ...],
        target: Parameters,
        loss: Loss | None,
        penalties: Sequence[Penalty],
        samples: Samples,
        batch_size: int | None,
    ) -> Task:
        start = min(self.chain.stages.index(stage_of(name)) for name in trained)
        raw = samples.x
        if start > 0:
            features = self._features(samples, start, target)
            samples = Samples(features, samples.y, samples.counts)
        base = loss or (fitting.squared_error if self.num_classes is None else fitting.cross_entropy)

        def total(step: Step) -> Tensor:
            value = base(step)
            for penalty in penalties:
                value = value + penalty(step)
            return value

        for name in trained:
            target[name] = target[name].contiguous()
        settings = self.method
        optimizer = optimizer_for(
            trained,
            {name: t.ndim for name, t in self.chain.named_parameters()},
            kind=settings.optimizer,
            momentum=settings.momentum,
            lr=lambda stage: _per_stage(settings.lr, stage, 1e-3),
            weight_decay=lambda stage: _per_stage(settings.weight_decay, stage, 0.0),
            decay_all=settings.decay == "all",
        )
        return Task(
            chain=self.chain,
            params={**self.model, **target},
            trained=trained,
            samples=samples,
            keys=self.key("fit", self._fits),
            optimizer=optimizer,
            loss=total,
            batch_size=batch_size or settings.batch_size,
            start=start,
            raw=raw,
            rows=np.arange(self.n),
        )

    def _check(self, losses: Tensor, steps: IntArray, first: int) -> None:
        bad = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
        if bad:
            where = f"round {self.where.round}" if self.where.round > 0 else "preparation before round 1"
            raise PerfedError(
                f"{where}: the training loss of client '{self.ids[first + bad[0]]}' became "
                f"{float(losses[bad[0]])}; lower the learning rate or look at this client's data"
            )


def _trial(task: Task, chunk: int) -> None:
    part = task.part(0, chunk)
    fitting.run(fitting.detached(part), limit=_TRIAL_STEPS)


def _per_stage(value: float | dict[str, float], stage: str, default: float) -> float:
    return value.get(stage, default) if isinstance(value, dict) else value


def sample_losses(outputs: Tensor, y: Tensor, num_classes: int | None) -> Tensor:
    """Cross-entropy, or squared error for regression, of every sample: ``(n, batch)``."""
    if num_classes is None:
        return (outputs.flatten(2) - y.unsqueeze(-1).flatten(2)).square().mean(2)
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
