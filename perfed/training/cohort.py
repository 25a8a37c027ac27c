"""The leading-axis view of clients: what a client program works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from perfed import rng
from perfed.data.augment import CropFlip
from perfed.data.client import Client
from perfed.data.labels import Task as Targets
from perfed.errors import ClientsDiverged, Diverged, PerfedError
from perfed.model.chain import STAGES, Parameters, stage_of
from perfed.model.placement import SENT, Layout
from perfed.training import fit as fitting
from perfed.training.batches import IntArray, Samples, steps_of, stream_of
from perfed.training.fit import Task
from perfed.training.optim import Optimizer, optimizer_for
from perfed.training.plan import Plan
from perfed.training.private import PrivateTraining, ReleaseCounter, check_rows_apart
from perfed.training.settings import LocalTraining
from perfed.training.step import Loss, Penalty, mean_loss, with_penalties
from perfed.training.steprules import GradientTransform, StepRule, StepRules, Transform
from perfed.training.trials import Trial, is_faster
from perfed.training.view import ExchangeId, View


class Extensions(Protocol):
    """What travels with a program: the extensions of the method."""

    def penalties(self, cohort: Cohort) -> Sequence[Penalty]:
        """What they add to the loss of local training."""

    def transforms(self, cohort: Cohort) -> Sequence[Transform]:
        """What they make of gradients."""

    def reply(self, cohort: Cohort) -> dict[str, Any]:
        """What they add to the program's reply."""


