"""The row ``blend``: at each site a mixture of the other rows' models, with weights from folds of the training rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax  # type: ignore[import-untyped]

from perfed.client_model.load import load_joined_site
from perfed.client_model.mixture import mix_models
from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.held_out import fold_as_test
from perfed.data.labels import Task
from perfed.data.names import find_client
from perfed.data.reading import read_json
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.config import Experiment, readable
from perfed.experiment.estimators import is_baseline, is_pooled, new_model
from perfed.experiment.rows import AnyRun, Judged, RunWithoutRounds
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import open_method_run
from perfed.maths.blending import (
    ROWS,
    Prior,
    Rows,
    choose_prior_rows,
    drop_small_weights,
    guard_weights,
    learn_weights,
    prepare_outputs,
    shrink_site_weights,
)
from perfed.plugins import BLEND, SKLEARN
from perfed.run import predictions
from perfed.run.callbacks.progress import Progress
from perfed.system import versions, write_atomic

FILE = "blend.json"
"""A blend's weights, in its run's directory."""

LINEAR: dict[Task, str] = {"classification": "logistic", "regression": "ridge", "survival": "cox"}
TREES = ("random-forest", "gradient-boosting")

Numbers = NDArray[np.float64]


def candidates_of(methods: Sequence[str]) -> list[str]:
    """Return the methods that a blend mixes: all that give a site a model."""
    return [name for name in methods if name != BLEND and not is_pooled(name)]


def own_among(names: Sequence[str]) -> tuple[int, ...]:
    """Return the positions in ``names`` of scikit-learn models, which a site trains without other sites."""
    return tuple(k for k, name in enumerate(names) if is_baseline(name))


def with_own_models(methods: Sequence[str], task: Task) -> list[str]:
    """Return ``methods`` with a linear scikit-learn model for this task, and with a tree model if the task has one.

    Example:
        >>> with_own_models(["local", "blend"], "classification")
        ['local', 'sklearn:logistic', 'sklearn:random-forest', 'blend']
    """
    needed = [] if SKLEARN + LINEAR[task] in methods else [SKLEARN + LINEAR[task]]
    if task != "survival" and not any(SKLEARN + tree in methods for tree in TREES):
        needed.append(SKLEARN + TREES[0])
    position = list(methods).index(BLEND) if BLEND in methods else len(methods)
    return [*methods[:position], *needed, *methods[position:]]


def check_blend(methods: Sequence[str], experiment: Experiment, federation: Federation) -> None:
    """Refuse methods and settings that cannot be blended.

    Raises:
        PerfedError: there are fewer than two candidates, a classifier has no probabilities, the evaluation is not of
            each client's model on test data, or there are more folds than rows.
    """
    names, evaluation, folds = candidates_of(methods), experiment.evaluation, experiment.blend.folds
    if len(names) < 2:
        raise PerfedError(f"{BLEND}: at least two candidates are needed (given: {', '.join(names) or 'none'})")
    for name in filter(is_baseline, names):
        model = new_model(name, federation.task, experiment.seed)
        if federation.task == "classification" and not hasattr(model, "predict_proba"):
            raise PerfedError(f"{BLEND}: {name} has no probabilities, which a blend is made of; leave it out")
    if (evaluation.split, evaluation.who, evaluation.when) != ("test", "all", "before"):
        raise PerfedError(f"{BLEND}: is judged with evaluation.split = 'test', who = 'all' and when = 'before' alone")
    if experiment.data.options["inner_fold"]:
        raise PerfedError(f"{BLEND}: makes folds itself; leave data.inner_fold out")
    if predictions.exceeds_limit(federation, "test"):
        raise PerfedError(f"{BLEND}: {predictions.NOT_SAVED_NOTE.partition(':')[0]}; a blend is made of these")
    last = (folds - 1, folds)
    last_fold_clients = (
        fold_as_test(client, last, federation.task != "regression", experiment.seed) for client in federation
    )
    if all(client.test is None for client in last_fold_clients):
        raise PerfedError(f"blend.folds = {folds}: no client has so many training rows; use fewer folds")


@dataclass(frozen=True)
class BlendRun(RunWithoutRounds):
    """A mixture of trained models at each site; only its weights are learnt.

    At each site the weights are not negative and sum to one. They minimise the loss on the site's training rows, each
    of which is predicted by models that no site trained on its fold, and are shrunk towards the weights that all sites
    learn together (:mod:`perfed.maths.blending`). For regression, a site uses only its best own model if the mixture
    has a larger error (:func:`~perfed.maths.blending.guard_weights`). The mixture combines the outputs of the
    candidates that are trained on all training rows: probabilities, values, or log hazards.

    Attributes:
        experiment: the experiment, of which only the seed, the data, the evaluation and ``blend`` are used.
        federation: the clients.
        candidates: by name the finished run on all training rows, and one for each fold (only needed to execute).
        path: the directory of the results.
    """

    experiment: Experiment
    federation: Federation
    candidates: Mapping[str, Sequence[Path]]
    path: Path
    name: str = BLEND
    _opened: dict[str, AnyRun] = field(default_factory=dict, init=False, repr=False, compare=False)

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Learn the weights, evaluate the mixtures, and write ``blend.json`` and the files that every run writes.

        Raises:
            PerfedError: fewer than two candidates have finished, or they did not save predictions of the same rows.
        """
        started = time.perf_counter()
        if len(self.candidates) < 2:
            raise PerfedError(f"fewer than two candidates have finished in all folds ({', '.join(self.candidates)})")
        names, settings = list(self.candidates), self.experiment.blend
        full_runs, *folds = zip(*self.candidates.values(), strict=True)
        sites = self.held_out(folds)
        ids = [client.id for client in self.federation]
        prior_rows = choose_prior_rows([sites[i] for i in ids]) if settings.prior_rows == "cv" else settings.prior_rows
        prior, site_weights = learn_weights([sites[i] for i in ids], prior_rows)
        mixed = {site: drop_small_weights(values) for site, values in zip(ids, site_weights, strict=True)}
        weights = {site: guard_weights(sites[site], values, own_among(names)) for site, values in mixed.items()}
        unmixed = [site for site in ids if (weights[site] != mixed[site]).any()]
        judged, predicted = Judged(self.experiment, self.federation), _read_outputs(full_runs)
        for number, client in enumerate(self.federation, 1):
            if client.id in predicted:
                y, outputs = predicted[client.id]
                judged.add(client, y, mixture(self.federation.task, y, outputs, weights[client.id]))
            if progress is not None:
                progress(number, len(self.federation), None)
        content = {
            "candidates": {name: os.path.relpath(where[0], self.path) for name, where in self.candidates.items()},
            "folds": settings.folds,
            "prior_rows": prior_rows,
            **_prior_to_dict(names, prior),
            "rows": {site: len(sites[site].outputs) for site in ids},
            "keep_own": unmixed,
            "sites": {site: _weights_to_dict(names, values) for site, values in weights.items()},
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / FILE, json.dumps(content, indent=1).replace("Infinity", '"inf"') + "\n")
        seconds = time.perf_counter() - started
        return judged.finish(
            BLEND,
            self.path,
            files=[FILE],
            wall_seconds=seconds,
            training_seconds=seconds,
            settings={"folds": settings.folds, "prior_rows": prior_rows, "candidates": names},
            notes=self._describe_weights(names, prior.weights, prior_rows, unmixed),
            versions=versions("numpy", np.__version__),
        )

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the mixture of one client, to predict with and to export.

        Args:
            client: the id of the client, or the name of a site that has joined the run.
            trust: whether files of a site that has joined may run code.

        Raises:
            PerfedError: the client is unknown, or a candidate's model was not saved or is damaged.
        """
        ids = self.federation.ids
        if (joined_site := load_joined_site(self.path, client, ids, trust)) is not None:
            return joined_site
        site = find_client(client, [name for name in ids if name in self.content["sites"]])
        weights = {name: float(weight) for name, weight in self.content["sites"][site].items() if weight > 0}
        parts = {name: self.open_candidate(name).site(site) for name in weights}
        return self._mix_parts(self.federation.clients[ids.index(site)], parts, list(weights.values()))

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the mixture of a new client, which joins each candidate or trains it on its own rows.

        Its weights are learnt like those of other sites: from folds of its training rows, where the pooled weights
        count as much as ``prior_rows`` rows. A candidate that no client can join is left out.

        Args:
            client: the new client, with the classes of the federation.
            rounds: the number of training rounds of each candidate (default: that of its run).

        Raises:
            PerfedError: the client does not fit the others, or it can join none of the candidates.
        """
        runs = {name: self.open_candidate(name) for name in self.candidates}
        parts, why = dict[str, SiteModel](), ""
        for name, run in runs.items():
            try:
                parts[name] = run.join(client, rounds)
            except PerfedError as error:
                why = str(error)
        if not parts:
            raise PerfedError(f"{BLEND}: no candidate can be joined: {why}")
        weights = self._weights_of_new_client(client, {name: runs[name] for name in parts}, rounds)
        mixed = {name: part for (name, part), weight in zip(parts.items(), weights, strict=True) if weight > 0}
        rounds = rounds or max(run.done for run in runs.values())
        return self._mix_parts(client, mixed, [float(weight) for weight in weights if weight > 0], joined=rounds)

    def open_candidate(self, name: str) -> AnyRun:
        """Return the finished run of a candidate on all training rows, which is opened once."""
        if name not in self._opened:
            place = self.candidates[name][0]
            self._opened[name] = (
                SklearnRun(name, self.experiment, self.federation, place)
                if is_baseline(name)
                else open_method_run(place, federation=self.federation)
            )
        return self._opened[name]

    def _weights_of_new_client(
        self, client: Client, runs: Mapping[str, AnyRun], rounds: int | None
    ) -> NDArray[np.float64]:
        """Return the weights by what the candidates predict of the client's training rows, held out fold by fold."""
        content, federation, task = self.content, self.federation, self.federation.task
        candidates = list(content["pooled"])
        columns = [candidates.index(name) for name in runs]
        pooled, gradient = (
            np.array(values)[columns] for values in (list(content["pooled"].values()), content["gradient"])
        )
        share = pooled.sum()
        weights = pooled / share if share > 0 else np.full(len(columns), 1 / len(columns))
        hessian = np.array(content["hessian"])[np.ix_(columns, columns)]
        prior = Prior(weights, float(content["loss"]), gradient, hessian)
        predicted, targets = [np.empty((0, len(columns)))], [np.empty((0, 2) if task == "survival" else 0)]
        folds, count = [np.empty(0, np.int64)], int(content["folds"])
        for fold in range(count):
            part = fold_as_test(client, (fold, count), task != "regression", self.seed)
            if part.test is None:
                continue
            test = part.test if federation.target_scale is None else part.test.with_targets(federation.target_scale.up)
            models = [run.join(part, rounds) for run in runs.values()]
            outputs = [model.outputs(*model.check_inputs(part.test.x, part.test.domain)) for model in models]
            if task == "classification":
                outputs = [np.log(probabilities.clip(np.finfo(np.float32).tiny)) for probabilities in outputs]
            rows, y = prepare_outputs(task, test.y.numpy(), outputs)
            predicted, targets, folds = [*predicted, rows], [*targets, y], [*folds, np.full(len(rows), fold)]
        rows_of_client = ROWS[task](np.concatenate(predicted), np.concatenate(targets), np.concatenate(folds))
        mixed = drop_small_weights(shrink_site_weights(rows_of_client, prior, float(content["prior_rows"])))
        return guard_weights(rows_of_client, mixed, own_among(list(runs)))

    def _mix_parts(self, client: Client, parts: dict[str, SiteModel], weights: list[float], **facts: Any) -> SiteModel:
        settings = {name: self.content[name] for name in ("folds", "prior_rows")}
        model = mix_models(parts, weights, settings=settings, seed=self.seed, **facts)
        return model.with_metrics(client, self.federation)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content of ``blend.json``, checked.

        Raises:
            PerfedError: the file is damaged.
        """
        return _read_content(self.path / FILE)

    def _describe_weights(
        self, names: Sequence[str], pooled: Numbers, prior_rows: float, unmixed: Sequence[str]
    ) -> list[str]:
        order = np.argsort(-pooled, kind="stable")
        listed = ", ".join(f"{names[k]} {pooled[k]:.2f}" for k in order if pooled[k] >= 0.005)
        notes = [f"weights over all sites: {listed}; each site's own count as if these had {prior_rows:g} rows there"]
        if unmixed:
            sites = shorten_list(unmixed)
            notes.append(f"sites that keep their best own model, which errs less on held-out rows: {sites}")
        return notes

    def held_out(self, folds: Sequence[Sequence[Path]]) -> dict[str, Rows]:
        """Return the candidates' outputs for each client's training rows, from the runs without the fold of the row."""
        task, count, parts = self.federation.task, len(self.candidates), dict[str, list[tuple[Numbers, Numbers, int]]]()
        for number, places in enumerate(folds):
            for site, (y, outputs) in _read_outputs(places).items():
                parts.setdefault(site, []).append((*prepare_outputs(task, y, outputs), number))
        rows = {}
        for client in self.federation:
            fold_parts = parts.get(client.id, [])
            width = (0, 2) if task == "survival" else (0,)
            rows[client.id] = ROWS[task](
                np.concatenate([np.empty((0, count)), *(outputs for outputs, _, _ in fold_parts)]),
                np.concatenate([np.empty(width), *(y for _, y, _ in fold_parts)]),
                np.concatenate([np.empty(0, np.int64), *(np.full(len(y), fold) for _, y, fold in fold_parts)]),
            )
        return rows


def open_blend(experiment: Experiment, federation: Federation, path: Path, site: str | None = None) -> BlendRun:
    """Return the finished blend in ``path`` with the runs of its candidates.

    Args:
        experiment: the experiment of the blend.
        federation: the clients.
        path: the directory of the blend.
        site: the only site whose model is needed: candidates that have no weight there are not opened.

    Raises:
        PerfedError: ``blend.json`` is damaged, or a candidate cannot be opened.
    """
    content = _read_content(path / FILE)
    candidates = {name: [path / place] for name, place in content["candidates"].items()}
    run = BlendRun(experiment, federation, candidates, path)
    weights = content["sites"].get(site, {})
    for name in candidates:
        if not weights or weights[name] > 0:
            run.open_candidate(name)
    return run


def mixture(task: Task, y: NDArray[Any], outputs: Sequence[Numbers], weights: Numbers) -> Numbers:
    """Return the weighted mean of the candidates' outputs for rows with targets ``y``; for classes its logarithm."""
    if task != "classification":
        shape = y.shape if task == "regression" else (len(y), 1)
        return np.tensordot(weights, np.stack([values.reshape(shape) for values in outputs]), 1)
    mixed = np.tensordot(weights, np.stack([softmax(logits, axis=1) for logits in outputs]), 1)
    return np.asarray(np.log(mixed.clip(np.finfo(np.float64).tiny)))


