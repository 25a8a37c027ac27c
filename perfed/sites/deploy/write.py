"""Write the files of a deployment, and change it later: add sites, replace a site's key, renew the certificate."""

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
"""The default number of days for which a server's certificate is valid."""


@create_private_files()
def deploy(
    experiment: Experiment, deployment: Deployment, out: Path, days: int = DAYS, release: Release | None = None
) -> None:
    """Write the files of a deployment into the new directory ``out``.

    Args:
        experiment: an experiment on tables; the paths of its files are not written.
        deployment: the server and the sites.
        out: a directory that must not exist; it appears only once all files are written.
        days: the number of days for which the server's certificate is valid.
        release: the files from which server and sites install perfed; ``None``: they are added by hand.

    Raises:
        PerfedError: ``out`` exists, the experiment cannot be deployed, or cryptography is missing.
    """
    if out.exists():
        raise PerfedError(f"{out} is there already; name another directory with --out")
    study = make_deployed_study(experiment, deployment.sites)
    release = release or Release.to_be_added()
    if deployment.tls:
        tls.check_installed()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        credentials = _make_credentials(temporary, deployment, days) if deployment.tls else None
        files = {FILE: deployment.to_toml(), **make_app_files(study), **server_files(deployment, release)}
        files["README.md"] = make_server_page(deployment, study, release)
        for site in deployment.sites:
            files |= make_site_files(deployment, study, site, credentials, release)
        _write_new_files(temporary, files)
        for folder in (FOLDER, *(f"sites/{site}" for site in deployment.sites)):
            _write_release(temporary / folder, release)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def study_in(folder: Path) -> Experiment:
    """Return the study of the deployment in ``folder``.

    Raises:
        PerfedError: the file of the study cannot be read.
    """
    file = folder / STUDY_FILE
    with readable(file):
        return read(file.read_text(encoding="utf-8"), str(file))


@create_private_files()
def extend(folder: Path, names: Sequence[str]) -> Deployment:
    """Add sites to the deployment in ``folder``.

    Writes their folders, with TLS also their keys, and adds their names to the study. The files of the other sites do
    not change.

    Args:
        folder: the folder of the deployment.
        names: the names of the new sites.

    Returns:
        the extended deployment.

    Raises:
        PerfedError: ``folder`` holds no deployment, or a name is already used or not allowed.
    """
    previous = Deployment.read(folder)
    if not names:
        raise PerfedError("--extend: the new sites are given with --sites, e.g. --sites east")
    deployment, release = previous.with_sites(names), Release.of_deployment(folder)
    study = make_deployed_study(study_in(folder), deployment.sites)
    for site in names:
        if (folder / "sites" / site).exists():
            raise PerfedError(f"{folder / 'sites' / site} is there already; choose another name")
    if deployment.tls:
        tls.check_installed()
    try:
        credentials = _make_site_credentials(folder, names) if deployment.tls else None
        for site in names:
            _write_new_files(folder, make_site_files(deployment, study, site, credentials, release))
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
    """Issue a new certificate for the server of the deployment in ``folder``, with the same key and authority.

    Args:
        folder: the folder of the deployment.
        days: the number of days for which the certificate is valid.
        server_names: further names and addresses of the server, added to those of the deployment.

    Returns:
        the last day on which the certificate is valid.

    Raises:
        PerfedError: ``folder`` holds no deployment with TLS, the authority's key is not in its place, or the
            authority expires before the certificate would.
    """
    deployment = Deployment.read(folder)
    if not deployment.tls:
        raise PerfedError(f"{folder}: this deployment has no TLS, and so no certificate")
    tls.check_installed()
    names = tuple(dict.fromkeys((*deployment.server_names, *server_names)))
    deployment = replace(deployment, server_names=names)
    last_day = _certify_server(folder, deployment, days)
    write_atomic(folder / FILE, deployment.to_toml())
    return last_day


@create_private_files()
def rotate(folder: Path, site: str) -> str:
    """Replace the key of a site of the deployment in ``folder``; the study does not change.

    The SuperLink accepts the previous key until that key is barred.

    Returns:
        the new key's fingerprint, which is also written on the site's page.

    Raises:
        PerfedError: ``folder`` holds no deployment with TLS, or the deployment has no such site.
    """
    deployment = Deployment.read(folder)
    if not deployment.tls:
        raise PerfedError(f"{folder}: this deployment has no TLS, and so no keys of sites")
    if site not in deployment.sites:
        raise PerfedError(f"--rotate {site}: no such site; allowed: {', '.join(deployment.sites)}")
    tls.check_installed()
    study = study_in(folder)
    authority, site_folder = folder / "tls/ca.crt", folder / "sites" / site
    site_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        key, public = Path(temporary) / "key", Path(temporary) / "pub"
        tls.make_site_key(key, public, site)
        credentials = Credentials(tls.hash_certificate(authority), {site: tls.hash_public_key(public)})
        page = f"sites/{site}/README.md"
        text = make_site_files(deployment, study, site, credentials, Release.of_deployment(folder))[page]
        key.replace(site_folder / f"{site}.key")
        public.replace(folder / f"server/keys/{site}.pub")
    write_atomic(folder / page, text)
    return credentials.keys[site]


def _make_credentials(folder: Path, deployment: Deployment, days: int) -> Credentials:
    """Write the authority, the server's key and certificate and the sites' keys, and return their fingerprints."""
    for part in ("tls", "server/tls", "server/keys"):
        (folder / part).mkdir(parents=True)
    tls.make_authority(folder / "tls/ca.key", folder / "tls/ca.crt", deployment.name)
    shutil.copyfile(folder / "tls/ca.crt", folder / "server/tls/ca.crt")
    tls.make_server_key(folder / "server/tls/server.key")
    _certify_server(folder, deployment, days)
    return _make_site_credentials(folder, deployment.sites)


def _certify_server(folder: Path, deployment: Deployment, days: int) -> str:
    """Write the server's certificate, and return the last day on which it is valid."""
    authority = folder / "tls/ca.key", folder / "tls/ca.crt"
    server = folder / "server/tls"
    return tls.certify_server(authority, server / "server.key", server / "server.crt", deployment.certified_names, days)


def _make_site_credentials(folder: Path, sites: Sequence[str]) -> Credentials:
    """Write the keys of ``sites``, and return the fingerprints of the authority and of the keys."""
    keys = {}
    for site in sites:
        site_folder, public = folder / "sites" / site, folder / f"server/keys/{site}.pub"
        site_folder.mkdir(parents=True)
        tls.make_site_key(site_folder / f"{site}.key", public, site)
        shutil.copyfile(folder / "tls/ca.crt", site_folder / "ca.crt")
        keys[site] = tls.hash_public_key(public)
    return Credentials(tls.hash_certificate(folder / "tls/ca.crt"), keys)


def _write_release(folder: Path, release: Release) -> None:
    for name, content in release.files.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, content)


def _write_new_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
