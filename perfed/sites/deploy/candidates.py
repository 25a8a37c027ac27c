"""A deployed study that blends candidate models: its runs, and the exchange of weights after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from perfed.data.federation_schema import FederationSchema
from perfed.data.labels import Task
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError
from perfed.experiment.blend import candidates_of, own_among, with_own_models
from perfed.experiment.config import Experiment, read, validate
from perfed.experiment.estimators import TRIES, baseline_id, is_baseline, is_pooled
from perfed.maths.blending import EXCHANGES
from perfed.method.registry import method_id
from perfed.methods.blending import Blending
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.plugins import BLEND
from perfed.run.settings import Evaluation
from perfed.sites.deploy.part import read_study_content
from perfed.sites.deploy.trial import get_task, make_synthetic_site, rehearse_study
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.dry_run import ExchangeSettings, derive_allow_list


@dataclass(frozen=True)
class CandidateRun:
    """A run of one candidate of a blend.

    Attributes:
        name: name of the candidate's method.
        fold: index of the fold that all sites hold out; ``None`` for a run on all training rows.
        study: the study of this run.
    """

    name: str
    fold: int | None
    study: Experiment

    @property
    def title(self) -> str:
        """The title of the run in messages."""
        return self.name if self.fold is None else f"{self.name}, fold {self.fold + 1}"


def is_blend(study: Experiment) -> bool:
    """Return whether the study, when it is deployed, blends candidate models."""
    return bool(study.blend.candidates)


def format_title(study: Experiment) -> str:
    """Return the name of the study's method, or of the blend with its candidates."""
    return f"{BLEND} of {', '.join(study.blend.candidates)}" if is_blend(study) else study.method


def list_methods(study: Experiment) -> list[str]:
    """Return the names of all methods that run at the sites, including ``blend`` if the study blends candidates."""
    return [*_list_federated_candidates(study), BLEND] if is_blend(study) else [study.method]


def _list_federated_candidates(study: Experiment) -> list[str]:
    """Return the candidates that are trained in a federation, that is, all except models of scikit-learn."""
    return [name for name in study.blend.candidates if not is_baseline(name)]


def list_candidate_runs(study: Experiment) -> list[CandidateRun]:
    """Return the runs of a blend: for each federated candidate one on all training rows, and one per fold."""
    folds = [None, *range(study.blend.folds)]
    return [
        CandidateRun(name, fold, make_fold_study(study, fold, name))
        for fold in folds
        for name in _list_federated_candidates(study)
    ]


def make_fold_study(study: Experiment, fold: int | None, method: str = "") -> Experiment:
    """Return the study of a single method with a fold held out.

    Args:
        study: the study of the blend.
        fold: index of the fold; ``None`` to hold out none.
        method: name of the method; by default that of the study.
    """
    table = study.model_dump(mode="json", exclude_none=True, exclude={"blend"})
    data = table["data"] if fold is None else {**table["data"], "inner_fold": [fold, study.blend.folds]}
    return validate({**table, "method": method or study.method, "data": data})


def is_part_of_study(study: str, whole_study: str) -> bool:
    """Return whether a study equals ``whole_study``, or one of its runs, apart from the names of sites."""
    return read_study_content(study) in _read_contents_of_runs(whole_study)


@lru_cache(maxsize=2)
def _read_contents_of_runs(study: str) -> list[dict[str, Any]]:
    """Return the content of a study, and of each of its runs if it is a blend."""
    experiment = read(study, "the study")
    runs = list_candidate_runs(experiment) if is_blend(experiment) else []
    return [read_study_content(study), *(read_study_content(run.study.to_toml()) for run in runs)]


def resolve_candidates(study: Experiment) -> Experiment:
    """Return ``study`` with the canonical names of its candidates, and with tuning of its scikit-learn models enabled.

    Raises:
        PerfedError: the candidates cannot be blended across sites, or settings are not supported for deployed blends.
    """
    blend, evaluation = study.blend, study.evaluation
    names = [_resolve_name(name) for name in blend.candidates]
    if len(set(names)) < max(2, len(names)):
        raise PerfedError(f"blend.candidates: at least two different methods are needed (given: {', '.join(names)})")
    if blend.prior_rows == "cv":
        raise PerfedError(
            "blend.prior_rows = 'cv' is for simulations only; in a deployment set a number of rows, such as 50"
        )
    if (evaluation.split, evaluation.who, evaluation.when) != ("test", "all", "before"):
        raise PerfedError(
            f"{BLEND}: can only be evaluated with evaluation.split = 'test', who = 'all' and when = 'before'"
        )
    if study.privacy is not None:
        raise PerfedError(f"[privacy]: the sums of a {BLEND} have no noise; leave out the table, or blend.candidates")
    if study.data.options["inner_fold"]:
        raise PerfedError(f"{BLEND}: creates its own folds; leave out data.inner_fold")
    first = next((name for name in names if not is_baseline(name)), "local")
    table = study.model_dump(mode="json", exclude_none=True)
    tuned = {"baseline_tries": TRIES, **table}
    return validate({**tuned, "method": first, "blend": {**table["blend"], "candidates": names}})


