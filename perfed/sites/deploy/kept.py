"""A site's model of a run, made at the site: of what it has kept and of the server's last message on it."""

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
from perfed.sites.deploy.part import Part
from perfed.sites.flower.site import hash_request, load_model_message, make_background
from perfed.sites.flower.wire import unpack_task
from perfed.training.cohort import Cohort
from perfed.training.private import ReleaseCounter


class Here(Server):
    """A server's view of one client, whose own model the message of the real server makes.

    Args:
        part: a run as the site has agreed to it.
        folder: of the site.

    Raises:
        PerfedError: its model has not been made yet.
    """

    def __init__(self, part: Part, folder: Path) -> None:
        super().__init__(part.federation, part.initialiser, part.plan_in(folder), Participation(), 1)
        self._part, self._folder = part, folder
        stored = part.stored(folder)
        self.header, self._tree, self._content = load_model_message(stored.path)
        self.budget = part.budget(folder)
        self._state = stored.load_state(self.header["base"])

    def own_models(self, ids: Sequence[str], round_: int) -> Iterator[Cohort]:
        """The site's own, by the last message that was of it."""
        work, executor = self._last
        cohort = executor.run_program(work)[0]
        if self._part.has_other_versions and executor.counter is not None and executor.counter.releases:
            raise PerfedError(
                f"{self._folder}: this model is fine-tuned with noise, by {self._part.versions or 'an older perfed'}; "
                "the versions that are installed may make another one with the same noise: install the former again"
            )
        yield cohort

    @property
    def said(self) -> Outputs | None:
        """What the model says of the site's test rows, in the unit of training; ``None`` where there are none."""
        work, executor = self._last
        if work.exchange.measure != "test":
            return None
        done = executor.run(replace(work, keep_outputs=True, scoring=replace(work.scoring, scale=None)))
        return done.outputs[0] if done.outputs else None

    @property
    def _last(self) -> tuple[ChunkTask, LocalExecutor]:
        (client,) = self.federation
        work = unpack_task(self.header, self._tree, client.id, self._state, self.federation.target_scale)
        background = make_background(client, self.header, self.initialiser.info(self.federation))
        executor = LocalExecutor([client], background, self.initialiser, self.plan)
        if self.budget is not None:
            executor.noise = self.budget.make_noise(hash_request(self._content, self._state))
            executor.counter = ReleaseCounter()
        return work, executor


class KeptModel(PersonalModels):
    """The site's own model of a run; parameters as of :class:`Here`."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.name, self._sites = part.experiment.method, part.experiment.data.options["files"]
        self.here = Here(part, folder)
        self.server, self.callbacks = self.here, []

    @property
    def done(self) -> int:
        """The round that the model is of."""
        return int(self.here.header["round"])

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The sites of the study; who was used in which round, the server knows alone."""
        return dict.fromkeys(sorted(self._sites))

    def privacy_spending(self, client: str) -> dict[str, Any] | None:
        """What the site has spent, as its ledger has it."""
        return None if self.here.budget is None else self.here.budget.stated()

    @property
    def best_models(self) -> BestModels:
        """Nothing: the message is of the model that was taken."""
        return BestModels()
