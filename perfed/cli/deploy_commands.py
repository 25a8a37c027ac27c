"""The commands of a federation of real sites: ``perfed deploy | site | submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.commands import app
from perfed.cli.options import JsonOption, Settings
from perfed.errors import PerfedError


@app.command(
    "deploy",
    epilog="Example: perfed deploy study.toml --sites north,south --tls --host fed.example.org --out deployment",
)
def deploy_command(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="an experiment on tables, a .toml file; not needed with --extend and --renew",
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
) -> None:
    """Write what a federation of real sites needs: Flower app, server files, keys, a page for each site."""
    names = [name.strip() for name in sites.split(",") if name.strip()]
    given = {"EXPERIMENT": experiment, "--extend": extend, "--renew": renew}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise PerfedError(f"one of {', '.join(given)} is needed (given: {', '.join(chosen) or 'none'})")
    from perfed.cli import deploying

    if extend is not None:
        return deploying.extend_command(extend, names)
    if renew is not None:
        return deploying.renew_command(renew, days, server_name or [])
    if out is None:
        raise PerfedError("--out: a directory for the files is needed")
    server = deploying.Place(tls, host, port, superlink_port, server_name or [], dir_on_server)
    deploying.deploy_command(str(experiment), settings or [], names, server, out, days)


site_app = typer.Typer(invoke_without_command=True, help="Be a site of a federation; its log and its own model.")
app.add_typer(site_app, name="site")
SiteFolder = Annotated[
    Path | None, typer.Option("--dir", help="the site's folder: log, states; perfed-site-NAME if not given")
]


@site_app.callback(epilog="Example: perfed site --data north.csv --server fed.example.org:8443 --name north")
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
        Path | None, typer.Option("--study", help="the study to take part in, and no other; else the server's")
    ] = None,
    folder: SiteFolder = None,
) -> None:
    """Be a site: answer the server's messages with what is made of one table, until stopped."""
    if context.invoked_subcommand is not None:
        return
    for option, value in (("--data", data), ("--server", server), ("--name", name)):
        if not value:
            raise PerfedError(f"{option} is needed; 'perfed site --help' lists all options")
    from perfed.cli import deploying

    assert data is not None
    deploying.site_command(data, server, name, key, ca, study, folder or Path(f"perfed-site-{name}"))


@site_app.command("log", epilog="Example: perfed site log --dir perfed-site-north")
def site_log_command(folder: SiteFolder = None, as_json: JsonOption = False) -> None:
    """List every message that has left the site, and check that no line of the log was changed."""
    from perfed.cli import site_log

    site_log.site_log_command(folder, as_json)


@site_app.command("export", epilog="Example: perfed site export --data north.csv --format onnx")
def site_export_command(
    data: Annotated[
        Path | None, typer.Option("--data", help="the site's table; that of the last start if not given")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="onnx, pt2 or safetensors")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", help="file; NAME.FORMAT in the site's folder if not given")
    ] = None,
    folder: SiteFolder = None,
) -> None:
    """Write the site's own model, which the server does not have, and a model card."""
    from perfed.cli import deploying

    deploying.site_export_command(folder, data, format_, out)


@app.command("submit", epilog="Example: perfed submit deployment")
def submit_command(
    directory: Annotated[Path, typer.Argument(help="what 'perfed deploy' wrote, on the server")],
    out: Annotated[
        Path | None, typer.Option("--out", help="directory of the results, on the server; one with a run goes on")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds in which all sites must be there")] = 300.0,
    deadline: Annotated[float, typer.Option("--deadline", min=1, help="seconds that one exchange may take")] = 600.0,
    norm: Annotated[float, typer.Option("--max-norm", min=0, help="longest norm of a reply; 0: any")] = 0.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="end the run that goes on; without --stop the same command continues it")
    ] = False,
) -> None:
    """Start a deployment's run, or go on with it, and follow it to its end; or end it."""
    from perfed.cli import submitting

    if stop:
        return submitting.stop_command(directory, out)
    submitting.submit_command(directory, out, wait, deadline, norm)
