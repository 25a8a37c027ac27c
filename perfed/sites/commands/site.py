"""The commands of the administrator of a site: ``perfed site``, and its ``preview | log | key | leave | export``.

``log`` does not import torch, so that it answers at once; the others import their modules when they run.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from perfed.cli.app import App, app
from perfed.cli.console import print_json, say, say_where, say_whole
from perfed.cli.options import FormatOption, JsonOption, TrustOption, check_new, file_name
from perfed.errors import PerfedError
from perfed.plugins import refuse_modules
from perfed.sites.flower.hash_chain import BEGINNING, LOG, read_log, verify_log
from perfed.system import create_private_files, write_atomic

SITE = "site.json"
"""The file in a site's folder with its name and the paths of its data and key."""


site_app = App(invoke_without_command=True, help="Be a site of a federation; its log and its own model.")
app.add_typer(site_app, name="site")
SiteFolder = Annotated[
    Path | None, typer.Option("--dir", help="the site's folder: log, states; perfed-site-NAME if not given")
]


@site_app.callback(epilog="Example: perfed site --data a.csv --server fed.example.org:8443 --name a --study study.toml")
@create_private_files()
def site_command(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option("--data", help="the site's table, a file or a folder with one")] = None,
    server: Annotated[str, typer.Option("--server", help="HOST:PORT of the server")] = "",
    name: Annotated[str, typer.Option("--name", help="of this site, as the server knows it")] = "",
    key: Annotated[Path | None, typer.Option("--key", help="the site's private key")] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="certificate of the authority that the server's is of")
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="the study to take part in, and no other; its file is needed")
    ] = None,
    any_study: Annotated[
        bool, typer.Option("--any-study", help="in place of --study: take part in whatever study the server has")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="what is allowed at most, whatever the study needs, a .toml file")
    ] = None,
    folder: SiteFolder = None,
    consent: Annotated[
        str | None,
        typer.Option(
            "--consent",
            metavar="HASH|yes|any",
            help="agree to what leaves, by the hash that 'perfed site preview' prints; without it you are asked",
        ),
    ] = None,
) -> None:
    """Be a site: answer the server's messages with what is made of one table, until stopped."""
    if context.invoked_subcommand is not None:
        return
    for option, value in (("--data", data), ("--server", server), ("--name", name)):
        if not value:
            raise PerfedError(f"{option} is needed; 'perfed site --help' lists all options")
    if (study is None) != any_study:
        raise PerfedError(
            "--study FILE or --any-study is needed, and not both: with --study the site takes part in that study and "
            "in no other; with --any-study the server's administrator chooses target, columns and method"
        )
    assert data is not None
    from perfed.sites.commands.preview import confirm
    from perfed.sites.deploy.policy import Policy
    from perfed.sites.deploy.site_agent import SiteSettings, check_site, run_site
    from perfed.sites.flower.probe import ServerAddress

    place, text = folder or Path(f"perfed-site-{name}"), None if study is None else _read_study(study)
    allowed = Policy() if policy is None else Policy.read(policy)
    settings = SiteSettings(name, data, ServerAddress(server, ca, key), place, text, allowed)
    _check_keys(key, ca)
    check_site(settings)
    confirm(settings, study, consent)
    place.mkdir(parents=True, exist_ok=True)
    description = {"name": name, "data": str(data.resolve()), "key": None if key is None else str(key.resolve())}
    write_atomic(place / SITE, json.dumps(description) + "\n")
    say_whole(f"site {name}: {data}; what leaves is in {place / LOG}")
    if study is None:
        say_whole("any study is taken: the server's administrator chooses the target, the columns and the method")
    stop = threading.Event()
    try:
        run_site(settings, lambda line: say_whole(f"{time.strftime('%H:%M:%S')} {line}"), stop)
    except (KeyboardInterrupt, SystemExit):
        say("stopped")
    finally:
        stop.set()


def _check_keys(key: Path | None, ca: Path | None) -> None:
    """Refuse a missing key or certificate, and a key that other users can read."""
    from perfed.sites.deploy.tls import check_private

    for option, file in (("--key", key), ("--ca", ca)):
        if file is not None and not file.is_file():
            raise PerfedError(f"{option} {file}: no such file")
    if key is not None:
        check_private(key, "--key")


