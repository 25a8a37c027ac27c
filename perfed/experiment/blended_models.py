"""Any finished run's models, each site's taken out again; those of a blend are mixtures of its candidates'."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.client_model.load import joined_sites, load_site
from perfed.client_model.mixture import mix_models
from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.held_out import fold_as_test
from perfed.data.names import find_name
from perfed.data.reading import read_json
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.blend import FILE, own_among
from perfed.experiment.config import Experiment, readable, validate
from perfed.experiment.estimators import is_baseline
from perfed.experiment.kept_models import KeptModels, estimator_site
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import open_run
from perfed.maths.blending import ROWS, Prior, drop_small_weights, guard_weights, prepare_outputs, shrink_site_weights
from perfed.plugins import BLEND
from perfed.run.directory import RunDirectory
from perfed.run.run import Run


@dataclass
class BlendedModels:
    """A finished blend.

    Attributes:
        path: its directory.
        experiment: that its candidates are of.
        federation: the clients.
        candidates: their finished runs, by name.
        content: of ``blend.json``.
    """

    path: Path
    experiment: Experiment
    federation: Federation
    candidates: Mapping[str, Run | KeptModels]
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As in a comparison."""
        return BLEND

    @property
    def seed(self) -> int:
        """What the run was made with."""
        return self.experiment.seed

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """One client's mixture, to predict with and to export.

        Args:
            client: its id, or the name of a site that has joined the run.
            trust: whether files of a site that has joined may run code.

        Raises:
            PerfedError: an unknown client, or a candidate's model that was not kept or is damaged.
        """
        joined = joined_sites(self.path)
        site = find_name(client, self.federation.ids)
        if site is None and (name := find_name(client, joined)) is not None:
            return load_site(joined[name], trust)
        weights = self.content["sites"].get(site)
        if weights is None or site is None:
            raise PerfedError(f"unknown client '{client}'; ids are: {shorten_list(self.federation.ids)}")
        client = site
        own = self.federation.clients[self.federation.ids.index(client)]
        used = {name: float(weight) for name, weight in weights.items() if weight > 0}
        return self._mix(own, {name: self.candidates[name].site(client) for name in used}, list(used.values()))

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the mixture of a new client: each candidate as the client joins it, own models from its own rows.

        Its weights are learnt as any site's: from folds of its training rows, as if the pooled weights had
        ``prior_rows`` rows there. A candidate that no client can join is left out.

        Args:
            client: with data of the federation's classes.
            rounds: of training of each candidate; as many as its run's if not given.

        Raises:
            PerfedError: a client that does not fit the others, or none of the candidates can be joined.
        """
        parts, why = dict[str, SiteModel](), ""
        for name in self.candidates:
            try:
                parts[name] = self._joined(name, client, rounds)
            except PerfedError as error:
                why = str(error)
        if not parts:
            raise PerfedError(f"{BLEND}: no candidate can be joined: {why}")
        found = self._weights(client, list(parts), rounds)
        used = {name: part for (name, part), w in zip(parts.items(), found, strict=True) if w > 0}
        return self._mix(client, used, [float(w) for w in found if w > 0], joined=rounds or self._rounds)

    @property
    def _rounds(self) -> int:
        return max((run.done for run in self.candidates.values() if isinstance(run, Run)), default=0)

    def _joined(self, name: str, client: Client, rounds: int | None) -> SiteModel:
        run = self.candidates[name]
        if isinstance(run, Run):
            return run.join(client, rounds)
        alone = replace(self.federation, clients=(client,))
        fitted = SklearnRun(name, self.experiment, alone).fitted(client)
        return estimator_site(name, fitted, client, alone, seed=self.seed, settings=run.summary["settings"])

    def _weights(self, client: Client, names: list[str], rounds: int | None) -> NDArray[np.float64]:
        """By what the candidates say of the client's training rows, held out fold by fold."""
        federation, task, count = self.federation, self.federation.task, int(self.content["folds"])
        every = list(self.content["pooled"])
        at = [every.index(name) for name in names]
        pooled, gradient = (np.array(values)[at] for values in (list(self.content["pooled"].values()), self._slope))
        share = pooled.sum()
        weights = pooled / share if share > 0 else np.full(len(at), 1 / len(at))
        prior = Prior(weights, float(self.content["loss"]), gradient, np.array(self.content["hessian"])[np.ix_(at, at)])
        said, targets = [np.empty((0, len(at)))], [np.empty((0, 2) if task == "survival" else 0)]
        folds = [np.empty(0, np.int64)]
        for fold in range(count):
            held = fold_as_test(client, (fold, count), task != "regression", self.seed)
            if held.test is None:
                continue
            test = held.test if federation.target_scale is None else held.test.with_targets(federation.target_scale.up)
            models = [self._joined(name, held, rounds) for name in names]
            outputs = [model.outputs(*model.check_inputs(held.test.x, held.test.domain)) for model in models]
            if task == "classification":
                outputs = [np.log(one.clip(np.finfo(np.float32).tiny)) for one in outputs]
            rows, y = prepare_outputs(task, test.y.numpy(), outputs)
            said, targets, folds = [*said, rows], [*targets, y], [*folds, np.full(len(rows), fold)]
        own = ROWS[task](np.concatenate(said), np.concatenate(targets), np.concatenate(folds))
        found = drop_small_weights(shrink_site_weights(own, prior, float(self.content["prior_rows"])))
        return guard_weights(own, found, own_among(names))

    @property
    def _slope(self) -> list[float]:
        return list(self.content["gradient"])

    def _mix(self, client: Client, parts: dict[str, SiteModel], weights: list[float], **facts: Any) -> SiteModel:
        settings = {name: self.content[name] for name in ("folds", "prior_rows")}
        model = mix_models(parts, weights, settings=settings, seed=self.seed, **facts)
        return model.with_metrics(client, self.federation)


