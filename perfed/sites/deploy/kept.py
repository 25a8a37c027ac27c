"""A site's model of a run, computed at the site from its stored state and the last message about the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfed.engine.evaluate import Outputs
from perfed.engine.executor import ChunkTask, LocalExecutor
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.participation.settings import Participation
from perfed.run.callbacks.best import BestModels
from perfed.run.own_model import PersonalModels
from perfed.sites.deploy.part import SiteRun
from perfed.sites.flower.site import hash_request, load_model_message, make_background
from perfed.sites.flower.wire import unpack_task
from perfed.training.cohort import Cohort
from perfed.training.private import ReleaseCounter


class SiteServer(Server):
    """A server's view of a single client, whose model is computed from a stored message of the real server.

    Args:
        site_run: the run that the site has joined.
        folder: folder of the site.

    Raises:
        PerfedError: the server has not yet evaluated the site's model.
    """

    def __init__(self, site_run: SiteRun, folder: Path) -> None:
        super().__init__(site_run.federation, site_run.initialiser, site_run.load_plan(folder), Participation(), 1)
        self._site_run, self._folder = site_run, folder
        stored = site_run.get_stored_exchanges(folder)
        self.header, self._tree, self._content = load_model_message(stored.path)
        self.budget = site_run.make_budget(folder)
        self._state = stored.load_state(self.header["base"])

    def own_models(self, ids: Sequence[str], round_: int) -> Iterator[Cohort]:
        """Yield the site's model, computed from the last message about it."""
        work, executor = self._prepare_task()
        cohort = executor.run_program(work)[0]
        if self._site_run.has_other_versions and executor.counter is not None and executor.counter.releases:
            raise PerfedError(
                f"{self._folder}: this model was fine-tuned with noise by "
                f"{self._site_run.versions or 'an older perfed'}; "
                "the installed versions may compute another model with the same noise: "
                "install the earlier versions again"
            )
        yield cohort

    @property
    def test_outputs(self) -> Outputs | None:
        """The model's outputs for the site's test rows, in the unit of training; ``None`` without test rows."""
        work, executor = self._prepare_task()
        if work.exchange.measure != "test":
            return None
        results = executor.run(replace(work, keep_outputs=True, scoring=replace(work.scoring, scale=None)))
        return results.outputs[0] if results.outputs else None

    def _prepare_task(self) -> tuple[ChunkTask, LocalExecutor]:
        """Return the task of the last message about the model, and an executor that can run it."""
        (client,) = self.federation
        work = unpack_task(self.header, self._tree, client.id, self._state, self.federation.target_scale)
        background = make_background(client, self.header, self.initialiser.info(self.federation))
        executor = LocalExecutor([client], background, self.initialiser, self.plan)
        if self.budget is not None:
            executor.noise = self.budget.make_noise(hash_request(self._content, self._state))
            executor.counter = ReleaseCounter()
        return work, executor


class StoredModel(PersonalModels):
    """The site's model of a run that it has joined.

    Args:
        site_run: the run that the site has joined.
        folder: folder of the site.
    """

    def __init__(self, site_run: SiteRun, folder: Path) -> None:
        self.name, self._sites = site_run.experiment.method, site_run.experiment.data.options["files"]
        self.site_server = SiteServer(site_run, folder)
        self.server, self.callbacks = self.site_server, []

    @property
    def done(self) -> int:
        """The number of the round to which the model belongs."""
        return int(self.site_server.header["round"])

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The sites of the study; the rounds in which each was used are unknown, because only the server knows them."""
        return dict.fromkeys(sorted(self._sites))

    def privacy_spending(self, client: str) -> dict[str, Any] | None:
        """Return the site's privacy settings and spent epsilon, or ``None`` without a table ``[privacy]``."""
        return None if self.site_server.budget is None else self.site_server.budget.describe()

    @property
    def best_models(self) -> BestModels:
        """An empty selection: the stored message already belongs to the selected model."""
        return BestModels()
