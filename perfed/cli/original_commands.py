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
    source_names = _resolve_sources(names or [])
    if not names:
        source_names = [name for name, source in SOURCES.items() if _find_source_file(source, data_dir)]
    paths = {name: str(find_file(SOURCES[name].file, data_dir)) for name in source_names if SOURCES[name].file}
    if as_json:
        folders = [str(folder) for folder in data_folders(data_dir)]
        return print_json({"folders": folders, "shipped": str(SHIPPED), "files": paths})
    if not names:
        for number, folder in enumerate(data_folders(data_dir), 1):
            say_whole(f"{number}. {folder}{'' if folder.is_dir() else ' (no such folder)'}")
        say_whole(f"{len(data_folders(data_dir)) + 1}. {SHIPPED} (comes with perfed)")
    for name, path in paths.items():
        say_whole(f"{name}: {path}")


@data_app.command("get", epilog="Example: perfed data get mnist usps")
def get_command(
    names: Names,
    original_paths: Annotated[
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
    source_names, provided = _resolve_sources(names), original_paths or []
    for path in provided:
        if not path.exists():
            raise PerfedError(f"--from {path}: no such file")
    if provided:
        from perfed.data.originals.making import find_unused

        for path in find_unused(provided, [SOURCES[name] for name in source_names]):
            original_names = [
                part for name in source_names for o in SOURCES[name].originals for part in (o.name, *o.members)
            ]
            raise PerfedError(
                f"--from {path}: none of the originals: {', '.join(original_names[:6]) or 'there are none'}"
            )
    with reserve_stdout(as_json):
        paths = {name: _prepare_file(name, provided, mirror, again, data_dir) for name in source_names}
    if as_json:
        print_json(paths)


def _prepare_file(name: str, provided: list[Path], mirror: str, again: bool, data_dir: Path | None) -> str:
    """Return the path of the file of a source, which is created if it is missing or ``again`` is set."""
    from perfed.data.originals.making import collect_originals, convert_originals, hash_arrays, write_arrays

    source = SOURCES[name]
    if source.why_not:
        raise PerfedError(f"{name}: no command makes it: {source.why_not}")
    path = _find_source_file(source, data_dir)
    if path is not None and not again:
        say_whole(f"{name}: {path} (is there; --again makes it again)")
        return str(path)
    files = collect_originals(name, source, provided, own_folder() / "originals", mirror, say_whole)
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
    source_names: dict[str, None] = {}
    for name in names:
        key = name.casefold()
        if key in SOURCES:
            source_names[key] = None
            continue
        items = [
            i
            for list_name in ("datasets", "experiments", "leaderboards")
            for i in index()[list_name]
            if i["name"] == key
        ]
        if not items:
            raise PerfedError(f"no data are called '{name}'{suggest_name(key, SOURCES)}; see 'perfed data list'")
        sources = [maker for item in items for file in item["files"] if (maker := find_source(file)) is not None]
        if not sources:
            raise PerfedError(f"'{name}' needs no file of perfed's; 'perfed show {name}' says what it needs")
        for source_name, source in sources:
            if source.why_not and len(sources) > 1:  # the others are of use without it
                say(f"{source_name}: no command makes it: {source.why_not}")
            else:
                source_names[source_name] = None
    return list(source_names)


def _find_source_file(source: Source, data_dir: Path | None) -> Path | None:
    """Return the path of the file of a source; ``None`` if it is not found, or the source has no file."""
    paths = [folder / source.file for folder in (*data_folders(data_dir), SHIPPED)] if source.file else []
    return next((path for path in paths if path.is_file()), None)


def _format_source(source: Source, data_dir: Path | None) -> list[str]:
    """Return the lines about a source in ``perfed data list``."""
    if source.why_not:
        return [f"not by command: {source.why_not}"]
    path = _find_source_file(source, data_dir)
    location = "" if not source.file else f"{source.file}, " + ("not here" if path is None else f"here: {path}")
    facts = _describe_source(source, data_dir)
    checksum_texts = {"": "checksum unknown"}
    sums = [checksum_texts.get(o["checksum"], o["checksum"].partition(":")[0]) for o in facts["originals"]]
    size = _format_size(source) if source.originals else ""
    address = f"from {source.originals[0].urls[0]}" if source.originals else ""
    lines = [location, address, ", ".join(filter(None, (size, *dict.fromkeys(sums)))), f"licence: {source.licence}"]
    return [*filter(None, lines), *([source.remark] if source.remark else [])]


def _format_size(source: Source) -> str:
    sizes = [original.size for original in source.originals]
    number = f"{len(sizes)} files, " if len(sizes) > 1 else ""
    return f"{number}{sum(sizes):,} bytes" if all(sizes) else f"{number}size unknown"


def _describe_source(source: Source, data_dir: Path | None) -> dict[str, Any]:
    path = _find_source_file(source, data_dir)
    return {
        "title": source.title,
        "file": source.file,
        "here": None if path is None else str(path),
        "licence": source.licence,
        "originals": [
            {"name": o.name, "urls": list(o.urls), "checksum": o.checksum, "size": o.size or None}
            for o in source.originals
        ],
        "remark": source.remark,
        "why_not": source.why_not,
    }
