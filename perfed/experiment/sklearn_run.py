"""Baselines without a federation: scikit-learn models, per client or on the samples of all clients together."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from perfed.client_model.estimator import outputs_of, rows_of
from perfed.client_model.load import load_joined_site
from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.held_out import TUNING_FRACTION, with_validation
from perfed.data.names import find_client
from perfed.engine.evaluate import sample_counts
from perfed.engine.metrics import ALWAYS, METRICS, find_metric, metrics_of
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment
from perfed.experiment.estimators import (
    TRIES,
    baseline_id,
    is_pooled,
    new_model,
    trained,
    tries,
)
from perfed.experiment.kept_models import estimator_site, keep, load_kept, model_files
from perfed.experiment.rows import Judged, RunWithoutRounds
from perfed.run import predictions
from perfed.run.callbacks.progress import Progress
from perfed.run.directory import RunDirectory
from perfed.system import versions

TOGETHER = "one model on the samples of all clients together: what could be had if data could be brought together"


@dataclass(frozen=True)
class SklearnRun(RunWithoutRounds):
    """The scikit-learn models of a baseline on the data of a federation, without rounds and communication.

    ``sklearn:NAME`` is one model per client, trained on the client's own samples; ``pooled:NAME`` is one model, trained
    on the samples of all clients together. NAME is one of :func:`~perfed.experiment.estimators.baseline_names`, or a
    class ``module.Class``. The models have the defaults of scikit-learn and the seed of the run, except that logistic
    regression may take 1000 iterations, boosted trees have two levels, and forests choose the size of their leaves out
    of bag (:func:`~perfed.experiment.estimators.trained`).

    The strength of a named model is tuned if clients have validation samples and these are not the samples to evaluate:
    of ``baseline_tries`` values (default: :data:`~perfed.experiment.estimators.TRIES`), the model trained on the
    training samples chooses the best one on the validation samples. If the experiment sets ``baseline_tries`` and no
    client has validation samples, a quarter of the training samples is held out for this choice, as in a search. The
    model that is evaluated is trained on training and validation samples together.

    Models get the same arrays as methods, with flattened images and without further scaling. A client whose samples
    have a single class always predicts that class. Cox models are those of lifelines
    (:class:`~perfed.experiment.cox.Cox`).

    Attributes:
        name: the name of the baseline.
        experiment: the experiment, of which only the seed, the data and the evaluation are used.
        federation: the clients.
        path: the directory of the results; ``None`` writes nothing.
    """

    name: str
    experiment: Experiment
    federation: Federation
    path: Path | None = None

    def check(self) -> None:
        """Check that the models can be trained on these data.

        Raises:
            PerfedError: the baseline does not exist or does not support the targets, inputs are token ids, the inputs
                of clients have different columns although samples are pooled, or no client has data to evaluate.
        """
        baseline_id(self.name)  # which raises where there is none
        self._new_model()
        data, split = self.federation.name, self.experiment.evaluation.split
        if self.federation.words is not None:
            raise PerfedError(f"{self.name}: the inputs of data set '{data}' are token ids, which are no features")
        if not sample_counts(self.federation, split):
            raise PerfedError(f"evaluation.split = '{split}': no client has such data")
        if is_pooled(self.name):
            self._check_columns()

    def _check_columns(self) -> None:
        first, *further_clients = self.federation
        for client in further_clients:
            if (client.input_shape, client.feature_names) != (first.input_shape, first.feature_names):
                raise PerfedError(
                    f"{self.name}: the inputs of clients '{first.id}' and '{client.id}' have different columns, so "
                    "that their samples are not for one model"
                )

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train and evaluate the models of all clients, and write the files of a run.

        These are ``config.toml``, ``clients.csv``, ``summary.json``, the models, and the predictions for every sample.
        ``progress`` is called after each client with the number of the client and the number of clients.

        Returns:
            The summary, with 0 rounds and all metrics of a run except ``loss``; metrics in ``evaluation.metrics`` that
            need probabilities only occur if the model has them.

        Raises:
            PerfedError: the reasons of :meth:`check`, or scikit-learn refuses the data of a client, which is named.
        """
        from sklearn.exceptions import ConvergenceWarning

        self.check()
        started = time.perf_counter()
        judged = Judged(self.experiment, self.federation, self._has_probabilities)
        fitted: dict[str, Any] = {}
        # The rows of a client are few: its threads would mostly wait for each other.
        threads = self.plan.untimed_threads if is_pooled(self.name) else 1
        with warnings.catch_warnings(record=True) as caught, threadpool_limits(threads):
            warnings.simplefilter("always")
            for number, client in enumerate(self.federation, 1):
                split = client.split(self.experiment.evaluation.split)
                if split is not None or self.path is not None:
                    fitted[client.id] = self.fitted(client)
                if split is not None:
                    self._evaluate(fitted[client.id], client, judged)
                if progress is not None:
                    progress(number, len(self.federation), None)
        models = [model for client, model in fitted.items() if client in judged.metrics]
        stopped = sum(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        notes = [TOGETHER] if is_pooled(self.name) else []
        notes += [f"{stopped} of the models did not converge"] if stopped else []
        still = sum(getattr(model, "events_", 1) == 0 for model in models)
        notes += [f"{still} of the models were trained without an event and give every sample the same hazard"] * (
            still > 0
        )
        notes += [predictions.NOT_SAVED_NOTE] if judged.too_many else []
        notes += self._describe_choices(models)
        seconds = time.perf_counter() - started
        kept_note = "" if self.path is None else keep(self.path, self.name, fitted, self.federation.ids)
        return judged.finish(
            self.name,
            self.path,
            files=[] if self.path is None else model_files(self.path),
            wall_seconds=seconds,
            training_seconds=seconds,
            settings=self._new_model().get_params(),
            notes=notes + ([kept_note] if kept_note else []),
            versions=versions("scikit-learn", version("scikit-learn")),
        )

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the model of a client, from the files of the run if it has a directory, otherwise newly trained.

        Args:
            client: its id, or the name of a site that has joined the run.
            trust: whether files of a site that has joined may run code.

        Raises:
            PerfedError: an unknown client, a model that was not kept, or a file that is damaged.
        """
        if (joined_site := load_joined_site(self.path, client, self.federation.ids, trust)) is not None:
            return joined_site
        ids = self.federation.ids
        member = self.federation.clients[ids.index(find_client(client, ids))]
        if self.path is None:
            model = self.fitted(member)
            return self._site_model(model, member, self.federation, model.get_params())
        return self._site_model(
            load_kept(self.path, self.name, member, ids), member, self.federation, self._written_settings
        )

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the model of a new client, trained only on its samples; there are no ``rounds``.

        Raises:
            PerfedError: the run has one model of all clients' samples, or scikit-learn refuses the data.
        """
        if is_pooled(self.name):
            raise PerfedError(f"{self.name}: no site can join a model that is trained on the samples of all together")
        federation = replace(self.federation, clients=(client,))
        model = replace(self, federation=federation, path=None).fitted(client)
        settings = model.get_params() if self.path is None else self._written_settings
        return self._site_model(model, client, federation, settings)

    def _site_model(self, model: Any, client: Client, federation: Federation, settings: dict[str, Any]) -> SiteModel:
        return estimator_site(self.name, model, client, federation, seed=self.seed, settings=settings)

    @cached_property
    def _written_settings(self) -> dict[str, Any]:
        assert self.path is not None
        settings: dict[str, Any] = RunDirectory(self.path).read_summary()["settings"]
        return settings

    def _evaluate(self, model: Any, client: Client, judged: Judged) -> None:
        split = client.split(self.experiment.evaluation.split)
        assert split is not None
        y, predicted = split.y.numpy(), self._compute_outputs(model, client, split.x)
        if (scale := self.federation.target_scale) is not None:
            y, predicted = scale.up(split.y).numpy(), scale.up(torch.from_numpy(predicted)).numpy()
        judged.add(client, y, predicted)

    @property
    def _has_probabilities(self) -> bool:
        return hasattr(self._new_model(), "predict_proba")

    def fitted(self, client: Client) -> Any:
        """Return the scikit-learn model that one client predicts with, trained."""
        return self._pooled_model if is_pooled(self.name) else self._fit_best([client])

    @cached_property
    def _pooled_model(self) -> Any:
        return self._fit_best(self.federation.clients)

    def _fit_best(self, clients: Sequence[Client]) -> Any:
        """Return the model whose strength is best on the clients' validation samples, trained on these too."""
        setting, values = self._settings_to_try or ("", ())
        tuning_clients, settings = [self._tuning_clients[client.id] for client in clients], {}
        if values and any(self._can_tune(client) for client in clients):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores = [
                    self._compute_score(self._train(tuning_clients, ("train",), {setting: value}), tuning_clients)
                    for value in values
                ]
            settings = {setting: values[int(np.argmax(scores))]}
        scored = self.experiment.evaluation.split == "validation"
        return self._train(clients, ("train",) if scored else ("train", "validation"), settings)

    @property
    def _settings_to_try(self) -> tuple[str, tuple[float, ...]] | None:
        return tries(self.name, self.experiment.baseline_tries or TRIES)

    @cached_property
    def _tuning_clients(self) -> dict[str, Client]:
        """The clients with the validation samples on which strengths are chosen."""
        clients, stratify, seed = self.federation.clients, self.federation.task != "regression", self.experiment.seed
        if self._holds_out:
            clients = tuple(with_validation(client, TUNING_FRACTION, stratify, seed) for client in clients)
        return {client.id: client for client in clients}

    @property
    def _holds_out(self) -> bool:
        none = all(client.split("validation") is None for client in self.federation)
        return none and self.experiment.baseline_tries is not None

    def _can_tune(self, client: Client) -> bool:
        """Return whether the client has validation samples to tune on, which are not the samples to evaluate."""
        return (
            self.experiment.evaluation.split != "validation"
            and self._tuning_clients[client.id].split("validation") is not None
        )

    def _compute_score(self, model: Any, clients: Sequence[Client]) -> float:
        """Return the score of ``model`` on the validation samples of all clients together; higher is better.

        It is the metric by which methods are compared, or the first one of the task. If it is not defined on these
        samples, every model has the same score.
        """
        samples = [(client, split) for client in clients if (split := client.split("validation")) is not None]
        y = np.concatenate([split.y.numpy() for _, split in samples])
        predicted = np.concatenate([self._compute_outputs(model, client, split.x) for client, split in samples])
        task, compare_by = self.federation.task, self.experiment.evaluation.compare_by
        by = find_metric(compare_by)[0] if compare_by else ""
        metric = (
            by if by in Judged(self.experiment, self.federation, self._has_probabilities).names else ALWAYS[task][0]
        )
        value = metrics_of(y, predicted, task, self.federation.num_classes, [metric]).get(metric)
        return -np.inf if value is None else METRICS[metric].direction * value

    def _train(self, clients: Sequence[Client], splits: Sequence[str], settings: dict[str, float]) -> Any:
        parts = [part for client in clients for name in splits if (part := client.split(name)) is not None]
        x = np.concatenate([rows_of(part.x) for part in parts])
        y = np.concatenate([part.y.numpy() for part in parts])
        single = self.federation.num_classes is not None and len(np.unique(y)) == 1
        model = (
            new_model("sklearn:majority", "classification", 0) if single else self._new_model().set_params(**settings)
        )
        with self._rephrase_errors(clients):
            return trained(self.name, model, x, y.ravel() if y.shape[1:] == (1,) else y, tuned=single or bool(settings))

    def _compute_outputs(self, model: Any, client: Client, x: Tensor) -> NDArray[np.float64]:
        """Return the outputs of ``model`` for a client's samples.

        A model of all clients gives -inf for classes without training rows at the client, if ``evaluation.classes`` is
        "held".
        """
        with self._rephrase_errors([client]):
            outputs = outputs_of(model, rows_of(x), self.federation.num_classes)
        if is_pooled(self.name) and self.experiment.evaluation.classes == "held":
            outputs[:, np.setdiff1d(np.arange(outputs.shape[1]), client.train.y.numpy())] = -np.inf
        return outputs

    @contextmanager
    def _rephrase_errors(self, clients: Sequence[Client]) -> Iterator[None]:
        """Raise the first line of an error of scikit-learn about the data as an error of perfed."""
        try:
            yield
        except (ValueError, TypeError) as error:
            whose = f"client '{clients[0].id}'" if len(clients) == 1 else "all clients"
            raise PerfedError(f"{self.name}, {whose}: {str(error).splitlines()[0]}") from None

    def _describe_choices(self, models: Sequence[Any]) -> list[str]:
        """Return a note about the strengths chosen on validation samples; empty without such samples."""
        num_tuned = sum(self._can_tune(client) for client in self.federation)
        if not num_tuned:
            return []
        tried = self._settings_to_try
        if tried is None:
            return ["nothing is tuned: no settings to try are known"]
        setting, values = tried
        tuned_models = models[:1] if is_pooled(self.name) else models
        counts = Counter(model.get_params().get(setting) for model in tuned_models if setting in model.get_params())
        chosen_values = ", ".join(
            f"{value:g} ({count} of {len(tuned_models)})" for value, count in sorted(counts.items())
        )
        lacking = len(self.federation) - num_tuned
        without = f"; {lacking} clients without them have the default" if lacking and not is_pooled(self.name) else ""
        which = "a quarter of the training samples" if self._holds_out else "validation samples"
        return [f"{setting} chosen on {which}, {len(values)} tries: {chosen_values}{without}"]

    def _new_model(self) -> Any:
        return new_model(self.name, self.federation.task, self.experiment.seed)
