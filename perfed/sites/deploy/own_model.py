"""The model of a site, built at the site during or after a run."""

from __future__ import annotations

from pathlib import Path

from perfed.client_model.site_model import SiteModel
from perfed.errors import PerfedError
from perfed.sites.deploy.kept import StoredModel
from perfed.sites.deploy.mixing import BlendSiteRun, specialise_site_run
from perfed.sites.deploy.part import SiteRun


def load_site_model(folder: Path, site: str, data: Path, run: str | None = None) -> SiteModel:
    """Return the site's model as it was last evaluated.

    The site may continue in another process meanwhile.

    Args:
        folder: folder of the site.
        site: name of the site.
        data: file or folder with the site's table, with the rows with which the site joined the run.
        run: id of a run that the site has joined; ``None`` for its current run.

    Raises:
        PerfedError: the site is in no run, or the server has not yet evaluated its model.
    """
    site_run = SiteRun.read_current(folder, site, data) if run is None else SiteRun.read_joined(folder, site, data, run)
    if site_run is None:
        raise PerfedError(f"{folder}: this site has not taken part in any run yet")
    site_run = specialise_site_run(site_run, folder)
    return site_run.build_blend() if isinstance(site_run, BlendSiteRun) else StoredModel(site_run, folder).site(site)