@site_app.command("preview", epilog="Example: perfed site preview --data north.csv --study study.toml --name north")
def site_preview_command(
    data: Annotated[Path, typer.Option("--data", help="the site's table, a file or a folder with one")],
    study: Annotated[Path, typer.Option("--study", help="the study that the site would take part in")],
    name: Annotated[str, typer.Option("--name", help="of this site, as the server knows it")],
    as_json: JsonOption = False,
) -> None:
    """Show every value, fact, entry and shape that would leave the site, without a server."""
    from perfed.sites.commands.preview import preview

    preview(data, _read_study(study), name, as_json)


def _read_study(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PerfedError(f"--study {file}: cannot be read: {error}") from None


@site_app.command("log", epilog="Example: perfed site log --dir perfed-site-north")
def site_log_command(
    folder: SiteFolder = None,
    as_json: JsonOption = False,
    head: Annotated[bool, typer.Option("--head", help="say the last hash alone, to be noted elsewhere")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="new file for the log, signed with the site's key if it has one")
    ] = None,
    exported: Annotated[Path | None, typer.Option("--verify", help="a file of --export, to be checked")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="with --verify: the site's public key")] = None,
) -> None:
    """List every message that has left the site or arrived, and check that no line of the log was changed."""
    modes = [name for name, value in (("--head", head), ("--export", export), ("--verify", exported)) if value]
    if len(modes) > 1 or (key is not None and exported is None):
        raise PerfedError("at most one of --head, --export and --verify can be given, and --key with --verify alone")
    if exported is not None:
        return _verify_exported_log(exported, key)
    place = site_folder(folder)
    if export is not None:
        return _export_log(place, export)
    if head:
        return say_whole(_last_hash(place / LOG))
    entries, broken = read_log(place / LOG), verify_log(place / LOG)
    if as_json:
        print_json({"log": entries, "broken": broken})
    else:
        for entry in entries:
            say_whole(_describe_entry(entry))
    if broken is not None:
        raise PerfedError(broken)
    if not as_json:
        last = entries[-1]["hash"] if entries else "none"
        say_whole(f"{len(entries)} lines; the chain is whole; its last hash is {last}")


def _export_log(place: Path, file: Path) -> None:
    """Write a site's log to a new file, signed if the site has a key."""
    check_new(file)
    head = _last_hash(place / LOG)
    description = json.loads((place / SITE).read_text(encoding="utf-8"))
    content = {"site": description.get("name"), "head": head, "log": (place / LOG).read_text(encoding="ascii")}
    signature_fields: dict[str, str] = {}
    if description.get("key"):
        from perfed.sites.deploy.tls import signature

        text, public = signature(Path(description["key"]), _serialize(content))
        signature_fields = {"signature": text, "key": public}
    write_atomic(file, json.dumps({**content, **signature_fields}) + "\n")
    say_where("log" if signature_fields else "log, not signed: the site has no key,", file)
    say_whole(f"its last hash is {head}")


