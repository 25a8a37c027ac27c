"""The preview that ``perfed site preview`` prints, and the administrator's consent to it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfed.cli.console import print_json, say_whole
from perfed.errors import PerfedError, shorten_list
from perfed.sites.deploy.candidates import format_title
from perfed.sites.deploy.preview import ANY, Preview, consent, consented
from perfed.sites.deploy.site_agent import SiteSettings

YES = "yes"
"""The answer with which an administrator agrees."""
_MEANS = {"named": "columns that the study names and this site has"}


def preview(data: Path, study: str, name: str, as_json: bool) -> None:
    """Print everything that a site would send in the study."""
    site_preview = Preview.of(name, data, study)
    if as_json:
        return print_json(site_preview.plain())
    for line in _describe_preview(site_preview):
        say_whole(line)


def confirm(settings: SiteSettings, study: Path | None, answer: str | None) -> None:
    """Check that the administrator agrees, or has agreed before, to what the site would send.

    Args:
        settings: the settings of the site.
        study: the file of its study.
        answer: the value of ``--consent``: "yes", "any" or the hash of the preview; ``None``: ask at the terminal.

    Raises:
        PerfedError: the administrator has not agreed.
    """
    if settings.study is None:
        if answer != ANY and consented(settings.folder) != ANY:
            raise PerfedError("with --any-study nobody knows what would leave; --consent any agrees to all of it")
        return _record_consent(settings.folder, ANY)
    site_preview = Preview.of(settings.name, settings.data, settings.study)
    words = ["perfed", "site", "preview", "--data", str(settings.data), "--study", str(study), "--name", settings.name]
    command = f"'{shlex.join(words)}'"
    digest = site_preview.digest
    if consented(settings.folder) != digest and answer not in (YES, ANY, digest):
        if answer is not None:
            raise PerfedError(f"--consent {answer}: what would leave has the hash {digest}; {command} shows it")
        if not sys.stdin.isatty():
            raise PerfedError(
                f"nobody has agreed to what would leave: look at it with {command}, and add --consent HASH"
            )
        for line in (*_summarize_preview(site_preview), f"all of it: {command}"):
            say_whole(line)
        if input("Type yes to agree: ").strip() != YES:
            raise PerfedError("you have not agreed; nothing has left")
    _record_consent(settings.folder, digest)


def _record_consent(folder: Path, digest: str) -> None:
    if consented(folder) != digest:
        consent(folder, digest)


def _summarize_preview(site_preview: Preview) -> Iterator[str]:
    """Yield a preview in four lines, and the doubts."""
    yield _format_title_line(site_preview)
    metadata, columns = site_preview.told, site_preview.told["columns"] or []
    values = sum(len(column["levels"]) for column in columns)
    parts = [f"classes {shorten_list(metadata['classes'])}" if metadata["classes"] else f"task {metadata['task']}"]
    parts += [f"names and kinds of {len(columns)} columns, {values} values of them"] if columns else []
    yield f"  before training: {'; '.join(parts)}"
    yield f"  once all have agreed: how many rows you have; {_describe_inputs(site_preview)}"
    entries = f"{len(site_preview.entries)} entries, at most {site_preview.bytes} bytes a reply"
    yield f"  in a round: {entries}; {_describe_metrics(site_preview)}"
    yield from _describe_doubts(site_preview)


def _describe_preview(site_preview: Preview) -> Iterator[str]:
    """Yield the lines of a complete preview."""
    yield _format_title_line(site_preview)
    yield "before training:"
    for name, value in site_preview.told.items():
        if name != "columns" and value is not None:
            yield f"  {_MEANS.get(name, name)}: {_format_value(value)}"
    for column in site_preview.told["columns"] or ():
        yield f"  column {column['name']}: {_describe_column(column)}"
    yield "once all have agreed, as if there were no other site:"
    if site_preview.facts is None:
        yield f"  how many rows you have; all else, and the shapes below, depend on the others ({site_preview.why})"
    else:
        for name, split in site_preview.facts["splits"].items():
            counts = {key: value for key, value in split.items() if value is not None and value != []}
            yield f"  {name}: {_format_value(counts)}"
        yield f"  {_describe_inputs(site_preview)}; a checksum of your rows"
    yield f"in training (at most {site_preview.bytes} bytes a reply):"
    for entry in site_preview.entries:
        shape = "x".join("?" if length is None else str(length) for length in entry["shape"]) or "1"
        yield f"  {entry['name']}: {shape} {entry['dtype']}"
    for name in site_preview.summed:
        yield f"  under masks, of which the server gets the sum over the sites: {name.removeprefix(':')}"
    if site_preview.summed:
        yield f"  {_describe_keys(site_preview)}"
    yield f"  {_describe_metrics(site_preview)} of your model on your test rows"
    yield "and your site's name, and a fixed sentence where something fails"
    yield from _describe_doubts(site_preview)
    yield f"hash of all this, for --consent: {site_preview.digest}"


def _describe_doubts(site_preview: Preview) -> Iterator[str]:
    for line in site_preview.doubts:
        yield f"to mind, and not told to anybody: {line}"


def _describe_keys(site_preview: Preview) -> str:
    secure = site_preview.experiment.secure_aggregation
    if secure is None or secure.keys is None:
        return "the study has no keys of the sites: a dishonest server could put its own in their place and see through"
    key = secure.keys.get(site_preview.site, "not there")
    return f"this site checks the keys of the other sites; its own is {key} in the study ('perfed site key' prints it)"


def _describe_metrics(site_preview: Preview) -> str:
    if not site_preview.metrics:
        return "no loss and no metric"
    noisy = site_preview.experiment.privacy is not None
    return f"the metrics {', '.join(site_preview.metrics)}{', with noise,' if noisy else ''}"


def _format_title_line(site_preview: Preview) -> str:
    study = site_preview.experiment
    details = f"{format_title(study)}, {study.rounds} rounds"
    return f"what would leave site {site_preview.site} in study {study.name} ({details}):"


def _describe_inputs(site_preview: Preview) -> str:
    if site_preview.facts is None or site_preview.facts["feature_names"] is None:
        return "how many inputs they become"
    names = site_preview.facts["feature_names"]
    return f"{len(names)} inputs, and in the place of their names one hash"


def _describe_column(column: Mapping[str, Any]) -> str:
    flags = {"constant": "constant", "missing": "values are missing", "binary": "0 and 1 alone"}
    words = [str(column["kind"]), *(text for key, text in flags.items() if column[key])]
    return ", ".join(words) + (f": {', '.join(column['levels'])}" if column["levels"] else "")


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_format_value(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
