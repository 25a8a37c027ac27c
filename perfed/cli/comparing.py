"""What ``perfed compare`` does, and ``resume`` with a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfed.cli.choosing import check_one_word, chosen_methods
from perfed.cli.console import alone_on_stdout, print_json, say, say_where, say_whole
from perfed.cli.options import Shown, Training
from perfed.cli.progress import Work, shown
from perfed.cli.terminal import conclusion_json, print_conclusion
from perfed.cli.training import default_out, device_of, executor, resumable, shared_settings
from perfed.errors import PerfedError
from perfed.experiment.comparison import ComparisonSpec, Conclusion, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.experiment.planned import parse_names, parse_seeds
from perfed.experiment.study import Study, extend
from perfed.report.against import needs_no_federation

WORSE = 3
"""Exit code where a federated method is behind what needs no federation (--fail-if-worse-than-local)."""


def compare_command(
    experiment: str | None,
    settings: list[str] | None,
    methods: str,
    seeds: str | None,
    extended: Path | None,
    how: Training,
    show: Shown,
    *,
    gate: bool = False,
) -> None:
    """Train several methods over several seeds: one table, one report, comparison.json."""
    check_one_word(methods, [experiment, *(settings or [])])
    if extended is not None:
        study = _extended(extended, experiment, settings, methods, seeds, how)
    elif experiment is None:
        raise PerfedError("an experiment is needed: a shipped one ('perfed list experiments') or a .toml file")
    else:
        table = find_experiment(experiment)
        names = chosen_methods(methods, table, baselines=True)
        numbers = parse_seeds("0" if seeds is None else seeds)
        table = override(table, shared_settings(how.engine, settings), federated(names))
        out = how.out or default_out(str(table.get("name", "comparison")))
        study = Study.create(out, ComparisonSpec(table, names, numbers), how.data_dir, device_of(how.device))
    if gate and not any(needs_no_federation(method) for _, method, _ in study.keys):
        raise PerfedError("--fail-if-worse-than-local: needs a local method among --methods: local, sklearn:NAME")
    with resumable(study.path, how.data_dir, ray=how.ray), alone_on_stdout(show.as_json):
        say_where("results", study.path)
        verdict = compare(study, how, show).verdict
    if gate and verdict is not None and verdict.below_local:
        say_whole(f"behind {verdict.reference}: {', '.join(verdict.below_local)}", style="red")
        raise SystemExit(WORSE)


def _extended(
    path: Path, experiment: str | None, settings: list[str] | None, methods: str, seeds: str | None, how: Training
) -> Study:
    """The comparison in ``path`` with more methods or seeds."""
    if how.out is not None:
        raise PerfedError(f"--out {how.out}: a comparison is extended where it is, in {path}; leave --out out")
    if experiment is not None and "=" in experiment:  # no experiment was given
        settings, experiment = [experiment, *(settings or [])], None
    names = parse_names(methods, baselines=True) if methods else []
    numbers = [] if seeds is None else parse_seeds(seeds)
    given = None if experiment is None else find_experiment(experiment)
    own = shared_settings(how.engine, settings)
    return extend(path, names, numbers, given, own, how.data_dir, device_of(how.device))


def compare(study: Study, how: Training, show: Shown) -> Conclusion:
    """Do the runs that are not finished, and say what came of all."""
    found, failed = done(study, how, show)
    if show.as_json:
        print_json(conclusion_json(found[""], failed=[str(error) for error in failed]))
    else:
        print_conclusion(found[""], show.all_metrics)
    raise_failed(study, failed)
    return found[""]


def done(study: Study, how: Training, show: Shown) -> tuple[dict[str, Conclusion], list[PerfedError]]:
    """Do the runs that are not finished, and say of each what came of it."""

    def tell(label: str, outcome: dict[str, Any] | PerfedError) -> None:
        if isinstance(outcome, PerfedError):
            say_whole(f"failed: {outcome}", style="red")
        else:
            say_outcome(label, outcome, show.verbose)

    number = len(study.keys)
    with shown(Work(number)) as work:
        work.already(number - len(study.left()))
        return study.execute(how.data_dir, device_of(how.device), executor(how, work), tell)


def raise_failed(study: Study, failed: Sequence[PerfedError]) -> None:
    """End with how many runs failed, and why the first did, if any."""
    if failed:
        raise PerfedError(f"{len(failed)} of {len(study.keys)} runs failed; {failed[0]}")


def say_outcome(label: str, summary: dict[str, Any], verbose: bool) -> None:
    """What came of a run, in a line; ``verbose``: its notes too."""
    found = [f"{name} {values['mean']:.4g}" for name, values in summary["metrics"].items()]
    text = f"{100 * summary['accuracy']['mean']:.1f} %" if "accuracy" in summary else ", ".join(found)
    say(f"{label}: {text} in {summary['wall_seconds']:.1f} s")
    if verbose:
        for note in summary["notes"]:
            say(f"  {note}", style="dim")
