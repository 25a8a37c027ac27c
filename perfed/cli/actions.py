"""What the commands do: imported when one of them runs, for it takes torch along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfed.cli.boards import play
from perfed.cli.campaigning import go_on
from perfed.cli.choosing import check_one_word, chosen_methods
from perfed.cli.comparing import compare
from perfed.cli.console import alone_on_stdout, print_json, say, say_where
from perfed.cli.options import Shown, Training
from perfed.cli.progress import Work, shown
from perfed.cli.table import print_table
from perfed.cli.terminal import print_choice, print_summary
from perfed.cli.training import default_out, device_of, executor, resumable, settings_of, shared_settings
from perfed.errors import PerfedError
from perfed.experiment.comparison import ComparisonSpec
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.names import parse_seeds
from perfed.experiment.overrides import override, parse_value
from perfed.experiment.published import Leaderboard
from perfed.experiment.search import Search
from perfed.experiment.start import is_done, resume, start
from perfed.experiment.study import Study
from perfed.method.registry import method_id
from perfed.report import load_runs, write_report
from perfed.report.partition import ClassTable, counted_tables, write_partition_page
from perfed.run.directory import RunDirectory, marker_of, plain
from perfed.run.run import Run


def _execute(make: Callable[[], Run], label: str) -> dict[str, Any]:
    """Execute one run, and show how far it is."""
    with shown(Work(1)) as work:
        return work.execute(make, label)


def _end(directory: Path, title: str, summary: dict[str, Any], show: Shown) -> None:
    """Write a run's report and print its summary."""
    report = write_report(load_runs([directory]), directory / "report.html", title=title)
    _print_run(directory, summary, show, report)


def _print_run(directory: Path, summary: dict[str, Any], show: Shown, report: Path) -> None:
    if show.as_json:
        return print_json(plain({"directory": directory, "summary": summary, "report": report}))
    print_summary(summary, show.verbose)
    say_where("report", report)


def run_command(
    experiment: str, settings: list[str] | None, method: str | None, seed: int | None, how: Training, show: Shown
) -> None:
    """Train one method and write a run directory with a report."""
    options = [] if method is None else [f'method="{method}"']
    options += [] if seed is None else [f"seed={seed}"]
    checked = chosen_experiment(experiment, [*settings_of(how.engine, settings), *options])
    out = how.out or default_out(checked.name)
    with alone_on_stdout(show.as_json):
        make = partial(start, checked, data_dir=how.data_dir, out=out, device=device_of(how.device))
        with resumable(out, how.data_dir, ray=how.ray):
            summary = _execute(partial(_begun, make, out), checked.method)
        _end(out, f"{checked.name}: {checked.method}", summary, show)


def _begun(make: Callable[[], Run], out: Path) -> Run:
    """The run, which says where its results go as soon as there is something to go on with."""
    run = make()
    say_where("results", out)
    return run


def chosen_experiment(name: str, settings: list[str]) -> Experiment:
    """The experiment ``name`` with the ``settings`` of one method and seed."""
    table = find_experiment(name)
    method = method_id(_chosen_method(table, settings))
    return validate(override(table, settings, [method]))


def _chosen_method(table: dict[str, Any], settings: list[str]) -> str:
    """The method that ``settings`` name last, else the experiment's: its settings may be given by their bare names."""
    for assignment in reversed(settings):
        if assignment.startswith("method="):
            return str(parse_value(assignment.removeprefix("method=")))
    return str(table.get("method", Experiment.model_fields["method"].default))