def blended(path: Path) -> list[str]:
    """Return the candidates of the finished blend in ``path``; empty if it cannot be read."""
    try:
        return list(json.loads((path / FILE).read_text(encoding="utf-8"))["candidates"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _read_outputs(places: Sequence[Path]) -> dict[str, tuple[NDArray[Any], list[Numbers]]]:
    """Return by client the targets, and the outputs of each run for these rows."""
    by_client: dict[str, tuple[NDArray[Any], list[Numbers]]] = {}
    for number, place in enumerate(places):
        saved = predictions.read_predictions(place)
        if not saved:
            raise PerfedError(f"{place}: kept no predictions, which a blend is made of")
        for site, (y, outputs) in saved[-1].by_site().items():
            if number == 0:
                by_client[site] = y, [outputs]
            elif site in by_client and by_client[site][0].shape == y.shape and np.allclose(by_client[site][0], y):
                by_client[site][1].append(outputs)
            else:
                raise PerfedError(f"{place}: has other rows of client '{site}' than {places[0]}")
    lacking = [site for site, (_, outputs) in by_client.items() if len(outputs) < len(places)]
    if lacking:
        raise PerfedError(f"{places[0]}: others have no predictions of the clients {shorten_list(lacking)}")
    return by_client


def _weights_to_dict(names: Sequence[str], weights: Numbers) -> dict[str, float]:
    return {name: round(float(w), 6) for name, w in zip(names, weights, strict=True)}


def _prior_to_dict(names: Sequence[str], prior: Prior) -> dict[str, Any]:
    """Return what all sites learnt together as it is written to the file."""
    slopes = {"gradient": prior.gradient.tolist(), "hessian": prior.hessian.tolist()}
    return {"pooled": _weights_to_dict(names, prior.weights), "loss": prior.value, **slopes}


def _read_content(file: Path) -> dict[str, Any]:
    """Return the content of ``blend.json``, checked."""
    content: dict[str, Any] = read_json(file)
    with readable(file):
        names = [str(name) for name in content["candidates"]]
        for weights in (content["pooled"], *content["sites"].values()):
            if list(weights) != names or not all(0 <= float(weight) <= 1 for weight in weights.values()):
                raise ValueError("weights are of other candidates, or not between 0 and 1")
        if (len(content["gradient"]), np.shape(content["hessian"])) != (len(names), (len(names), len(names))):
            raise ValueError("sums are of another number of candidates")
        float(content["prior_rows"]), float(content["loss"]), int(content["folds"])
    return content
