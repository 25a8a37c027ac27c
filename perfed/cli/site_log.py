"""A site's folder, and what ``perfed site log`` does: without torch, so that it answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perfed.cli.console import print_json, say_whole
from perfed.engine.flower.chain import LOG, read, verify
from perfed.errors import PerfedError

SITE = "site.json"
"""File of a site's folder: its name, and where its data are."""


def site_log_command(folder: Path | None, as_json: bool) -> None:
    """List what has left a site."""
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


def _line(entry: dict[str, Any]) -> str:
    """One line of a log in words."""
    if "note" in entry:
        return f"{entry['time']} note: {entry['note']}"
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
