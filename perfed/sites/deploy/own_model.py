"""The model of a site, made at the site while or after it takes part in a run."""

from __future__ import annotations

from pathlib import Path

from perfed.client_model.site_model import SiteModel
from perfed.errors import PerfedError
from perfed.sites.deploy.kept import KeptModel
from perfed.sites.deploy.mixing import MixingPart, as_agreed
from perfed.sites.deploy.part import Part


def site_model(folder: Path, site: str, data: Path, run: str | None = None) -> SiteModel:
    """The site's own model, as it was last evaluated; the site may go on in another process meanwhile.

    Args:
        folder: of the site.
        site: its name.
        data: its file or folder, as the run was begun with.
        run: id of a run in which it was before; ``None``: the run in which it is.

    Raises:
        PerfedError: the site is in no run, or its model has not been made yet.
    """
    part = Part.of(folder, site, data) if run is None else Part.earlier(folder, site, data, run)
    if part is None:
        raise PerfedError(f"{folder}: this site has taken part in no run yet")
    part = as_agreed(part, folder)
    return part.mixture() if isinstance(part, MixingPart) else KeptModel(part, folder).site(site)
