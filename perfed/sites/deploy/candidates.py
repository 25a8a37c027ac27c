"""A deployed study that mixes candidates: the runs that it is made of, and the exchange of weights after them."""

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
from perfed.sites.deploy.part import asked
from perfed.sites.deploy.trial import allowed_in, made_up_site, task_of
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.dry_run import ExchangeSettings, derive_allow_list


@dataclass(frozen=True)
class CandidateRun:
    """One of the runs of a study that mixes candidates.

    Attributes:
        name: of the method.
        fold: which is held out everywhere, from 0; ``None``: none is.
        study: of the run alone.
    """

    name: str
    fold: int | None
    study: Experiment

    @property
    def title(self) -> str:
        """Return what people read."""
        return self.name if self.fold is None else f"{self.name}, fold {self.fold + 1}"


def mixes(study: Experiment) -> bool:
    """Whether the study, where it is deployed, mixes candidates."""
    return bool(study.blend.candidates)


def title_of(study: Experiment) -> str:
    """The study's method, or what it mixes."""
    return f"{BLEND} of {', '.join(study.blend.candidates)}" if mixes(study) else study.method


def methods_of(study: Experiment) -> list[str]:
    """Names of all methods that run at the sites, ``blend`` among them where the study mixes candidates."""
    return [*_federated(study), BLEND] if mixes(study) else [study.method]


def _federated(study: Experiment) -> list[str]:
    return [name for name in study.blend.candidates if not is_baseline(name)]


def candidate_runs(study: Experiment) -> list[CandidateRun]:
    """The runs that the study is made of: of each method one on all training rows, and one for each fold."""
    folds = [None, *range(study.blend.folds)]
    return [CandidateRun(name, fold, in_fold(study, fold, name)) for fold in folds for name in _federated(study)]


def in_fold(study: Experiment, fold: int | None, method: str = "") -> Experiment:
    """The study of one method, or of that which it names, with a fold held out or none."""
    table = study.model_dump(mode="json", exclude_none=True, exclude={"blend"})
    data = table["data"] if fold is None else {**table["data"], "inner_fold": [fold, study.blend.folds]}
    return validate({**table, "method": method or study.method, "data": data})


def belongs(study: str, to: str) -> bool:
    """Whether a study asks of a site what the study ``to`` does, or what one of the runs does that this is made of."""
    return asked(study) in _all_asked(to)


@lru_cache(maxsize=2)
def _all_asked(study: str) -> list[dict[str, Any]]:
    whole = read(study, "the study")
    runs = candidate_runs(whole) if mixes(whole) else []
    return [asked(study), *(asked(run.study.to_toml()) for run in runs)]


def checked_candidates(study: Experiment) -> Experiment:
    """``study`` with its candidates' names as perfed writes them, and own models that are tuned.

    Raises:
        PerfedError: candidates that cannot be mixed between sites, or settings that a blend does not have there.
    """
    blend, evaluation = study.blend, study.evaluation
    names = [_known(name) for name in blend.candidates]
    if len(set(names)) < max(2, len(names)):
        raise PerfedError(f"blend.candidates: at least two, each once, are needed (given: {', '.join(names)})")
    if blend.prior_rows == "cv":
        raise PerfedError("blend.prior_rows = 'cv' is for simulations; in a deployment: a number of rows, such as 50")
    if (evaluation.split, evaluation.who, evaluation.when) != ("test", "all", "before"):
        raise PerfedError(f"{BLEND}: is judged with evaluation.split = 'test', who = 'all' and when = 'before' alone")
    if study.privacy is not None:
        raise PerfedError(f"[privacy]: a {BLEND}'s sums have no noise; leave the table out, or blend.candidates")
    if study.data.options["inner_fold"]:
        raise PerfedError(f"{BLEND}: makes folds itself; leave data.inner_fold out")
    first = next((name for name in names if not is_baseline(name)), "local")
    table = study.model_dump(mode="json", exclude_none=True)
    tuned = {"baseline_tries": TRIES, **table}
    return validate({**tuned, "method": first, "blend": {**table["blend"], "candidates": names}})


