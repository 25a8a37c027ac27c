"""What the commands do: imported when one of them runs, for it takes torch along."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from perfed.cli.console import CTRL_C, INTERRUPTED, Stopped, console
from perfed.cli.terminal import print_choice, print_conclusion, print_summary, progress, rich_table
from perfed.errors import PerfedError
from perfed.experiment.baselines import Baseline
from perfed.experiment.compare import Comparison, federated, is_comparison, parse_names, parse_seeds
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.overrides import override, parse_value
from perfed.experiment.search import Search, is_search
from perfed.experiment.start import is_done, resume, start
from perfed.machine import TERMINATED
from perfed.method.registry import entry
from perfed.plugins import own_mistakes
from perfed.report import all_tables, load_runs, with_communication, write_report
from perfed.report.partition import ClassTable, terminal_tables, write_partition_page
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.training.device import usable_device
from perfed.training.plan import ENGINES


def _default_out(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _settings(engine: str | None, settings: list[str] | None) -> list[str]:
    if engine is not None and engine not in ENGINES:
        raise PerfedError(f"--engine {engine}: unknown engine; allowed: {', '.join(ENGINES)}")
    return [*(settings or []), *([f'plan.engine="{engine}"'] if engine else [])]


def _device(name: str | None) -> torch.device | None:
    return None if name is None else usable_device(name, f"--device {name}")


@contextmanager
def _resumable(directory: Path, data_dir: Path | None, device: str | None = None) -> Iterator[None]:
    """Say after Ctrl-C or SIGTERM which command goes on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else CTRL_C
        if code not in (CTRL_C, TERMINATED):
            raise
        options = {"--data-dir": data_dir, "--device": device}
        words = [str(directory), *(word for name, value in options.items() if value for word in (name, str(value)))]
        raise Stopped(f"{INTERRUPTED[code]}; 'perfed resume {shlex.join(words)}' continues", code) from None


def _execute(run: Run | Baseline, label: str) -> dict[str, Any]:
    if isinstance(run, Run) and run.resumed is not None:
        for note in run.notes:
            console.print(note, style="yellow", markup=False, highlight=False)
        console.print(f"{label}: continues from round {run.resumed} to {run.rounds}", markup=False, highlight=False)
    with own_mistakes(), progress(label, run.rounds) as update:
        return run.execute(update)


def _report(directory: Path, title: str) -> None:
    report = write_report(load_runs([directory]), directory / "report.html", title=title)
    console.print(f"report: {report}", soft_wrap=True, highlight=False)


def run_command(
    experiment: str,
    settings: list[str] | None,
    method: str | None,
    seed: int | None,
    engine: str | None,
    device: str | None,
    data_dir: Path | None,
    out: Path | None,
) -> None:
    """Train one method and write a run directory with a report."""
    options = [] if method is None else [f'method="{method}"']
    options += [] if seed is None else [f"seed={seed}"]
    checked = chosen_experiment(experiment, [*_settings(engine, settings), *options])
    out = out or _default_out(checked.name)
    run = start(checked, data_dir=data_dir, out=out, device=_device(device))
    console.print(f"results: {out}", soft_wrap=True, highlight=False)
    with _resumable(out, data_dir):
        print_summary(_execute(run, checked.method))
    _report(out, f"{checked.name}: {checked.method}")


def chosen_experiment(name: str, settings: list[str]) -> Experiment:
    """The experiment ``name`` with the ``settings`` of one method and seed."""
    table = find_experiment(name)
    method = _chosen_method(table, settings)
    entry(method)
    return validate(override(table, settings, [method]))


def _chosen_method(table: dict[str, Any], settings: list[str]) -> str:
    """The method that ``settings`` name last, else the experiment's: its settings may be given by their bare names."""
    for assignment in reversed(settings):
        if assignment.startswith("method="):
            return str(parse_value(assignment.removeprefix("method=")))
    return str(table.get("method", Experiment.model_fields["method"].default))


def _shared_settings(engine: str | None, settings: list[str] | None) -> list[str]:
    """Settings of a command that runs several methods and seeds."""
    for assignment in settings or []:
        key = assignment.partition("=")[0].strip()
        if key in ("method", "seed"):
            raise PerfedError(f"'{assignment}': methods and seeds are given with --methods and --seeds here")
    return _settings(engine, settings)


def resume_command(directory: Path, settings: list[str], device: str | None, data_dir: Path | None) -> None:
    """Continue an interrupted run or comparison from its last checkpoint, to the same bits, or a search."""
    where, rounds = _device(device), _more_rounds(settings)
    if rounds is not None and (is_comparison(directory) or is_search(directory)):
        raise PerfedError(f"{directory}: only a run can go on to more rounds")
    with _resumable(directory, data_dir, device):
        if is_comparison(directory):
            _compare(Comparison.read(directory), data_dir, where)
        elif is_search(directory):
            search = Search.read(directory)
            search.check(data_dir, where)
            _tune(search, data_dir, where)
        else:
            _resume(directory, data_dir, where, rounds)


def _more_rounds(settings: list[str]) -> int | None:
    """The number of rounds that ``settings`` ask for."""
    found = None
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if key != "rounds" or not equals or not value.isdigit():
            raise PerfedError(f"'{assignment}': a run goes on with the settings that it has; allowed: rounds=NUMBER")
        found = int(value)
    return found


