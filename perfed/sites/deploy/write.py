"""Writing a deployment: all of it or nothing, a further site, a new key, a new certificate."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read, readable
from perfed.sites.deploy import tls
from perfed.sites.deploy.deployment import FILE, Deployment
from perfed.sites.deploy.pages import Credentials, make_server_page, make_site_files
from perfed.sites.deploy.release import FOLDER, Release
from perfed.sites.deploy.server_files import STUDY_FILE, make_app_files, server_files
from perfed.sites.deploy.study import make_deployed_study
from perfed.system import create_private_files, write_atomic

DAYS = 365
"""How long a server's certificate is valid, if nothing else is said."""


@create_private_files()
def deploy(
    experiment: Experiment, deployment: Deployment, out: Path, days: int = DAYS, release: Release | None = None
) -> None:
    """Write the files of a deployment into the new directory ``out``.

    Args:
        experiment: on tables; its paths stay behind.
        deployment: server and sites.
        out: must not be there; it appears when everything is written.
        days: how long the server's certificate is valid.
        release: the files from which server and sites install perfed; ``None``: they are added by hand.

    Raises:
        PerfedError: ``out`` is there, the experiment cannot be deployed, or cryptography is missing.
    """
    if out.exists():
        raise PerfedError(f"{out} is there already; name another directory with --out")
    study = make_deployed_study(experiment, deployment.sites)
    release = release or Release.to_be_added()
    if deployment.tls:
        tls.check_installed()
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    making.mkdir()
    try:
        credentials = _credentials(making, deployment, days) if deployment.tls else None
        files = {FILE: deployment.to_toml(), **make_app_files(study), **server_files(deployment, release)}
        files["README.md"] = make_server_page(deployment, study, release)
        for site in deployment.sites:
            files |= make_site_files(deployment, study, site, credentials, release)
        _write(making, files)
        for folder in (FOLDER, *(f"sites/{site}" for site in deployment.sites)):
            _write_release(making / folder, release)
        making.rename(out)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def study_in(folder: Path) -> Experiment:
    """The study of the deployment in ``folder``.

    Raises:
        PerfedError: its file is none.
    """
    file = folder / STUDY_FILE
    with readable(file):
        return read(file.read_text(encoding="utf-8"), str(file))


@create_private_files()
def extend(folder: Path, names: Sequence[str]) -> Deployment:
    """Add sites to the deployment in ``folder``: their folders, with TLS their keys, and their names in the study.

    Nothing that other sites have changes.

    Raises:
        PerfedError: no deployment is there, or a name is there already or cannot be one.
    """
    before = Deployment.read(folder)
    if not names:
        raise PerfedError("--extend: the new sites are given with --sites, e.g. --sites east")
    deployment, release = before.with_sites(names), Release.of_deployment(folder)
    study = make_deployed_study(study_in(folder), deployment.sites)
    for site in names:
        if (folder / "sites" / site).exists():
            raise PerfedError(f"{folder / 'sites' / site} is there already; choose another name")
    if deployment.tls:
        tls.check_installed()
    try:
        credentials = _site_credentials(folder, names) if deployment.tls else None
        for site in names:
            _write(folder, make_site_files(deployment, study, site, credentials, release))
            _write_release(folder / "sites" / site, release)
    except BaseException:
        for site in names:
            shutil.rmtree(folder / "sites" / site, ignore_errors=True)
            (folder / f"server/keys/{site}.pub").unlink(missing_ok=True)
        raise
    write_atomic(folder / STUDY_FILE, study.to_toml())
    write_atomic(folder / FILE, deployment.to_toml())
    return deployment


@create_private_files()
def renew(folder: Path, days: int = DAYS, server_names: Sequence[str] = ()) -> str:
    """Give the server of the deployment in ``folder`` a new certificate of the same key and authority.

    Returns:
        its last day.

    Raises:
        PerfedError: no deployment with TLS is there, the authority's key is not in its place, or the authority ends
            before.
    """
    deployment = Deployment.read(folder)
    if not deployment.tls:
        raise PerfedError(f"{folder}: this deployment has no TLS, and so no certificate")
    tls.check_installed()
    names = tuple(dict.fromkeys((*deployment.server_names, *server_names)))
    deployment = replace(deployment, server_names=names)
    last_day = _certify(folder, deployment, days)
    write_atomic(folder / FILE, deployment.to_toml())
    return last_day


@create_private_files()
def rotate(folder: Path, site: str) -> str:
    """Make a site of the deployment in ``folder`` a new key, in the place of the one before; the study stays as it is.

    The SuperLink knows the key before until that is barred.

    Returns:
        the new key's fingerprint, which is on the site's page too.

    Raises:
        PerfedError: no deployment with TLS is there, or it has no such site.
    """
    deployment = Deployment.read(folder)
    if not deployment.tls:
        raise PerfedError(f"{folder}: this deployment has no TLS, and so no keys of sites")
    if site not in deployment.sites:
        raise PerfedError(f"--rotate {site}: no such site; allowed: {', '.join(deployment.sites)}")
    tls.check_installed()
    study = study_in(folder)
    authority, own = folder / "tls/ca.crt", folder / "sites" / site
    own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        key, public = Path(made) / "key", Path(made) / "pub"
        tls.make_site_key(key, public, site)
        found = Credentials(tls.hash_certificate(authority), {site: tls.hash_public_key(public)})
        page = f"sites/{site}/README.md"
        text = make_site_files(deployment, study, site, found, Release.of_deployment(folder))[page]
        key.replace(own / f"{site}.key")
        public.replace(folder / f"server/keys/{site}.pub")
    write_atomic(folder / page, text)
    return found.keys[site]


def _credentials(folder: Path, deployment: Deployment, days: int) -> Credentials:
    """Make the authority, the server's certificate and the sites' keys."""
    for part in ("tls", "server/tls", "server/keys"):
        (folder / part).mkdir(parents=True)
    tls.make_authority(folder / "tls/ca.key", folder / "tls/ca.crt", deployment.name)
    shutil.copyfile(folder / "tls/ca.crt", folder / "server/tls/ca.crt")
    tls.make_server_key(folder / "server/tls/server.key")
    _certify(folder, deployment, days)
    return _site_credentials(folder, deployment.sites)


def _certify(folder: Path, deployment: Deployment, days: int) -> str:
    authority = folder / "tls/ca.key", folder / "tls/ca.crt"
    server = folder / "server/tls"
    return tls.certify_server(authority, server / "server.key", server / "server.crt", deployment.certified_names, days)


def _site_credentials(folder: Path, sites: Sequence[str]) -> Credentials:
    keys = {}
    for site in sites:
        own, public = folder / "sites" / site, folder / f"server/keys/{site}.pub"
        own.mkdir(parents=True)
        tls.make_site_key(own / f"{site}.key", public, site)
        shutil.copyfile(folder / "tls/ca.crt", own / "ca.crt")
        keys[site] = tls.hash_public_key(public)
    return Credentials(tls.hash_certificate(folder / "tls/ca.crt"), keys)


def _write_release(folder: Path, release: Release) -> None:
    for name, content in release.files.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, content)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
