"""The commands on several comparisons: ``perfed sweep | campaign | leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.commands import app
from perfed.cli.options import (
    ComparedOption,
    DataOption,
    DeviceOption,
    EngineOption,
    ExperimentName,
    JobsOption,
    JsonOption,
    OutOption,
    RayOption,
    Settings,
    Shown,
    Training,
    VerboseOption,
    Workers,
    WorkersOption,
)


@app.command(
    "sweep", epilog="Example: perfed sweep digits-label-skew samples=24,48 --methods local,fedpac --seeds 0..2"
)
def sweep_command(
    experiment: ExperimentName,
    axis: Annotated[
        str, typer.Argument(metavar="KEY=V1,V2,...", help="what is varied; commas in brackets are of a value")
    ],
    settings: Settings = None,
    methods: ComparedOption = "",
    seeds: Annotated[str, typer.Option("--seeds", help="as in compare")] = "0",
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare methods (else the experiment's) for each of several values of one key: a table and a figure."""
    from perfed.cli import campaigning

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine, jobs), device, data_dir, out, ray, jobs)
    campaigning.sweep_command(experiment, axis, settings, methods, seeds, how, Shown(as_json, verbose=verbose))


@app.command("campaign", epilog="Example: perfed campaign papers.toml --out runs/papers --jobs 2")
def campaign_command(
    file: Annotated[Path, typer.Argument(help="a .toml file of comparisons", autocompletion=complete.campaigns)],
    settings: Settings = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME if not given")] = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make the comparisons of a file one after the other; what is done is skipped, what is new is added."""
    from perfed.cli import campaigning

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine, jobs), device, data_dir, out, ray, jobs)
    campaigning.campaign_command(file, settings, how, Shown(as_json, verbose=verbose))


@app.command("leaderboard", epilog="Example: perfed leaderboard flamby-heart --out boards/heart --jobs 2")
def leaderboard_command(
    name: Annotated[
        str,
        typer.Argument(
            help="a leaderboard that others published ('perfed list leaderboards')",
            autocompletion=complete.leaderboards,
        ),
    ],
    settings: Settings = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", metavar="NAME", help="a row to run; repeat for more (default: all)")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="how many of each row; else the board's")] = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    ray_address: RayOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a published leaderboard's protocol: theirs beside ours, ours on top; with the same --out what is left."""
    from perfed.cli import boards

    ray = Workers(workers, ray_address)
    how = Training(ray.engine(engine, jobs), device, data_dir, out, ray, jobs)
    boards.leaderboard_command(name, settings, rows, seeds, how, Shown(as_json))
