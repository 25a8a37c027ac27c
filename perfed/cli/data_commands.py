"""The commands that prepare and check data before training: ``perfed init | check | partition``.

Modules that need torch are imported when a command runs, so that help and completion do not wait for torch.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perfed.cli.app import app
from perfed.cli.console import command_lines, print_json, reserve_stdout, say, say_where, say_whole
from perfed.cli.options import DataOption, ExperimentName, JsonOption, Settings, default_out, with_seed
from perfed.errors import PerfedError
from perfed.plugins import IMPORTED

_PROBLEMS = 100  # largest number that is printed


@app.command("init", epilog="Example: perfed init hospitals/ --target disease --drop patient")
def init_command(
    files: Annotated[list[Path], typer.Argument(help="CSV, Parquet or Excel files, or folders of them; one site each")],
    target: Annotated[str, typer.Option("--target", help="column to predict; a time with --event")],
    event: Annotated[str, typer.Option("--event", help="column of events, where the target is a time")] = "",
    site_column: Annotated[str, typer.Option("--site-column", help="column that names the site of every row")] = "",
    domain: Annotated[str, typer.Option("--domain", help="column of domains, e.g. race")] = "",
    group: Annotated[str, typer.Option("--group", help="column whose equal values are never split, e.g. patient")] = "",
    drop: Annotated[list[str] | None, typer.Option("--drop", help="column to leave out; may be repeated")] = None,
    numbers: Annotated[
        list[str] | None, typer.Option("--numbers", help="column of numbers, or COLUMN=UNIT; may be repeated")
    ] = None,
    dates: Annotated[list[str] | None, typer.Option("--dates", help="column of dates; may be repeated")] = None,
    categories: Annotated[
        list[str] | None, typer.Option("--categories", help="column whose numbers are codes; may be repeated")
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            "--missing",
            help='value that means missing, or COLUMN=VALUE; may be repeated; "" or COLUMN= for no text such as NA',
        ),
    ] = None,
    thousands: Annotated[
        list[str] | None, typer.Option("--thousands", help="column with separated thousands (1,250); may be repeated")
    ] = None,
    decimals: Annotated[
        list[str] | None, typer.Option("--decimals", help="column with decimal commas; may be repeated")
    ] = None,
    swapped: Annotated[
        list[str] | None,
        typer.Option("--swapped", help="column of dates whose day and month a spreadsheet swapped; may be repeated"),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--values", help="COLUMN:TEXT=TEXT, a text and its replacement; may be repeated"),
    ] = None,
    inputs: Annotated[
        str,
        typer.Option(
            "--columns", help="named (columns of one name mean the same) or own; by default whatever fits the tables"
        ),
    ] = "",
    test: Annotated[list[Path] | None, typer.Option("--test", help="file or folder of rows to test on")] = None,
    out: Annotated[Path, typer.Option("--out", help="experiment file to write")] = Path("study.toml"),
    as_json: JsonOption = False,
) -> None:
    """Write a commented experiment for tables of your own, after checking them."""
    from perfed.cli.terminal import print_federation
    from perfed.data.names import quote_name
    from perfed.experiment.config import validate
    from perfed.experiment.init_template import choose_split_and_columns, study_text, suggest_methods, tune_command
    from perfed.tables.files import table_files

    table_files([*files, *(test or [])])
    if out.exists():
        raise PerfedError(f"{out} is there already; name another file with --out, or edit it")
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise PerfedError(f"--out {out}: a .toml file in a folder that is there is needed")
    if not out.stem.isprintable():
        raise PerfedError(f"--out {quote_name(str(out))}: a study's name holds no line breaks or control characters")
    _check_mode(inputs)
    roles = {
        "columns": inputs,
        "site_column": site_column,
        "target": target,
        "event": event,
        "domain": domain,
        "group": group,
    }
    columns = {"drop": drop, "numbers": numbers, "dates": dates, "categories": categories, "missing": missing}
    columns |= {"thousands": thousands, "decimals": decimals, "swapped": swapped}
    tables = {"files": [str(file) for file in files], "test_files": [str(file) for file in test or []]}
    table_settings: dict[str, Any] = {key: value for key, value in {**tables, **roles, **columns}.items() if value}
    table_settings |= {"values": _parse_replacements(values)} if values else {}
    with reserve_stdout(as_json), _print_all_problems():
        federation, settings = choose_split_and_columns(table_settings)
    settings |= {key: [_make_relative(path, out) for path in settings[key]] for key in tables if key in settings}
    text = study_text(out.stem, settings, federation)
    validate(tomllib.loads(text))
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    if as_json:
        return print_json({**asdict(federation.facts), "experiment": str(out)})
    print_federation(federation)
    say_where("experiment", out)
    methods = ",".join(suggest_methods(settings, federation))
    _print_next_steps(
        shlex.join(["perfed", "compare", str(out), "--methods", methods, "--seeds", "0..4"]),
        tune_command(str(out), settings, federation),
    )


def _print_next_steps(compare_command: str, tune_command: str) -> None:
    """Print the commands that may follow ``perfed init``."""
    for line in ("next:", *command_lines(compare_command)):
        say_whole(line)
    say("the same as perfed blend adds a mixture of all these at each site, in six times the time")
    say("rate and weight decay decide who wins; this chooses them for your tables, on validation data:")
    for line in command_lines(tune_command):
        say_whole(line)


def _parse_replacements(values: list[str]) -> dict[str, dict[str, str]]:
    """Parse the option ``--values``: return the replacement of each text, by column and text."""
    replacements: dict[str, dict[str, str]] = {}
    for value in values:
        column, colon, texts = value.partition(":")
        old, equals, new = texts.rpartition("=")
        if not (column and colon and old and equals and new):
            raise PerfedError(f"--values {value}: COLUMN:TEXT=TEXT is needed, such as sex:female=F")
        replacements.setdefault(column, {})[old] = new
    return replacements


def _check_mode(columns: str) -> None:
    if columns not in ("", "named", "own"):
        raise PerfedError(f"--columns {columns}: allowed: named, own")


def _make_relative(path: str, out: Path) -> str:
    return Path(os.path.relpath(Path(path).resolve(), out.parent.resolve())).as_posix()


@app.command("check", epilog="Example: perfed check study.toml")
def check_command(
    experiment: ExperimentName, settings: Settings = None, data_dir: DataOption = None, as_json: JsonOption = False
) -> None:
    """Check the data of all sites without training: print what they have and disclose, and all problems."""
    from perfed.cli.execution import chosen_experiment
    from perfed.cli.terminal import print_federation
    from perfed.experiment.start import start

    with reserve_stdout(as_json), _report_imported_modules():
        checked = chosen_experiment(experiment, settings or [])
        with _print_all_problems():
            federation = checked.data.load(checked.seed, data_dir)
        if not as_json:
            print_federation(federation)
        start(checked, federation=federation)
    if as_json:
        print_json(asdict(federation.facts))


@contextmanager
def _report_imported_modules() -> Iterator[None]:
    """Print at the end, even after an error, which modules were imported for ``module:NAME`` and thereby executed."""
    try:
        yield
    finally:
        if IMPORTED:
            say(f"check has run code of these modules: {', '.join(IMPORTED)}")


@contextmanager
def _print_all_problems() -> Iterator[None]:
    """Print all problems of the tables if there are any, and raise an error with their number."""
    from perfed.data.problems import DataProblems

    try:
        yield
    except DataProblems as error:
        for problem in error.problems[:_PROBLEMS]:
            say_whole(problem)
        if len(error.problems) > _PROBLEMS:
            say(f"and {len(error.problems) - _PROBLEMS} more")
        number = len(error.problems)
        raise PerfedError(f"{number} problem{'s' if number > 1 else ''} in the tables") from None


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
    """Print the number of samples of each class and domain at each client."""
    from perfed.cli.execution import chosen_experiment
    from perfed.cli.table import print_table
    from perfed.report.partition import ClassTable, count_tables, write_partition_page

    checked = chosen_experiment(experiment, with_seed(settings, seed))
    with reserve_stdout(as_json):
        class_table = ClassTable.from_federation(checked.data.load(checked.seed, data_dir))
        if show:
            out = out or default_out(f"partition-{checked.name}").with_suffix(".html")
        picture = None if out is None else write_partition_page(class_table, out)
        if as_json:
            return print_json({**class_table.to_dict(), "picture": None if picture is None else str(picture)})
        say(class_table.summary())
        for table in count_tables(class_table) if show else ():
            print_table(table)
        if picture is not None:
            say_where("picture", picture)
