"""What runs at the server: SuperLink, SuperExec and the proxy, as scripts, systemd units and containers."""

from __future__ import annotations

from typing import Any

from perfed.deploy.deployment import CONNECTION, Deployment
from perfed.deploy.text import filled
from perfed.engine.flower.processes import SWITCHES
from perfed.machine import installed_version

BAR = "bar.sh"
"""Script that bars a site's key."""
_SCRIPTS = ("environment.sh", "superlink.sh", "superexec.sh", "register.sh", BAR)
_UNITS = ("perfed-superlink.service", "perfed-superexec.service")
_PUBLIC = ("nginx.conf", "compose.yaml")
_HOMES = ("/home/", "/root/", "/run/user/")


def release() -> str:
    """``==VERSION`` behind perfed's name: the server and all sites have the same."""
    version = installed_version()
    return "" if version == "unknown" else f"=={version}"


def values_of(deployment: Deployment) -> dict[str, Any]:
    """What the templates of a deployment stand for, without its study."""
    here = '"$here/tls/{}"'.format
    tls, ca = deployment.tls, f"{deployment.directory}/server/tls/ca.crt"
    files = f"--ssl-ca-certfile {here('ca.crt')} --ssl-certfile {here('server.crt')} \\\n"
    files += f"    --ssl-keyfile {here('server.key')}"
    return {
        "name": deployment.name,
        "address": deployment.address,
        "directory": deployment.directory,
        "port": deployment.port,
        "superlink_port": deployment.superlink_port,
        "sites_in_a_row": " ".join(deployment.sites),
        "connection": CONNECTION,
        "release": release(),
        "superlink_tls": f"\\\n    {files} --enable-supernode-auth" if tls else "--insecure",
        "superexec_tls": f"--root-certificates {here('ca.crt')}" if tls else "--insecure",
        "connection_tls": f'root-certificates = "{ca}"' if tls else "insecure = true",
        "hardening": filled("hardening.conf", {}).rstrip(),
        "protect_home": "read-only" if deployment.directory.startswith(_HOMES) else "yes",
        "switches": "\n".join(f"export {key}={value}" for key, value in SWITCHES.items()),
        "switches_systemd": "\n".join(f"Environment={key}={value}" for key, value in SWITCHES.items()),
        "switches_yaml": "\n".join(f'      {key}: "{value}"' for key, value in SWITCHES.items()),
    }


def server_files(deployment: Deployment) -> dict[str, str]:
    """The server's files by their paths in the deployment's directory; proxy and containers with TLS alone."""
    values = values_of(deployment)
    names = (*_SCRIPTS, *_UNITS, *(_PUBLIC if deployment.tls else ()))
    files = {f"server/{name}": filled(name, values) for name in names}
    return {**files, "server/flwr/config.toml": filled("flwr-config.toml", values)}
