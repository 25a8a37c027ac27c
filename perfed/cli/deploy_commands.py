"""The commands of a federation of real sites: ``perfed deploy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import complete
from perfed.cli.commands import app
from perfed.cli.options import Settings
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
    server = deploying.Server(tls, host, port, superlink_port, server_name or [], dir_on_server)
    deploying.deploy_command(str(experiment), settings or [], names, server, out, days)
