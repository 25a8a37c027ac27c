"""The commands that get the files of data sets: ``perfed data list | get | where``; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perfed.cli import complete
from perfed.cli.app import App, app
from perfed.cli.console import print_json, reserve_stdout, say, say_whole
from perfed.cli.index import index
from perfed.cli.options import DataOption, JsonOption
from perfed.data.files import SHIPPED, data_folders, find_file, own_folder
from perfed.data.originals.sources import SOURCES, Source, find_source
from perfed.errors import PerfedError, suggest_name

data_app = App(
    no_args_is_help=True, help="Get the files of data sets: from where, under which terms, with one command."
)
app.add_typer(data_app, name="data")
Names = Annotated[list[str], typer.Argument(help="data sets, or experiments", autocompletion=complete.sources)]


@data_app.command("list", epilog="Example: perfed data list")
def list_command(data_dir: DataOption = None, as_json: JsonOption = False) -> None:
    """List the data sets that can be downloaded: size, licence and checksums, and why others cannot be."""
    facts = {name: _describe_source(source, data_dir) for name, source in SOURCES.items()}
    if as_json:
        return print_json(facts)
    for name, source in SOURCES.items():
        say_whole(f"{name}: {source.title}")
        for line in _format_source(source, data_dir):
            say_whole(f"  {line}")
    say("Data sets and experiments that are not named here need no file, or several of these: perfed show NAME")


@data_app.command("where", epilog="Example: perfed data where mnist")
def where_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="data sets, or experiments", autocompletion=complete.sources)
    ] = None,
    data_dir: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the paths of the files of data sets; without names, the folders that are searched and the files in them."""
    wanted = _resolve_sources(names or [])
    if not names:
        wanted = [name for name, source in SOURCES.items() if _find_source_file(source, data_dir)]
    places = {name: str(find_file(SOURCES[name].file, data_dir)) for name in wanted if SOURCES[name].file}
    if as_json:
        folders = [str(folder) for folder in data_folders(data_dir)]
        return print_json({"folders": folders, "shipped": str(SHIPPED), "files": places})
    if not names:
        for number, folder in enumerate(data_folders(data_dir), 1):
            say_whole(f"{number}. {folder}{'' if folder.is_dir() else ' (no such folder)'}")
        say_whole(f"{len(data_folders(data_dir)) + 1}. {SHIPPED} (comes with perfed)")
    for name, place in places.items():
        say_whole(f"{name}: {place}")


