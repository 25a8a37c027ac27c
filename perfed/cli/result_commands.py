"""The commands that use the results of runs: ``perfed report | export | predict | join``.

Modules that need torch are imported when a command runs, so that help and completion do not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.app import Without, app
from perfed.cli.options import Files, FormatOption, Shown, Source, check_new, file_name


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
            help="method with which others are compared; by default the best that needs no federation",
            autocompletion=complete.methods,
        ),
    ] = None,
    *,
    files: Files,
    communication: Annotated[
        float | None, typer.Option("--communication", help="seconds per exchange, in place of those of the runs")
    ] = None,
    show: Annotated[Shown, Without("verbose")],
) -> None:
    """Write the report of runs and comparisons again, print tables and verdict, and write files for papers."""
    from perfed.cli import reports

    reports.report_all(directories, reference, communication, files, show)


@app.command("export", epilog="Example: perfed export runs/one --site 003 --format onnx")
def export_command(
    source: Source,
    format_: FormatOption = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="file; RUN/models/SITE.FORMAT if not given")] = None,
) -> None:
    """Write the personal model of a site in a format for use without perfed, and a model card."""
    file = out or source.directory / "models" / f"{file_name(source.site)}.{format_}"
    check_new(file)
    from perfed.cli import sites

    sites.check_format(format_)
    sites.write_model(sites.model_of(source), file, format_)


@app.command("predict", epilog="Example: perfed predict runs/one --site north new.csv --out proba.csv")
def predict_command(
    source: Source,
    file: Annotated[Path, typer.Argument(help="table of new rows, with the site's columns in any order")],
    out: Annotated[
        Path,
        typer.Option("--out", help="CSV file of predictions and probabilities, after the ids or numbers of the rows"),
    ],
) -> None:
    """Predict new rows with the personal model of a site, and write the predictions."""
    check_new(out)
    from perfed.cli import sites

    sites.predict(sites.model_of(source), file, out)


@app.command("join", epilog="Example: perfed join runs/one west.csv --site west")
def join_command(
    source: Source,
    file: Annotated[Path, typer.Argument(help="the new site's table, or arrays x and y in a .npz file")],
) -> None:
    """Train the personal parameters of a new site for a finished run; no other file of the run changes."""
    from perfed.cli import sites

    sites.join(source, file)
