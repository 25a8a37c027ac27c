"""The commands that train: ``perfed run | resume | compare | blend | tune | sweep | campaign | leaderboard``.

Modules that need torch are imported when a command runs, so that help and completion do not wait for torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.app import Without, app
from perfed.cli.console import reserve_stdout
from perfed.cli.options import (
    ComparedOption,
    ExperimentName,
    SeedsOption,
    Settings,
    Shown,
    Training,
    default_out,
    with_seed,
)
from perfed.errors import PerfedError
from perfed.plugins import refuse_modules

InTurn = Annotated[Training, Without("jobs")]
JsonAlone = Annotated[Shown, Without("all_metrics", "verbose")]
NoMetrics = Annotated[Shown, Without("all_metrics")]


@app.command("run", epilog="Example: perfed run digits-label-skew --method fedpac rounds=20 --out runs/one")
def run_command(
    experiment: ExperimentName,
    settings: Settings = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="in place of the experiment's method", autocompletion=complete.methods),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="seed of data, initial values and mini-batches")] = None,
    *,
    how: InTurn,
    show: NoMetrics,
) -> None:
    """Train one method and write a run directory with a report."""
    from perfed.cli.execution import (
        chosen_experiment,
        create_run,
        device_of,
        finish_run,
        handle_interruption,
        settings_of,
    )
    from perfed.experiment.start import start

    assignments = [*settings_of(how, settings), *([] if method is None else [f'method="{method}"'])]
    checked = chosen_experiment(experiment, with_seed(assignments, seed))
    out = how.out or default_out(checked.name)
    with reserve_stdout(show.as_json), handle_interruption(out, how):
        make = partial(start, checked, data_dir=how.data_dir, out=out, device=device_of(how))
        finish_run(partial(create_run, make, out), out, checked.name, checked.method, show)


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
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="a larger number of rounds than the run has")
    ] = None,
    *,
    how: Annotated[Training, Without("engine", "out")],
    show: Shown,
) -> None:
    """Resume an interrupted run or study with bit-identical results, or extend a finished run to more rounds."""
    from perfed.cli import execution
    from perfed.experiment.study import Study
    from perfed.run.directory import read_marker

    rounds, kind = _parse_rounds(settings or []), read_marker(directory)[0]
    if rounds is not None and kind:
        raise PerfedError(
            f"{directory}: only a run can go on to more rounds; give each run to resume by itself, all seeds of all "
            f"methods that are to be compared, or begin another comparison with rounds={rounds}"
        )
    if how.jobs > 1 and not kind:
        raise PerfedError(f"{directory}: is one run, if any; --jobs is for comparisons, searches and campaigns")
    with (
        refuse_modules(directory, how.trust),
        execution.handle_interruption(directory, how, resumed=True),
        reserve_stdout(show.as_json),
    ):
        if kind:
            study = Study.read(directory)
            study.check(execution.resources_of(how))
            execution.finish(study, how, show)
        else:
            execution.resume_run(directory, rounds, how, show)


def _parse_rounds(settings: list[str]) -> int | None:
    """Return the value of ``rounds=N`` in ``settings``; ``None`` if they are empty, an error for any other setting."""
    rounds = None
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if key != "rounds" or not equals or not value.isdigit():
            raise PerfedError(f"'{assignment}': a run goes on with the settings that it has; allowed: rounds=NUMBER")
        rounds = int(value)
    return rounds


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
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="'0..2' (inclusive), '0,3,5' or '7'; unless given, 0")
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            "--extend",
            help="a comparison's directory, to which --methods and --seeds are added; what is done stays",
            autocompletion=complete.run_directories,
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--fail-if-worse-than-local",
            help="exit code 3 where the verdict says that a federated method is behind the best that needs none",
        ),
    ] = False,
    *,
    how: Training,
    show: Shown,
) -> None:
    """Train several methods over several seeds: one table, one report, a verdict at the end."""
    from perfed.cli import execution
    from perfed.experiment.study import Study

    if extend is not None:
        study = execution.extend_runs(extend, experiment, settings, methods, seeds, how)
    elif experiment is None:
        raise PerfedError("an experiment is needed: a shipped one ('perfed list experiments') or a .toml file")
    else:
        comparison = execution.asked_comparison(experiment, settings, methods, "0" if seeds is None else seeds, how)
        out = how.out or default_out(str(comparison.table.get("name", "comparison")))
        study = Study.create(out, comparison, execution.resources_of(how))
    if gate:
        execution.check_gate(study)
    conclusions = execution.run_study(study, how, show)
    if gate:
        execution.end_if_worse(conclusions[""])


@app.command("blend", epilog="Example: perfed blend digits-label-skew --methods local,fedavg-ft --folds 5 --jobs 2")
def blend_command(
    experiment: ExperimentName,
    settings: Settings = None,
    methods: ComparedOption = "",
    seeds: SeedsOption = "0",
    folds: Annotated[
        int | None,
        typer.Option(
            "--folds", help="number of folds of the training rows, for the weights; by default that of the experiment"
        ),
    ] = None,
    *,
    how: Training,
    show: Shown,
) -> None:
    """Mix several methods and own models at each site, so that none is worse off: compare with the row blend."""
    from perfed.cli import execution

    execution.check_one_word(methods, [experiment, *(settings or [])])
    assignments = [*(settings or []), *([] if folds is None else [f"blend.folds={folds}"])]
    comparison = execution.asked_comparison(experiment, assignments, execution.with_blend(methods), seeds, how)
    out = how.out or default_out(f"blend-{comparison.table.get('name', 'experiment')}")
    execution.begin(out, comparison, how, show)


@app.command("tune", epilog="Example: perfed tune digits-label-skew --methods local,fedpac --grid lr=1e-3,1e-2")
def tune_command(
    experiment: ExperimentName,
    settings: Settings = None,
    methods: Annotated[
        str,
        typer.Option("--methods", help="names separated by commas", autocompletion=complete.several_methods),
    ] = "",
    grid: Annotated[list[str] | None, typer.Option("--grid", help="key=v1,v2,...; may be given several times")] = None,
    seeds: SeedsOption = "0",
    *,
    how: Training,
    show: JsonAlone,
) -> None:
    """Choose settings on validation data only, with the same budget for every method."""
    from perfed.cli import execution
    from perfed.experiment.search import Search

    comparison = execution.asked_comparison(experiment, settings, methods, seeds, how, baselines=False)
    out = how.out or default_out(f"tune-{comparison.table.get('name', 'experiment')}")
    execution.begin(out, Search.from_grid(comparison, grid or []), how, show)


@app.command(
    "sweep", epilog="Example: perfed sweep digits-label-skew samples=24,48 --methods local,fedpac --seeds 0..2"
)
def sweep_command(
    experiment: ExperimentName,
    axis: Annotated[
        str,
        typer.Argument(
            metavar="KEY=V1,V2,...", help="settings to vary, as key=v1,v2; commas in brackets belong to a value"
        ),
    ],
    settings: Settings = None,
    methods: ComparedOption = "",
    seeds: SeedsOption = "0",
    *,
    how: Training,
    show: NoMetrics,
) -> None:
    """Compare methods (else the experiment's) for each of several values of one key: a table and a figure."""
    from perfed.cli import execution
    from perfed.experiment.config import find_experiment
    from perfed.experiment.planned import plan_sweep

    execution.check_one_word(methods, [experiment, axis, *(settings or [])])
    execution.shared_settings(how, [axis])
    compared_methods = methods or execution.method_in(find_experiment(experiment))
    comparison = execution.asked_comparison(experiment, settings, compared_methods, seeds, how)
    key, planned = plan_sweep(comparison.table, axis, comparison.methods, comparison.seeds)
    out = how.out or default_out(f"sweep-{comparison.table.get('name', 'experiment')}")
    execution.begin(out, planned, how, show, key)


@app.command("campaign", epilog="Example: perfed campaign papers.toml --out runs/papers --jobs 2")
def campaign_command(
    file: Annotated[Path, typer.Argument(help="a .toml file of comparisons", autocompletion=complete.campaigns)],
    settings: Settings = None,
    *,
    how: Annotated[Training, Without("out")],
    out: Annotated[Path | None, typer.Option("--out", help="directory for results; runs/NAME if not given")] = None,
    show: NoMetrics,
) -> None:
    """Run the comparisons of a file one by one; finished ones are skipped, and new ones are added."""
    from perfed.cli import execution
    from perfed.experiment.planned import read_campaign

    planned = read_campaign(file, execution.shared_settings(how, settings))
    execution.begin(out or Path("runs") / file.stem, planned, how, show)


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
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="number of seeds of each row; by default that of the leaderboard"),
    ] = None,
    *,
    how: Training,
    show: JsonAlone,
) -> None:
    """Run a published leaderboard's protocol: theirs beside ours, ours on top; with the same --out what is left."""
    from perfed.cli import execution
    from perfed.experiment.published import Leaderboard

    board = Leaderboard.from_names(name, seeds, execution.shared_settings(how, settings), rows or ())
    execution.begin(how.out or default_out(name), board, how, show)
