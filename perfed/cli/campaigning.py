"""What ``perfed sweep`` and ``perfed campaign`` do, and ``resume`` and ``report`` with what they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perfed.cli.choosing import check_one_word
from perfed.cli.comparing import done, raise_failed
from perfed.cli.console import alone_on_stdout, print_json, say, say_where
from perfed.cli.files import Files, command_line
from perfed.cli.options import Shown, Training
from perfed.cli.table import print_table
from perfed.cli.training import default_out, device_of, resumable, shared_settings
from perfed.errors import PerfedError
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import Experiment, find_experiment
from perfed.experiment.names import parse_names, parse_seeds
from perfed.experiment.overrides import override
from perfed.experiment.planned import read_campaign, swept
from perfed.experiment.study import Study
from perfed.machine import write_atomic
from perfed.report.campaign import Part, campaign_csv, campaign_rows, grids
from perfed.report.page.campaign import sweep_figures
from perfed.report.papers import latex_file
from perfed.run.directory import plain


def sweep_command(
    experiment: str,
    axis: str,
    settings: list[str] | None,
    methods: str,
    seeds: str,
    how: Training,
    show: Shown,
) -> None:
    """Compare methods for each of several values of a key."""
    check_one_word(methods, [experiment, axis, *(settings or [])])
    table = find_experiment(experiment)
    names = parse_names(methods or str(table.get("method", Experiment.model_fields["method"].default)), baselines=True)
    shared_settings(None, [axis])
    table = override(table, shared_settings(how.engine, settings), federated(names))
    key, planned = swept(table, axis, names, parse_seeds(seeds))
    _begin(how.out or default_out(f"sweep-{table.get('name', 'experiment')}"), planned, how, show, key)


def campaign_command(file: Path, settings: list[str] | None, how: Training, show: Shown) -> None:
    """Make the comparisons of a file."""
    planned = read_campaign(file, shared_settings(how.engine, settings))
    _begin(how.out or Path("runs") / file.stem, planned, how, show)


def _begin(out: Path, planned: Mapping[str, ComparisonSpec], how: Training, show: Shown, key: str = "") -> None:
    with alone_on_stdout(show.as_json):
        say(f"checking {len(planned)} comparisons on their data")
        campaign = Study.create(out, planned, how.data_dir, device_of(how.device), key)
        with resumable(out, how.data_dir, ray=how.ray):
            say_where("results", out)
            go_on(campaign, how, show)


def go_on(campaign: Study, how: Training, show: Shown) -> None:
    """Do the runs that are not finished, and say what came of all."""
    found, failed = done(campaign, how, show)
    page, parts = campaign.conclude(found)
    _show(campaign, parts, page, show, failed=[str(problem) for problem in failed])
    raise_failed(campaign, failed)


def report_campaign(directory: Path, files: Files, show: Shown) -> None:
    """Write a campaign's reports anew, print its tables, and write files."""
    files.check()
    with alone_on_stdout(show.as_json):
        campaign = Study.read(directory)
        page, parts = campaign.conclude(campaign.concluded())
        if not parts:
            raise PerfedError(f"{directory}: no run has started yet")
        if files.out is not None:
            write_atomic(files.out, page.read_text(encoding="utf-8"))
        written = files.write(
            lambda: _latex(campaign, parts),
            lambda: campaign_csv(parts, campaign.key),
            lambda: sweep_figures(parts, campaign.key),
        )
        for path in written:
            say_where("written", path)
        _show(campaign, parts, page, show, files=[str(path) for path in written])


def _latex(campaign: Study, parts: Sequence[Part]) -> str:
    """The tables for papers."""
    name = campaign.path.resolve().name
    if campaign.key:
        name = str(next(iter(campaign.comparisons.values())).table.get("name", name))
    comments = [f"table: {command_line()}", *(f"runs: {one.origin}" for one in campaign.comparisons.values())]
    return latex_file((grid.latex(name) for grid in grids(parts, campaign.key)), comments)


def _show(campaign: Study, parts: Sequence[Part], page: Path, show: Shown, **more: object) -> None:
    """Print the tables, the first sentence on each comparison, and where the report is."""
    if show.as_json:
        content = {"directory": campaign.path, "key": campaign.key, "table": campaign_rows(parts), "report": page}
        return print_json(plain({**content, **more}))
    for grid in grids(parts, campaign.key):
        print_table(grid.table)
    for part in parts:
        for sentence in part.sentences[:1]:
            say(f"{part.name}: {sentence}")
    say_where("report", page)
