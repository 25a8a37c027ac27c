"""The command line: ``perfed init | check | run | compare | resume | tune | report | list | show ...``.

Here is what a user can write. What the commands do is in :mod:`perfed.cli.actions` and beside it, which they import
when they run: help, version, lists and completion come without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.console import console, print_json
from perfed.cli.index import LISTS, index
from perfed.cli.options import (
    AllMetricsOption,
    ComparedOption,
    DataOption,
    DeviceOption,
    EngineOption,
    ExperimentName,
    JobsOption,
    JsonOption,
    MethodsOption,
    OutOption,
    RayOption,
    Settings,
    Shown,
    Training,
    VerboseOption,
    Workers,
    WorkersOption,
)
from perfed.cli.wording import App
from perfed.errors import PerfedError
from perfed.machine import installed_version
from perfed.plugins import known_as

app = App(
    no_args_is_help=True,
    help="Personalised federated learning: run, compare and tune methods on clients that differ.",
)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"perfed {installed_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="print the version and stop", callback=_print_version, is_eager=True)
]


@app.callback()
def _common(version: VersionOption = False) -> None:
    pass


@app.command("init", epilog="Example: perfed init hospitals/ --target disease --drop patient")
def init_command(
    files: Annotated[list[Path], typer.Argument(help="CSV, Parquet or Excel files, or folders of them; one site each")],
    target: Annotated[str, typer.Option("--target", help="column to predict; a time with --event")],
    event: Annotated[str, typer.Option("--event", help="column of events, where the target is a time")] = "",
    site_column: Annotated[str, typer.Option("--site-column", help="column that names the site of every row")] = "",
    domain: Annotated[str, typer.Option("--domain", help="column of domains, e.g. race")] = "",
    group: Annotated[str, typer.Option("--group", help="column whose equal values are never split, e.g. patient")] = "",
    drop: Annotated[list[str] | None, typer.Option("--drop", help="column to leave out; may be repeated")] = None,
    numbers: Annotated[list[str] | None, typer.Option("--numbers", help="column of numbers; may be repeated")] = None,
    dates: Annotated[list[str] | None, typer.Option("--dates", help="column of dates; may be repeated")] = None,
    categories: Annotated[
        list[str] | None, typer.Option("--categories", help="column whose numbers are codes; may be repeated")
    ] = None,
    test: Annotated[list[Path] | None, typer.Option("--test", help="file or folder of rows to test on")] = None,
    out: Annotated[Path, typer.Option("--out", help="experiment file to write")] = Path("study.toml"),
    as_json: JsonOption = False,
) -> None:
    """Write a commented experiment for tables of your own, after checking them."""
    from perfed.cli import study

    columns = {"drop": drop, "numbers": numbers, "dates": dates, "categories": categories}
    roles = {"site_column": site_column, "target": target, "event": event, "domain": domain, "group": group}
    study.init_command(files, test or [], {**roles, **columns}, out, as_json)


@app.command("check", epilog="Example: perfed check study.toml")
def check_command(
    experiment: ExperimentName, settings: Settings = None, data_dir: DataOption = None, as_json: JsonOption = False
) -> None:
    """Say what the sites hold, what they must tell each other, and everything that is wrong; train nothing."""
    from perfed.cli import study

    study.check_command(experiment, settings, data_dir, as_json)


@app.command("run", epilog="Example: perfed run digits-label-skew --method fedpac rounds=20 --out runs/one")
def run_command(
    experiment: ExperimentName,
    settings: Settings = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="in place of the experiment's method", autocompletion=complete.methods),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of data, initial values and mini-batches")] = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train one method and write a run directory with a report."""
    from perfed.cli import actions

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine), device, data_dir, out, ray)
    actions.run_command(experiment, settings, method, seed, how, Shown(as_json, verbose=verbose))


