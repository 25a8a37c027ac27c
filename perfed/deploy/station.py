"""A site in a deployment: what it tells before a run, the client that is made of its data, and its part of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from perfed.data.agreement import Agreement
from perfed.data.domain_input import completed
from perfed.data.federation import Federation
from perfed.data.site_data import SiteData, site_data
from perfed.data.tables.options import TableOptions
from perfed.datasets.tables import TableSettings
from perfed.engine.flower.chain import LOG
from perfed.engine.flower.message import pack, unframe
from perfed.engine.flower.outgoing import OutgoingLog
from perfed.engine.flower.site import Site
from perfed.engine.flower.store import SiteStore, Stored
from perfed.engine.setup import Setup
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.machine import write_atomic
from perfed.training.device import usable_device
from perfed.training.plan import Plan

_RUN = "run.json"  # the run that the site is in: its id and place, its study, what was agreed, and since when
_RUNS = "runs"  # folder of its states


def table_options(experiment: Experiment) -> TableOptions:
    """What the columns of the sites' tables are for."""
    return TableSettings.model_construct(**experiment.data.options).options(experiment.seed)


def same_study(one: str, other: str) -> bool:
    """Whether two studies ask the same of a site; others may have joined one of them."""
    plain = [read(text, "the study").model_dump(mode="json") for text in (one, other)]
    for table in plain:
        table["data"].pop("files", None)
    return plain[0] == plain[1]


