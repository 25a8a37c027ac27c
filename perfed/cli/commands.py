"""The command line: ``perfed run | compare | resume | tune | partition | list | report``."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.table import Table

from perfed.cli.listing import LISTS
from perfed.cli.terminal import console, print_choice, print_summary, progress, rich_table
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment.baselines import Baseline, baseline_names
from perfed.experiment.compare import Comparison, federated, is_comparison, parse_names, parse_seeds
from perfed.experiment.config import Experiment, find_experiment, validate
from perfed.experiment.overrides import override, parse_value
from perfed.experiment.search import Search, is_search
from perfed.experiment.start import is_done, resume, start
from perfed.machine import TERMINATED, installed_version, sigterm_as_exit, usable_device
from perfed.method.registry import entry
from perfed.plugins import own_mistakes
from perfed.report import all_tables, load_runs, with_communication, write_report
from perfed.report.partition import ClassTable, terminal_tables, write_partition_page
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.training.plan import ENGINES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Personalised federated learning: run, compare and tune methods on clients that differ.",
)

_CTRL_C = 130
_INTERRUPTED = {_CTRL_C: "interrupted", TERMINATED: "terminated"}

ExperimentName = Annotated[str, typer.Argument(help="a shipped experiment ('perfed list experiments') or a .toml file")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change, e.g. rounds=5")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help=f"one of: {', '.join(ENGINES)} ; else the experiment's")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="'cpu', 'cuda', ... in place of the experiment's")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="folder of data files, before PERFED_DATA")]
OutOption = Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME-TIME if not given")]
MethodsOption = Annotated[str, typer.Option("--methods", help="names separated by commas")]
ComparedOption = Annotated[
    str,
    typer.Option(
        "--methods",
        help=f"names separated by commas; for a scikit-learn model per client: {', '.join(baseline_names())}",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"perfed {installed_version()}", highlight=False)
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="print the version and stop", callback=_print_version, is_eager=True)
]


@app.callback()
def _common(version: VersionOption = False) -> None:
    pass


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
        code = stop.code if isinstance(stop, SystemExit) else _CTRL_C
        if code not in (_CTRL_C, TERMINATED):
            raise
        options = {"--data-dir": data_dir, "--device": device}
        words = [str(directory), *(word for name, value in options.items() if value for word in (name, str(value)))]
        raise _Stopped(f"{_INTERRUPTED[code]}; 'perfed resume {shlex.join(words)}' continues", code) from None


class _Stopped(Exception):
    """Message and exit code of a command that was interrupted."""


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


@app.command("run")
def run_command(
    experiment: ExperimentName,
    settings: Settings = None,
    method: Annotated[str | None, typer.Option("--method", help="in place of the experiment's method")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of data, initial values and mini-batches")] = None,
    engine: EngineOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
) -> None:
    """Train one method and write a run directory with a report."""
    table = find_experiment(experiment)
    options = [] if method is None else [f'method="{method}"']
    options += [] if seed is None else [f"seed={seed}"]
    given = [*_settings(engine, settings), *options]
    chosen = _chosen_method(table, given)
    entry(chosen)
    checked = validate(override(table, given, [chosen]))
    out = out or _default_out(checked.name)
    run = start(checked, data_dir=data_dir, out=out, device=_device(device))
    console.print(f"results: {out}", soft_wrap=True, highlight=False)
    with _resumable(out, data_dir):
        print_summary(_execute(run, checked.method))
    _report(out, f"{checked.name}: {checked.method}")


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


@app.command("resume")
def resume_command(
    directory: Annotated[Path, typer.Argument(help="a run's, a comparison's or a search's directory")],
    device: DeviceOption = None,
    data_dir: DataOption = None,
) -> None:
    """Continue an interrupted run or comparison from its last checkpoint, to the same bits, or a search."""
    where = _device(device)
    with _resumable(directory, data_dir, device):
        if is_comparison(directory):
            _compare(Comparison.read(directory), data_dir, where)
        elif is_search(directory):
            search = Search.read(directory)
            search.check(data_dir, where)
            _tune(search, data_dir, where)
        else:
            _resume(directory, data_dir, where)


def _resume(directory: Path, data_dir: Path | None, device: torch.device | None) -> None:
    if is_done(directory):
        console.print("this run has finished", highlight=False)
        print_summary(RunDirectory(directory).read_summary())
        if (directory / "report.html").exists():
            console.print(f"report: {directory / 'report.html'}", soft_wrap=True, highlight=False)
        else:
            _report(directory, directory.name)
        return
    run = resume(directory, data_dir=data_dir, device=device)
    print_summary(_execute(run, run.name))
    _report(directory, f"{run.federation.name}: {run.name}")


@app.command("compare")
def compare_command(
    experiment: ExperimentName,
    settings: Settings = None,
    methods: ComparedOption = "",
    seeds: Annotated[str, typer.Option("--seeds", help="'0..2' (inclusive), '0,3,5' or '7'")] = "0",
    engine: EngineOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
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
    for method, seed, make in planned.runs(data_dir, device):
        try:
            summary = _execute(make(), f"{method} seed {seed}")
        except PerfedError as error:
            failed.append(f"{method}, seed {seed}: {error}")
            console.print(f"failed: {failed[-1]}", style="red", markup=False, highlight=False)
            continue
        found = [f"{name} {values['mean']:.4g}" for name, values in summary["metrics"].items()]
        text = f"{100 * summary['accuracy']['mean']:.1f} %" if "accuracy" in summary else ", ".join(found)
        console.print(f"{method} seed {seed}: {text} in {summary['wall_seconds']:.1f} s", highlight=False)
    if planned.abandoned():
        raise PerfedError(failed[0])
    tables, oracle, report = planned.conclude()
    for table in tables:
        console.print(rich_table(table))
    if oracle is not None:
        console.print(f"Bayes oracle (known centres), mean over seeds: {100 * oracle:.1f} %", highlight=False)
    console.print(f"report: {report}", soft_wrap=True, highlight=False)
    if failed:
        raise PerfedError(f"{len(failed)} of {len(planned.methods) * len(planned.seeds)} runs failed; {failed[0]}")


@app.command("tune")
def tune_command(
    experiment: ExperimentName,
    settings: Settings = None,
    methods: MethodsOption = "",
    grid: Annotated[list[str] | None, typer.Option("--grid", help="key=v1,v2,...; may be given several times")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="as in compare")] = "0",
    engine: EngineOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
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


@app.command("partition")
def partition_command(
    experiment: ExperimentName,
    settings: Settings = None,
    show: Annotated[bool, typer.Option("--show", help="print and draw client x class and client x domain")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="in place of the experiment's")] = None,
    data_dir: DataOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file for a picture of the table")] = None,
) -> None:
    """Say who holds how many samples of which class and domain."""
    table = find_experiment(experiment)
    given = [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
    checked = validate(override(table, given, [_chosen_method(table, given)]))
    held = ClassTable.of(load(checked.data["name"], checked.data_options, seed=checked.seed, data_dir=data_dir))
    console.print(held.summary(), soft_wrap=True, markup=False, highlight=False)
    if show:
        for shown in terminal_tables(held, console.width):
            console.print(shown, markup=False, highlight=False)
        out = out or _default_out(f"partition-{checked.name}").with_suffix(".html")
    if out is not None:
        console.print(f"picture: {write_partition_page(held, out)}", soft_wrap=True, markup=False, highlight=False)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="methods, datasets, experiments or terms")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with all settings")] = False,
) -> None:
    """List what is there."""
    if what not in LISTS:
        raise PerfedError(f"unknown list '{what}'; allowed: {', '.join(LISTS)}")
    items = LISTS[what]()
    if as_json:
        typer.echo(json.dumps(items, indent=2, default=str))
        return
    table = Table("name", "summary", box=None, pad_edge=False)
    for item in items:
        table.add_row(item["name"], item["summary"])
    console.print(table, markup=False)


@app.command("report")
def report_command(
    directory: Annotated[Path, typer.Argument(help="a run's or a comparison's directory")],
    communication: Annotated[
        float | None, typer.Option("--communication", help="seconds per exchange, in place of what the runs had")
    ] = None,
) -> None:
    """Write report.html of a run or a comparison anew; with --communication another file, and the tables."""
    if communication is not None:
        _report_with(directory, communication)
        return
    if is_comparison(directory):
        report = Comparison.read(directory).conclude()[2]
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


def main() -> None:
    """Entry point: errors of the user are one line and exit code 2."""
    sys.path.append(str(Path.cwd()))  # for modules of the user: methods, data sets and stages
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the plus-minus sign
    try:
        with sigterm_as_exit(), own_mistakes():
            code = typer.main.get_command(app)(prog_name="perfed", standalone_mode=False)
    except _Stopped as stopped:
        _fail(*stopped.args)
    except PerfedError as error:
        _fail(str(error), 2)
    except OSError as error:  # a full disk, a folder without permission
        _fail(f"{error.filename or 'file'}: {error.strerror or error}", 2)
    except MemoryError as error:
        _fail(f"not enough memory ({error})", 2)
    except KeyboardInterrupt:
        _fail(_INTERRUPTED[_CTRL_C], _CTRL_C)
    except SystemExit as stop:
        if stop.code == TERMINATED:
            _fail(_INTERRUPTED[TERMINATED], TERMINATED)
        raise
    except Exception as error:
        # Typer's own errors (an unknown option, a missing argument) come from click, which newer versions carry inside.
        if type(error).__name__ == "Abort":
            _fail(_INTERRUPTED[_CTRL_C], _CTRL_C)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            raise SystemExit(2) from None
        if hasattr(error, "format_message"):
            _fail(error.format_message(), 2)
        raise
    if code == _CTRL_C:  # Typer turns Ctrl-C into this code
        _fail(_INTERRUPTED[_CTRL_C], _CTRL_C)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"perfed: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
