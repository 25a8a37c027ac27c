"""The commands on a site's own model: ``perfed export | predict | join``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.commands import app
from perfed.cli.options import DataOption, RunArgument, SiteOption, TrustOption, check_new, file_name


@app.command("export", epilog="Example: perfed export runs/one --site 003 --format onnx")
def export_command(
    directory: RunArgument,
    site: SiteOption,
    format_: Annotated[str, typer.Option("--format", help="onnx, pt2 or safetensors")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="file; RUN/models/SITE.FORMAT if not given")] = None,
    data_dir: DataOption = None,
    trust: TrustOption = False,
) -> None:
    """Write one site's own model for use without perfed, and a model card."""
    file = out or directory / "models" / f"{file_name(site)}.{format_}"
    check_new(file)
    from perfed.cli import sites

    sites.export_command(sites.Source(directory, site, data_dir, trust), format_, file)


@app.command("predict", epilog="Example: perfed predict runs/one --site north new.csv --out proba.csv")
def predict_command(
    directory: RunArgument,
    file: Annotated[Path, typer.Argument(help="table of new rows, with the site's columns in any order")],
    site: SiteOption,
    out: Annotated[
        Path, typer.Option("--out", help="CSV file for predictions and probabilities, behind the rows' ids, or numbers")
    ],
    data_dir: DataOption = None,
    trust: TrustOption = False,
) -> None:
    """Write what one site's own model says of new rows."""
    check_new(out)
    from perfed.cli import sites

    sites.predict_command(sites.Source(directory, site, data_dir, trust), file, out)


@app.command("join", epilog="Example: perfed join runs/one west.csv --site west")
def join_command(
    directory: RunArgument,
    file: Annotated[Path, typer.Argument(help="the new site's table, or arrays x and y in a .npz file")],
    site: SiteOption,
    data_dir: DataOption = None,
) -> None:
    """Let a new site train its own part of the model of a finished run, of which no other file changes."""
    from perfed.cli import sites

    sites.join_command(directory, file, site, data_dir)