def _resolve_name(name: str) -> str:
    """Return the canonical name of a candidate."""
    if name.casefold() == BLEND or is_pooled(name):
        raise PerfedError(f"blend.candidates: '{name}' cannot be trained within single sites; leave it out")
    if not is_baseline(name):
        return method_id(name)
    if "." in (identifier := baseline_id(name)):
        raise PerfedError(
            f"blend.candidates: '{name}': in a deployment, scikit-learn models have names such as {_SKLEARN_EXAMPLES}"
        )
    return identifier


_SKLEARN_EXAMPLES = "sklearn:logistic and sklearn:random-forest"

# The exchange of weights --------------------------------------------------------------------------------------------


def list_blended_models(study: Experiment, task: Task) -> list[str]:
    """Return the names of all models that each site blends: the candidates, and its own linear and tree models."""
    return with_own_models(candidates_of(study.blend.candidates), task)


def build_blending(study: Experiment, task: Task) -> Blending:
    """Return the method that learns the weights of the blend."""
    prior_rows, names = study.blend.prior_rows, list_blended_models(study, task)
    assert prior_rows != "cv"  # resolve_candidates has refused it
    return Blending(candidates=len(names), task=task, prior_rows=prior_rows, own=own_among(names))


def drop_inputs(agreement: FederationSchema) -> FederationSchema:
    """Return the agreement without columns and domains.

    In the exchange of weights the inputs of a site are the outputs of its models, so that only the targets are agreed
    on.
    """
    return agreement.model_copy(update={"columns": None, "domains": None})


def make_placeholder_model(outputs: int) -> Model:
    """Return a model for the run of the weights, which needs one but does not use it."""
    return Model(head=linear(outputs))


def build_weights_initialiser(study: Experiment, task: Task, outputs: int) -> Initialiser:
    """Return the initialiser of the run that learns the weights, for targets with ``outputs`` outputs."""
    method, model = build_blending(study, task), make_placeholder_model(outputs)
    return Initialiser(method, model, study.seed, torch.float64, secure=study.secure_aggregation)


def build_weights_evaluation(study: Experiment) -> Evaluation:
    """Return the evaluation settings of the run that learns the weights: blends are evaluated once, at the end."""
    return study.evaluation.model_copy(update={"every": EXCHANGES, "last": 1, "stop": "last", "targets": ()})


def build_weights_exchanges(study: Experiment) -> ExchangeSettings:
    """Return the exchange settings of the run that learns the weights."""
    evaluation, sites = study.evaluation, study.data.options["files"]
    return ExchangeSettings(
        EXCHANGES, len(sites), metrics=evaluation.requested_metrics, scores_held_classes=evaluation.classes == "held"
    )


def rehearse_weights(study: Experiment, task: Task, outputs: int = 1) -> AllowList:
    """Return what a site answers in the exchange of weights, for targets with ``outputs`` outputs.

    The inputs of a site are the outputs of each model for a row, and the index of the row's fold.
    """
    initialiser = build_weights_initialiser(study, task, outputs)
    width = outputs * len(list_blended_models(study, task)) + 1
    site = make_synthetic_site(task, width, outputs)
    return derive_allow_list(site.clients[0], initialiser.info(site), initialiser, build_weights_exchanges(study))


@lru_cache(maxsize=4)
def rehearse_all_runs(study: str, task: Task | None = None) -> list[AllowList]:
    """Return what a site answers in each run of the study, which is a TOML text.

    Raises:
        PerfedError: under the same conditions as in :func:`~perfed.sites.deploy.trial.rehearse_study`.
    """
    experiment = read(study, "the study")
    if not is_blend(experiment):
        return [rehearse_study(study, task)]
    runs = [rehearse_study(run.study.to_toml(), task) for run in list_candidate_runs(experiment) if run.fold is None]
    resolved_task = task or get_task(experiment) or "classification"
    return [*runs, rehearse_weights(experiment, resolved_task, 2 if resolved_task == "classification" else 1)]


def list_entries(study: Experiment) -> list[str]:
    """Return the names of all entries in a site's replies during the study, without duplicates.

    Raises:
        PerfedError: a method does not support such a federation or model.
    """
    return list(dict.fromkeys(name for allowed in rehearse_all_runs(study.to_toml()) for name in allowed.entry_names))
