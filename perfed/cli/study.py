"""What ``perfed init`` and ``perfed check`` do: imported when one of them runs, for it takes torch along."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perfed.cli.actions import chosen_experiment
from perfed.cli.console import alone_on_stdout, command_lines, print_json, say, say_where, say_whole
from perfed.cli.table import print_table
from perfed.data.federation import Federation
from perfed.data.tables.files import table_files
from perfed.data.tables.problems import TableProblems
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.init_template import compared, study_text, tune_command
from perfed.experiment.start import start
from perfed.plugins import IMPORTED
from perfed.report.text import TextTable


def init_command(files: list[Path], tests: list[Path], columns: dict[str, Any], out: Path, as_json: bool) -> None:
    """Write an experiment for tables; nothing where they have problems, or over a file that is there."""
    table_files([*files, *tests])
    if out.exists():
        raise PerfedError(f"{out} is there already; name another file with --out, or edit it")
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise PerfedError(f"--out {out}: a .toml file in a folder that is there is needed")
    given = {key: value for key, value in columns.items() if value}
    settings: dict[str, Any] = {"files": [str(file) for file in files], **given}
    settings |= {"test_files": [str(file) for file in tests]} if tests else {}
    with alone_on_stdout(as_json), _all_problems():
        federation, settings = _tried(settings)
    for key in ("files", "test_files"):
        settings |= {key: [_relative(path, out) for path in settings[key]]} if key in settings else {}
    text = study_text(out.stem, settings, federation)
    validate(tomllib.loads(text))
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    if as_json:
        return print_json({**asdict(federation.facts), "experiment": str(out)})
    _print_facts(federation)
    say_where("experiment", out)
    methods = ",".join(compared(settings, federation))
    command = shlex.join(["perfed", "compare", str(out), "--methods", methods, "--seeds", "0..4"])
    for line in ("next:", *command_lines(command)):
        say_whole(line)
    say("rate and weight decay decide who wins; this chooses them for your tables, on validation data:")
    for line in command_lines(tune_command(str(out), settings, federation)):
        say_whole(line)


def _tried(settings: dict[str, Any]) -> tuple[Federation, dict[str, Any]]:
    """The federation with the split and the columns that fit: five folds if each site has the rows, named columns if
    two sites have one of the same name, and these settings.
    """
    split: dict[str, Any] = {} if "test_files" in settings else {"folds": 5}
    try:
        federation = load("tables", {**settings, **split}, seed=0)
    except TableProblems:
        split = {} if "test_files" in settings else {"test_fraction": 0.2}
        federation = load("tables", {**settings, **split}, seed=0)
    tables = [client.table for client in federation if client.table is not None]
    times = Counter(name for table in tables for name in table.columns_there)
    named = {**settings, **split, "columns": "named"}
    if max(times.values(), default=0) > 1:
        with suppress(TableProblems):  # kinds that differ
            return load("tables", named, seed=0), named
    return federation, {**settings, **split, "columns": "own"}


def _relative(path: str, out: Path) -> str:
    return Path(os.path.relpath(Path(path).resolve(), out.parent.resolve())).as_posix()


def check_command(experiment: str, settings: list[str] | None, data_dir: Path | None, as_json: bool) -> None:
    """Say what an experiment's sites hold, which modules of the user's it runs, and all that is wrong with it."""
    with alone_on_stdout(as_json), _modules_named():
        checked = chosen_experiment(experiment, settings or [])
        with _all_problems():
            federation = checked.data.load(checked.seed, data_dir)
        if not as_json:
            _print_facts(federation)
        start(checked, federation=federation)
    if as_json:
        print_json(asdict(federation.facts))


def _print_facts(federation: Federation) -> None:
    header, *rows = federation.facts.rows()
    print_table(TextTable("", header, rows))
    for sentence in federation.facts.sentences():
        say(sentence)


@contextmanager
def _modules_named() -> Iterator[None]:
    """Say at the end, be it an error, which modules were imported for ``module:NAME``, and so run."""
    try:
        yield
    finally:
        if IMPORTED:
            say(f"check has run code of these modules: {', '.join(IMPORTED)}")


@contextmanager
def _all_problems() -> Iterator[None]:
    """Print every problem of tables, in place of the first alone."""
    try:
        yield
    except TableProblems as found:
        for problem in found.problems:
            say_whole(problem)
        number = len(found.problems)
        raise PerfedError(f"{number} problem{'s' if number > 1 else ''} in the tables") from None