def _known(name: str) -> str:
    if name.casefold() == BLEND or is_pooled(name):
        raise PerfedError(f"blend.candidates: '{name}' is no model of a single site; leave it out")
    if not is_baseline(name):
        return method_id(name)
    if "." in (found := baseline_id(name)):
        raise PerfedError(f"blend.candidates: '{name}': in a deployment models of scikit-learn's are named: {_NAMED}")
    return found


_NAMED = "sklearn:logistic, sklearn:random-forest and the like"

# The exchange of weights --------------------------------------------------------------------------------------------


def mixed_at_sites(study: Experiment, task: Task) -> list[str]:
    """Names of all that each site mixes: the candidates, and its own linear model and one of trees."""
    return with_own_models(candidates_of(study.blend.candidates), task)


def blending_of(study: Experiment, task: Task) -> Blending:
    """The method that learns the weights."""
    prior_rows, names = study.blend.prior_rows, mixed_at_sites(study, task)
    assert prior_rows != "cv"  # refused where the study was deployed
    return Blending(candidates=len(names), task=task, prior_rows=prior_rows, own=own_among(names))


def outputs_alone(agreement: FederationSchema) -> FederationSchema:
    """What holds at all sites of the targets: inputs are what candidates say, and no columns."""
    return agreement.model_copy(update={"columns": None, "domains": None})


def unused_model(outputs: int) -> Model:
    """The model that a run needs to have, of which a blend uses nothing."""
    return Model(head=linear(outputs))


def weights_initialiser(study: Experiment, task: Task, outputs: int) -> Initialiser:
    """What the run of the weights starts from, for targets of so many outputs."""
    method, model = blending_of(study, task), unused_model(outputs)
    return Initialiser(method, model, study.seed, torch.float64, secure=study.secure_aggregation)


def weights_evaluation(study: Experiment) -> Evaluation:
    """When the mixtures are judged: at the end."""
    return study.evaluation.model_copy(update={"every": EXCHANGES, "last": 1, "stop": "last", "targets": ()})


def weights_protocol(study: Experiment) -> ExchangeSettings:
    """What the study says of the exchange of weights."""
    evaluation, sites = study.evaluation, study.data.options["files"]
    return ExchangeSettings(
        EXCHANGES, len(sites), metrics=evaluation.requested_metrics, scores_held_classes=evaluation.classes == "held"
    )


def weights_allowed(study: Experiment, task: Task, outputs: int = 1) -> AllowList:
    """What a site answers in the exchange of weights, for targets of so many outputs.

    The inputs of a site are what each candidate says of a row, and the row's fold.
    """
    initialiser = weights_initialiser(study, task, outputs)
    width = outputs * len(mixed_at_sites(study, task)) + 1
    site = made_up_site(task, width, outputs)
    return derive_allow_list(site.clients[0], initialiser.info(site), initialiser, weights_protocol(study))


@lru_cache(maxsize=4)
def all_allowed(study: str, task: Task | None = None) -> list[AllowList]:
    """Return what a site answers in each run of the study, a TOML text (:func:`~perfed.sites.deploy.trial.allowed_in`).

    Raises:
        PerfedError: as there.
    """
    experiment = read(study, "the study")
    if not mixes(experiment):
        return [allowed_in(study, task)]
    runs = [allowed_in(run.study.to_toml(), task) for run in candidate_runs(experiment) if run.fold is None]
    known = task or task_of(experiment) or "classification"
    return [*runs, weights_allowed(experiment, known, 2 if known == "classification" else 1)]


def entries_in(study: Experiment) -> list[str]:
    """Names of all that a site's replies hold in the study, each once.

    Raises:
        PerfedError: a method refuses such a federation or model.
    """
    return list(dict.fromkeys(name for allowed in all_allowed(study.to_toml()) for name in allowed.entry_names))