@data_app.command("get", epilog="Example: perfed data get mnist usps")
def get_command(
    names: Names,
    given: Annotated[
        list[Path] | None,
        typer.Option("--from", help="an original that you have, or a folder of them; may be repeated"),
    ] = None,
    mirror: Annotated[
        str, typer.Option("--mirror", help="address of a folder that has NAME/FILE, in place of the publishers'")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="create a file again that exists already")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="folder for the files; PERFED_DATA or ~/.cache/perfed if not given"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download the originals of data sets, check them, and make the files that perfed reads."""
    wanted, own = _resolve_sources(names), given or []
    for path in own:
        if not path.exists():
            raise PerfedError(f"--from {path}: no such file")
    if own:
        from perfed.data.originals.making import find_unused

        for path in find_unused(own, [SOURCES[name] for name in wanted]):
            known = [part for name in wanted for o in SOURCES[name].originals for part in (o.name, *o.members)]
            raise PerfedError(f"--from {path}: none of the originals: {', '.join(known[:6]) or 'there are none'}")
    with reserve_stdout(as_json):
        paths = {name: _prepare_file(name, own, mirror, again, data_dir) for name in wanted}
    if as_json:
        print_json(paths)


def _prepare_file(name: str, given: list[Path], mirror: str, again: bool, data_dir: Path | None) -> str:
    """Return the path of the file of a source, which is created if it is missing or ``again`` is set."""
    from perfed.data.originals.making import collect_originals, convert_originals, hash_arrays, write_arrays

    source = SOURCES[name]
    if source.why_not:
        raise PerfedError(f"{name}: no command makes it: {source.why_not}")
    place = _find_source_file(source, data_dir)
    if place is not None and not again:
        say_whole(f"{name}: {place} (is there; --again makes it again)")
        return str(place)
    files = collect_originals(name, source, given, own_folder() / "originals", mirror, say_whole)
    arrays = convert_originals(name, source, files)
    if not source.file:
        say_whole(f"{name}: is where its own program keeps it")
        return ""
    target = data_folders(data_dir)[0] / source.file
    write_arrays(target, arrays)
    same = {"": "", hash_arrays(arrays): "; the arrays that perfed's results were measured on"}
    say_whole(f"{name}: {target}{same.get(source.contents, '; not quite the arrays of perfed’s own results')}")
    if source.remark:
        say(f"  {source.remark}")
    return str(target)


def _resolve_sources(names: list[str]) -> list[str]:
    """Return the names of the sources that the data sets, experiments and sources ``names`` need, without duplicates.

    Raises:
        PerfedError: if a name is unknown, or needs no file.
    """
    found: dict[str, None] = {}
    for name in names:
        key = name.casefold()
        if key in SOURCES:
            found[key] = None
            continue
        items = [i for what in ("datasets", "experiments", "leaderboards") for i in index()[what] if i["name"] == key]
        if not items:
            raise PerfedError(f"no data are called '{name}'{suggest_name(key, SOURCES)}; see 'perfed data list'")
        makers = [maker for item in items for file in item["files"] if (maker := find_source(file)) is not None]
        if not makers:
            raise PerfedError(f"'{name}' needs no file of perfed's; 'perfed show {name}' says what it needs")
        for own, source in makers:
            if source.why_not and len(makers) > 1:  # the others are of use without it
                say(f"{own}: no command makes it: {source.why_not}")
            else:
                found[own] = None
    return list(found)


def _find_source_file(source: Source, data_dir: Path | None) -> Path | None:
    """Return the path of the file of a source; ``None`` if it is not found, or the source has no file."""
    places = [folder / source.file for folder in (*data_folders(data_dir), SHIPPED)] if source.file else []
    return next((place for place in places if place.is_file()), None)


def _format_source(source: Source, data_dir: Path | None) -> list[str]:
    """Return the lines about a source in ``perfed data list``."""
    if source.why_not:
        return [f"not by command: {source.why_not}"]
    place = _find_source_file(source, data_dir)
    there = "" if not source.file else f"{source.file}, " + ("not here" if place is None else f"here: {place}")
    facts = _describe_source(source, data_dir)
    known = {"": "checksum unknown"}
    sums = [known.get(o["checksum"], o["checksum"].partition(":")[0]) for o in facts["originals"]]
    size = _size(source) if source.originals else ""
    first = f"from {source.originals[0].urls[0]}" if source.originals else ""
    lines = [there, first, ", ".join(filter(None, (size, *dict.fromkeys(sums)))), f"licence: {source.licence}"]
    return [*filter(None, lines), *([source.remark] if source.remark else [])]


def _size(source: Source) -> str:
    sizes = [original.size for original in source.originals]
    number = f"{len(sizes)} files, " if len(sizes) > 1 else ""
    return f"{number}{sum(sizes):,} bytes" if all(sizes) else f"{number}size unknown"


def _describe_source(source: Source, data_dir: Path | None) -> dict[str, Any]:
    place = _find_source_file(source, data_dir)
    return {
        "title": source.title,
        "file": source.file,
        "here": None if place is None else str(place),
        "licence": source.licence,
        "originals": [
            {"name": o.name, "urls": list(o.urls), "checksum": o.checksum, "size": o.size or None}
            for o in source.originals
        ],
        "remark": source.remark,
        "why_not": source.why_not,
    }
