"""What ``perfed deploy`` does: imported when it runs, for it takes torch along."""

from __future__ import annotations

import json
import shlex
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.cli.actions import chosen_experiment
from perfed.cli.console import CTRL_C, Stopped, print_json, say, say_where, say_whole
from perfed.cli.options import check_new, file_name
from perfed.cli.sites import write_model
from perfed.deploy.deployment import Deployment
from perfed.deploy.own_model import site_model
from perfed.deploy.site import SiteSettings, check_site, run_site
from perfed.deploy.station import LOG
from perfed.deploy.submit import RESULTS, stop, submit
from perfed.deploy.write import deploy, extend, renew
from perfed.engine.flower.outgoing import read, verify
from perfed.engine.flower.probe import Server
from perfed.errors import PerfedError, some
from perfed.experiment.config import readable
from perfed.machine import write_atomic
from perfed.run.export import FORMATS

_SITE = "site.json"  # in a site's folder: its name, and where its data are


@dataclass(frozen=True)
class Place:
    """Where the server is: options as they were given."""

    tls: bool
    host: str
    port: int
    superlink_port: int
    server_names: list[str]
    directory: str


def deploy_command(experiment: str, settings: list[str], sites: list[str], server: Place, out: Path, days: int) -> None:
    """Write a deployment's files into a new directory."""
    checked = chosen_experiment(experiment, settings)
    deployment = Deployment(
        checked.name,
        tuple(sites),
        server.directory or str(out.absolute()),
        server.tls,
        server.host,
        server.port,
        server.superlink_port,
        tuple(server.server_names),
    )
    deploy(checked, deployment, out, days)
    say_where("deployment", out)
    say_where("the server's administrator reads", out / "README.md")
    for site in deployment.sites:
        say_where(f"for {site}", out / "sites" / site)
    if deployment.tls:
        say("Private keys are among them: hand each on over a channel that nobody else reads.")


def extend_command(folder: Path, sites: list[str]) -> None:
    """Add sites to a deployment."""
    deployment = extend(folder, sites)
    for site in sites:
        say_where(f"for {site}", folder / "sites" / site)
    if deployment.tls:
        say_whole(f"to be known to the SuperLink: sh {folder / 'server' / 'register.sh'} {' '.join(sites)}")


def renew_command(folder: Path, days: int, server_names: list[str]) -> None:
    """Give a deployment's server a new certificate."""
    last_day = renew(folder, days, server_names)
    say(f"valid until {last_day}; restart the SuperLink and reload the proxy, which still have the one before")


def site_command(
    data: Path, server: str, name: str, key: Path | None, ca: Path | None, study: Path | None, folder: Path
) -> None:
    """Be a site until Ctrl-C or SIGTERM."""
    settings = SiteSettings(name, data, Server(server, ca, key), folder, None if study is None else _text(study))
    for option, file in (("--key", key), ("--ca", ca)):
        if file is not None and not file.is_file():
            raise PerfedError(f"{option} {file}: no such file")
    check_site(settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / _SITE, json.dumps({"name": name, "data": str(data.resolve())}) + "\n")
    say_whole(f"site {name}: {data}; what leaves is in {folder / LOG}")
    stop = threading.Event()
    try:
        run_site(settings, lambda line: say_whole(f"{time.strftime('%H:%M:%S')} {line}"), stop)
    except (KeyboardInterrupt, SystemExit):
        say("stopped")
    finally:
        stop.set()


def site_log_command(folder: Path | None, as_json: bool) -> None:
    """List what has left a site."""
    file = _site_folder(folder) / LOG
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


def site_export_command(folder: Path | None, data: Path | None, format_: str, out: Path | None) -> None:
    """Write a site's own model, and its card."""
    if format_ not in FORMATS:
        raise PerfedError(f"--format {format_}: unknown format; allowed: {', '.join(FORMATS)}")
    place = _site_folder(folder)
    with readable(place / _SITE) as file:
        known = json.loads(file.read_text(encoding="utf-8"))
        name, table = str(known["name"]), Path(known["data"])
    target = out or place / f"{file_name(name)}.{format_}"
    for path in (target, target.with_suffix(".md")):
        check_new(path)
    write_model(site_model(place, name, data or table), target, format_)


def _site_folder(folder: Path | None) -> Path:
    """The site's folder: that given, or the only one here."""
    if folder is not None:
        if not (folder / _SITE).exists():
            raise PerfedError(f"--dir {folder}: not the folder of a site ('perfed site' makes one: perfed-site-NAME)")
        return folder
    if Path(_SITE).exists():
        return Path()
    found = sorted(file.parent for file in Path().glob(f"*/{_SITE}"))
    if len(found) != 1:
        held = ", ".join(map(str, found)) or "none"
        raise PerfedError(f"--dir: the site's folder is needed where there is not exactly one here (found: {held})")
    return found[0]


def submit_command(directory: Path, out: Path | None, wait: float, deadline: float, norm: float) -> None:
    """Submit a run and follow it."""
    place = _results(directory, out)
    config = {"out": str(place), "wait": wait, "deadline": deadline, "norm": norm}
    try:
        submit(directory, config, _show, directory / "server" / "submit.log")
    except KeyboardInterrupt:
        said = f"interrupted; the run goes on, and {_again(directory, out)} follows it (with --stop: ends it)"
        raise Stopped(said, CTRL_C) from None
    say_where("results", place)


def stop_command(directory: Path, out: Path | None) -> None:
    """End a run that was submitted."""
    place = _results(directory, out)
    done = stop(directory, place)
    where = f"after round {done}" if done else "before the end of its first round"
    say_whole(f"the run in {place} was ended {where}; {_again(directory, out)} goes on from there")


def _results(directory: Path, out: Path | None) -> Path:
    return (out or directory / RESULTS).resolve()


def _again(directory: Path, out: Path | None) -> str:
    """The command that submits once more, in quotes."""
    return f"'{shlex.join(['perfed', 'submit', str(directory), *(['--out', str(out)] if out else [])])}'"


def _show(told: dict[str, Any]) -> None:
    """Say how far a submitted run is: a line for each stage and each round, which takes seconds."""
    if "stage" in told:
        say_whole(told["stage"])
    elif "round" in told:
        reached = "" if told["accuracy"] is None else f", {100 * told['accuracy']:.1f} %"
        lost = "; ".join(f"{name.replace('_', ' ')}: {some(ids)}" for name, ids in told["counts"].items() if ids)
        say(f"round {told['round']} of {told['rounds']}{reached}{lost and f' ({lost})'}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PerfedError(f"--study {file}: cannot be read: {error}") from None
