"""What ``perfed deploy`` does: imported when it runs, for it takes torch along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perfed.cli.actions import chosen_experiment
from perfed.cli.console import say, say_where, say_whole
from perfed.deploy.deployment import Deployment
from perfed.deploy.write import deploy, extend, renew


@dataclass(frozen=True)
class Server:
    """Where the server is: options as they were given."""

    tls: bool
    host: str
    port: int
    superlink_port: int
    server_names: list[str]
    directory: str


def deploy_command(
    experiment: str, settings: list[str], sites: list[str], server: Server, out: Path, days: int
) -> None:
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
