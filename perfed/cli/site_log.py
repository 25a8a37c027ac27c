"""A site's folder, and what ``perfed site log`` does: without torch, so that it answers at once."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from perfed.cli.console import print_json, say_where, say_whole
from perfed.cli.options import check_new
from perfed.engine.flower.hash_chain import BEGINNING, LOG, read, verify
from perfed.errors import PerfedError
from perfed.machine import write_atomic

SITE = "site.json"
"""File of a site's folder: its name, and where its data are."""


def site_log_command(folder: Path | None, as_json: bool) -> None:
    """List what has left a site and what has arrived."""
    file = site_folder(folder) / LOG
    entries, broken = read(file), verify(file)
    if as_json:
        print_json({"log": entries, "broken": broken})
    else:
        for entry in entries:
            say_whole(_line(entry))
    if broken is not None:
        raise PerfedError(broken)
    if not as_json:
        last = entries[-1]["hash"] if entries else "none"
        say_whole(f"{len(entries)} lines; the chain is whole; its last hash is {last}")


def leave_command(folder: Path | None) -> None:
    """Let a site leave."""
    from perfed.deploy.leaving import MARK, leave

    place = site_folder(folder)
    if leave(place):
        say_whole("the site has left; its process tells the server at the next message. Stop it then")
    else:
        say_whole("the site has left, and nothing runs here that could tell the server; its log says so")
    say_whole(f"to take part again, remove {place / MARK}")


def head_command(folder: Path | None) -> None:
    """Say the last hash of a site's log."""
    say_whole(_whole(site_folder(folder) / LOG))


def export_command(folder: Path | None, file: Path) -> None:
    """Write a site's log into a new file, signed where the site has a key."""
    place = site_folder(folder)
    check_new(file)
    head = _whole(place / LOG)
    known = json.loads((place / SITE).read_text(encoding="utf-8"))
    content = {"site": known.get("name"), "head": head, "log": (place / LOG).read_text(encoding="ascii")}
    signed: dict[str, str] = {}
    if known.get("key"):
        from perfed.deploy.tls import signature

        text, public = signature(Path(known["key"]), _canonical(content))
        signed = {"signature": text, "key": public}
    write_atomic(file, json.dumps({**content, **signed}) + "\n")
    say_where("log" if signed else "log, not signed: the site has no key,", file)
    say_whole(f"its last hash is {head}")


def verify_command(file: Path, key: Path | None) -> None:
    """Check an exported log: its lines, its last hash, and with a public key its signature."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        signed, site, text = content.pop("signature", None), content["site"], content["log"].encode("ascii")
        content.pop("key", None)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PerfedError(f"{file}: cannot be read as an exported log: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / LOG
        copy.write_bytes(text)
        broken, lines = verify(copy), read(copy)
    head = lines[-1]["hash"] if lines else BEGINNING
    if broken is not None or head != content.get("head"):
        said = "it does not end with its last hash" if broken is None else broken.partition(": ")[2]
        raise PerfedError(f"{file}: {said}")
    if key is not None:
        from perfed.deploy.tls import is_signed

        if signed is None or not is_signed(key, str(signed), _canonical(content)):
            raise PerfedError(f"{file}: is not signed with the key of {key}")
    by = "its signature was not looked at (--key)" if key is None else f"signed with the key of {key}"
    say_whole(f"site {site}: {len(lines)} lines; the chain is whole; its last hash is {head}; {by}")


def _whole(file: Path) -> str:
    """The last hash of a log.

    Raises:
        PerfedError: there is none, or it is broken.
    """
    if (broken := verify(file)) is not None:
        raise PerfedError(broken)
    lines = read(file)
    return str(lines[-1]["hash"]) if lines else BEGINNING


def _canonical(content: dict[str, Any]) -> bytes:
    """The bytes that are signed."""
    return json.dumps(content, sort_keys=True).encode()


def _line(entry: dict[str, Any]) -> str:
    """One line of a log in words."""
    if "note" in entry:
        return f"{entry['time']} note: {entry['note']}"
    if "arrived" in entry:
        asked = ", ".join(
            f"{name} {entry[name]}" for name in ("kind", "round", "program") if entry.get(name) is not None
        )
        return f"{entry['time']} arrived: {asked or entry['arrived']}: {entry['bytes']} bytes, {entry['sha256'][:16]}"
    held = ", ".join(f"{e['name']} {'x'.join(map(str, e['shape'])) or '1'} {e['dtype']}" for e in entry["entries"])
    what = f"round {entry['round']} {entry['program']}" if entry["program"] else "a mistake"
    plain = {name: value for name, value in entry["header"].items() if name in ("told", "facts", "metrics", "error")}
    said = f" {json.dumps(plain)}" if any(plain.values()) else ""
    return f"{entry['time']} {what}: {entry['bytes']} bytes, {entry['sha256'][:16]}: {held or 'no tensors'}{said}"


def site_folder(folder: Path | None) -> Path:
    """The site's folder: that given, or the only one here."""
    if folder is not None:
        if not (folder / SITE).exists():
            raise PerfedError(f"--dir {folder}: not the folder of a site ('perfed site' makes one: perfed-site-NAME)")
        return folder
    if Path(SITE).exists():
        return Path()
    found = sorted(file.parent for file in Path().glob(f"*/{SITE}"))
    if len(found) != 1:
        held = ", ".join(map(str, found)) or "none"
        raise PerfedError(f"--dir: the site's folder is needed where there is not exactly one here (found: {held})")
    return found[0]