class Cohort(View):
    """A view with the clients' states and local training.

    Attributes:
        model: working parameters and buffers by full name ``(n, ...)``. Personal ones start from the client's state
            and are committed when the round ends; shared ones are there after :meth:`load`.
        state: the method's and extensions' other parameter sets at home on the client, by name; assign to change them.
        received: the shared parameters as :meth:`load` got them.
        carried: what the server sent for each of the method's extensions, by the extension's name.
        delivered: the payload of the exchange, by name, as it came; empty where no extension replaces replies.
        extensions: the extensions, in an exchange that carries them.
        scratch: what a program leaves for the method's ``predict``, nested dictionaries of tensors ``(n, ...)``.
        watch: sees what is fitted before it is (:class:`perfed.training.fit.LossCurve`).
        private: how rows are kept private in all that is fitted and counted; ``None``: not at all.
        noise: where noise on what leaves comes from.
        counter: counts what is released of a single client; ``None``: nobody counts it.
        discreet: whether losses stay at the client, so that no error message may reveal a loss that is not finite.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        layout: Layout,
        model: Parameters,
        state: dict[str, Any],
        *,
        settings: LocalTraining,
        plan: Plan,
        where: ExchangeId,
        task: Targets,
        num_classes: int | None,
        num_domains: int = 0,
        augment: CropFlip | None = None,
    ) -> None:
        super().__init__(clients, layout, model, plan=plan, task=task, num_classes=num_classes, num_domains=num_domains)
        self.state, self.settings = state, settings
        self.where, self.augment = where, augment
        self.received: Parameters = {}
        self.carried: Mapping[str, Any] = {}
        self.delivered: Mapping[str, Any] = {}
        self.extensions: Extensions | None = None
        self.scratch: dict[str, Any] = {}
        self.watch: Callable[[Task], Task] = lambda task: task
        self.private: PrivateTraining | None = None
        self.noise = rng.Noise()
        self.counter: ReleaseCounter | None = None
        self.discreet = False
        self._fits = self._sums = 0
        self._penalties: Sequence[Penalty] | None = None
        self._transforms: Sequence[Transform] | None = None
        self._extensions_reply: dict[str, Any] | None = None
        self._loss_sum, self._loss_steps = (torch.zeros(self.n, dtype=torch.float64) for _ in range(2))

    @property
    def train_loss(self) -> Tensor:
        """Mean loss over all training steps of this exchange, float64 ``(n,)``; NaN where none were done."""
        return self._loss_sum / self._loss_steps

    def key(self, purpose: str, *words: int) -> Tensor:
        """Randomness of this exchange for ``purpose``, int64 ``(n,)``, one key per client."""
        base = rng.key(self.where.seed, purpose, self.where.round, self.where.exchange, *words)
        return rng.key(base, rng.words(self.ids)).to(self.device)

    # What is counted of rows -------------------------------------------------------------------------------

    @property
    def num_samples(self) -> Tensor:
        """Training samples per client, ``(n,)``; in a private run with noise, at least 1."""
        exact = super().num_samples
        return exact if self.private is None else self._noisy(self.private, exact, "rows").clamp_min(1)

    @property
    def class_counts(self) -> Tensor:
        """Training samples per client and class, ``(n, C)``; in a private run with noise, absent classes too."""
        exact = super().class_counts
        return exact if self.private is None else self._noisy(self.private, exact, "classes")

    def class_means(self, stage: str | None = None) -> Tensor:
        """Mean output of ``stage`` for each class (:meth:`View.class_means`); in a private run of noisy sums."""
        if self.private is None:
            return super().class_means(stage)
        samples, classes = self.samples(), self.num_classes or 0
        features = (self.representation() if stage is None else self.features(stage)).flatten(1)
        self._sums += 1
        keys = self.key("class sums", self._sums)
        sums = self.private.noisy_sums(features, self.client_of(samples) * classes + samples.y, classes, keys)
        return sums / self.class_counts.clamp_min(1)[:, :, None]

    def _noisy(self, private: PrivateTraining, counts: Tensor, what: str) -> Tensor:
        return private.noisy_counts(counts, self.where.seed, self.ids, what)

    # Parameters --------------------------------------------------------------------------------------------

    def load(self, *parameters: Mapping[str, Tensor]) -> None:
        """Copy received parameters (full name -> ``(n, ...)``) into the working model."""
        self.forget()
        self._penalties = self._transforms = None
        for tree in parameters:
            for name, tensor in tree.items():
                self.received[name] = tensor
                self.model[name] = tensor.clone(memory_format=torch.contiguous_format)

    def shared(self) -> Parameters:
        """The working values of the shared parameters (those per domain among them), for a reply."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] in SENT}

    def personal(self) -> Parameters:
        """The working values of the personal parameters."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] == "personal"}

    @property
    def personal_parameters(self) -> tuple[str, ...]:
        """Names of the trainable personal parameters: what a method trains whenever it trains its personal part."""
        return tuple(name for name in self.trainable(self.chain.stages) if self.places[name] == "personal")

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the trainable shared parameters, those per domain among them."""
        return tuple(name for name in self.trainable(self.chain.stages) if self.places[name] in SENT)

    def trainable(self, train: str | Sequence[str]) -> tuple[str, ...]:
        """Full names of the parameters (not buffers) in ``train``, stages or full names, that are not frozen.

        Stages that the model does not have have none.

        Raises:
            PerfedError: neither a stage's name nor a parameter's.
        """
        wanted = {train} if isinstance(train, str) else set(train)
        names = [name for name, _ in self.chain.named_parameters()]
        unknown = sorted(wanted.difference(names, STAGES))
        if unknown:
            raise PerfedError(f"'{unknown[0]}' is no stage and no parameter; stages: {', '.join(STAGES)}")
        return tuple(n for n in names if (stage_of(n) in wanted or n in wanted) and self.places[n] != "frozen")

    @property
    def steps_done(self) -> Tensor:
        """Mini-batch steps of each client in this exchange so far, float64 ``(n,)``."""
        return self._loss_steps.clone()

    # Extensions -------------------------------------------------------------------------------------------------

    @property
    def penalties(self) -> Sequence[Penalty]:
        """What every fit adds to the loss: that of the extensions, unless a program assigns others.

        Those of the extensions are for the model as it was when they were first asked for, made anew by :meth:`load`.
        """
        if self._penalties is None:
            self._penalties = [] if self.extensions is None else self.extensions.penalties(self)
        return self._penalties

    @penalties.setter
    def penalties(self, penalties: Sequence[Penalty]) -> None:
        self._penalties = penalties

    @property
    def transforms(self) -> Sequence[Transform]:
        """What the extensions make of every gradient, one after the other; made anew after :meth:`load`."""
        if self._transforms is None:
            self._transforms = [] if self.extensions is None else self.extensions.transforms(self)
        return self._transforms

    def close_extensions(self) -> None:
        """Let the extensions look at the model as it is now; else they do once the program has ended."""
        self.extensions_reply()

    def extensions_reply(self) -> dict[str, Any]:
        """What the extensions add to the reply; made once."""
        if self._extensions_reply is None:
            self._extensions_reply = {} if self.extensions is None else self.extensions.reply(self)
        return self._extensions_reply

    # Local optimisation ------------------------------------------------------------------------------------

    def fit(
        self,
        train: str | Sequence[str],
        *,
        epochs: int | IntArray | None = None,
        steps: int | None = None,
        params: Parameters | None = None,
        also: Mapping[str, Parameters] | None = None,
        loss: Loss | None = None,
        samples: Samples | None = None,
        update: StepRule | Sequence[StepRule] = (),
    ) -> None:
        """Train some stages of each client's model on its own data, as if each client were alone.

        Optimiser, learning rates, weight decay and batch size are the method's settings. Stages that are not trained
        run in evaluation mode (no dropout, running batch-norm statistics); if all stages before the first trained one
        are untrained, their features are computed once and reused by every epoch. Parameters of a domain that has no
        sample in a mini-batch take no step in it: values and optimiser state stay as they are.

        Args:
            train: a stage, or stages or full parameter names trained together; stages that the model does not have
                are skipped.
            epochs: for all or one number per client, each ceil(n_i / batch size) steps or as ``local_steps`` says, or
            steps: mini-batch steps, the same number for every client.
            params: train this set ``{name: (n, ...)}`` in place of the working model, in place.
            also: further sets ``{set: {name: (n, ...)}}`` that are trained along, in place; the loss finds them with
                :meth:`Step.of_set <perfed.training.step.Step.of_set>`. Buffers among them (statistics of batch-norm)
                are not trained; a pass with them moves them in place.
            loss: one value per client, to which :attr:`penalties` are added; default ``step.mean_loss``.
                They may be called for different clients at the same time: what they keep must be in the step's block.
            samples: data in place of the training split, or in mini-batches of another size
                (:meth:`Samples.in_batches <perfed.training.batches.Samples.in_batches>`).
            update: how a step departs from the optimiser's own, a rule or several
                (:mod:`perfed.training.steprules`); gradients are those that :attr:`transforms` have made.

        Raises:
            ClientsDiverged: clients' losses became NaN or infinite.
            PerfedError: rules that do not combine.
        """
        if (epochs is None) == (steps is None):
            raise ValueError("fit needs either epochs or steps")
        own = self.trainable(train)
        extra: Parameters = {}
        for group, values in (also or {}).items():
            for name, tensor in values.items():
                values[name] = extra[f"{group}/{name}"] = tensor.contiguous()
        learnt = self.trainable(self.chain.stages) if extra else ()
        trained = (*own, *(name for name in extra if name.rpartition("/")[2] in learnt))
        self._fits += 1
        if not trained or steps == 0 or (epochs is not None and not np.any(epochs)):
            return
        target = self.model if params is None else params
        for name in own:
            target[name] = target[name].contiguous()
        task = self._task(trained, {**target, **extra}, loss, samples or self.samples())
        length = steps_of(task.samples.counts, task.batch_size, epochs, steps, self.settings.epoch_steps)
        if not length.any():
            return
        self._run(replace(task, steps=length, rules=self._rules(update, own)))

    def _rules(self, update: StepRule | Sequence[StepRule], own: Sequence[str]) -> StepRules | None:
        """What the extensions make of gradients, then the rules of a fit, whose pull is on the parameters ``own``."""
        own_rules = update if isinstance(update, Sequence) else [update]
        given = [*map(GradientTransform, self.transforms), *own_rules]
        if not given:
            return None
        rules = StepRules.of(given)
        return replace(rules, near=rules.near.only(own)) if rules.near else rules

    def _run(self, task: Task) -> None:
        """Do ``task`` by the plan, and count its losses and steps."""
        if self.counter is not None:
            self.counter.begin_fit(int(task.samples.counts.sum()))
        task = self._in_precision(task)
        trial, kind, task = self._trial(task), task.kind(self.layout.label), self.watch(task)
        try:
            stackable = self.layout.unstackable is None
            path = self.plan.path(kind, self.n, trial, stackable=stackable, parallel=self.parallel)
            parts = self.plan.spread(
                path, self.n, lambda first, stop: fitting.run(task.part(first, stop)), parallel=self.parallel
            )
        except Diverged as error:
            if not (self.discreet and self.n == 1):
                raise self.diverged(error.row, error.reason) from None
            for name in task.trained:  # as if a loss were not finite; an error would tell of the client's rows
                task.params[name].fill_(torch.nan)
            return self.forget()
        self._check(torch.cat([losses for _, _, (losses, _) in parts]))
        for first, stop, (losses, done) in parts:
            self._loss_sum[first:stop] += losses.cpu().double()
            self._loss_steps[first:stop] += torch.from_numpy(done)
        self.forget()  # fused optimisers change tensors without raising their versions

    def _trial(self, task: Task) -> Trial:
        return Trial(partial(fitting.rehearsal, task), int(task.steps.sum()), partial(self._workload, task))

    def _in_precision(self, task: Task) -> Task:
        """``task``, with numbers of 16 bits where they are asked for and no trial finds that they are slower."""
        if self.settings.precision == "full":
            return task
        fast, label = replace(task, bf16=True), self.layout.label
        found = partial(is_faster, self._trial(fast), self._trial(task))
        untried = self.n == 1 or self.layout.unstackable
        return fast if untried or self.plan.prefers(fast.kind(label), task.kind(label), found) else task

    def _workload(self, task: Task) -> dict[str, Any]:
        """What the time of a step of ``task`` depends on beside machine, threads and clients, as plain values."""
        method, rules = type(self.settings), task.rules or StepRules()
        return self.workload(task.samples.x, task.params) | {
            "method": f"{method.__module__}.{method.__qualname__}",
            "added": [getattr(penalty, "__qualname__", type(penalty).__qualname__) for penalty in self.penalties],
            "rules": [len(rules.transforms), type(rules.rule).__qualname__, rules.near is not None],
            "trained": sorted(task.trained),
            "optimizer": [task.optimizer.kind, task.optimizer.needs_memory],
            "batch": task.batch_size,
            "augmented": task.augment is not None,
            "private": task.private is not None,
        }

    def count(self, losses: Tensor) -> None:
        """Count ``losses`` ``(n,)`` as those of one training step, for parameters found otherwise than by :meth:`fit`.

        Raises:
            ClientsDiverged: they are NaN or infinite.
        """
        self._check(losses)
        self._loss_sum += losses.detach().cpu().double()
        self._loss_steps += 1
        self.forget()

    def diverged(self, row: int, reason: str) -> ClientsDiverged:
        """What to raise where the function ``reason`` cannot factorise a matrix of the client in ``row``."""
        said = f"training of client '{self.ids[row]}' diverged: {reason} failed on values that are no longer finite"
        return ClientsDiverged(str(self.where), {self.ids[row]: said})

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Fits inside count neither for :attr:`train_loss` and :attr:`steps_done` nor for the keys of later fits.

        Extensions leave their gradients as they are. For trying things out on copies, as often as it takes.
        """
        if self.private:
            raise PerfedError("privacy.unit = 'sample': what is tried out on rows and chosen by them has no mechanism")
        before = self._fits, self._loss_sum.clone(), self._loss_steps.clone(), self.watch, self._transforms
        self.watch, self._transforms = lambda task: task, ()
        try:
            yield
        finally:
            self._fits, self._loss_sum, self._loss_steps, self.watch, self._transforms = before

    def optimizer(self, names: Sequence[str]) -> Optimizer:
        """The method's local optimiser for the parameters ``names``, also those of other sets (``set/name``)."""
        ranks = {name: t.ndim for name, t in self.chain.named_parameters()}
        return optimizer_for({name: ranks[name.rpartition("/")[2]] for name in names}, self.settings)

    def _task(self, trained: tuple[str, ...], target: Parameters, loss: Loss | None, samples: Samples) -> Task:
        start = min(self.chain.stages.index(stage_of(name)) for name in trained) if self.augment is None else 0
        raw = samples.x
        if start > 0:
            samples = replace(samples, x=self._features(samples, start, target))
        if self.private:
            check_rows_apart(self.chain, samples, self.task, self.per_domain, self.settings.class_weights == "balanced")
        batch_size = int(samples.counts.max()) if samples.batch_size == "all" else samples.batch_size
        return Task(
            chain=self.chain,
            params={**self.model, **target},
            trained=trained,
            samples=samples,
            keys=self.key("fit", self._fits),
            optimizer=self.optimizer(trained),
            loss=with_penalties(loss or mean_loss, self.penalties),
            batch_size=batch_size or self.settings.batch_size,
            stream=stream_of(self.state, self._loss_steps, self.where.seed, self.ids),
            augment=self.augment,
            per_domain=self.per_domain,
            objective=self.objective(self.settings.class_weights),
            start=start,
            raw=raw,
            rows=np.arange(self.n),
            private=self.private,
        )

    def _check(self, losses: Tensor) -> None:
        """Raise an error if some of the ``losses`` ``(clients,)`` are not finite, unless the cohort is discreet."""
        if self.discreet:
            return
        bad = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
        if bad:
            found = {self.ids[r]: f"the training loss of client '{self.ids[r]}' became {losses[r].item()}" for r in bad}
            raise ClientsDiverged(str(self.where), found)
