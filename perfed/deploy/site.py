"""``perfed site``: a worker that has the data, and a supervised SuperNode that brings it the server's messages."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perfed.data.site_data import problems
from perfed.deploy.station import Part, Station, same_study, table_options
from perfed.engine.flower.probe import Server
from perfed.engine.flower.supernode import supervise
from perfed.engine.flower.worker import serve
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
        folder: for its log, its states and Flower's own files.
        study: the study that it takes part in, as TOML; ``None``: that of the server.
    """

    name: str
    data: Path
    server: Server
    folder: Path
    study: str | None = None


def check_site(settings: SiteSettings) -> None:
    """Look at the site's data and its connection before anything starts.

    Raises:
        PerfedError: data that do not fit the study that the site knows, no file, or a server that will not take it.
    """
    if not settings.data.exists():
        raise PerfedError(f"--data {settings.data}: no such file")
    part = Part.of(settings.folder, settings.name, settings.data)
    study = settings.study or (None if part is None else part.study)
    if study is not None:
        options = table_options(read(study, "the study"))
        going_on = part is not None and same_study(part.study, study)
        agreement = part.agreement if part is not None and going_on else None
        found = problems(settings.name, settings.data, options, agreement)
        if found:
            raise PerfedError("\n".join(found))


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
    station = Station(settings.folder, settings.name, settings.data, settings.study, note)
    try:
        with tempfile.TemporaryDirectory(prefix="perfed-") as short:  # paths of sockets have 107 bytes at most
            path = Path(short) / "worker"
            worker = threading.Thread(target=_work, args=(path, station, stop), daemon=True)
            worker.start()
            try:
                config = {"site": settings.name, "worker": str(path)}
                supervise(settings.server, config, settings.folder, note, stop)
            finally:
                stop.set()
                worker.join()
    finally:
        station.close()


def _work(path: Path, station: Station, stop: threading.Event) -> None:
    serve(path, station.answer, stop)
