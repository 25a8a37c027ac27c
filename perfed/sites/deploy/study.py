"""The study that a deployment carries: an experiment whose tables stay at the sites."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.data.labels import Task
from perfed.engine.gap import GAP
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, validate
from perfed.method.aggregation import check_aggregation, refuse_aggregation
from perfed.methods.blending import Blending
from perfed.sites.deploy.candidates import candidate_runs, checked_candidates, mixes
from perfed.sites.deploy.part import table_options
from perfed.sites.deploy.trial import method_of, private_in, task_of
from perfed.tables.agreement import describe_fields
from perfed.tables.public import NOTHING_OF_ROWS

FASTEST = 5.0
"""Seconds that Flower itself needs for an exchange."""

_SAID = (
    *("target", "event", "domain", "drop", "numbers", "dates", "categories", "missing", "thousands", "decimals"),
    *("swapped", "values", "group", "columns", "public"),
)
_WHERE = {"classification": "where the target holds classes", "regression": "where it holds numbers"}


def study_of(experiment: Experiment, sites: Sequence[str]) -> Experiment:
    """``experiment`` as the sites know it: in place of the tables' files stand the names of the ``sites``.

    Each site puts its own file in its name's place.

    Raises:
        PerfedError: data, a clock, a policy or a method that only a simulation can have.

    Example:
        >>> data = {"name": "tables", "files": ["/home/me/a.csv"], "target": "ill"}
        >>> table = {"rounds": 2, "data": data, "model": {"head": "linear"}}
        >>> study_of(validate(table), ["north", "south"]).data.options["files"]
        ['north', 'south']
    """
    _check_data(experiment)
    _check_time(experiment)
    if mixes(experiment):
        experiment = checked_candidates(experiment)
        for run in candidate_runs(experiment):
            if run.fold is None:
                study_of(run.study, sites)
    if experiment.built_method.changes_data:
        raise PerfedError(
            f"{experiment.method} cannot be deployed: what it makes of a site's rows it makes of all at once, so that "
            "the site's model could say nothing of new rows"
        )
    if experiment.built_method.uses_validation and experiment.evaluation.split == "validation":
        raise PerfedError(
            f"evaluation.split = 'validation': {experiment.method} uses these rows of the sites itself; allowed: test"
        )
    if experiment.snapshots.rounds:
        raise PerfedError("snapshots.rounds: embedded samples would leave the sites; leave it out")
    if GAP in experiment.evaluation.metrics:
        raise PerfedError(f"evaluation.metrics: '{GAP}' is of the sites' own models, which stay there; leave it out")
    if experiment.snapshots.losses:
        raise PerfedError("snapshots.losses: losses of single sites would leave them; leave it out")
    if experiment.callbacks:
        raise PerfedError("callbacks: they would see what the study does not name; leave them out")
    table = experiment.model_dump(mode="json", exclude_none=True)
    if experiment.secure_aggregation is not None:
        experiment.secure_aggregation.check_sites(sites)
    study = validate({**table, "data": {**table["data"], "files": list(sites)}})
    private_in(study)
    if mixes(study) and not study.aggregation.aggregator.is_mean:
        raise refuse_aggregation(study.aggregation, Blending.needs_mean)
    check_aggregation(study.aggregation, method_of(study), sums_only=study.secure_aggregation is not None)
    return study


def _check_data(experiment: Experiment) -> None:
    data = experiment.data
    if data.name != "tables":
        raise PerfedError(
            f"data.name = '{data.name}': sites of a deployment bring tables of their own (data.name = 'tables'); "
            "'perfed init' writes an experiment for such tables"
        )
    for key, why in (
        ("site_column", "each site has a file of its own rows"),
        ("test_files", "each site tests on a part of its own rows (data.test_fraction, data.folds)"),
    ):
        if data.options[key]:
            raise PerfedError(f"data.{key}: in a deployment {why}; leave it out")


def _check_time(experiment: Experiment) -> None:
    clock, participation = experiment.clock, experiment.build_participation()
    if clock.speeds != "none" or clock.communication:
        key = "communication" if clock.speeds == "none" else "speeds"
        raise PerfedError(
            f"clock.{key} = {getattr(clock, key)!r} is of virtual time; in a deployment replies take as long as they "
            "take: leave the table [clock] out"
        )
    participation.entry.policy.check_real_time(participation.policy_settings, FASTEST)


def told_before(study: Experiment) -> list[str]:
    """What sites tell each other before they train, as far as it is known without their tables."""
    data, known = study.data.options, task_of(study)
    if data["public"]:
        return [NOTHING_OF_ROWS]
    own = data["columns"] == "own"
    columns: tuple[list[str], list[str], list[str]] | None = None if own else (["all"], [], ["all columns with some"])
    tasks: list[Task] = [known] if known else ["classification", "regression"]
    named = sorted({name for names in table_options(study).named.values() for name in names})
    by_task = {task: describe_fields(task, bool(data["domain"]), columns, named) for task in tasks}
    common = [line for line in by_task[tasks[-1]] if all(line in lines for lines in by_task.values())]
    own = [f"{line} ({_WHERE[task]})" for task in tasks for line in by_task[task] if line not in common]
    return [*own, *common]


def settings_of(study: Experiment) -> list[str]:
    """The data settings that a site's administrator should know, as ``key = value``."""
    data = study.data.options
    return [f"{key} = {data[key]!r}" for key in _SAID if data[key] or (key == "missing" and data[key] is not None)]
