"""``perfed site``: it has the data, fetches the server's messages and answers them, all in this one process."""

from __future__ import annotations

import hashlib
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from perfed.data.site_data import problems, site_data
from perfed.deploy.leaving import check_stays
from perfed.deploy.part import Part, same_study, table_options
from perfed.deploy.policy import Policy
from perfed.deploy.site_agent import Station
from perfed.deploy.trial import allowed_in
from perfed.engine.flower.probe import Server
from perfed.errors import PerfedError
from perfed.experiment.config import read

Note = Callable[[str], None]


@dataclass(frozen=True)
class SiteSettings:
    """What a site is started with.

    Attributes:
        name: as the server knows it.
        data: its file or folder.
        server: where the server is.
        folder: for its log and its states.
        study: the study that it takes part in, as TOML; ``None``: any that the server has.
        policy: what is allowed at most.
    """

    name: str
    data: Path
    server: Server
    folder: Path
    study: str | None = None
    policy: Policy = field(default_factory=Policy)


def check_site(settings: SiteSettings) -> None:
    """Look at the site's data and its connection before anything starts.

    Raises:
        PerfedError: a site that has left, data that do not fit the study that the site knows, no file, a study or data
            that the policy does not allow, or a server that will not take it.
    """
    check_stays(settings.folder)
    if not settings.data.exists():
        raise PerfedError(f"--data {settings.data}: no such file")
    part = Part.of(settings.folder, settings.name, settings.data)
    study = settings.study or (None if part is None else part.study)
    if study is not None:
        experiment = read(study, "the study")
        settings.policy.check_study(experiment)
        options = table_options(experiment)
        going_on = part is not None and same_study(part.study, study)
        agreement = part.agreement if part is not None and going_on else None
        found = problems(settings.name, settings.data, options, agreement)
        if found:
            raise PerfedError("\n".join(found))
        settings.policy.check(allowed_in(study))
        settings.policy.check_data(site_data(settings.name, settings.data, options))


def run_site(settings: SiteSettings, note: Note, stop: threading.Event) -> None:
    """Be a site until ``stop``: answer the server's messages.

    Args:
        settings: of the site.
        note: gets one line for each thing that its administrator may want to know.
        stop: ends it within seconds.

    Raises:
        PerfedError: another process is this site; a connection that will never succeed; data that do not fit are told
            to the server, see :func:`check_site`.
    """
    from perfed.engine.flower.node import Attendant, attend  # which needs perfed[flower]

    station = Station(settings.folder, settings.name, settings.data, settings.study, note, settings.policy)
    try:
        place = hashlib.sha256(f"{platform.node()}:{settings.folder.resolve()}".encode()).hexdigest()[:16]
        at = Attendant(settings.name, place, station.answer, station.began, note, station.heard)
        attend(settings.server, at, stop)
    finally:
        station.close()