@dataclass(frozen=True)
class Part:
    """A run as a site has agreed to it.

    Attributes:
        site: its name.
        data: its file or folder.
        run: id of the run.
        study: the experiment, as TOML.
        agreement: what holds at all sites.
        place: the directory of its results on the server.
        since: when the site first agreed to it.
        own: the data, where they have been read already.
    """

    site: str
    data: Path
    run: str
    study: str
    agreement: Agreement
    place: str
    since: str
    own: SiteData | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, folder: Path, site: str, data: Path) -> Part | None:
        """The run that the site in ``folder`` is in; ``None`` where it is in none.

        Raises:
            PerfedError: the file that says so is damaged.
        """
        file = folder / _RUN
        if not file.exists():
            return None
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            agreement = Agreement.of_plain(held["agreement"], str(file))
            return cls(site, data, held["run"], held["study"], agreement, held["place"], held["since"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PerfedError(f"{file}: cannot be read: {error}") from None

    def write(self, folder: Path) -> None:
        """Let :meth:`of` find it."""
        content = {name: getattr(self, name) for name in ("run", "place", "since", "study")}
        content["agreement"] = self.agreement.plain()
        write_atomic(folder / _RUN, json.dumps(content, indent=1) + "\n")

    @property
    def held(self) -> dict[str, str]:
        """What the site tells a server of another run: it finds out whether anybody is at work on this one."""
        refuses = (
            f"busy since {self.since} with run {self.run}, whose results are in {self.place} on the server; "
            "wait for its end, or end it ('perfed submit DIR --stop')"
        )
        return {"busy": self.run, "place": self.place, "refuses": refuses}

    @cached_property
    def experiment(self) -> Experiment:
        """The study, parsed and checked."""
        return read(self.study, "the study")

    @cached_property
    def federation(self) -> Federation:
        """The site's client alone, by the agreement, with inputs as the study has them in type and place.

        Raises:
            PerfedError: its data do not fit.
        """
        experiment = self.experiment
        own = self.own or site_data(self.site, self.data, table_options(experiment))
        alone = Federation.of_agreement((own.client(self.agreement),), self.agreement, name=experiment.data.name)
        options = experiment.data.options
        made = completed(alone, options["validation_fraction"], options["domain_input"], experiment.seed)
        return made.to(dtype=experiment.torch_dtype, device=self.device)

    @cached_property
    def device(self) -> torch.device:
        """Where the site computes."""
        return usable_device(self.experiment.device, f"device = '{self.experiment.device}'")

    @cached_property
    def setup(self) -> Setup:
        """Method, model and seed of the study."""
        experiment = self.experiment
        model = experiment.build_model(self.federation.num_outputs)
        return Setup(experiment.built_method, model, experiment.seed, experiment.torch_dtype, self.device)

    @property
    def plan(self) -> Plan:
        """One client at a time, on the study's threads."""
        return Plan("sequential", threads=self.experiment.plan.threads)

    def states(self, folder: Path) -> SiteStore:
        """Where the site in ``folder`` keeps its states of the run; this process is the site until it is closed."""
        return SiteStore(folder / _RUNS, self.run)

    def stored(self, folder: Path) -> Stored:
        """The same to read, while another process is the site."""
        return Stored(folder / _RUNS, self.run)


class _Busy(PerfedError):
    """A run asks for a site that is in another one."""

    def __init__(self, held: dict[str, str]) -> None:
        self.held = held
        super().__init__(held["refuses"])


class Station:
    """Answers every message of the server, and writes down what leaves.

    Args:
        folder: of the site, where its log and its states are.
        site: its name.
        data: its file or folder.
        study: the study that it takes part in, and no other; ``None``: that of the server.
        note: gets one line for each thing that the site's administrator may want to know.

    Raises:
        PerfedError: another process is this site, or what it has kept is damaged.
    """

    def __init__(
        self,
        folder: Path,
        site: str,
        data: Path,
        study: str | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder, self._name, self._data, self._study, self._note = folder, site, data, study, note
        folder.mkdir(parents=True, exist_ok=True)
        self._log = OutgoingLog(folder / LOG)
        self._store: SiteStore | None = None
        self._site: Site | None = None
        self._part = Part.of(folder, site, data)
        self._read: dict[str, SiteData] = {}  # by the study that has asked for it, until all have agreed
        self._told: set[str] = set()  # runs that know of the present one, since its last message
        self._last: tuple[bytes, bytes] | None = None  # the last message before a run, and the reply

    def close(self) -> None:
        """Let another process work for the site."""
        self._log.close()
        if self._store is not None:
            self._store.close()

    def answer(self, data: bytes) -> bytes:
        """The reply to a message, logged before it is returned; a mistake is a reply too, in one line."""
        try:
            reply = self._answered(unframe(data)[0], data)
        except _Busy as error:  # the server says next whether that run is over
            reply = pack({"kind": "error", "site": self._name, "error": str(error), **error.held}, {})
        except (PerfedError, OSError) as error:
            said = " ".join(str(error).split())
            self._note(said)
            reply = pack({"kind": "error", "site": self._name, "error": said}, {})
        self._log.append(reply)
        return reply

    def _answered(self, header: Mapping[str, Any], data: bytes) -> bytes:
        kind, run = header.get("kind"), str(header.get("run"))
        if self._part is not None and self._part.run == run:
            self._told = set()
        if kind == "work":
            return self._at(run).answer(data)
        if kind not in ("study", "agreement"):
            raise PerfedError(f"a message of kind {kind!r}; allowed: study, agreement, work")
        if self._last is None or self._last[0] != data:  # else it is sent again
            self._last = data, self._opened(kind, run, header)
        return self._last[1]

    def _opened(self, kind: str, run: str, header: Mapping[str, Any]) -> bytes:
        """The reply to a message before a run: what the site tells, or its facts when it has joined."""
        study = header.get("study")
        if not isinstance(study, str) or (self._study is not None and not same_study(study, self._study)):
            raise PerfedError("the server's study is not the one that this site was given")
        part, fields = self._part, {"site": self._name, "run": run, "round": 0, "program": kind}
        held = {} if part is None or part.run == run else part.held
        known = run in self._told
        self._told.add(run)
        if kind == "study":
            self._read = {study: site_data(self._name, self._data, table_options(read(study, "the study")))}
            return pack({"kind": "told", **fields, **held, "told": self._read[study].told().plain()}, {})
        if held and not (known and header.get("ended") == held["busy"]):
            self._read = {}
            raise _Busy(held)
        agreement = Agreement.of_plain(header.get("agreement"), "the server's agreement")
        since = part.since if part is not None and part.run == run else f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        own, place = self._read.pop(study, None), str(header.get("place"))
        self._join(Part(self._name, self._data, run, study, agreement, place, since, own))
        client = self._at(run).client
        facts = client.facts(agreement.task == "survival")
        return pack({"kind": "facts", **fields, "facts": facts.plain()}, {})

    def _join(self, part: Part) -> None:
        """Take part in a run from here on, in the place of any other."""
        part.federation  # noqa: B018 - which finds out whether the data fit
        if self._store is not None:
            self._store.close()
        self._store = self._site = None
        part.write(self._folder)
        self._part = part
        self._note(f"takes part in run {part.run}: {part.experiment.method}, {part.experiment.rounds} rounds")

    def _at(self, run: str) -> Site:
        """The site's part of the run, which is read and prepared once."""
        part = self._part
        if part is None or part.run != run:
            raise PerfedError("this site is not in that run; the server must begin with the study")
        if self._site is None:
            (client,) = part.federation
            self._store = part.states(self._folder)
            self._site = Site(
                client,
                part.setup,
                part.plan,
                info=part.setup.info(part.federation),
                scale=part.federation.target_scale,
                store=self._store,
                run=run,
            )
        return self._site