def _verify_exported_log(file: Path, key: Path | None) -> None:
    """Check the lines and the last hash of an exported log, and its signature if a public key is given."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        signature, site, text = content.pop("signature", None), content["site"], content["log"].encode("ascii")
        content.pop("key", None)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PerfedError(f"{file}: cannot be read as an exported log: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / LOG
        copy.write_bytes(text)
        broken, lines = verify_log(copy), read_log(copy)
    head = lines[-1]["hash"] if lines else BEGINNING
    if broken is not None or head != content.get("head"):
        reason = "it does not end with its last hash" if broken is None else broken.partition(": ")[2]
        raise PerfedError(f"{file}: {reason}")
    if key is not None:
        from perfed.sites.deploy.tls import is_signature_valid

        if signature is None or not is_signature_valid(key, str(signature), _serialize(content)):
            raise PerfedError(f"{file}: is not signed with the key of {key}")
    signature_check = "its signature was not looked at (--key)" if key is None else f"signed with the key of {key}"
    say_whole(f"site {site}: {len(lines)} lines; the chain is whole; its last hash is {head}; {signature_check}")


def _last_hash(file: Path) -> str:
    """Return the last hash of a log, or :data:`BEGINNING` if it is empty.

    Raises:
        PerfedError: the log is missing or broken.
    """
    if (broken := verify_log(file)) is not None:
        raise PerfedError(broken)
    lines = read_log(file)
    return str(lines[-1]["hash"]) if lines else BEGINNING


def _serialize(content: dict[str, Any]) -> bytes:
    """Return the bytes of an exported log that are signed."""
    return json.dumps(content, sort_keys=True).encode()


def _describe_entry(entry: dict[str, Any]) -> str:
    """Return the line that ``perfed site log`` prints for an entry of the log."""
    if "note" in entry:
        return f"{entry['time']} note: {entry['note']}"
    if "arrived" in entry:
        request = ", ".join(
            f"{name} {entry[name]}" for name in ("kind", "round", "program") if entry.get(name) is not None
        )
        return f"{entry['time']} arrived: {request or entry['arrived']}: {entry['bytes']} bytes, {entry['sha256'][:16]}"
    tensors = ", ".join(f"{e['name']} {'x'.join(map(str, e['shape'])) or '1'} {e['dtype']}" for e in entry["entries"])
    subject = f"round {entry['round']} {entry['program']}" if entry["program"] else "a mistake"
    fields = {name: value for name, value in entry["header"].items() if name in ("told", "facts", "metrics", "error")}
    suffix = f" {json.dumps(fields)}" if any(fields.values()) else ""
    return (
        f"{entry['time']} {subject}: {entry['bytes']} bytes, {entry['sha256'][:16]}: {tensors or 'no tensors'}{suffix}"
    )


@site_app.command("key", epilog="Example: perfed site key --name north")
@create_private_files()
def site_key_command(
    name: Annotated[str, typer.Option("--name", help="of this site, as the server knows it")],
    folder: SiteFolder = None,
) -> None:
    """Print the site's public signing key as a line of [secure_aggregation.keys]; the first call makes the key."""
    import tomli_w

    from perfed.sites.flower.signing import SigningKey

    key = SigningKey.in_folder(folder or Path(f"perfed-site-{name}"))
    say_whole(tomli_w.dumps({name: key.public_key}).strip())


@site_app.command("leave", epilog="Example: perfed site leave --dir perfed-site-north")
def site_leave_command(folder: SiteFolder = None) -> None:
    """Leave the study: the log says when, the server is told, and the site does not start again."""
    from perfed.sites.deploy.leaving import MARKER, leave_study

    place = site_folder(folder)
    if leave_study(place):
        say_whole("the site has left; its process tells the server at the next message. Stop it then")
    else:
        say_whole("the site has left, and nothing runs here that could tell the server; its log says so")
    say_whole(f"to take part again, remove {place / MARKER}")


@site_app.command("export", epilog="Example: perfed site export --data north.csv --format onnx")
@create_private_files()
def site_export_command(
    data: Annotated[
        Path | None, typer.Option("--data", help="the site's table; that of the last start if not given")
    ] = None,
    format_: FormatOption = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", help="file; NAME.FORMAT in the site's folder if not given")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="an earlier run, by its folder in runs/; the present one if not given")
    ] = None,
    folder: SiteFolder = None,
    trust: TrustOption = False,
) -> None:
    """Write the site's own model, which the server does not have, and a model card."""
    from perfed.cli.sites import check_format, write_model
    from perfed.experiment.config import readable
    from perfed.sites.deploy.own_model import load_site_model

    check_format(format_)
    place = site_folder(folder)
    with readable(place / SITE) as file:
        description = json.loads(file.read_text(encoding="utf-8"))
        name, table = str(description["name"]), Path(description["data"])
    target = out or place / f"{file_name(name)}.{format_}"
    check_new(target)
    with refuse_modules(place, trust):
        write_model(load_site_model(place, name, data or table, run), target, format_)


def site_folder(folder: Path | None) -> Path:
    """Return ``folder``, or the only folder of a site in or below the current directory if it is ``None``."""
    if folder is not None:
        if not (folder / SITE).exists():
            raise PerfedError(f"--dir {folder}: not the folder of a site ('perfed site' makes one: perfed-site-NAME)")
        return folder
    if Path(SITE).exists():
        return Path()
    folders = sorted(file.parent for file in Path().glob(f"*/{SITE}"))
    if len(folders) != 1:
        names = ", ".join(map(str, folders)) or "none"
        raise PerfedError(f"--dir: the site's folder is needed where there is not exactly one here (found: {names})")
    return folders[0]
