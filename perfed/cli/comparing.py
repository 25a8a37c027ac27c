"""What ``perfed compare`` does, and ``resume`` with a comparison."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from perfed.cli.choosing import check_one_word, chosen_methods
from perfed.cli.console import alone_on_stdout, print_json, say, say_where, say_whole
from perfed.cli.options import Shown, Training
from perfed.cli.progress import Work, shown
from perfed.cli.terminal import conclusion_json, print_conclusion
from perfed.cli.training import default_out, device_of, executor, resumable, shared_settings
from perfed.errors import PerfedError
from perfed.experiment.compare import Comparison, federated
from perfed.experiment.conclusion import Failure
from perfed.experiment.config import find_experiment
from perfed.experiment.extend import More, extend
from perfed.experiment.names import parse_names, parse_seeds
from perfed.experiment.overrides import override


def compare_command(
    experiment: str | None,
    settings: list[str] | None,
    methods: str,
    seeds: str | None,
    extended: Path | None,
    how: Training,
    show: Shown,
) -> None:
    """Train several methods over several seeds: one table, one report, comparison.json."""
    check_one_word(methods, [experiment, *(settings or [])])
    if extended is not None:
        planned = _extended(extended, experiment, settings, methods, seeds, how)
    elif experiment is None:
        raise PerfedError("an experiment is needed: a shipped one ('perfed list experiments') or a .toml file")
    else:
        table = find_experiment(experiment)
        names = chosen_methods(methods, table, baselines=True)
        numbers = parse_seeds("0" if seeds is None else seeds)
        table = override(table, shared_settings(how.engine, settings), federated(names))
        out = how.out or default_out(str(table.get("name", "comparison")))
        planned = Comparison.create(out, table, names, numbers, how.data_dir, device_of(how.device))
    with resumable(planned.path, how.data_dir, ray=how.ray), alone_on_stdout(show.as_json):
        say_where("results", planned.path)
        compare(planned, how, show)


def _extended(
    path: Path, experiment: str | None, settings: list[str] | None, methods: str, seeds: str | None, how: Training
) -> Comparison:
    """The comparison in ``path`` with more methods or seeds."""
    if how.out is not None:
        raise PerfedError(f"--out {how.out}: a comparison is extended where it is, in {path}; leave --out out")
    if experiment is not None and "=" in experiment:  # no experiment was given
        settings, experiment = [experiment, *(settings or [])], None
    names = parse_names(methods, baselines=True) if methods else []
    numbers = [] if seeds is None else parse_seeds(seeds)
    given = None if experiment is None else find_experiment(experiment)
    more = More(names, numbers, given, shared_settings(how.engine, settings))
    return extend(path, more, how.data_dir, device_of(how.device))


def compare(planned: Comparison, how: Training, show: Shown) -> None:
    """Do the runs that are not finished, and say what came of all."""
    failed: dict[tuple[str, int], PerfedError] = {}
    number = len(planned.methods) * len(planned.seeds)
    with shown(Work(number)) as work:
        work.already(number - len(planned.left()))
        outcomes = planned.outcomes(how.data_dir, device_of(how.device), executor(how, work))
        with closing(outcomes):
            for method, seed, outcome in outcomes:
                if isinstance(outcome, PerfedError):
                    failed[method, seed] = outcome
                    say_whole(f"failed: {outcome}", style="red")
                else:
                    say_outcome(f"{method} seed {seed}", outcome, show.verbose)
    failed = {key: failed[key] for key in planned.keys if key in failed}  # runs side by side end in any order
    found = planned.conclude(failures=[Failure.of(*key, outcome) for key, outcome in failed.items()])
    if show.as_json:
        print_json(conclusion_json(found, failed=[str(error) for error in failed.values()]))
    else:
        print_conclusion(found, show.all_metrics)
    if failed:
        raise PerfedError(f"{len(failed)} of {number} runs failed; {next(iter(failed.values()))}")


def say_outcome(label: str, summary: dict[str, Any], verbose: bool) -> None:
    """What came of a run, in a line; ``verbose``: its notes too."""
    found = [f"{name} {values['mean']:.4g}" for name, values in summary["metrics"].items()]
    text = f"{100 * summary['accuracy']['mean']:.1f} %" if "accuracy" in summary else ", ".join(found)
    say(f"{label}: {text} in {summary['wall_seconds']:.1f} s")
    if verbose:
        for note in summary["notes"]:
            say(f"  {note}", style="dim")
