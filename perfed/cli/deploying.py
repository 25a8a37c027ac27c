"""What ``perfed deploy``, ``perfed site`` and its ``export`` do: imported when they run, for it takes torch along."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

from perfed.cli import previewing
from perfed.cli.actions import chosen_experiment
from perfed.cli.console import say, say_where, say_whole
from perfed.cli.options import check_new, file_name
from perfed.cli.site_log import SITE, site_folder
from perfed.cli.sites import write_model
from perfed.deploy.deployment import Deployment
from perfed.deploy.own_model import site_model
from perfed.deploy.policy import Policy
from perfed.deploy.server_files import app_hash
from perfed.deploy.site import SiteSettings, check_site, run_site
from perfed.deploy.tls import check_private
from perfed.deploy.write import deploy, extend, renew, rotate, study_in
from perfed.engine.flower.hash_chain import LOG
from perfed.engine.flower.probe import Server
from perfed.errors import PerfedError
from perfed.experiment.config import readable
from perfed.machine import private_files, write_atomic
from perfed.run.export import FORMATS


def deploy_command(experiment: str, settings: list[str], deployment: Deployment, out: Path, days: int) -> None:
    """Write a deployment's files into a new directory; its name is that of the experiment."""
    checked = chosen_experiment(experiment, settings)
    deploy(checked, replace(deployment, name=checked.name), out, days)
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
    if submitted := app_hash(study_in(folder)):
        say_whole(f"tell the other sites the SHA-256 of what is submitted from now on: {submitted}")


def renew_command(folder: Path, days: int, server_names: list[str]) -> None:
    """Give a deployment's server a new certificate."""
    last_day = renew(folder, days, server_names)
    say(f"valid until {last_day}; restart the SuperLink and reload the proxy, which still have the one before")


def rotate_command(folder: Path, site: str) -> None:
    """Make a site of a deployment a new key."""
    fingerprint = rotate(folder, site)
    server = folder / "server"
    say_where(f"for {site}, its new key", folder / "sites" / site / f"{site}.key")
    say_whole(f"its fingerprint: {fingerprint}")
    say_whole("The SuperLink knows the key before until you bar it, and then the new one:")
    say_whole(f"sh {server / 'bar.sh'} {site}")
    say_whole(f"sh {server / 'register.sh'} {site}")


@private_files()
def site_command(
    data: Path, server: Server, name: str, study: Path | None, policy: Path | None, folder: Path, consent: str | None
) -> None:
    """Be a site until Ctrl-C or SIGTERM."""
    allowed = Policy() if policy is None else Policy.read(policy)
    text = None if study is None else previewing.study_text(study)
    settings = SiteSettings(name, data, server, folder, text, allowed)
    for option, file in (("--key", server.key), ("--ca", server.ca)):
        if file is not None and not file.is_file():
            raise PerfedError(f"{option} {file}: no such file")
    if server.key is not None:
        check_private(server.key, "--key")
    check_site(settings)
    previewing.confirm(settings, study, consent)
    folder.mkdir(parents=True, exist_ok=True)
    key = None if server.key is None else str(server.key.resolve())
    write_atomic(folder / SITE, json.dumps({"name": name, "data": str(data.resolve()), "key": key}) + "\n")
    say_whole(f"site {name}: {data}; what leaves is in {folder / LOG}")
    if study is None:
        say_whole("any study is taken: the server's administrator chooses the target, the columns and the method")
    stop = threading.Event()
    try:
        run_site(settings, lambda line: say_whole(f"{time.strftime('%H:%M:%S')} {line}"), stop)
    except (KeyboardInterrupt, SystemExit):
        say("stopped")
    finally:
        stop.set()


@private_files()
def site_export_command(
    folder: Path | None, data: Path | None, format_: str, out: Path | None, run: str | None
) -> None:
    """Write a site's own model, and its card."""
    if format_ not in FORMATS:
        raise PerfedError(f"--format {format_}: unknown format; allowed: {', '.join(FORMATS)}")
    place = site_folder(folder)
    with readable(place / SITE) as file:
        known = json.loads(file.read_text(encoding="utf-8"))
        name, table = str(known["name"]), Path(known["data"])
    target = out or place / f"{file_name(name)}.{format_}"
    check_new(target)
    write_model(site_model(place, name, data or table, run), target, format_)