def resume_command(directory: Path, settings: list[str], how: Training, show: Shown) -> None:
    """Continue an interrupted run, comparison, search, campaign or leaderboard where it stopped, to the same bits."""
    where, rounds = device_of(how.device), _more_rounds(settings)
    kind = marker_of(directory)[0]
    if rounds is not None and kind:
        raise PerfedError(
            f"{directory}: only a run can go on to more rounds; give each run to resume by itself, all seeds of all "
            f"methods that are to be compared, or begin another comparison with rounds={rounds}"
        )
    if how.jobs > 1 and not kind:
        raise PerfedError(f"{directory}: is one run, if any; --jobs is for comparisons, searches and campaigns")
    with resumable(directory, how.data_dir, how.device, how.ray), alone_on_stdout(show.as_json):
        if kind == "comparison":
            compare(Study.read(directory), how, show)
        elif kind == "campaign":
            go_on(Study.read(directory), how, show)
        elif kind == "leaderboard":
            play(Leaderboard.read(directory), how, show)
        elif kind == "search":
            search = Search.read(directory)
            search.check_data(how.data_dir, where)
            _tune(search, how, show)
        else:
            _resume(directory, how.data_dir, where, rounds, show)


def _more_rounds(settings: list[str]) -> int | None:
    """The number of rounds that ``settings`` ask for."""
    found = None
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if key != "rounds" or not equals or not value.isdigit():
            raise PerfedError(f"'{assignment}': a run goes on with the settings that it has; allowed: rounds=NUMBER")
        found = int(value)
    return found


def _resume(
    directory: Path, data_dir: Path | None, device: torch.device | None, rounds: int | None, show: Shown
) -> None:
    report = directory / "report.html"
    if is_done(directory) and rounds in (None, RunDirectory(directory).newest()[0]):
        say("this run has finished")
        summary = RunDirectory(directory).read_summary()
        if report.exists():
            return _print_run(directory, summary, show, report)
        return _end(directory, directory.name, summary, show)
    run = resume(directory, data_dir=data_dir, device=device, rounds=rounds)
    summary = _execute(lambda: run, run.name)
    _end(directory, f"{run.federation.name}: {run.name}", summary, show)


def tune_command(
    experiment: str,
    settings: list[str] | None,
    methods: str,
    grid: list[str] | None,
    seeds: str,
    how: Training,
    show: Shown,
) -> None:
    """Choose settings on validation data only, with the same budget for every method."""
    check_one_word(methods, [experiment, *(settings or [])])
    table = find_experiment(experiment)
    names = chosen_methods(methods, table)
    table = override(table, shared_settings(how.engine, settings), names)
    out = how.out or default_out(f"tune-{table.get('name', 'experiment')}")
    planned = ComparisonSpec(table, names, parse_seeds(seeds))
    search = Search.create(out, planned, grid or [], how.data_dir, device_of(how.device))
    with resumable(out, how.data_dir, ray=how.ray), alone_on_stdout(show.as_json):
        say_where("results", out)
        _tune(search, how, show)


def _tune(search: Search, how: Training, show: Shown) -> None:
    with shown(Work(search.size)) as work:
        chosen = search.execute(how.data_dir, device_of(how.device), executor(how, work), work.already)
    if show.as_json:
        methods = {method: asdict(choice) for method, choice in chosen.items()}
        return print_json(plain({"directory": search.path, "runs": search.size, "chosen": methods}))
    print_choice(chosen, search.size)
    say_where("chosen settings", search.path / "chosen.toml")
    say_where("whole grid", search.path / "grid.json")


def partition_command(
    experiment: str,
    settings: list[str] | None,
    show: bool,
    seed: int | None,
    data_dir: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say who holds how many samples of which class and domain."""
    checked = chosen_experiment(experiment, [*(settings or []), *([] if seed is None else [f"seed={seed}"])])
    with alone_on_stdout(as_json):
        held = ClassTable.of(checked.data.load(checked.seed, data_dir))
        if show:
            out = out or default_out(f"partition-{checked.name}").with_suffix(".html")
        picture = None if out is None else write_partition_page(held, out)
        if as_json:
            return print_json({**held.to_dict(), "picture": None if picture is None else str(picture)})
        say(held.summary())
        for table in counted_tables(held) if show else ():
            print_table(table)
        if picture is not None:
            say_where("picture", picture)
