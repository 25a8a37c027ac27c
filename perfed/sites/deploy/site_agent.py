"""``perfed site``, a site in a deployment: it answers the server's messages, and writes down what goes and comes."""

from __future__ import annotations

import hashlib
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from perfed.data.federation_schema import FederationSchema
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.plugins import allow_modules
from perfed.privacy.apply import PrivateMethod
from perfed.sites.deploy.candidates import all_allowed, belongs, title_of
from perfed.sites.deploy.leaving import check_stays, left, said
from perfed.sites.deploy.mixing import as_agreed
from perfed.sites.deploy.part import (
    Part,
    count_sites,
    hash_study,
    installed_versions,
    make_schema_of_one_site,
    own_modules,
    table_options,
    told_by,
)
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.server_files import app_hash
from perfed.sites.deploy.spending import RUNS, ledger
from perfed.sites.deploy.trial import private_in
from perfed.sites.flower.allowed import Allowed
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import LOG
from perfed.sites.flower.masking import KINDS
from perfed.sites.flower.message import pack, unframe
from perfed.sites.flower.probe import Server
from perfed.sites.flower.refusal import Refused, Said, detail, refusing, said_of
from perfed.sites.flower.site import Site
from perfed.sites.flower.store import SiteStore, check_sums
from perfed.system import installed_version
from perfed.tables.site_data import SiteData, describe_problems, read_site_data


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
        # of a study with [privacy], once: what is wrong with rows later on could be seen from the replies
        self._rows: SiteData | None = None
        if study is not None and read(study, "the study").privacy is not None:
            self._rows = read_checked_data(site, data, study, self._policy)
        self._log = OutgoingLog(folder / LOG)
        pinned = "any study" if study is None else f"a study with SHA-256 {hashlib.sha256(study.encode()).hexdigest()}"
        self._log.note(f"site '{site}' has started for {pinned}, with perfed {installed_version()}")
        self._modules = [] if study is None else own_modules(read(study, "the study"))
        self._left = False  # since it was started
        self._store: SiteStore | None = None
        self._site: Site | None = None
        part = Part.of(folder, site, data)
        if part is not None and study is not None and belongs(part.study, study):
            part = replace(part, own=self._rows)
        self._part = None if part is None else as_agreed(part, folder)
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
            allowed = f"the server names it; allowed: {', '.join(self._modules) or 'none'}"
            with allow_modules(self._modules, allowed):
                return self._answered(header, data)
        except _Busy as error:  # the server says next whether that run is over
            return pack({"kind": "error", "site": self._name, "error": str(error), **error.held}, {})
        except Exception as error:  # whatever failed, its words may say something of the rows
            self._note(detail(error))
            return pack({"kind": "error", "site": self._name, "error": said_of(error)}, {})

    def _answered(self, header: Mapping[str, Any], data: bytes) -> bytes:
        if self._left:
            raise Refused(Said.LEFT)
        kind, run = header.get("kind"), str(header.get("run"))
        if self._part is not None and self._part.run == run:
            self._told = set()
        if kind == "work" or kind in KINDS:
            reply = self._at(run).answer(data)
            if self._store is not None:
                for line in self._store.notes:
                    self.heard(line)
                self._store.notes.clear()
            return reply
        if kind not in ("study", "agreement"):
            raise Refused(Said.MESSAGE, f"a message of kind {str(kind)[:60]!r}; allowed: study, agreement, work")
        if self._last is None or self._last[0] != data:  # else it is sent again
            self._last = data, self._opened(kind, run, header)
        return self._last[1]

    def _opened(self, kind: str, run: str, header: Mapping[str, Any]) -> bytes:
        """The reply to a message before a run: what the site tells, or its facts when it has joined."""
        study = self._study_of(header)
        part, fields = self._part, {"site": self._name, "run": run, "round": 0, "program": kind}
        with refusing(Said.MESSAGE):
            joined = Part.find_joined(self._folder, self._name, self._data, run)
        if joined is not None and joined.study != study:
            raise Refused(Said.JOINED, f"{Said.JOINED} (run {run})")
        held = {} if part is None or part.run == run else part.held
        known = run in self._told
        self._told.add(run)
        if kind == "study":
            with refusing(Said.DATA):
                rows = self._rows or read_checked_data(self._name, self._data, study, self._policy)
                line = "" if joined is None else self._ledger_line(joined)
                sites = count_sites(read(study, "the study"))
                self._policy.check_budget(self._folder, line, _private(study), rows, sites)
                self._read = {study: rows}
                told = told_by(self._read[study])
            return pack({"kind": "told", **fields, **held, "told": told}, {})
        if held and not (known and header.get("ended") == held["busy"]):
            self._read = {}
            raise _Busy(held)
        with refusing(Said.MESSAGE):
            agreement = FederationSchema.of_plain(header.get("agreement"), "the server's agreement")
        if joined is not None and joined.agreement != agreement:
            raise Refused(Said.JOINED, f"{Said.JOINED} (run {run})")
        since = part.since if part is not None and part.run == run else f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        checked_rows, place = self._rows or self._read.pop(study, None), str(header.get("place"))
        rows_hash, versions = ("", installed_versions()) if joined is None else (joined.rows_hash, joined.versions)
        part = Part(self._name, self._data, run, study, agreement, place, since, checked_rows, rows_hash, versions)
        self._join(as_agreed(part, self._folder))
        self._at(run)
        facts = self._joined(run).facts(self._folder)
        return pack({"kind": "facts", **fields, "facts": facts}, {})

    def _study_of(self, header: Mapping[str, Any]) -> str:
        """The server's study, which must be that of the site."""
        study = header.get("study")
        with refusing(Said.STUDY):
            if not isinstance(study, str) or (self._study is not None and not belongs(study, self._study)):
                raise Refused(Said.STUDY)
            self._check_pinned(read(study, "the study"))
        self._policy.check_study(read(study, "the study"))  # before a row is read
        return study

    def _check_pinned(self, study: Experiment) -> None:
        """Refuse a private study of the server's own, whose columns and classes could make refusals tell of rows."""
        if self._study is None and study.privacy is not None:
            raise Refused(Said.ANY_STUDY)

    def _join(self, part: Part) -> None:
        """Take part in a run from here on, in the place of any other."""
        with refusing(Said.MESSAGE):
            part.stored(self._folder)  # which finds out whether the run has a name
        with refusing(Said.DATA):
            part.federation  # noqa: B018 - which finds out whether the data fit
            part.check_unchanged()
        with refusing(Said.UNFIT):
            allowed = part.allowed
        self._consents(part, allowed)
        if self._store is not None:
            self._store.close()
        self._store = self._site = None
        part.write(self._folder)
        self._part = part
        self._note(f"takes part in run {part.run}: {title_of(part.experiment)}, {part.experiment.rounds} rounds")

    def _consents(self, part: Part, allowed: Allowed) -> None:
        """Refuse what the policy does not allow as it is now: of the study, of its rehearsal, of the site's data."""
        self._policy.check_study(part.experiment)
        with refusing(Said.UNFIT):  # all runs of the study, before the first
            runs = [] if self._study is None else all_allowed(self._study, part.agreement.task)
        for needed in (allowed, *runs):
            self._policy.check(needed)
        with refusing(Said.DATA):
            own = part.own or read_site_data(self._name, self._data, table_options(part.experiment))
            self._policy.check_data(own)
        with refusing(Said.UNFIT):
            line, sites = self._ledger_line(part), count_sites(part.experiment)
            self._policy.check_budget(self._folder, line, part.private, own, sites)

    def _ledger_line(self, part: Part) -> str:
        """Return the name of the ledger's line of a run; empty where it is not private."""
        budget = part.budget(self._folder)
        return "" if budget is None else budget.line

    def _joined(self, run: str) -> Part:
        """The run with the id ``run``, in which the site must be."""
        if self._part is None or self._part.run != run:
            raise Refused(Said.AWAY)
        return self._part

    def _at(self, run: str) -> Site:
        """The site's part of the run, which is read and prepared once."""
        part = self._joined(run)
        if self._site is None:
            if self._study is not None and not belongs(part.study, self._study):  # it was started again with another
                raise Refused(Said.STUDY)
            self._check_pinned(part.experiment)
            part.check_unchanged()
            self._consents(part, part.allowed)
            (client,) = part.federation
            self._store = part.states(self._folder)
            plan = part.plan_in(self._folder)
            plan.on_choice = partial(part.record_plan, plan, self._folder)
            self._site = Site(
                client,
                part.initialiser,
                plan,
                info=part.initialiser.info(part.federation),
                scale=part.federation.target_scale,
                store=self._store,
                allowed=part.allowed,
                budget=part.budget(self._folder, self._policy.epsilon, self._policy.delta),
                study=hash_study(self._study or part.study),  # runs of one blend have payloads in common
                signer=part.signing_key(self._folder),
            )
        return self._site


