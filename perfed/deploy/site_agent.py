"""A site in a deployment: what it tells before a run, the client that is made of its data, and its part of the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from perfed.data.client import Client
from perfed.data.domain_input import completed
from perfed.data.federation import Federation
from perfed.data.federation_schema import FederationSchema
from perfed.data.reading import checked, read_json
from perfed.data.site_data import SiteData, site_data
from perfed.data.tables.checks import FEWEST
from perfed.data.tables.options import TableOptions
from perfed.datasets.tables import TableSettings
from perfed.deploy.leaving import left, said
from perfed.deploy.policy import Policy
from perfed.deploy.server_files import app_hash
from perfed.deploy.trial import protocol_of
from perfed.engine.flower.allowed import Allowed
from perfed.engine.flower.audit_log import OutgoingLog
from perfed.engine.flower.dry_run import allowed_by
from perfed.engine.flower.hash_chain import LOG
from perfed.engine.flower.message import pack, unframe
from perfed.engine.flower.refusal import Refused, Said, detail, refusing, said_of
from perfed.engine.flower.site import Site
from perfed.engine.flower.store import SiteStore, Stored
from perfed.engine.setup import Setup
from perfed.errors import PerfedError, some
from perfed.experiment.config import Experiment, read
from perfed.machine import installed_version, write_atomic
from perfed.training.device import usable_device
from perfed.training.plan import Plan

_RUN = "run.json"  # the run that the site is in: its id and place, its study, what was agreed, and since when
_RUNS = "runs"  # folder of its states


def table_options(experiment: Experiment) -> TableOptions:
    """What the columns of the sites' tables are for."""
    return TableSettings.model_construct(**experiment.data.options).options(experiment.seed)


def told_by(own: SiteData) -> dict[str, Any]:
    """What a site tells the server before its facts, as it leaves."""
    return own.told(FEWEST).plain()


def facts_by(client: Client, agreement: FederationSchema) -> dict[str, Any]:
    """What a site tells the server once all have agreed, as it leaves: counts, shapes, a hash of its inputs' names."""
    return client.facts(agreement.task == "survival").nameless.plain()


def same_study(one: str, other: str) -> bool:
    """Whether two studies ask the same of a site; others may have joined one of them."""
    return asked(one) == asked(other)


def asked(study: str) -> dict[str, Any]:
    """What a study asks of a site, as plain values: all of it but for the names of sites."""
    plain = read(study, "the study").model_dump(mode="json")
    plain["data"].pop("files", None)
    return plain