def opened_models(
    path: Path | str, *, data_dir: Path | None = None, site: str | None = None
) -> Run | KeptModels | BlendedModels:
    """What :func:`perfed.experiment.start.open_run` gives; of scikit-learn models and of a blend those that were kept.

    Raises:
        PerfedError: as there, or such a run has not finished.
    """
    directory = RunDirectory(Path(path))
    name = directory.method
    if not is_baseline(name) and name != BLEND:
        return open_run(path, data_dir=data_dir, site=site)
    if not directory.finished:
        raise PerfedError(f"{path}: this run has not finished, and so there is no model yet")
    directory.refuse_damage(["config.toml", FILE])
    table = {**tomllib.loads(directory.read_config()), "method": "local"}  # which has a model per client, too
    try:
        experiment = validate(table)
    except PerfedError as error:
        raise PerfedError(f"{directory.path / 'config.toml'}: {error}") from None
    federation = experiment.data.load(experiment.seed, data_dir)
    if name != BLEND:
        return KeptModels(name, directory.path, experiment.seed, federation)
    content = _content(directory.path / FILE)
    used = [own for own in content["candidates"] if _is_used(own, content, site)]
    runs = {own: _candidate(own, directory.path / content["candidates"][own], federation) for own in used}
    return BlendedModels(directory.path, experiment, federation, runs, content)


def _is_used(name: str, content: Mapping[str, Any], site: str | None) -> bool:
    """Whether a candidate is needed: for one site where it has a weight there, for a new site always."""
    return site is None or site not in content["sites"] or content["sites"][site].get(name, 0) > 0


def _candidate(name: str, place: Path, federation: Federation) -> Run | KeptModels:
    if not is_baseline(name):
        return open_run(place, federation=federation)
    return KeptModels(name, place, federation=federation, seed=int(RunDirectory(place).read_summary()["seed"]))


def _content(file: Path) -> dict[str, Any]:
    """What ``blend.json`` holds, checked."""
    found: dict[str, Any] = read_json(file)
    with readable(file):
        names = [str(name) for name in found["candidates"]]
        for weights in (found["pooled"], *found["sites"].values()):
            if list(weights) != names or not all(0 <= float(weight) <= 1 for weight in weights.values()):
                raise ValueError("weights are of other candidates, or not between 0 and 1")
        if (len(found["gradient"]), np.shape(found["hessian"])) != (len(names), (len(names), len(names))):
            raise ValueError("sums are of another number of candidates")
        float(found["prior_rows"]), float(found["loss"]), int(found["folds"])
    return found
