"""A site's part in the exchange of a blend's weights: its rows are what its candidates say, which stays at the site."""

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
    in_fold,
    mixed_at_sites,
    outputs_alone,
    weights_initialiser,
    weights_protocol,
)
from perfed.sites.deploy.kept import Here, KeptModel
from perfed.sites.deploy.part import Part, same_study
from perfed.sites.flower.allowed import Allowed
from perfed.sites.flower.dry_run import allowed_by
from perfed.system import write_atomic

SAID = "candidates.npz"
"""File of a run's folder at the site: what each candidate says of its rows, of training rows while held out."""
_LEAST = -700.0  # logarithm of a probability: no number is infinite
Arrays = dict[str, NDArray[Any]]


def as_agreed(part: Part, folder: Path) -> Part:
    """``part`` of the site in ``folder``, as one of the exchange of weights where its study mixes candidates."""
    if not part.experiment.blend.candidates:
        return part
    return MixingPart(**{field.name: getattr(part, field.name) for field in fields(part)}, folder=folder)


@dataclass(frozen=True)
class MixingPart(Part):
    """The exchange of weights as a site has agreed to it.

    Attributes:
        folder: of the site, where it has kept the runs of the study before.
    """

    folder: Path = Path()

    @cached_property
    def candidates(self) -> list[str]:
        """Names of all that are mixed."""
        return mixed_at_sites(self.experiment, self.agreement.task)

    @cached_property
    def federation(self) -> Federation:
        """The site's client alone; its inputs are what the candidates say (:class:`~perfed.methods.blending.Blending`).

        Raises:
            PerfedError: a run of the study has left no model here, or scikit-learn refuses the data.
        """
        file = self.stored(self.folder).path / SAID
        if not file.exists() or find_damage(file.parent, read_checksums(file.parent)):
            file.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, **self._said())  # type: ignore[arg-type]
            write_atomic(file, content.getvalue())
            write_checksums_of(file.parent, [SAID])
        held = read_arrays(file, ("x_train", "y_train", "x_test", "y_test"))
        train, test = (
            Split(torch.from_numpy(held[f"x_{name}"]), torch.from_numpy(held[f"y_{name}"]))
            for name in ("train", "test")
        )
        client = Client(self.site, train, test if len(test) else None)
        alone = federation_of([client], outputs_alone(self.agreement), self.experiment.data.name)
        return alone.to(dtype=torch.float64, device=self.device)

    @cached_property
    def initialiser(self) -> Initialiser:
        """Of the method that learns the weights."""
        return weights_initialiser(self.experiment, self.agreement.task, self.federation.num_outputs)

    @cached_property
    def allowed(self) -> Allowed:
        """What the site answers in the exchange of weights."""
        (client,) = self.federation
        protocol = weights_protocol(self.experiment)
        return allowed_by(client, self.initialiser.info(self.federation), self.initialiser, protocol)

    def mixture(self) -> SiteModel:
        """The site's mixture, by the server's last message on the weights.

        Raises:
            PerfedError: its weights have not been learnt yet.
        """
        kept = KeptModel(self, self.folder)
        (cohort,) = kept.here.own_models([self.site], kept.done)
        weights = cohort.scratch["weights"][0].tolist()
        used = {name: weight for name, weight in zip(self.candidates, weights, strict=True) if weight > 0}
        parts, blend = {name: self._model(name) for name in used}, self.experiment.blend
        settings = {"folds": blend.folds, "prior_rows": blend.prior_rows}
        model = mix_models(parts, list(used.values()), settings=settings, seed=self.experiment.seed)
        federation = self._whole.rows
        return model.with_metrics(federation.clients[0], federation)

    # Candidates --------------------------------------------------------------------------------------------

    @cached_property
    def _whole(self) -> Part:
        """The site's rows, with no fold held out."""
        return self._held_out(None)

    def _held_out(self, fold: int | None) -> Part:
        """The site's rows, with a fold in the place of its test rows or none."""
        study = in_fold(self.experiment, fold).to_toml()
        return Part(self.site, self.data, self.run, study, self.agreement, self.place, self.since, self.own)

    def _run(self, name: str, fold: int | None) -> Part:
        """The run of a method that the site has kept.

        Raises:
            PerfedError: there is none.
        """
        study = in_fold(self.experiment, fold, name).to_toml()
        for part in Part.all_kept(self.folder, self.site, self.data):
            if part.place == self.place and same_study(part.study, study):
                return part
        where = "all training rows" if fold is None else f"all training rows but fold {fold + 1}"
        raise PerfedError(f"{self.folder}: nothing is kept of the run of {name} on {where}")

    def _model(self, name: str) -> SiteModel:
        if is_baseline(name):
            return self._sklearn_run(name, self._whole).site(self.site)
        return KeptModel(self._run(name, None), self.folder).site(self.site)

    def _sklearn_run(self, name: str, rows: Part) -> SklearnRun:
        """Return the run of a baseline on the rows of the site, in memory."""
        federation = rows.rows
        experiment = by_loss(rows.experiment, federation)
        on_train = experiment.evaluation.model_copy(update={"split": "train"})  # a fold may hold no row of the site
        return SklearnRun(name, experiment.model_copy(update={"evaluation": on_train}), federation)

    def _said(self) -> Arrays:
        """What the candidates say of all training rows, fold by fold, and of the test rows."""
        folds = [self._of_fold(fold) for fold in range(self.experiment.blend.folds)]
        test = self._of_fold(None)
        found = {f"{name}_test": test[name] for name in ("x", "y")}
        return found | {f"{name}_train": np.concatenate([of[name] for of in folds]) for name in ("x", "y")}

    def _of_fold(self, fold: int | None) -> Arrays:
        """What each candidate says of the rows of a fold, or of the test rows; none where there are none."""
        rows = self._held_out(fold)
        (client,) = rows.rows
        outputs, test = self._whole.rows.num_outputs, client.split("test")
        if test is None:
            width = len(self.candidates) * outputs + 1
            return {"x": np.empty((0, width)), "y": client.train.y[:0].numpy()}
        said = [self._outputs(name, fold, rows, test).reshape(len(test), outputs) for name in self.candidates]
        if self.agreement.task == "classification":
            said = [log_softmax(one, axis=1).clip(_LEAST) for one in said]
        numbers = np.full((len(test), 1), 0 if fold is None else fold)
        return {"x": np.concatenate([*said, numbers], 1).astype(np.float64), "y": test.y.numpy()}

    def _outputs(self, name: str, fold: int | None, rows: Part, test: Split) -> NDArray[np.float64]:
        """Logits, values or log hazards of one candidate, in the unit of training."""
        if is_baseline(name):
            model = self._sklearn_run(name, rows).fitted(rows.rows.clients[0])
            return outputs_of(model, rows_of(test.x), rows.rows.num_classes)
        found = Here(self._run(name, fold), self.folder).said
        if found is None or len(found.outputs) != len(test):
            raise PerfedError(f"{self.folder}: the run of {name} says nothing of the site's rows")
        return found.outputs