class _Held(BaseModel):
    """What ``run.json`` of a site holds."""

    run: str
    study: str
    place: str
    since: str
    agreement: dict[str, Any]


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
    agreement: FederationSchema
    place: str
    since: str
    own: SiteData | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, folder: Path, site: str, data: Path) -> Part | None:
        """The run that the site in ``folder`` is in; ``None`` where it is in none.

        Raises:
            PerfedError: the file that says so is damaged.
        """
        return cls._in(folder / _RUN, site, data) if (folder / _RUN).exists() else None

    @classmethod
    def earlier(cls, folder: Path, site: str, data: Path, run: str) -> Part:
        """The run with the id ``run``, in which the site in ``folder`` is or was.

        Raises:
            PerfedError: it was in no such run, or the file that says so is damaged.
        """
        file = Stored(folder / _RUNS, run).path / _RUN
        if not file.exists():
            held = sorted(found.parent.name for found in (folder / _RUNS).glob(f"*/{_RUN}"))
            raise PerfedError(f"{folder}: nothing is kept of run '{run}'; allowed: {some(held) or 'none'}")
        return cls._in(file, site, data)

    @classmethod
    def _in(cls, file: Path, site: str, data: Path) -> Part:
        held = checked(_Held, read_json(file), file)
        agreement = FederationSchema.of_plain(held.agreement, str(file))
        return cls(site, data, held.run, held.study, agreement, held.place, held.since)

    def write(self, folder: Path) -> None:
        """Let :meth:`of` and, once the site is in another run, :meth:`earlier` find it."""
        content = {name: getattr(self, name) for name in ("run", "place", "since", "study")}
        content["agreement"] = self.agreement.plain()
        kept = self.stored(folder).path
        kept.mkdir(parents=True, exist_ok=True)
        for place in (kept, folder):
            write_atomic(place / _RUN, json.dumps(content, indent=1) + "\n")

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
        experiment, model = self.experiment, self.experiment.model_for(self.federation)
        return Setup(experiment.built_method, model, experiment.seed, experiment.torch_dtype, self.device)

    @property
    def plan(self) -> Plan:
        """One client at a time, on the study's threads."""
        return Plan("sequential", threads=self.experiment.plan.threads)

    @cached_property
    def allowed(self) -> Allowed:
        """What the site answers in the run.

        Raises:
            PerfedError: the study's method refuses such sites; see :func:`allowed_by`.
        """
        setup, federation, domains = self.setup, self.federation, self.agreement.domains
        protocol = protocol_of(self.experiment, len(domains) if isinstance(domains, tuple) else domains or 0)
        try:
            return allowed_by(federation.clients[0], setup.info(federation), setup, protocol)
        except PerfedError as error:
            raise PerfedError(f"the study was tried on made-up rows: {error}") from None

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
    """Answers every message of the server, and writes down what arrives and what leaves.

    Args:
        folder: of the site, where its log and its states are.
        site: its name.
        data: its file or folder.
        study: the study that it takes part in, and no other; ``None``: that of the server.
        note: gets one line for each thing that the site's administrator may want to know.
        policy: what the site's administrator allows at most.

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
        policy: Policy | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._folder, self._name, self._data, self._study, self._note = folder, site, data, study, note
        folder.mkdir(parents=True, exist_ok=True)
        self._log = OutgoingLog(folder / LOG)
        pinned = "any study" if study is None else f"a study with SHA-256 {hashlib.sha256(study.encode()).hexdigest()}"
        self._log.note(f"site '{site}' has started for {pinned}, with perfed {installed_version()}")
        self._left = False  # since it was started
        self._store: SiteStore | None = None
        self._site: Site | None = None
        self._part = Part.of(folder, site, data)
        self._read: dict[str, SiteData] = {}  # by the study that has asked for it, until all have agreed
        self._told: set[str] = set()  # runs that know of the present one, since its last message
        self._last: tuple[bytes, bytes] | None = None  # the last message before a run, and the reply

    def close(self) -> None:
        """Let another process work for the site."""
        with suppress(OSError):  # the disk may be full
            if not self._left and left(self._folder):
                self._log.note(said(self._folder))
            self._log.note("the site has stopped")
        self._log.close()
        if self._store is not None:
            self._store.close()

    def began(self, app: str) -> None:
        """Write down the hash of a run's app, as the server gives it; nothing of the app is loaded here."""
        expected = "" if self._study is None else app_hash(read(self._study, "the study"))
        other = "" if expected in ("", app) else f"; with the sites of this site's own study it is {expected}"
        self.heard(f"a run begins, whose app has the SHA-256 {app}{other}; it is not loaded here")

    def heard(self, line: str) -> None:
        """Write down what is no message of a run, and what is replied to it; where it cannot be, say it alone."""
        with suppress(OSError):
            self._log.note(line)
        self._note(line)

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; it is logged that the message came, and the reply before it is returned.

        Whatever goes wrong is a reply too: one of the sentences that the server may be told. Why, ``note`` is told.

        Raises:
            PerfedError: nothing can be logged: nothing leaves.
        """
        try:
            self._log.arrived(data)
            if not self._left and left(self._folder):
                self._left = True
                self._log.note(said(self._folder))
            reply = self._reply(data)
            self._log.append(reply)
        except OSError as error:
            self._note(detail(error))
            raise Refused(Said.DISK) from None
        return reply

    def _reply(self, data: bytes) -> bytes:
        try:
            with refusing(Said.MESSAGE):
                header, _ = unframe(data)
            return self._answered(header, data)
        except _Busy as error:  # the server says next whether that run is over
            return pack({"kind": "error", "site": self._name, "error": str(error), **error.held}, {})
        except Exception as error:  # whatever failed, its words may say something of the rows
            self._note(detail(error))
            return pack({"kind": "error", "site": self._name, "error": str(said_of(error))}, {})

    def _answered(self, header: Mapping[str, Any], data: bytes) -> bytes:
        if self._left:
            raise Refused(Said.LEFT)
        kind, run = header.get("kind"), str(header.get("run"))
        if self._part is not None and self._part.run == run:
            self._told = set()
        if kind == "work":
            return self._at(run).answer(data)
        if kind not in ("study", "agreement"):
            raise Refused(Said.MESSAGE, f"a message of kind {str(kind)[:60]!r}; allowed: study, agreement, work")
        if self._last is None or self._last[0] != data:  # else it is sent again
            self._last = data, self._opened(kind, run, header)
        return self._last[1]

    def _opened(self, kind: str, run: str, header: Mapping[str, Any]) -> bytes:
        """The reply to a message before a run: what the site tells, or its facts when it has joined."""
        study = self._study_of(header)
        part, fields = self._part, {"site": self._name, "run": run, "round": 0, "program": kind}
        held = {} if part is None or part.run == run else part.held
        known = run in self._told
        self._told.add(run)
        if kind == "study":
            with refusing(Said.DATA):
                self._read = {study: site_data(self._name, self._data, table_options(read(study, "the study")))}
                told = told_by(self._read[study])
            return pack({"kind": "told", **fields, **held, "told": told}, {})
        if held and not (known and header.get("ended") == held["busy"]):
            self._read = {}
            raise _Busy(held)
        with refusing(Said.MESSAGE):
            agreement = FederationSchema.of_plain(header.get("agreement"), "the server's agreement")
        since = part.since if part is not None and part.run == run else f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        own, place = self._read.pop(study, None), str(header.get("place"))
        self._join(Part(self._name, self._data, run, study, agreement, place, since, own))
        facts = facts_by(self._at(run).client, agreement)
        return pack({"kind": "facts", **fields, "facts": facts}, {})

    def _study_of(self, header: Mapping[str, Any]) -> str:
        """The server's study, which must be that of the site."""
        study = header.get("study")
        with refusing(Said.STUDY):
            if not isinstance(study, str) or (self._study is not None and not same_study(study, self._study)):
                raise Refused(Said.STUDY)
            read(study, "the study")
        return study

    def _join(self, part: Part) -> None:
        """Take part in a run from here on, in the place of any other."""
        with refusing(Said.MESSAGE):
            part.stored(self._folder)  # which finds out whether the run has a name
        with refusing(Said.DATA):
            part.federation  # noqa: B018 - which finds out whether the data fit
        with refusing(Said.UNFIT):
            allowed = part.allowed
        with refusing(Said.POLICY):
            self._policy.check(allowed)
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
            raise Refused(Said.AWAY)
        if self._site is None:
            if self._study is not None and not same_study(part.study, self._study):  # it was started again with another
                raise Refused(Said.STUDY)
            with refusing(Said.POLICY):
                self._policy.check(part.allowed)
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
                allowed=part.allowed,
            )
        return self._site