def read_checked_data(site: str, data: Path, study: str, policy: Policy) -> SiteData:
    """Return the data of a site, in which nothing is wrong as far as one site can know.

    Under ``[privacy]`` that is all that could be wrong, as the study says what else the sites will agree on: whether
    the site answers then depends on no row.

    Args:
        site: its name.
        data: its file or folder.
        study: as TOML.
        policy: what the site's administrator allows at most.

    Raises:
        PerfedError: data that do not fit the study.
        Refused: data with which the policy does not let the site take part.
    """
    experiment = read(study, "the study")
    options = table_options(experiment)
    rows = read_site_data(site, data, options)
    policy.check_data(rows)
    if experiment.privacy is not None:
        schema = make_schema_of_one_site(site, told_by(rows), options)
        Part(site, data, "check", study, schema, "", "", rows).federation  # noqa: B018 - which finds out
    return rows


def _private(study: str) -> PrivateMethod | None:
    with refusing(Said.UNFIT):
        return private_in(read(study, "the study"))


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
    if settings.study is None and settings.policy.epsilon is not None:
        raise PerfedError(
            "--any-study: a policy with epsilon allows studies with [privacy] only, and a site takes part in these "
            "with --study only; give --study, or leave epsilon out of the policy"
        )
    if not settings.data.exists():
        raise PerfedError(f"--data {settings.data}: no such file")
    part = Part.of(settings.folder, settings.name, settings.data)
    study = settings.study or (None if part is None else part.study)
    if study is not None:
        experiment = read(study, "the study")
        settings.policy.check_study(experiment)
        if experiment.privacy is not None:
            ledger(settings.folder)  # which refuses one that is older than the site's other files
        secure, options = experiment.secure_aggregation, table_options(experiment)
        if secure is not None:
            check_sums(settings.folder / RUNS)
        if secure is not None and secure.keys is not None:
            from perfed.sites.flower.signing import SigningKey  # which needs perfed[flower]

            secure.check_key(settings.name, SigningKey.in_folder(settings.folder).public)
        going_on = part is not None and belongs(part.study, study)
        agreement = part.agreement if part is not None and going_on else None
        found = describe_problems(settings.name, settings.data, options, agreement)
        if found:
            raise PerfedError("\n".join(found))
        for allowed in all_allowed(study):
            settings.policy.check(allowed)
        rows = read_checked_data(settings.name, settings.data, study, settings.policy)
        budget = None if part is None or not going_on else part.budget(settings.folder)
        line = "" if budget is None else budget.line
        settings.policy.check_budget(settings.folder, line, private_in(experiment), rows, count_sites(experiment))


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
    from perfed.sites.flower.node import Attendant, attend  # which needs perfed[flower]

    station = Station(settings.folder, settings.name, settings.data, settings.study, note, settings.policy)
    try:
        place = hashlib.sha256(f"{platform.node()}:{settings.folder.resolve()}".encode()).hexdigest()[:16]
        at = Attendant(settings.name, place, station.answer, station.began, note, station.heard)
        attend(settings.server, at, stop)
    finally:
        station.close()
