"""The commands of a federation of real sites: ``perfed deploy | site | submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.commands import app
from perfed.cli.options import JsonOption, Settings
from perfed.cli.wording import App
from perfed.errors import PerfedError


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
    given = {"EXPERIMENT": experiment, "--extend": extend, "--renew": renew, "--rotate": rotate}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise PerfedError(f"one of {', '.join(given)} is needed (given: {', '.join(chosen) or 'none'})")
    from perfed.cli import deploying

    if extend is not None:
        return deploying.extend_command(extend, names)
    if renew is not None:
        return deploying.renew_command(renew, days, server_name or [])
    if rotate is not None:
        return deploying.rotate_command(rotate[1], rotate[0])
    if out is None:
        raise PerfedError("--out: a directory for the files is needed")
    from perfed.deploy.deployment import Deployment

    where = dir_on_server or str(out.absolute())
    deployment = Deployment("", tuple(names), where, tls, host, port, superlink_port, tuple(server_name or []))
    deploying.deploy_command(str(experiment), settings or [], deployment, out, days)


site_app = App(invoke_without_command=True, help="Be a site of a federation; its log and its own model.")
app.add_typer(site_app, name="site")
SiteFolder = Annotated[
    Path | None, typer.Option("--dir", help="the site's folder: log, states; perfed-site-NAME if not given")
]


@site_app.callback(epilog="Example: perfed site --data a.csv --server fed.example.org:8443 --name a --study study.toml")
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
            help="agree to what leaves, by the hash that 'perfed site preview' prints; else you are asked",
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
    from perfed.cli import deploying
    from perfed.engine.flower.probe import Server

    assert data is not None
    place = folder or Path(f"perfed-site-{name}")
    deploying.site_command(data, Server(server, ca, key), name, study, policy, place, consent)


@site_app.command("preview", epilog="Example: perfed site preview --data north.csv --study study.toml --name north")
def site_preview_command(
    data: Annotated[Path, typer.Option("--data", help="the site's table, a file or a folder with one")],
    study: Annotated[Path, typer.Option("--study", help="the study that the site would take part in")],
    name: Annotated[str, typer.Option("--name", help="of this site, as the server knows it")],
    as_json: JsonOption = False,
) -> None:
    """Show every value, fact, entry and shape that would leave the site, without a server."""
    from perfed.cli import previewing

    previewing.site_preview_command(data, study, name, as_json)


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
    chosen = [name for name, on in (("--head", head), ("--export", export), ("--verify", exported)) if on]
    if len(chosen) > 1 or (key is not None and exported is None):
        raise PerfedError("at most one of --head, --export and --verify can be given, and --key with --verify alone")
    from perfed.cli import site_log

    if exported is not None:
        return site_log.verify_command(exported, key)
    if export is not None:
        return site_log.export_command(folder, export)
    if head:
        return site_log.head_command(folder)
    site_log.site_log_command(folder, as_json)


@site_app.command("leave", epilog="Example: perfed site leave --dir perfed-site-north")
def site_leave_command(folder: SiteFolder = None) -> None:
    """Leave the study: the log says when, the server is told, and the site does not start again."""
    from perfed.cli import site_log

    site_log.leave_command(folder)


@site_app.command("export", epilog="Example: perfed site export --data north.csv --format onnx")
def site_export_command(
    data: Annotated[
        Path | None, typer.Option("--data", help="the site's table; that of the last start if not given")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="onnx, pt2 or safetensors")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", help="file; NAME.FORMAT in the site's folder if not given")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="an earlier run, by its folder in runs/; the present one if not given")
    ] = None,
    folder: SiteFolder = None,
) -> None:
    """Write the site's own model, which the server does not have, and a model card."""
    from perfed.cli import deploying

    deploying.site_export_command(folder, data, format_, out, run)


@app.command("submit", epilog="Example: perfed submit deployment")
def submit_command(
    directory: Annotated[Path, typer.Argument(help="what 'perfed deploy' wrote, on the server")],
    out: Annotated[
        Path | None, typer.Option("--out", help="directory of the results, on the server; one with a run goes on")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds in which all sites must be there")] = 300.0,
    deadline: Annotated[float, typer.Option("--deadline", min=1, help="seconds that one exchange may take")] = 600.0,
    norm: Annotated[float, typer.Option("--max-norm", min=0, help="longest norm of a reply; 0: any")] = 0.0,
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
    from perfed.cli import submitting

    if stop:
        return submitting.stop_command(directory, out)
    newer = {"at_least": (float(at_least), 0.0), "ratio": (ratio, 1e6)}  # apps of older deployments lack the keys
    said = {name: value for name, (value, usual) in newer.items() if value != usual}
    submitting.submit_command(directory, out, wait=wait, deadline=deadline, norm=norm, **said)
