"""The work of ``perfed export``, ``predict`` and ``join``: use the model of a site, or add a site to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perfed.cli.console import say, say_where, say_whole
from perfed.cli.options import Source, check_new, file_name
from perfed.client_model.card import card, is_card_of, shown_metrics
from perfed.client_model.export import FORMATS, export
from perfed.client_model.load import joined_sites, load_site
from perfed.client_model.site_model import DOMAIN, FACTS, SiteModel
from perfed.data.client import Client
from perfed.data.column import Column
from perfed.data.csv_text import csv_text
from perfed.data.federation import Federation
from perfed.data.names import compose_text, find_name
from perfed.data.new_client import new_client
from perfed.data.problems import raise_problems
from perfed.data.reading import read_arrays
from perfed.errors import PerfedError
from perfed.experiment.factory import open_run
from perfed.plugins import refuse_modules
from perfed.system import write_atomic
from perfed.tables.cells import clean_frame
from perfed.tables.files import read_table
from perfed.tables.joining import new_client_from_frame
from perfed.tables.kinds import read

_TARGET = "y"


def check_format(format_: str) -> None:
    """Refuse a format that is not in :data:`~perfed.client_model.export.FORMATS`."""
    if format_ not in FORMATS:
        raise PerfedError(f"--format {format_}: unknown format; allowed: {', '.join(FORMATS)}")


def write_model(model: SiteModel, file: Path, format_: str) -> None:
    """Write a site's model in one of the formats, and its card beside it; print the paths of both.

    A card of the same model, written with another format, is overwritten.

    Raises:
        PerfedError: the file of the card exists and has another text.
    """
    card_file = file.with_suffix(".md")
    if card_file.exists() and not is_card_of(model.facts, card_file.read_text(encoding="utf-8", errors="replace")):
        check_new(card_file)
    file.parent.mkdir(parents=True, exist_ok=True)
    results = export(model, file, next(name for name in FORMATS if name == format_))
    if results:
        say(f"largest difference to perfed's own answers: {results['largest_difference']:.2g}")
    say_where("model", file)
    say_where("card", card_file)


def predict(model: SiteModel, file: Path, out: Path) -> None:
    """Predict the rows of a file with the model of a site; write their ids or numbers, and the predictions."""
    frame, notes = read_table(file)
    if not len(frame):
        raise PerfedError(f"{file}: there are no rows")
    if model.table is None:
        frame = _parse_numbers(frame, file, () if model.facts["domains"] is None else (DOMAIN,))
    else:
        notes += [
            f"column '{name}': {n} rows hold a category that training never saw"
            for name, n in model.table.unseen(frame).items()
        ]
    if not model.has_probabilities:
        header, columns = ["prediction"], [model.predict(frame).reshape(len(frame), -1)[:, 0]]
    else:
        probabilities = model.predict_proba(frame)
        header = ["prediction", *(f"probability of {label}" for label in model.classes_)]
        columns = [model.classes_[probabilities.argmax(1)], *probabilities.T]
    ids = [] if model.table is None else [name for name in frame.columns if compose_text(name) in model.table.ids]
    header = [*(ids or ["row"]), *header]
    columns = [*(frame[name].to_numpy(object) for name in ids), *([] if ids else [frame.index.to_numpy()]), *columns]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, csv_text([header, *zip(*(column.tolist() for column in columns), strict=True)]))
    for note in notes:
        say_whole(f"{file}: {note}", style="yellow")
    say_where(f"{len(frame)} rows", out)


def join(source: Source, file: Path) -> None:
    """Train and save the model of a new site for a finished run; no other file of the run changes."""
    site = source.site
    folder = source.directory / "joined" / file_name(site)
    if find_name(site, joined_sites(source.directory)) is not None or (folder / FACTS).exists():
        raise PerfedError(f"{folder}: site '{site}' has joined already")
    with refuse_modules(source.directory, source.trust):
        run = open_run(source.directory, data_dir=source.data_dir)
    model = run.join(_build_newcomer(run.federation, site, file, run.seed))
    model.save(folder)
    write_atomic(folder / "card.md", card(model.facts))
    for name, value, interval in shown_metrics(model.facts["metrics"]):
        say(f"{name}: {value} (95 %: {interval})")
    say_where(f"site '{site}'", folder)


def model_of(source: Source) -> SiteModel:
    """Return the model of a site of the run, or of one that has joined it."""
    joined = joined_sites(source.directory)
    if (name := find_name(source.site, joined)) is not None:
        return load_site(joined[name], source.trust)
    with refuse_modules(source.directory, source.trust):
        return open_run(source.directory, data_dir=source.data_dir, site=source.site).site(source.site)


def _build_newcomer(federation: Federation, site: str, file: Path, seed: int) -> Client:
    if file.suffix == ".npz":
        return new_client(federation, site, read_arrays(file), seed)
    frame, _ = read_table(file)
    if any(client.table is not None for client in federation):
        return new_client_from_frame(federation, site, frame, str(file), seed)
    if _TARGET not in frame.columns:
        raise PerfedError(f"{file}: no column '{_TARGET}', the target; found: {', '.join(map(str, frame.columns))}")
    texts = any(isinstance(label, str) for label in federation.classes or ())
    numbers = _parse_numbers(frame, file, (_TARGET,) if texts else ())
    y = numbers.pop(_TARGET)
    if federation.num_classes is not None:
        y = y.to_numpy(str) if texts else y.astype(np.int64)
    arrays: dict[str, Any] = {"y": y}
    if federation.num_domains and DOMAIN in numbers.columns:
        arrays["domain"] = numbers.pop(DOMAIN).astype(np.int64)
    names = federation.clients[0].feature_names
    return new_client(federation, site, {**arrays, "x": numbers.to_numpy() if names is None else numbers}, seed)


def _parse_numbers(frame: Any, file: Path, excluded: tuple[str, ...]) -> Any:
    """Return a data frame whose columns, except ``excluded``, are parsed as numbers."""
    parsed, problems = frame.copy(), []
    cleaned = clean_frame(frame)
    for position, name in enumerate(frame.columns):
        if name not in excluded:
            parsed[name], column_problems = read(cleaned.iloc[:, position], Column(name=str(name), kind="number"))
            problems += [f"{file}: {problem}" for problem in column_problems]
    raise_problems(problems)
    return parsed
