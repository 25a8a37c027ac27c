"""The model of a site, made at the site: of what it has kept and of the server's last message on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfed.deploy.part import Part
from perfed.engine.executor import LocalExecutor
from perfed.engine.flower.site import background_of, digest_of, model_message
from perfed.engine.flower.wire import work_of
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.participation.settings import Participation
from perfed.run.callbacks.best import BestModels
from perfed.run.own_model import OwnModels
from perfed.run.site import SiteModel
from perfed.training.cohort import Cohort


class _Here(Server):
    """A server's view of one client, whose own model the message of the real server makes."""

    def __init__(self, part: Part, folder: Path) -> None:
        super().__init__(part.federation, part.initialiser, part.plan, Participation(), 1)
        self._part = part
        stored = part.stored(folder)
        self.header, self._tree, self._content = model_message(stored.path)
        self.budget = part.budget(folder)
        self._state = stored.state(self.header["base"])

    def own_models(self, ids: Sequence[str], round_: int) -> Iterator[Cohort]:
        """The site's own, by the last message that was of it."""
        (client,) = self.federation
        work = work_of(self.header, self._tree, client.id, self._state, self.federation.target_scale)
        background = background_of(client, self.header, self.initialiser.info(self.federation))
        host = LocalExecutor([client], background, self.initialiser, self.plan)
        if self.budget is not None:
            host.noise = self.budget.noise(digest_of(self._content))
        yield host.worked(work)[0]


class _OwnModel(OwnModels):
    def __init__(self, part: Part, folder: Path) -> None:
        self.name, self._sites = part.experiment.method, part.experiment.data.options["files"]
        self.here = _Here(part, folder)
        self.server, self.callbacks = self.here, []

    @property
    def done(self) -> int:
        """The round that the model is of."""
        return int(self.here.header["round"])

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The sites of the study; who was used in which round, the server knows alone."""
        return dict.fromkeys(sorted(self._sites))

    def spent_by(self, client: str) -> dict[str, Any] | None:
        """What the site has spent, as its ledger has it."""
        return None if self.here.budget is None else self.here.budget.stated()

    @property
    def taken(self) -> BestModels:
        """Nothing: the message is of the model that was taken."""
        return BestModels()


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
    return _OwnModel(part, folder).site(site)
