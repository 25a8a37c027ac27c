"""Clients of one architecture with their states and local training: the object that a client program works on."""

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
from perfed.training.batches import IntArray, Samples, continue_streams, count_steps
from perfed.training.fit import Task
from perfed.training.optim import Optimizer, build_optimizer
from perfed.training.plan import Plan
from perfed.training.private import PrivateTraining, ReleaseCounter, check_rows_are_separate
from perfed.training.settings import LocalTraining
from perfed.training.step import Loss, Penalty, add_penalties, mean_loss
from perfed.training.steprules import GradientTransform, StepRule, StepRules, Transform
from perfed.training.trials import Trial, is_faster
from perfed.training.view import ExchangeId, View


class Extensions(Protocol):
    """The extensions of the method, which travel with a program."""

    def penalties(self, cohort: Cohort) -> Sequence[Penalty]:
        """Return the terms that the extensions add to the loss of local training."""

    def transforms(self, cohort: Cohort) -> Sequence[Transform]:
        """Return the functions that the extensions apply to gradients."""

    def reply(self, cohort: Cohort) -> dict[str, Any]:
        """Return what the extensions add to the program's reply."""


class Cohort(View):
    """A view with the clients' states and local training.

    Attributes:
        model: working parameters and buffers by full name ``(n, ...)``. Personal ones are initialised from the client's
            state and saved when the round ends; shared ones are available after :meth:`load`.
        state: the other parameter sets of the method and its extensions that stay on the client, by name; assign to
            change them.
        received: the shared parameters that were passed to :meth:`load`.
        carried: what the server sent for each of the method's extensions, by the extension's name.
        delivered: the payload of the exchange, by name; empty if no extension replaces replies.
        extensions: the extensions, in an exchange that carries them.
        scratch: results of a program for the method's ``predict``, nested dictionaries of tensors ``(n, ...)``.
        watch: is called with each task before it is fitted, and returns the task to fit
            (:class:`perfed.training.fit.LossCurve`).
        private: differential privacy of rows in everything that is fitted and counted; ``None`` without it.
        noise: the source of noise on everything that leaves the client.
        counter: counts the releases of a single client; ``None`` without counting.
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
        """Return the mean loss over all training steps of this exchange, float64 ``(n,)``; NaN without steps."""
        return self._loss_sum / self._loss_steps

    def key(self, purpose: str, *words: int) -> Tensor:
        """Return random keys of this exchange for ``purpose``, int64 ``(n,)``, one per client."""
        base = rng.key(self.where.seed, purpose, self.where.round, self.where.exchange, *words)
        return rng.key(base, rng.encode_texts(self.ids)).to(self.device)

    # Counts of rows ----------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> Tensor:
        """Return the number of training samples per client, ``(n,)``; in a private run with noise, and at least 1."""
        exact = super().num_samples
        return exact if self.private is None else self._add_count_noise(self.private, exact, "rows").clamp_min(1)

    @property
    def class_counts(self) -> Tensor:
        """Return the training samples per client and class, ``(n, C)``.

        In a private run the counts have noise, also those of absent classes.
        """
        exact = super().class_counts
        return exact if self.private is None else self._add_count_noise(self.private, exact, "classes")

    def class_means(self, stage: str | None = None) -> Tensor:
        """Return the mean output of ``stage`` per class (:meth:`View.class_means`).

        In a private run it is computed from noisy sums.
        """
        if self.private is None:
            return super().class_means(stage)
        samples, classes = self.samples(), self.num_classes or 0
        features = (self.representation() if stage is None else self.features(stage)).flatten(1)
        self._sums += 1
        keys = self.key("class sums", self._sums)
        sums = self.private.noisy_sums(features, self.client_of(samples) * classes + samples.y, classes, keys)
        return sums / self.class_counts.clamp_min(1)[:, :, None]

    def _add_count_noise(self, private: PrivateTraining, counts: Tensor, purpose: str) -> Tensor:
        return private.noisy_counts(counts, self.where.seed, self.ids, purpose)

    # Parameters --------------------------------------------------------------------------------------------

    def load(self, *parameters: Mapping[str, Tensor]) -> None:
        """Copy received parameters (full name -> ``(n, ...)``) into the working model."""
        self.drop_features()
        self._penalties = self._transforms = None
        for tree in parameters:
            for name, tensor in tree.items():
                self.received[name] = tensor
                self.model[name] = tensor.clone(memory_format=torch.contiguous_format)

    def shared(self) -> Parameters:
        """Return the working values of the shared and per-domain parameters, for a reply."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] in SENT}

    def personal(self) -> Parameters:
        """Return the working values of the personal parameters."""
        return {name: tensor.detach() for name, tensor in self.model.items() if self.places[name] == "personal"}

    @property
    def personal_parameters(self) -> tuple[str, ...]:
        """Return the names of the trainable personal parameters."""
        return tuple(name for name in self.trainable_names(self.chain.stages) if self.places[name] == "personal")

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Return the names of the trainable shared and per-domain parameters."""
        return tuple(name for name in self.trainable_names(self.chain.stages) if self.places[name] in SENT)

    def trainable_names(self, train: str | Sequence[str]) -> tuple[str, ...]:
        """Return the names of the parameters (not buffers) in ``train``, stages or full names, that are not frozen.

        Stages that the model does not have contribute no parameters.

        Raises:
            PerfedError: if a name is neither a stage nor a parameter.
        """
        requested = {train} if isinstance(train, str) else set(train)
        names = [name for name, _ in self.chain.named_parameters()]
        unknown = sorted(requested.difference(names, STAGES))
        if unknown:
            raise PerfedError(f"'{unknown[0]}' is no stage and no parameter; stages: {', '.join(STAGES)}")
        return tuple(n for n in names if (stage_of(n) in requested or n in requested) and self.places[n] != "frozen")

    @property
    def steps_done(self) -> Tensor:
        """Return the number of mini-batch steps of each client in this exchange so far, float64 ``(n,)``."""
        return self._loss_steps.clone()

    # Extensions -------------------------------------------------------------------------------------------------

    @property
    def penalties(self) -> Sequence[Penalty]:
        """The terms that every fit adds to the loss: those of the extensions, unless a program assigns others.

        The terms of the extensions refer to the model at their first use; :meth:`load` resets them.
        """
        if self._penalties is None:
            self._penalties = [] if self.extensions is None else self.extensions.penalties(self)
        return self._penalties

    @penalties.setter
    def penalties(self, penalties: Sequence[Penalty]) -> None:
        self._penalties = penalties

    @property
    def transforms(self) -> Sequence[Transform]:
        """The functions that the extensions apply to every gradient, in order; :meth:`load` resets them."""
        if self._transforms is None:
            self._transforms = [] if self.extensions is None else self.extensions.transforms(self)
        return self._transforms

    def close_extensions(self) -> None:
        """Compute the extensions' reply from the model as it is now, instead of at the end of the program."""
        self.extensions_reply()

    def extensions_reply(self) -> dict[str, Any]:
        """Return what the extensions add to the reply; computed once."""
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
        """Train some stages of each client's model on its data, independently of the other clients.

        Optimiser, learning rates, weight decay and batch size are the method's settings. Stages that are not trained
        run in evaluation mode (no dropout, running batch-norm statistics); if all stages before the first trained one
        are untrained, their features are computed once and reused by every epoch. Parameters of a domain that has no
        sample in a mini-batch take no step in it: values and optimiser state stay as they are.

        Args:
            train: a stage, or stages or full parameter names trained together; stages that the model does not have
                are skipped.
            epochs: number of epochs, for all clients or one per client; an epoch has ceil(n_i / batch size) steps,
                unless ``local_steps`` is set. Either ``epochs`` or ``steps`` is required.
            steps: number of mini-batch steps, the same for every client.
            params: train this set ``{name: (n, ...)}`` in place of the working model, in place.
            also: further sets ``{set: {name: (n, ...)}}`` that are also trained, in place; the loss gets them with
                :meth:`Step.set_parameters <perfed.training.step.Step.set_parameters>`. Buffers among them (statistics
                of batch-norm) are not trained; a pass with them moves them in place.
            loss: returns one value per client, to which :attr:`penalties` are added; default ``step.mean_loss``. It may
                be called for different clients at the same time: values to reuse must be stored in the step's block.
            samples: data in place of the training split, or the same data in mini-batches of another size
                (:meth:`Samples.in_batches <perfed.training.batches.Samples.in_batches>`).
            update: one or several rules that change the optimiser's step (:mod:`perfed.training.steprules`); they act
                on gradients after :attr:`transforms`.

        Raises:
            ClientsDiverged: if clients' losses became NaN or infinite.
            PerfedError: if rules do not combine.
        """
        if (epochs is None) == (steps is None):
            raise ValueError("fit needs either epochs or steps")
        names = self.trainable_names(train)
        extra: Parameters = {}
        for group, values in (also or {}).items():
            for name, tensor in values.items():
                values[name] = extra[f"{group}/{name}"] = tensor.contiguous()
        all_names = self.trainable_names(self.chain.stages) if extra else ()
        trained = (*names, *(name for name in extra if name.rpartition("/")[2] in all_names))
        self._fits += 1
        if not trained or steps == 0 or (epochs is not None and not np.any(epochs)):
            return
        target = self.model if params is None else params
        for name in names:
            target[name] = target[name].contiguous()
        task = self._make_task(trained, {**target, **extra}, loss, samples or self.samples())
        length = count_steps(task.samples.counts, task.batch_size, epochs, steps, self.settings.epoch_steps)
        if not length.any():
            return
        self._run_task(replace(task, steps=length, rules=self._combine_rules(update, names)))

    def _combine_rules(self, update: StepRule | Sequence[StepRule], names: Sequence[str]) -> StepRules | None:
        """Return the rules of the extensions followed by those of a fit, with the pull limited to the parameters
        ``names``.
        """
        fit_rules = update if isinstance(update, Sequence) else [update]
        all_rules = [*map(GradientTransform, self.transforms), *fit_rules]
        if not all_rules:
            return None
        rules = StepRules.combine(all_rules)
        return replace(rules, near=rules.near.limit_to(names)) if rules.near else rules

    def _run_task(self, task: Task) -> None:
        """Run ``task`` according to the plan, and record its losses and steps."""
        if self.counter is not None:
            self.counter.begin_fit(int(task.samples.counts.sum()))
        task = self._choose_precision(task)
        trial, kind, task = self._make_trial(task), task.kind(self.layout.label), self.watch(task)
        try:
            stackable = self.layout.unstackable is None
            path = self.plan.path(kind, self.n, trial, stackable=stackable, parallel=self.parallel)
            parts = self.plan.run_chunks(
                path,
                self.n,
                lambda first, stop: fitting.run_task(task.slice_clients(first, stop)),
                parallel=self.parallel,
            )
        except Diverged as error:
            if not (self.discreet and self.n == 1):
                raise self.make_divergence_error(error.row, error.reason) from None
            for name in task.trained:  # as if a loss were not finite; an error would tell of the client's rows
                task.params[name].fill_(torch.nan)
            return self.drop_features()
        self._check_losses(torch.cat([losses for _, _, (losses, _) in parts]))
        for first, stop, (losses, steps) in parts:
            self._loss_sum[first:stop] += losses.cpu().double()
            self._loss_steps[first:stop] += torch.from_numpy(steps)
        self.drop_features()  # fused optimisers change tensors without raising their versions

    def _make_trial(self, task: Task) -> Trial:
        return Trial(
            partial(fitting.rehearse_steps, task), int(task.steps.sum()), partial(self._describe_workload, task)
        )

    def _choose_precision(self, task: Task) -> Task:
        """Return ``task``, with numbers of 16 bits if the settings request them and no trial shows that they are
        slower.
        """
        if self.settings.precision == "full":
            return task
        fast, label = replace(task, bf16=True), self.layout.label
        compare_speed = partial(is_faster, self._make_trial(fast), self._make_trial(task))
        untried = self.n == 1 or self.layout.unstackable
        return fast if untried or self.plan.prefers(fast.kind(label), task.kind(label), compare_speed) else task

    def _describe_workload(self, task: Task) -> dict[str, Any]:
        """Return, as plain values, what determines the time of a step besides machine, threads and clients."""
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
        """Record ``losses`` ``(n,)`` as those of one training step, for parameters that were not trained by
        :meth:`fit`.

        Raises:
            ClientsDiverged: if a loss is NaN or infinite.
        """
        self._check_losses(losses)
        self._loss_sum += losses.detach().cpu().double()
        self._loss_steps += 1
        self.drop_features()

    def make_divergence_error(self, row: int, reason: str) -> ClientsDiverged:
        """Return the error for a matrix of the client in ``row`` that the function ``reason`` cannot factorise."""
        message = f"training of client '{self.ids[row]}' diverged: {reason} failed on values that are no longer finite"
        return ClientsDiverged(str(self.where), {self.ids[row]: message})

    @contextmanager
    def trial_fits(self) -> Iterator[None]:
        """Open a context in which fits change neither :attr:`train_loss`, :attr:`steps_done` nor the keys of later
        fits.

        Extensions do not change gradients in it. It is meant for trial fits on copies of parameters.
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
        """Return the method's local optimiser for the parameters ``names``, including those of other sets
        (``set/name``).
        """
        ranks = {name: t.ndim for name, t in self.chain.named_parameters()}
        return build_optimizer({name: ranks[name.rpartition("/")[2]] for name in names}, self.settings)

    def _make_task(self, trained: tuple[str, ...], target: Parameters, loss: Loss | None, samples: Samples) -> Task:
        start = min(self.chain.stages.index(stage_of(name)) for name in trained) if self.augment is None else 0
        raw = samples.x
        if start > 0:
            samples = replace(samples, x=self._features(samples, start, target))
        if self.private:
            check_rows_are_separate(
                self.chain, samples, self.task, self.per_domain, self.settings.class_weights == "balanced"
            )
        batch_size = int(samples.counts.max()) if samples.batch_size == "all" else samples.batch_size
        return Task(
            chain=self.chain,
            params={**self.model, **target},
            trained=trained,
            samples=samples,
            keys=self.key("fit", self._fits),
            optimizer=self.optimizer(trained),
            loss=add_penalties(loss or mean_loss, self.penalties),
            batch_size=batch_size or self.settings.batch_size,
            stream=continue_streams(self.state, self._loss_steps, self.where.seed, self.ids),
            augment=self.augment,
            per_domain=self.per_domain,
            objective=self.objective(self.settings.class_weights),
            start=start,
            raw=raw,
            rows=np.arange(self.n),
            private=self.private,
        )

    def _check_losses(self, losses: Tensor) -> None:
        """Raise an error if some of the ``losses`` ``(clients,)`` are not finite, unless the cohort is discreet."""
        if self.discreet:
            return
        bad = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
        if bad:
            messages = {
                self.ids[r]: f"the training loss of client '{self.ids[r]}' became {losses[r].item()}" for r in bad
            }
            raise ClientsDiverged(str(self.where), messages)
