"""The files of the server's side: the app that is submitted, scripts, units, containers and the proxy's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from perfed.data.names import markdown_text
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment
from perfed.sites.deploy.deployment import CONNECTION, Deployment, app_name
from perfed.sites.deploy.release import LOCK, Release
from perfed.sites.flower.processes import FLOWER_SETTINGS


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """Return a file of ``perfed/sites/deploy/templates`` with a value in place of each of its placeholders."""
    text = (resources.files("perfed.sites.deploy") / "templates" / template).read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"@\{(\w+)\}", lambda match: str(values[match[1]]), text))


_INIT = '''"""A deployment of perfed: the study, and the server's program that runs it."""

from pathlib import Path

STUDY = (Path(__file__).parent / "study.toml").read_text(encoding="utf-8")
"""The experiment as TOML; ``data.files`` are the names of the sites."""
'''
_SERVER = '''"""The server's program."""

from functools import partial

from perfed_app import STUDY

from perfed.sites.deploy.server_app import main
from perfed.sites.flower.adapter import server_app

app = server_app(partial(main, study=STUDY))
'''
STUDY_FILE = "app/perfed_app/study.toml"
"""The file of the study in a deployment's directory."""


def make_app_files(study: Experiment) -> dict[str, str]:
    """Return the app's files by their paths in the deployment's directory; the same study gives the same bytes."""
    return {
        "app/pyproject.toml": fill_template("pyproject.toml", {"app": app_name(study.name)}),
        "app/perfed_app/__init__.py": _INIT,
        "app/perfed_app/server.py": _SERVER,
        STUDY_FILE: study.to_toml(),
    }


def hash_app(study: Experiment) -> str:
    """Return the SHA-256 of the bundle that Flower makes of the app, or an empty text if Flower is not installed.

    The same study gives the same hash with all versions of Flower that perfed supports.
    """
    try:
        from perfed.sites.flower.adapter import hash_bundle
    except PerfedError:
        return ""
    return hash_bundle({name.removeprefix("app/"): text for name, text in make_app_files(study).items()})


BAR = "bar.sh"
"""The script that bars a site's key."""
_SCRIPTS = ("environment.sh", "superlink.sh", "superexec.sh", "register.sh", BAR)
_UNITS = ("perfed-superlink.service", "perfed-superexec.service")
_PUBLIC = ("nginx.conf", "compose.yaml")
_IPV6 = "listen [::]:{} ssl;"
_NO_IPV6 = "# Where sites reach it by an IPv6 address, the same is needed for [::]:{}."
_HOMES = ("/home/", "/root/", "/run/user/")


def make_template_values(deployment: Deployment, release: Release) -> dict[str, Any]:
    """Return the values of the templates' placeholders that do not depend on the study."""
    here = '"$here/tls/{}"'.format
    tls, ca = deployment.tls, f"{deployment.directory}/server/tls/ca.crt"
    files = f"--ssl-ca-certfile {here('ca.crt')} --ssl-certfile {here('server.crt')} \\\n"
    files += f"    --ssl-keyfile {here('server.key')}"
    return {
        "name": markdown_text(deployment.name),
        "unit_name": deployment.name.replace("%", "%%"),
        "address": deployment.address,
        "directory": deployment.directory,
        "port": deployment.port,
        "superlink_port": deployment.superlink_port,
        "listen_ipv6": (_IPV6 if deployment.listens_on_ipv6 else _NO_IPV6).format(deployment.port),
        "sites_in_a_row": " ".join(deployment.sites),
        "connection": CONNECTION,
        "wheel": release.wheel_name,
        "lock": LOCK,
        "release_rows": release.rows,
        "release_steps": "\n".join(f"   {row}" for row in release.rows.splitlines()),
        "superlink_tls": f"\\\n    {files} --enable-supernode-auth" if tls else "--insecure",
        "superexec_tls": f"--root-certificates {here('ca.crt')}" if tls else "--insecure",
        "connection_tls": f'root-certificates = "{ca}"' if tls else "insecure = true",
        "hardening": fill_template("hardening.conf", {}).rstrip(),
        "protect_home": "read-only" if deployment.directory.startswith(_HOMES) else "yes",
        "switches": "\n".join(f"export {key}={value}" for key, value in FLOWER_SETTINGS.items()),
        "switches_systemd": "\n".join(f"Environment={key}={value}" for key, value in FLOWER_SETTINGS.items()),
        "switches_yaml": "\n".join(f'      {key}: "{value}"' for key, value in FLOWER_SETTINGS.items()),
    }


def server_files(deployment: Deployment, release: Release) -> dict[str, str]:
    """Return the server's files by their paths in the deployment's directory; proxy and containers only with TLS."""
    values = make_template_values(deployment, release)
    names = (*_SCRIPTS, *_UNITS, *(_PUBLIC if deployment.tls else ()))
    files = {f"server/{name}": fill_template(name, values) for name in names}
    return {**files, "server/flwr/config.toml": fill_template("flwr-config.toml", values)}
