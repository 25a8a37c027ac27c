"""The commands of the administrator of a federation's server: ``perfed deploy | submit``.

``submit`` does not import torch, so that it starts at once; ``deploy`` imports its modules when it runs.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from perfed.cli import complete
from perfed.cli.app import app
from perfed.cli.console import CTRL_C, Stopped, say, say_where, say_whole
from perfed.cli.options import Settings
from perfed.errors import PerfedError, shorten_list


@app.command(
    "deploy",
    epilog="Example: perfed deploy study.toml --sites north,south --tls --host fed.example.org --out deployment",
)
def deploy_command(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="an experiment on tables, a .toml file; not needed with --extend, --renew and --rotate",
            autocompletion=complete.experiments,
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", help="new directory for the files")] = None,
    sites: Annotated[str, typer.Option("--sites", help="names of the sites, separated by commas")] = "",
    blend: Annotated[
        str,
        typer.Option("--blend", help="methods and own models, separated by commas, of which each site gets a mixture"),
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="sites elsewhere: certificates, a key for each site, a proxy (perfed[flower])")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="name or address by which sites reach the server")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="of the proxy, which sites call; with --tls")] = 8443,
    superlink_port: Annotated[
        int, typer.Option("--superlink-port", help="of Flower's SuperLink, on the server's loopback address")
    ] = 8000,
    server_name: Annotated[
        list[str] | None, typer.Option("--server-name", help="further name in the certificate; may be repeated")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="how long the server's certificate is valid")] = 365,
    dir_on_server: Annotated[
        str, typer.Option("--dir-on-server", help="where the files will be on the server; --out if not given")
    ] = "",
    release: Annotated[
        Path | None,
        typer.Option("--release", help="folder with perfed's wheel and requirements.lock, which every site gets"),
    ] = None,
    extend: Annotated[Path | None, typer.Option("--extend", help="a deployment, to which --sites are added")] = None,
    renew: Annotated[
        Path | None, typer.Option("--renew", help="a deployment, whose server gets a new certificate")
    ] = None,
    rotate: Annotated[
        tuple[str, Path] | None,
        typer.Option("--rotate", metavar="NAME DIR", help="a site that gets a new key, and its deployment"),
    ] = None,
) -> None:
    """Write what a federation of real sites needs: Flower app, server files, keys, a page for each site."""
    names = [name.strip() for name in sites.split(",") if name.strip()]
    modes = {"EXPERIMENT": experiment, "--extend": extend, "--renew": renew, "--rotate": rotate}
    requested = [name for name, value in modes.items() if value is not None]
    if len(requested) != 1:
        raise PerfedError(f"one of {', '.join(modes)} is needed (given: {', '.join(requested) or 'none'})")
    if extend is not None:
        return _extend_deployment(extend, names)
    if renew is not None:
        return _renew_certificate(renew, days, server_name or [])
    if rotate is not None:
        return _rotate_key(rotate[1], rotate[0])
    if out is None:
        raise PerfedError("--out: a directory for the files is needed")
    from perfed.cli.execution import chosen_experiment
    from perfed.sites.deploy.deployment import Deployment
    from perfed.sites.deploy.release import FOLDER, Release
    from perfed.sites.deploy.write import deploy

    blend_settings = [f"blend.candidates=[{blend}]"] if blend else []
    study = chosen_experiment(str(experiment), [*(settings or []), *blend_settings])
    server_folder = dir_on_server or str(out.absolute())
    names_of_server = tuple(server_name or ())
    deployment = Deployment(study.name, tuple(names), server_folder, tls, host, port, superlink_port, names_of_server)
    deploy(study, deployment, out, days, None if release is None else Release.read(release))
    say_where("deployment", out)
    say_where("the server's administrator reads", out / "README.md")
    for site in deployment.sites:
        say_where(f"for {site}", out / "sites" / site)
    if release is None:
        say_whole(
            f"without --release: add perfed's wheel and requirements.lock to {out / FOLDER} and to each site's folder"
        )
    if deployment.tls:
        say("Private keys are among them: hand each on over a channel that nobody else reads.")


def _extend_deployment(folder: Path, sites: list[str]) -> None:
    """Add sites to a deployment, and print what its administrator has to do next."""
    from perfed.experiment.config import read
    from perfed.sites.deploy.server_files import STUDY_FILE, hash_app
    from perfed.sites.deploy.write import extend

    deployment = extend(folder, sites)
    for site in sites:
        say_where(f"for {site}", folder / "sites" / site)
    if deployment.tls:
        say_whole(f"to be known to the SuperLink: sh {folder / 'server' / 'register.sh'} {' '.join(sites)}")
    if submitted := hash_app(read((folder / STUDY_FILE).read_text(encoding="utf-8"), str(folder / STUDY_FILE))):
        say_whole(f"tell the other sites the SHA-256 of what is submitted from now on: {submitted}")


def _renew_certificate(folder: Path, days: int, server_names: list[str]) -> None:
    """Issue a new certificate for the server of a deployment."""
    from perfed.sites.deploy.write import renew

    last_day = renew(folder, days, server_names)
    say(f"valid until {last_day}; restart the SuperLink and reload the proxy, which still have the one before")


def _rotate_key(folder: Path, site: str) -> None:
    """Replace the key of a site of a deployment, and print what its administrator has to do next."""
    from perfed.sites.deploy.write import rotate

    fingerprint = rotate(folder, site)
    server = folder / "server"
    say_where(f"for {site}, its new key", folder / "sites" / site / f"{site}.key")
    say_whole(f"its fingerprint: {fingerprint}")
    say_whole("The SuperLink knows the key before until you bar it, and then the new one:")
    say_whole(f"sh {server / 'bar.sh'} {site}")
    say_whole(f"sh {server / 'register.sh'} {site}")


@app.command("submit", epilog="Example: perfed submit deployment")
def submit_command(
    directory: Annotated[Path, typer.Argument(help="what 'perfed deploy' wrote, on the server")],
    out: Annotated[
        Path | None, typer.Option("--out", help="directory of the results, on the server; one with a run goes on")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds in which all sites must be there")] = 300.0,
    deadline: Annotated[float, typer.Option("--deadline", min=1, help="seconds that one exchange may take")] = 600.0,
    ratio: Annotated[
        float,
        typer.Option("--max-ratio", min=0, help="how many times as long as the others' an entry may be; 0: any"),
    ] = 1e6,
    at_least: Annotated[
        int,
        typer.Option("--at-least", min=0, metavar="N", help="sites with which rounds go on without the others; 0: all"),
    ] = 0,
    stop: Annotated[
        bool, typer.Option("--stop", help="end the run that goes on; without --stop the same command continues it")
    ] = False,
) -> None:
    """Start a deployment's run, or go on with it, and follow it to its end; or end it."""
    from perfed.sites.deploy import submit

    results = (out or directory / submit.RESULTS).resolve()
    again = f"'{shlex.join(['perfed', 'submit', str(directory), *(['--out', str(out)] if out else [])])}'"
    if stop:
        last_round = submit.stop(directory, results)
        moment = f"after round {last_round}" if last_round else "before the end of its first round"
        return say_whole(f"the run in {results} was ended {moment}; {again} goes on from there")
    config = {"out": str(results), "wait": wait, "deadline": deadline, "ratio": ratio, "at_least": float(at_least)}
    try:
        submit.submit(directory, config, _show_progress, directory / "server" / "submit.log")
    except KeyboardInterrupt:
        reason = f"interrupted; the run goes on, and {again} follows it (with --stop: ends it)"
        raise Stopped(reason, CTRL_C) from None
    say_where("results", results)


def _show_progress(report: dict[str, Any]) -> None:
    """Print the progress of a submitted run, one line for each stage and each round."""
    if "stage" in report:
        say_whole(report["stage"])
    elif "round" in report:
        accuracy = "" if report["accuracy"] is None else f", {100 * report['accuracy']:.1f} %"
        lost = "; ".join(
            f"{name.replace('_', ' ')}: {shorten_list(ids)}" for name, ids in report["counts"].items() if ids
        )
        say(f"round {report['round']} of {report['rounds']}{accuracy}{lost and f' ({lost})'}")
