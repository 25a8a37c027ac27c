"""What ``perfed site preview`` does, and how a site's administrator agrees to what leaves."""

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
"""What an administrator types."""
_MEANS = {"named": "columns that the study names and this site has"}


def preview(data: Path, study: str, name: str, as_json: bool) -> None:
    """Show all that would leave a site."""
    shown = Preview.of(name, data, study)
    if as_json:
        return print_json(shown.plain())
    for line in _whole(shown):
        say_whole(line)


def confirm(settings: SiteSettings, study: Path | None, given: str | None) -> None:
    """Go on only if the administrator agrees to what leaves, or has done so before.

    Args:
        settings: of the site.
        study: the file with its study.
        given: the option: "yes", "any", the hash of what leaves, or nothing, and then whoever is at the terminal is
            asked.

    Raises:
        PerfedError: nobody agrees.
    """
    if settings.study is None:
        if given != ANY and consented(settings.folder) != ANY:
            raise PerfedError("with --any-study nobody knows what would leave; --consent any agrees to all of it")
        return _keep(settings.folder, ANY)
    shown = Preview.of(settings.name, settings.data, settings.study)
    words = ["perfed", "site", "preview", "--data", str(settings.data), "--study", str(study), "--name", settings.name]
    look = f"'{shlex.join(words)}'"
    if consented(settings.folder) != shown.digest and given not in (YES, ANY, shown.digest):
        if given is not None:
            raise PerfedError(f"--consent {given}: what would leave has the hash {shown.digest}; {look} shows it")
        if not sys.stdin.isatty():
            raise PerfedError(f"nobody has agreed to what would leave: look at it with {look}, and add --consent HASH")
        for line in (*_short(shown), f"all of it: {look}"):
            say_whole(line)
        if input("Type yes to agree: ").strip() != YES:
            raise PerfedError("you have not agreed; nothing has left")
    _keep(settings.folder, shown.digest)


def _keep(folder: Path, digest: str) -> None:
    if consented(folder) != digest:
        consent(folder, digest)


def _short(shown: Preview) -> Iterator[str]:
    """What would leave, in four lines."""
    yield _head(shown)
    told, columns = shown.told, shown.told["columns"] or []
    values = sum(len(column["levels"]) for column in columns)
    said = [f"classes {shorten_list(told['classes'])}" if told["classes"] else f"task {told['task']}"]
    said += [f"names and kinds of {len(columns)} columns, {values} values of them"] if columns else []
    yield f"  before training: {'; '.join(said)}"
    yield f"  once all have agreed: how many rows you have; {_inputs(shown)}"
    entries = f"{len(shown.entries)} entries, at most {shown.bytes} bytes a reply"
    yield f"  in a round: {entries}; {_metrics(shown)}"
    yield from _describe_doubts(shown)


def _whole(shown: Preview) -> Iterator[str]:
    yield _head(shown)
    yield "before training:"
    for name, value in shown.told.items():
        if name != "columns" and value is not None:
            yield f"  {_MEANS.get(name, name)}: {_value(value)}"
    for column in shown.told["columns"] or ():
        yield f"  column {column['name']}: {_column(column)}"
    yield "once all have agreed, as if there were no other site:"
    if shown.facts is None:
        yield f"  how many rows you have; all else, and the shapes below, depend on the others ({shown.why})"
    else:
        for name, split in shown.facts["splits"].items():
            counts = {key: value for key, value in split.items() if value is not None and value != []}
            yield f"  {name}: {_value(counts)}"
        yield f"  {_inputs(shown)}; a checksum of your rows"
    yield f"in training (at most {shown.bytes} bytes a reply):"
    for entry in shown.entries:
        shape = "x".join("?" if length is None else str(length) for length in entry["shape"]) or "1"
        yield f"  {entry['name']}: {shape} {entry['dtype']}"
    for name in shown.summed:
        yield f"  under masks, of which the server gets the sum over the sites: {name.removeprefix(':')}"
    if shown.summed:
        yield f"  {_describe_keys(shown)}"
    yield f"  {_metrics(shown)} of your model on your test rows"
    yield "and your site's name, and a fixed sentence where something fails"
    yield from _describe_doubts(shown)
    yield f"hash of all this, for --consent: {shown.digest}"


def _describe_doubts(shown: Preview) -> Iterator[str]:
    for line in shown.doubts:
        yield f"to mind, and not told to anybody: {line}"


def _describe_keys(shown: Preview) -> str:
    secure = shown.experiment.secure_aggregation
    if secure is None or secure.keys is None:
        return "the study has no keys of the sites: a dishonest server could put its own in their place and see through"
    key = secure.keys.get(shown.site, "not there")
    return f"this site checks the keys of the other sites; its own is {key} in the study ('perfed site key' prints it)"


def _metrics(shown: Preview) -> str:
    if not shown.metrics:
        return "no loss and no metric"
    noisy = shown.experiment.privacy is not None
    return f"the metrics {', '.join(shown.metrics)}{', with noise,' if noisy else ''}"


def _head(shown: Preview) -> str:
    study = shown.experiment
    return f"what would leave site {shown.site} in study {study.name} ({format_title(study)}, {study.rounds} rounds):"


def _inputs(shown: Preview) -> str:
    if shown.facts is None or shown.facts["feature_names"] is None:
        return "how many inputs they become"
    names = shown.facts["feature_names"]
    return f"{len(names)} inputs, and in the place of their names one hash"


def _column(column: Mapping[str, Any]) -> str:
    flags = {"constant": "constant", "missing": "values are missing", "binary": "0 and 1 alone"}
    said = [str(column["kind"]), *(words for key, words in flags.items() if column[key])]
    return ", ".join(said) + (f": {', '.join(column['levels'])}" if column["levels"] else "")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_value(held)}" for key, held in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