def _resume(directory: Path, data_dir: Path | None, device: torch.device | None, rounds: int | None) -> None:
    if is_done(directory) and rounds in (None, RunDirectory(directory).newest()[0]):
        console.print("this run has finished", highlight=False)
        print_summary(RunDirectory(directory).read_summary())
        if (directory / "report.html").exists():
            console.print(f"report: {directory / 'report.html'}", soft_wrap=True, highlight=False)
        else:
            _report(directory, directory.name)
        return
    run = resume(directory, data_dir=data_dir, device=device, rounds=rounds)
    print_summary(_execute(run, run.name))
    _report(directory, f"{run.federation.name}: {run.name}")


def compare_command(
    experiment: str,
    settings: list[str] | None,
    methods: str,
    seeds: str,
    engine: str | None,
    device: str | None,
    data_dir: Path | None,
    out: Path | None,
) -> None:
    """Train several methods over several seeds: one table, one report, comparison.json."""
    names = parse_names(methods, baselines=True)
    numbers = parse_seeds(seeds)
    table = override(find_experiment(experiment), _shared_settings(engine, settings), federated(names))
    out = out or _default_out(str(table.get("name", "comparison")))
    where = _device(device)
    planned = Comparison.create(out, table, names, numbers, data_dir, where)
    console.print(f"results: {out}", soft_wrap=True, highlight=False)
    with _resumable(out, data_dir):
        _compare(planned, data_dir, where)


def _compare(planned: Comparison, data_dir: Path | None, device: torch.device | None) -> None:
    failed = []
    for method, seed, outcome in planned.outcomes(data_dir, device, _execute):
        if isinstance(outcome, PerfedError):
            failed.append(outcome)
            console.print(f"failed: {outcome}", style="red", markup=False, highlight=False)
            continue
        found = [f"{name} {values['mean']:.4g}" for name, values in outcome["metrics"].items()]
        text = f"{100 * outcome['accuracy']['mean']:.1f} %" if "accuracy" in outcome else ", ".join(found)
        console.print(f"{method} seed {seed}: {text} in {outcome['wall_seconds']:.1f} s", highlight=False)
    print_conclusion(planned.conclude())
    if failed:
        raise PerfedError(f"{len(failed)} of {len(planned.methods) * len(planned.seeds)} runs failed; {failed[0]}")


def tune_command(
    experiment: str,
    settings: list[str] | None,
    methods: str,
    grid: list[str] | None,
    seeds: str,
    engine: str | None,
    device: str | None,
    data_dir: Path | None,
    out: Path | None,
) -> None:
    """Choose settings on validation data only, with the same budget for every method."""
    names = parse_names(methods)
    table = override(find_experiment(experiment), _shared_settings(engine, settings), names)
    out = out or _default_out(f"tune-{table.get('name', 'experiment')}")
    numbers, where = parse_seeds(seeds), _device(device)
    search = Search.create(out, table, names, numbers, grid or [], data_dir, where)
    console.print(f"results: {out}", soft_wrap=True, highlight=False)
    with _resumable(out, data_dir):
        _tune(search, data_dir, where)


def _tune(search: Search, data_dir: Path | None, device: torch.device | None) -> None:
    with progress("tuning", search.size) as update:
        chosen = search.execute(data_dir, device, update)
    print_choice(chosen, search.size)
    for label, name in (("chosen settings", "chosen.toml"), ("whole grid", "grid.json")):
        console.print(f"{label}: {search.path / name}", soft_wrap=True, highlight=False)


def partition_command(
    experiment: str,
    settings: list[str] | None,
    show: bool,
    seed: int | None,
    data_dir: Path | None,
    out: Path | None,
) -> None:
    """Say who holds how many samples of which class and domain."""
    checked = chosen_experiment(experiment, [*(settings or []), *([] if seed is None else [f"seed={seed}"])])
    held = ClassTable.of(checked.data.load(checked.seed, data_dir))
    console.print(held.summary(), soft_wrap=True, markup=False, highlight=False)
    if show:
        for shown in terminal_tables(held, console.width):
            console.print(shown, markup=False, highlight=False)
        out = out or _default_out(f"partition-{checked.name}").with_suffix(".html")
    if out is not None:
        console.print(f"picture: {write_partition_page(held, out)}", soft_wrap=True, markup=False, highlight=False)


def report_command(directory: Path, communication: float | None) -> None:
    """Write report.html of a run or a comparison anew; with --communication another file, and the tables."""
    if communication is not None:
        _report_with(directory, communication)
        return
    if is_comparison(directory):
        report = Comparison.read(directory).conclude().report
        console.print(f"report: {report}", soft_wrap=True, highlight=False)
    else:
        _report(directory, directory.name)


def _report_with(directory: Path, communication: float) -> None:
    places = Comparison.read(directory).started() if is_comparison(directory) else [directory]
    runs = [with_communication(run, communication) for run in load_runs(places)]
    for table in all_tables(runs):
        console.print(rich_table(table))
    report = write_report(runs, directory / f"report-communication-{communication:g}.html", title=directory.name)
    console.print(f"report: {report}", soft_wrap=True, highlight=False)