@app.command("resume", epilog="Examples: perfed resume runs/one ; perfed resume runs/one rounds=60")
def resume_command(
    directory: Annotated[
        Path,
        typer.Argument(
            help="the directory of a run, a comparison, a search or a leaderboard",
            autocompletion=complete.run_directories,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="more rounds than a run was begun with")
    ] = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
    all_metrics: AllMetricsOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue what was interrupted to the same bits, or a finished run to more rounds."""
    from perfed.cli import actions

    how = Training(None, device, data_dir, None, Workers(workers, ray_address), jobs)
    actions.resume_command(directory, settings or [], how, Shown(as_json, all_metrics, verbose))


@app.command("compare", epilog="Example: perfed compare digits-label-skew --methods local,fedpac --seeds 0..2 --jobs 2")
def compare_command(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="a shipped experiment ('perfed list experiments') or a .toml file; not needed with --extend",
            autocompletion=complete.experiments,
        ),
    ] = None,
    settings: Settings = None,
    methods: ComparedOption = "",
    seeds: Annotated[str | None, typer.Option("--seeds", help="'0..2' (inclusive), '0,3,5' or '7'; else 0")] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            "--extend",
            help="a comparison's directory, to which --methods and --seeds are added; what is done stays",
            autocompletion=complete.run_directories,
        ),
    ] = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
    all_metrics: AllMetricsOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train several methods over several seeds: one table, one report, a verdict at the end."""
    from perfed.cli import comparing

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine, jobs), device, data_dir, out, ray, jobs)
    comparing.compare_command(experiment, settings, methods, seeds, extend, how, Shown(as_json, all_metrics, verbose))


@app.command("tune", epilog="Example: perfed tune digits-label-skew --methods local,fedpac --grid lr=1e-3,1e-2")
def tune_command(
    experiment: ExperimentName,
    settings: Settings = None,
    methods: MethodsOption = "",
    grid: Annotated[list[str] | None, typer.Option("--grid", help="key=v1,v2,...; may be given several times")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="as in compare")] = "0",
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Choose settings on validation data only, with the same budget for every method."""
    from perfed.cli import actions

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine, jobs), device, data_dir, out, ray, jobs)
    actions.tune_command(experiment, settings, methods, grid, seeds, how, Shown(as_json))


@app.command("report", epilog="Example: perfed report runs/three --latex t.tex --csv t.csv --figures figures")
def report_command(
    directories: Annotated[
        list[Path],
        typer.Argument(
            help="directories of runs and comparisons, taken together", autocompletion=complete.run_directories
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            help="method that differences are to; else the best that needs no federation",
            autocompletion=complete.methods,
        ),
    ] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="file for a LaTeX table (booktabs)")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="CSV file: a row per method and metric")] = None,
    figures: Annotated[Path | None, typer.Option("--figures", help="folder for the figures as SVG and PDF")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML file; of one directory its report.html if not given")
    ] = None,
    communication: Annotated[
        float | None, typer.Option("--communication", help="seconds per exchange, in place of what the runs had")
    ] = None,
    as_json: JsonOption = False,
    all_metrics: AllMetricsOption = False,
) -> None:
    """Write the report of runs and comparisons anew, print tables and verdict, and write files for papers."""
    from perfed.cli import files, reports

    written = files.Files(out, latex, csv, figures)
    reports.report_command(directories, reference, communication, written, Shown(as_json, all_metrics))


@app.command("list", epilog="Example: perfed list methods")
def list_command(
    what: Annotated[str, typer.Argument(help=", ".join(LISTS), autocompletion=complete.lists)],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with all settings")] = False,
) -> None:
    """List what is there: methods by what differs between the clients and by paper."""
    asked = known_as(what, LISTS)
    if asked is None:
        raise PerfedError(f"unknown list '{what}'; allowed: {', '.join(LISTS)}")
    if as_json:
        return print_json(index()[asked])
    from perfed.cli import catalogue

    for line in catalogue.listed(asked):
        typer.echo(line)


@app.command("show", epilog="Example: perfed show fedpac")
def show_command(
    name: Annotated[
        str, typer.Argument(help="a method, data set, experiment or extension", autocompletion=complete.shown)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON: kind and facts")] = False,
) -> None:
    """Say what a method, data set or experiment is, its settings, what it needs, and a command to try."""
    from perfed.cli import catalogue

    found = catalogue.found(name)
    if as_json:
        return print_json(found)
    for number, (kind, item) in enumerate(found.items()):
        for line in [*([""] if number else []), *catalogue.described(kind, item)]:
            typer.echo(line)


@app.command("partition", epilog="Example: perfed partition digits-label-skew --show")
def partition_command(
    experiment: ExperimentName,
    settings: Settings = None,
    show: Annotated[bool, typer.Option("--show", help="print and draw client x class and client x domain")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="in place of the experiment's")] = None,
    data_dir: DataOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file for a picture of the table")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say who holds how many samples of which class and domain."""
    from perfed.cli import actions

    actions.partition_command(experiment, settings, show, seed, data_dir, out, as_json)
