"""The study of a deployment: an experiment whose tables stay at the sites."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.data.labels import Task
from perfed.engine.gap import GAP
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, validate
from perfed.method.aggregation import check_aggregation, refuse_aggregation
from perfed.methods.blending import Blending
from perfed.sites.deploy.candidates import is_blend, list_candidate_runs, resolve_candidates
from perfed.sites.deploy.part import read_table_options
from perfed.sites.deploy.trial import build_method, build_private_method, get_task
from perfed.tables.agreement import describe_fields
from perfed.tables.public import NOTHING_OF_ROWS

FLOWER_SECONDS = 5.0
"""Seconds that Flower itself needs for an exchange."""

_COLUMN_SETTINGS = (
    *("target", "event", "domain", "drop", "numbers", "dates", "categories", "missing", "thousands", "decimals"),
    *("swapped", "values", "group", "columns", "public"),
)
_TASK_CONDITIONS = {"classification": "where the target holds classes", "regression": "where it holds numbers"}


def make_deployed_study(experiment: Experiment, sites: Sequence[str]) -> Experiment:
    """Return ``experiment`` as it is deployed, with the names of the ``sites`` in place of the paths of the tables.

    Each site substitutes its own file.

    Each site puts its own file in its name's place.

    Raises:
        PerfedError: the experiment has data, a clock, a policy or a method that only a simulation supports.

    Example:
        >>> data = {"name": "tables", "files": ["/home/me/a.csv"], "target": "ill"}
        >>> table = {"rounds": 2, "data": data, "model": {"head": "linear"}}
        >>> make_deployed_study(validate(table), ["north", "south"]).data.options["files"]
        ['north', 'south']
    """
    _check_data(experiment)
    _check_time(experiment)
    if is_blend(experiment):
        experiment = resolve_candidates(experiment)
        for run in list_candidate_runs(experiment):
            if run.fold is None:
                make_deployed_study(run.study, sites)
    if experiment.built_method.changes_data:
        raise PerfedError(
            f"{experiment.method} cannot be deployed: it transforms all rows of a site at once: the site's "
            "model could not predict new rows"
        )
    if experiment.built_method.uses_validation and experiment.evaluation.split == "validation":
        raise PerfedError(
            f"evaluation.split = 'validation': {experiment.method} already uses the sites' validation rows; "
            "allowed: test"
        )
    if experiment.snapshots.rounds:
        raise PerfedError("snapshots.rounds: embeddings of single rows would leave the sites; leave it out")
    if GAP in experiment.evaluation.metrics:
        raise PerfedError(
            f"evaluation.metrics: '{GAP}' needs the sites' local models, which stay at the sites; leave it out"
        )
    if experiment.snapshots.losses:
        raise PerfedError("snapshots.losses: the losses of single sites would leave the sites; leave it out")
    if experiment.callbacks:
        raise PerfedError("callbacks: they could access values that the study does not declare; leave them out")
    table = experiment.model_dump(mode="json", exclude_none=True)
    if experiment.secure_aggregation is not None:
        experiment.secure_aggregation.check_sites(sites)
    study = validate({**table, "data": {**table["data"], "files": list(sites)}})
    build_private_method(study)
    if is_blend(study) and not study.aggregation.aggregator.is_mean:
        raise refuse_aggregation(study.aggregation, Blending.needs_mean)
    check_aggregation(study.aggregation, build_method(study), sums_only=study.secure_aggregation is not None)
    return study


def _check_data(experiment: Experiment) -> None:
    """Refuse data other than one table per site."""
    data = experiment.data
    if data.name != "tables":
        raise PerfedError(
            f"data.name = '{data.name}': the sites of a deployment use their own tables (data.name = 'tables'); "
            "'perfed init' writes an experiment for such tables"
        )
    for key, reason in (
        ("site_column", "each site has a file of its own rows"),
        ("test_files", "each site tests on a part of its own rows (data.test_fraction, data.folds)"),
    ):
        if data.options[key]:
            raise PerfedError(f"data.{key}: in a deployment {reason}; leave it out")


def _check_time(experiment: Experiment) -> None:
    """Refuse a simulated clock, and participation policies that need one."""
    clock, participation = experiment.clock, experiment.build_participation()
    if clock.speeds != "none" or clock.communication:
        key = "communication" if clock.speeds == "none" else "speeds"
        raise PerfedError(
            f"clock.{key} = {getattr(clock, key)!r} applies to virtual time only; a deployment runs in real time: "
            "leave out the table [clock]"
        )
    participation.entry.policy.check_real_time(participation.policy_settings, FLOWER_SECONDS)


def describe_metadata(study: Experiment) -> list[str]:
    """Return descriptions of the metadata that sites send before training, as far as known without the tables."""
    data, known_task = study.data.options, get_task(study)
    if data["public"]:
        return [NOTHING_OF_ROWS]
    columns: tuple[list[str], list[str], list[str]] | None = (
        None if data["columns"] == "own" else (["all"], [], ["all columns with some"])
    )
    tasks: list[Task] = [known_task] if known_task else ["classification", "regression"]
    named = sorted({name for names in read_table_options(study).named.values() for name in names})
    by_task = {task: describe_fields(task, bool(data["domain"]), columns, named) for task in tasks}
    common = [line for line in by_task[tasks[-1]] if all(line in lines for lines in by_task.values())]
    task_lines = [
        f"{line} ({_TASK_CONDITIONS[task]})" for task in tasks for line in by_task[task] if line not in common
    ]
    return [*task_lines, *common]


def list_column_settings(study: Experiment) -> list[str]:
    """Return the settings of tables and columns that the study sets, as lines ``key = value``."""
    data = study.data.options
    return [
        f"{key} = {data[key]!r}"
        for key in _COLUMN_SETTINGS
        if data[key] or (key == "missing" and data[key] is not None)
    ]
