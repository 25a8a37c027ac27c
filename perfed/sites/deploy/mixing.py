"""A site in the exchange of a blend's weights: its inputs are the outputs of its models, which stay at the site."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax  # type: ignore[import-untyped]

from perfed.client_model.estimator import outputs_of, rows_of
from perfed.client_model.mixture import mix_models
from perfed.client_model.site_model import SiteModel
from perfed.data.checksums import find_damage, read_checksums, write_checksums_of
from perfed.data.client import Client, Split
from perfed.data.federation import Federation, federation_of
from perfed.data.reading import read_arrays
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError
from perfed.experiment.estimators import is_baseline
from perfed.experiment.factory import by_loss
from perfed.experiment.sklearn_run import SklearnRun
from perfed.sites.deploy.candidates import (
    build_weights_exchanges,
    build_weights_initialiser,
    drop_inputs,
    list_blended_models,
    make_fold_study,
)
from perfed.sites.deploy.kept import SiteServer, StoredModel
from perfed.sites.deploy.part import SiteRun, is_same_study
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.dry_run import derive_allow_list
from perfed.system import write_atomic

CANDIDATE_FILE = "candidates.npz"
"""File in a run's folder with the outputs of each model for the site's rows; training rows are held out."""
_MIN_LOG_PROBABILITY = -700.0  # keeps logarithms of probabilities finite
Arrays = dict[str, NDArray[Any]]


def specialise_site_run(site_run: SiteRun, folder: Path) -> SiteRun:
    """Return ``site_run`` as a :class:`BlendSiteRun` if its study blends candidates, and unchanged otherwise."""
    if not site_run.experiment.blend.candidates:
        return site_run
    return BlendSiteRun(**{field.name: getattr(site_run, field.name) for field in fields(site_run)}, folder=folder)


@dataclass(frozen=True)
class BlendSiteRun(SiteRun):
    """The exchange of a blend's weights, which a site has joined.

    Attributes:
        folder: folder of the site, with the runs of the candidates.
    """

    folder: Path = Path()

    @cached_property
    def candidates(self) -> list[str]:
        """The names of all models that are blended."""
        return list_blended_models(self.experiment, self.agreement.task)

    @cached_property
    def federation(self) -> Federation:
        """A federation of this site only, with the outputs of its models as inputs.

        See :class:`~perfed.methods.blending.Blending` for their layout.

        Raises:
            PerfedError: the site has no model of a candidate's run, or scikit-learn rejects the data.
        """
        file = self.get_stored_exchanges(self.folder).path / CANDIDATE_FILE
        if not file.exists() or find_damage(file.parent, read_checksums(file.parent)):
            file.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, **self._compute_arrays())  # type: ignore[arg-type]
            write_atomic(file, content.getvalue())
            write_checksums_of(file.parent, [CANDIDATE_FILE])
        arrays = read_arrays(file, ("x_train", "y_train", "x_test", "y_test"))
        train, test = (
            Split(torch.from_numpy(arrays[f"x_{name}"]), torch.from_numpy(arrays[f"y_{name}"]))
            for name in ("train", "test")
        )
        client = Client(self.site, train, test if len(test) else None)
        federation = federation_of([client], drop_inputs(self.agreement), self.experiment.data.name)
        return federation.to(dtype=torch.float64, device=self.device)

    @cached_property
    def initialiser(self) -> Initialiser:
        """The initialiser of the method that learns the weights."""
        return build_weights_initialiser(self.experiment, self.agreement.task, self.federation.num_outputs)

    @cached_property
    def allow_list(self) -> AllowList:
        """The list of exchanges that the site answers in the exchange of weights."""
        (client,) = self.federation
        protocol = build_weights_exchanges(self.experiment)
        return derive_allow_list(client, self.initialiser.info(self.federation), self.initialiser, protocol)

    def build_blend(self) -> SiteModel:
        """Return the site's blended model with the weights of the server's last message.

        Raises:
            PerfedError: the weights have not been learnt yet.
        """
        stored_model = StoredModel(self, self.folder)
        (cohort,) = stored_model.site_server.own_models([self.site], stored_model.done)
        weights = cohort.scratch["weights"][0].tolist()
        positive_weights = {name: weight for name, weight in zip(self.candidates, weights, strict=True) if weight > 0}
        models, blend = {name: self._build_model(name) for name in positive_weights}, self.experiment.blend
        settings = {"folds": blend.folds, "prior_rows": blend.prior_rows}
        model = mix_models(models, list(positive_weights.values()), settings=settings, seed=self.experiment.seed)
        federation = self._full_run.site_federation
        return model.with_metrics(federation.clients[0], federation)

    # Candidates --------------------------------------------------------------------------------------------

    @cached_property
    def _full_run(self) -> SiteRun:
        """The site's rows with no fold held out."""
        return self._hold_out(None)

    def _hold_out(self, fold: int | None) -> SiteRun:
        """Return the site's rows with a fold in place of the test rows, or unchanged if ``fold`` is ``None``."""
        study = make_fold_study(self.experiment, fold).to_toml()
        return SiteRun(self.site, self.data, self.run, study, self.agreement, self.place, self.since, self.site_data)

    def _find_run(self, name: str, fold: int | None) -> SiteRun:
        """Return the stored run of a candidate on all training rows, or without one fold.

        Raises:
            PerfedError: the site has no such run.
        """
        study = make_fold_study(self.experiment, fold, name).to_toml()
        for site_run in SiteRun.read_all(self.folder, self.site, self.data):
            if site_run.place == self.place and is_same_study(site_run.study, study):
                return site_run
        where = "all training rows" if fold is None else f"all training rows but fold {fold + 1}"
        raise PerfedError(f"{self.folder}: no data of the run of {name} on {where} are stored")

    def _build_model(self, name: str) -> SiteModel:
        """Return a candidate's model trained on all training rows."""
        if is_baseline(name):
            return self._build_sklearn_run(name, self._full_run).site(self.site)
        return StoredModel(self._find_run(name, None), self.folder).site(self.site)

    def _build_sklearn_run(self, name: str, rows: SiteRun) -> SklearnRun:
        """Return the run of a scikit-learn model on the rows of the site, in memory."""
        federation = rows.site_federation
        experiment = by_loss(rows.experiment, federation)
        on_train = experiment.evaluation.model_copy(update={"split": "train"})  # a fold may hold no row of the site
        return SklearnRun(name, experiment.model_copy(update={"evaluation": on_train}), federation)

    def _compute_arrays(self) -> Arrays:
        """Return the models' outputs and the targets, for all training rows, fold by fold, and for the test rows."""
        folds = [self._compute_fold(fold) for fold in range(self.experiment.blend.folds)]
        test = self._compute_fold(None)
        arrays = {f"{name}_test": test[name] for name in ("x", "y")}
        return arrays | {
            f"{name}_train": np.concatenate([fold_arrays[name] for fold_arrays in folds]) for name in ("x", "y")
        }

    def _compute_fold(self, fold: int | None) -> Arrays:
        """Return each model's outputs and the targets for the rows of a fold, or for the test rows if any."""
        rows = self._hold_out(fold)
        (client,) = rows.site_federation
        outputs, test = self._full_run.site_federation.num_outputs, client.split("test")
        if test is None:
            width = len(self.candidates) * outputs + 1
            return {"x": np.empty((0, width)), "y": client.train.y[:0].numpy()}
        outputs_by_model = [
            self._compute_outputs(name, fold, rows, test).reshape(len(test), outputs) for name in self.candidates
        ]
        if self.agreement.task == "classification":
            outputs_by_model = [log_softmax(values, axis=1).clip(_MIN_LOG_PROBABILITY) for values in outputs_by_model]
        numbers = np.full((len(test), 1), 0 if fold is None else fold)
        return {"x": np.concatenate([*outputs_by_model, numbers], 1).astype(np.float64), "y": test.y.numpy()}

    def _compute_outputs(self, name: str, fold: int | None, rows: SiteRun, test: Split) -> NDArray[np.float64]:
        """Return the logits, values or log hazards of one model for the held-out rows, in the unit of training."""
        if is_baseline(name):
            federation = rows.site_federation
            model = self._build_sklearn_run(name, rows).fitted(federation.clients[0])
            return outputs_of(model, rows_of(test.x), federation.num_classes)
        stored_outputs = SiteServer(self._find_run(name, fold), self.folder).test_outputs
        if stored_outputs is None or len(stored_outputs.outputs) != len(test):
            raise PerfedError(f"{self.folder}: the run of {name} has no outputs for the site's rows")
        return stored_outputs.outputs
