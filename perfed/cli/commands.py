"""The command line: ``perfed init | check | run | compare | resume | tune | partition | export | predict ...``.

Here is what a user can write. What the commands do is in :mod:`perfed.cli.actions`, which they import when they run:
help, version and lists come without torch.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from perfed.cli.console import CTRL_C, INTERRUPTED, Stopped, console
from perfed.cli.index import INDEX, LISTS
from perfed.errors import PerfedError
from perfed.machine import TERMINATED, installed_version, sigterm_as_exit
from perfed.plugins import own_mistakes

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Personalised federated learning: run, compare and tune methods on clients that differ.",
)

ExperimentName = Annotated[str, typer.Argument(help="a shipped experiment ('perfed list experiments') or a .toml file")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings to change, e.g. rounds=5")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help=f"one of: {', '.join(INDEX['engines'])} ; else the experiment's")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="'cpu', 'cuda', ... in place of the experiment's")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="folder of data files, before PERFED_DATA")]
OutOption = Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME-TIME if not given")]
RunArgument = Annotated[Path, typer.Argument(help="a run's directory")]
SiteOption = Annotated[str, typer.Option("--site", help="the client's id")]
MethodsOption = Annotated[str, typer.Option("--methods", help="names separated by commas")]
ComparedOption = Annotated[
    str,
    typer.Option(
        "--methods",
        help=f"names separated by commas; models of scikit-learn: {', '.join(INDEX['baselines'])}",
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


@app.command("init")
def init_command(
    files: Annotated[list[Path], typer.Argument(help="CSV, Parquet or Excel files, or folders of them; one site each")],
    target: Annotated[str, typer.Option("--target", help="column to predict; a time with --event")],
    event: Annotated[str, typer.Option("--event", help="column of events, where the target is a time")] = "",
    site_column: Annotated[str, typer.Option("--site-column", help="column that names the site of every row")] = "",
    domain: Annotated[str, typer.Option("--domain", help="column of domains, e.g. race")] = "",
    group: Annotated[str, typer.Option("--group", help="column whose equal values are never split, e.g. patient")] = "",
    drop: Annotated[list[str] | None, typer.Option("--drop", help="column to leave out; may be repeated")] = None,
    dates: Annotated[list[str] | None, typer.Option("--dates", help="column of dates; may be repeated")] = None,
    categories: Annotated[
        list[str] | None, typer.Option("--categories", help="column whose numbers are codes; may be repeated")
    ] = None,
    test: Annotated[list[Path] | None, typer.Option("--test", help="file or folder of rows to test on")] = None,
    out: Annotated[Path, typer.Option("--out", help="experiment file to write")] = Path("study.toml"),
) -> None:
    """Write a commented experiment for tables of your own, after checking them."""
    from perfed.cli import study

    columns = {"drop": drop or [], "dates": dates or [], "categories": categories or []}
    roles = {"site_column": site_column, "target": target, "event": event, "domain": domain, "group": group}
    study.init_command(files, test or [], {**roles, **columns}, out)


@app.command("check")
def check_command(
    experiment: ExperimentName,
    settings: Settings = None,
    data_dir: DataOption = None,
) -> None:
    """Say what the sites hold, what they must tell each other, and everything that is wrong; train nothing."""
    from perfed.cli import study

    study.check_command(experiment, settings, data_dir)


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
    from perfed.cli import actions

    actions.run_command(experiment, settings, method, seed, engine, device, data_dir, out)


@app.command("resume")
def resume_command(
    directory: Annotated[Path, typer.Argument(help="a run's, a comparison's or a search's directory")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="more rounds than a run was begun with")
    ] = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
) -> None:
    """Continue an interrupted run, comparison or search to the same bits, or a finished run to more rounds."""
    from perfed.cli import actions

    actions.resume_command(directory, settings or [], device, data_dir)


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
    from perfed.cli import actions

    actions.compare_command(experiment, settings, methods, seeds, engine, device, data_dir, out)


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
    from perfed.cli import actions

    actions.tune_command(experiment, settings, methods, grid, seeds, engine, device, data_dir, out)


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
    from perfed.cli import actions

    actions.partition_command(experiment, settings, show, seed, data_dir, out)


@app.command("export")
def export_command(
    directory: RunArgument,
    site: SiteOption,
    format_: Annotated[str, typer.Option("--format", help="onnx, pt2 or safetensors")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="file; RUN/models/SITE.FORMAT if not given")] = None,
    data_dir: DataOption = None,
) -> None:
    """Write one site's own model for use without perfed, and a model card."""
    from perfed.cli import sites

    sites.export_command(directory, site, format_, out, data_dir)


@app.command("predict")
def predict_command(
    directory: RunArgument,
    file: Annotated[Path, typer.Argument(help="table of new rows, with the site's columns in any order")],
    site: SiteOption,
    out: Annotated[Path, typer.Option("--out", help="CSV file for predictions and probabilities")],
    data_dir: DataOption = None,
) -> None:
    """Write what one site's own model says of new rows."""
    from perfed.cli import sites

    sites.predict_command(directory, file, site, out, data_dir)


@app.command("join")
def join_command(
    directory: RunArgument,
    file: Annotated[Path, typer.Argument(help="the new site's table, or arrays x and y in a .npz file")],
    site: SiteOption,
    data_dir: DataOption = None,
) -> None:
    """Let a new site train its own part of the model of a finished run, of which no other file changes."""
    from perfed.cli import sites

    sites.join_command(directory, file, site, data_dir)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="methods, datasets, experiments or terms")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with all settings")] = False,
) -> None:
    """List what is there."""
    if what not in LISTS:
        raise PerfedError(f"unknown list '{what}'; allowed: {', '.join(LISTS)}")
    items = INDEX[what]
    if as_json:
        return typer.echo(json.dumps(items, indent=2))
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
    from perfed.cli import actions

    actions.report_command(directory, communication)


def main() -> None:
    """Entry point: errors of the user are one line and exit code 2."""
    sys.path.append(str(Path.cwd()))  # for modules of the user: methods, data sets and stages
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the plus-minus sign
    try:
        with sigterm_as_exit(), own_mistakes():
            code = typer.main.get_command(app)(prog_name="perfed", standalone_mode=False)
    except Stopped as stopped:
        _fail(*stopped.args)
    except PerfedError as error:
        _fail(str(error), 2)
    except OSError as error:  # a full disk, a folder without permission
        _fail(f"{error.filename or 'file'}: {error.strerror or error}", 2)
    except MemoryError as error:
        _fail(f"not enough memory ({error})", 2)
    except KeyboardInterrupt:
        code = CTRL_C
    except SystemExit as stop:
        if stop.code == TERMINATED:
            _fail(INTERRUPTED[TERMINATED], TERMINATED)
        raise
    except Exception as error:
        # Typer's own errors (an unknown option, a missing argument) come from click, which newer versions carry inside.
        if type(error).__name__ == "Abort":
            _fail(INTERRUPTED[CTRL_C], CTRL_C)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            raise SystemExit(2) from None
        if hasattr(error, "format_message"):
            _fail(error.format_message(), 2)
        raise
    if code == CTRL_C:  # Typer turns Ctrl-C into this code
        _fail(INTERRUPTED[CTRL_C], CTRL_C)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"perfed: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
