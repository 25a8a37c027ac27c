"""``perfed site``: a site of a deployment, which answers the server's messages and logs all messages."""

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
from perfed.sites.deploy.candidates import format_title, is_part_of_study, rehearse_all_runs
from perfed.sites.deploy.leaving import check_not_left, format_leaving_note, read_leaving_time
from perfed.sites.deploy.mixing import specialise_site_run
from perfed.sites.deploy.part import (
    SiteRun,
    count_sites,
    create_site_metadata,
    hash_study,
    installed_versions,
    list_user_modules,
    make_schema_of_one_site,
    read_table_options,
)
from perfed.sites.deploy.policy import Policy
from perfed.sites.deploy.server_files import hash_app
from perfed.sites.deploy.spending import RUNS, read_ledger
from perfed.sites.deploy.trial import build_private_method
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import LOG
from perfed.sites.flower.masking import KINDS
from perfed.sites.flower.message import pack, unframe
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.refusal import RefusalReason, Refused, describe_for_server, describe_for_site, refuse_as
from perfed.sites.flower.site import Site
from perfed.sites.flower.store import SiteStore, check_sums
from perfed.system import installed_version
from perfed.tables.site_data import SiteData, describe_problems, read_site_data


class _SiteBusy(PerfedError):
    """The site is asked to join a run while it is in another one."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = fields
        super().__init__(fields["refuses"])


class SiteAgent:
    """Answers all messages of the server, and logs the messages that arrive and leave.

    Args:
        folder: folder of the site, with its log and its states.
        site: name of the site.
        data: file or folder with the site's table.
        study: the only study that the site takes part in, as TOML; ``None`` for any study of the server.
        note: called with one line for each event that the site's administrator may want to know.
        policy: the limits that the site's administrator sets.

    Raises:
        PerfedError: another process already acts as this site, or the stored state of the site is damaged.
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
        # A private study's rows are read and checked only once, because the replies would reveal later errors in them.
        self._rows: SiteData | None = None
        if study is not None and read(study, "the study").privacy is not None:
            self._rows = load_checked_data(site, data, study, self._policy)
        self._log = OutgoingLog(folder / LOG)
        pinned = "any study" if study is None else f"a study with SHA-256 {hashlib.sha256(study.encode()).hexdigest()}"
        self._log.add_note(f"site '{site}' has started for {pinned}, with perfed {installed_version()}")
        self._modules = [] if study is None else list_user_modules(read(study, "the study"))
        self._has_left = False  # whether leaving has been logged since the start
        self._store: SiteStore | None = None
        self._site: Site | None = None
        site_run = SiteRun.read_current(folder, site, data)
        if site_run is not None and study is not None and is_part_of_study(site_run.study, study):
            site_run = replace(site_run, site_data=self._rows)
        self._site_run = None if site_run is None else specialise_site_run(site_run, folder)
        self._data_by_study: dict[str, SiteData] = {}  # data read for a study, until all sites have agreed
        self._notified_runs: set[str] = set()  # runs that were told of the current one since its last message
        self._last_opening: tuple[bytes, bytes] | None = None  # the last message that opens a run, and the reply

    def close(self) -> None:
        """Log that the site has stopped, and release it, so that another process can act as this site."""
        with suppress(OSError):  # the disk may be full
            if not self._has_left and read_leaving_time(self._folder):
                self._log.add_note(format_leaving_note(self._folder))
            self._log.add_note("the site has stopped")
        self._log.close()
        if self._store is not None:
            self._store.close()

    def log_app(self, app_sha256: str) -> None:
        """Log the SHA-256 of a run's app as the server reports it, and whether it is that of the site's own study.

        The site does not load the app.
        """
        expected = "" if self._study is None else hash_app(read(self._study, "the study"))
        difference = "" if expected in ("", app_sha256) else f"; the app of this site's study has {expected}"
        self.log_event(
            f"a run begins, whose app has the SHA-256 {app_sha256}{difference}; this site does not load the app"
        )

    def log_event(self, line: str) -> None:
        """Write an event that is not a message of a run to the log, if the disk allows, and report it to ``note``."""
        with suppress(OSError):
            self._log.add_note(line)
        self._note(line)

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a message, after both have been logged.

        If anything fails, the reply contains one of a few fixed sentences for the server; ``note`` gets the details.

        Raises:
            PerfedError: the log cannot be written, so that no reply may be sent.
        """
        try:
            self._log.record_arrival(data)
            if not self._has_left and read_leaving_time(self._folder):
                self._has_left = True
                self._log.add_note(format_leaving_note(self._folder))
            reply = self._make_reply(data)
            self._log.append(reply)
        except OSError as error:
            self._note(describe_for_site(error))
            raise Refused(RefusalReason.DISK) from None
        return reply

    def _make_reply(self, data: bytes) -> bytes:
        """Return the reply to a message; errors become replies that reveal nothing about the rows."""
        try:
            with refuse_as(RefusalReason.MESSAGE):
                header, _ = unframe(data)
            allowed = f"the server requested it; allowed: {', '.join(self._modules) or 'none'}"
            with allow_modules(self._modules, allowed):
                return self._answer_message(header, data)
        except _SiteBusy as error:  # the server then finds out whether that run has ended
            return pack({"kind": "error", "site": self._name, "error": str(error), **error.fields}, {})
        except Exception as error:  # the message of any error may reveal something about rows
            self._note(describe_for_site(error))
            return pack({"kind": "error", "site": self._name, "error": describe_for_server(error)}, {})

    def _answer_message(self, header: Mapping[str, Any], data: bytes) -> bytes:
        """Return the reply to a message, whose parsed header is ``header``."""
        if self._has_left:
            raise Refused(RefusalReason.LEFT)
        kind, run = header.get("kind"), str(header.get("run"))
        if self._site_run is not None and self._site_run.run == run:
            self._notified_runs = set()
        if kind == "work" or kind in KINDS:
            reply = self._prepare_site(run).answer(data)
            if self._store is not None:
                for line in self._store.notes:
                    self.log_event(line)
                self._store.notes.clear()
            return reply
        if kind not in ("study", "agreement"):
            raise Refused(
                RefusalReason.MESSAGE, f"a message of kind {str(kind)[:60]!r}; allowed: study, agreement, work"
            )
        if self._last_opening is None or self._last_opening[0] != data:  # the same message again gets the same reply
            self._last_opening = data, self._answer_opening(kind, run, header)
        return self._last_opening[1]

    def _answer_opening(self, kind: str, run: str, header: Mapping[str, Any]) -> bytes:
        """Return the reply to a message that opens a run.

        The reply to a study is the site's metadata; the reply to an agreement is the site's facts, once it has joined
        the run.
        """
        study = self._check_study(header)
        site_run, fields = self._site_run, {"site": self._name, "run": run, "round": 0, "program": kind}
        with refuse_as(RefusalReason.MESSAGE):
            joined_run = SiteRun.find_joined(self._folder, self._name, self._data, run)
        if joined_run is not None and joined_run.study != study:
            raise Refused(RefusalReason.JOINED, f"{RefusalReason.JOINED} (run {run})")
        busy_fields = {} if site_run is None or site_run.run == run else site_run.busy_fields
        was_notified = run in self._notified_runs
        self._notified_runs.add(run)
        if kind == "study":
            with refuse_as(RefusalReason.DATA):
                rows = self._rows or load_checked_data(self._name, self._data, study, self._policy)
                line = "" if joined_run is None else self._get_ledger_line(joined_run)
                sites = count_sites(read(study, "the study"))
                self._policy.check_budget(self._folder, line, _read_private_method(study), rows, sites)
                self._data_by_study = {study: rows}
                metadata = create_site_metadata(self._data_by_study[study])
            return pack({"kind": "told", **fields, **busy_fields, "told": metadata}, {})
        if busy_fields and not (was_notified and header.get("ended") == busy_fields["busy"]):
            self._data_by_study = {}
            raise _SiteBusy(busy_fields)
        with refuse_as(RefusalReason.MESSAGE):
            agreement = FederationSchema.of_plain(header.get("agreement"), "the server's agreement")
        if joined_run is not None and joined_run.agreement != agreement:
            raise Refused(RefusalReason.JOINED, f"{RefusalReason.JOINED} (run {run})")
        since = (
            site_run.since
            if site_run is not None and site_run.run == run
            else f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        )
        checked_rows, place = self._rows or self._data_by_study.pop(study, None), str(header.get("place"))
        rows_hash, versions = (
            ("", installed_versions()) if joined_run is None else (joined_run.rows_hash, joined_run.versions)
        )
        site_run = SiteRun(
            self._name, self._data, run, study, agreement, place, since, checked_rows, rows_hash, versions
        )
        self._join(specialise_site_run(site_run, self._folder))
        self._prepare_site(run)
        facts = self._get_joined_run(run).create_facts(self._folder)
        return pack({"kind": "facts", **fields, "facts": facts}, {})

    def _check_study(self, header: Mapping[str, Any]) -> str:
        """Return the server's study, after checking that it is the site's study and allowed by the policy."""
        study = header.get("study")
        with refuse_as(RefusalReason.STUDY):
            if not isinstance(study, str) or (self._study is not None and not is_part_of_study(study, self._study)):
                raise Refused(RefusalReason.STUDY)
            self._check_private_study(read(study, "the study"))
        self._policy.check_study(read(study, "the study"))  # before any row is read
        return study

    def _check_private_study(self, study: Experiment) -> None:
        """Refuse a private study if the site accepts any study of the server.

        The server could choose its columns and classes such that refusals reveal something about rows.
        """
        if self._study is None and study.privacy is not None:
            raise Refused(RefusalReason.ANY_STUDY)

    def _join(self, site_run: SiteRun) -> None:
        """Join a run in place of the current one."""
        with refuse_as(RefusalReason.MESSAGE):
            site_run.get_stored_exchanges(self._folder)  # checks the run's id
        with refuse_as(RefusalReason.DATA):
            site_run.federation  # noqa: B018 - checks the data
            site_run.check_unchanged()
        with refuse_as(RefusalReason.UNFIT):
            allowed = site_run.allow_list
        self._check_policy(site_run, allowed)
        if self._store is not None:
            self._store.close()
        self._store = self._site = None
        site_run.write(self._folder)
        self._site_run = site_run
        study = site_run.experiment
        self._note(f"takes part in run {site_run.run}: {format_title(study)}, {study.rounds} rounds")

    def _check_policy(self, site_run: SiteRun, allow_list: AllowList) -> None:
        """Refuse a run if the current policy does not allow its study, its rehearsal or the site's data."""
        self._policy.check_study(site_run.experiment)
        with refuse_as(RefusalReason.UNFIT):  # all runs of the study, before the first one starts
            run_lists = [] if self._study is None else rehearse_all_runs(self._study, site_run.agreement.task)
        for required in (allow_list, *run_lists):
            self._policy.check(required)
        with refuse_as(RefusalReason.DATA):
            data = site_run.site_data or read_site_data(self._name, self._data, read_table_options(site_run.experiment))
            self._policy.check_data(data)
        with refuse_as(RefusalReason.UNFIT):
            line, sites = self._get_ledger_line(site_run), count_sites(site_run.experiment)
            self._policy.check_budget(self._folder, line, site_run.private_method, data, sites)

    def _get_ledger_line(self, site_run: SiteRun) -> str:
        """Return the name of the ledger line of a run, or an empty text if the run is not private."""
        budget = site_run.make_budget(self._folder)
        return "" if budget is None else budget.line_name

    def _get_joined_run(self, run: str) -> SiteRun:
        """Return the current run, whose id must be ``run``."""
        if self._site_run is None or self._site_run.run != run:
            raise Refused(RefusalReason.AWAY)
        return self._site_run

    def _prepare_site(self, run: str) -> Site:
        """Return the object that answers the messages of a run; it is prepared at the first call."""
        site_run = self._get_joined_run(run)
        if self._site is None:
            # The site may have been restarted with another study.
            if self._study is not None and not is_part_of_study(site_run.study, self._study):
                raise Refused(RefusalReason.STUDY)
            self._check_private_study(site_run.experiment)
            site_run.check_unchanged()
            self._check_policy(site_run, site_run.allow_list)
            (client,) = site_run.federation
            self._store = site_run.open_store(self._folder)
            plan = site_run.load_plan(self._folder)
            plan.on_choice = partial(site_run.record_plan, plan, self._folder)
            self._site = Site(
                client,
                site_run.initialiser,
                plan,
                info=site_run.initialiser.info(site_run.federation),
                scale=site_run.federation.target_scale,
                store=self._store,
                allowed=site_run.allow_list,
                budget=site_run.make_budget(self._folder, self._policy.epsilon, self._policy.delta),
                study=hash_study(self._study or site_run.study),  # the runs of one blend share payloads
                signer=site_run.load_signing_key(self._folder),
            )
        return self._site


def load_checked_data(site: str, data: Path, study: str, policy: Policy) -> SiteData:
    """Return the data of a site after all checks that are possible before the sites have agreed.

    With a table ``[privacy]`` the study specifies everything that the sites would otherwise agree on, so that all
    possible errors are found here: whether the site answers later does not depend on any row.

    Args:
        site: name of the site.
        data: file or folder with the site's table.
        study: the study as TOML.
        policy: the limits that the site's administrator sets.

    Raises:
        PerfedError: the data do not fit the study.
        Refused: the policy does not let the site take part with these data.
    """
    experiment = read(study, "the study")
    options = read_table_options(experiment)
    site_data = read_site_data(site, data, options)
    policy.check_data(site_data)
    if experiment.privacy is not None:
        schema = make_schema_of_one_site(site, create_site_metadata(site_data), options)
        SiteRun(site, data, "check", study, schema, "", "", site_data).federation  # noqa: B018 - checks the data
    return site_data


def _read_private_method(study: str) -> PrivateMethod | None:
    with refuse_as(RefusalReason.UNFIT):
        return build_private_method(read(study, "the study"))


Note = Callable[[str], None]


@dataclass(frozen=True)
class SiteSettings:
    """The settings with which a site is started.

    Attributes:
        name: name of the site, as the server knows it.
        data: file or folder with the site's table.
        server: address of the server.
        folder: folder for the site's log and states.
        study: the only study that the site takes part in, as TOML; ``None`` for any study of the server.
        policy: the limits that the site's administrator sets.
    """

    name: str
    data: Path
    server: ServerAddress
    folder: Path
    study: str | None = None
    policy: Policy = field(default_factory=Policy)


def check_site(settings: SiteSettings) -> None:
    """Check the site's settings, data and policy before it connects to the server.

    Raises:
        PerfedError: the site has left, the file with its data does not exist, the data do not fit the study, the policy
            forbids the study or the data, or the site's signing key is not that of the study.
    """
    check_not_left(settings.folder)
    if settings.study is None and settings.policy.epsilon is not None:
        raise PerfedError(
            "--any-study: a policy with epsilon allows studies with [privacy] only, and a site takes part in these "
            "with --study only; give --study, or leave epsilon out of the policy"
        )
    if not settings.data.exists():
        raise PerfedError(f"--data {settings.data}: no such file")
    site_run = SiteRun.read_current(settings.folder, settings.name, settings.data)
    study = settings.study or (None if site_run is None else site_run.study)
    if study is not None:
        experiment = read(study, "the study")
        settings.policy.check_study(experiment)
        if experiment.privacy is not None:
            read_ledger(settings.folder)  # which refuses a ledger that is older than the site's other files
        secure, options = experiment.secure_aggregation, read_table_options(experiment)
        if secure is not None:
            check_sums(settings.folder / RUNS)
        if secure is not None and secure.keys is not None:
            from perfed.sites.flower.signing import SigningKey  # requires perfed[flower]

            secure.check_key(settings.name, SigningKey.in_folder(settings.folder).public_key)
        is_continued = site_run is not None and is_part_of_study(site_run.study, study)
        agreement = site_run.agreement if site_run is not None and is_continued else None
        problems = describe_problems(settings.name, settings.data, options, agreement)
        if problems:
            raise PerfedError("\n".join(problems))
        for allow_list in rehearse_all_runs(study):
            settings.policy.check(allow_list)
        rows = load_checked_data(settings.name, settings.data, study, settings.policy)
        budget = None if site_run is None or not is_continued else site_run.make_budget(settings.folder)
        line = "" if budget is None else budget.line_name
        settings.policy.check_budget(
            settings.folder, line, build_private_method(experiment), rows, count_sites(experiment)
        )


def run_site(settings: SiteSettings, note: Note, stop: threading.Event) -> None:
    """Answer the server's messages until ``stop`` is set.

    Data that do not fit a study are reported to the server, without details; see :func:`check_site`.

    Args:
        settings: settings of the site.
        note: called with one line for each event that the site's administrator may want to know.
        stop: ends the site within seconds.

    Raises:
        PerfedError: another process already acts as this site, or the connection can never succeed.
    """
    from perfed.sites.flower.node import MessageHandler, serve_messages  # requires perfed[flower]

    agent = SiteAgent(settings.folder, settings.name, settings.data, settings.study, note, settings.policy)
    try:
        connection_id = hashlib.sha256(f"{platform.node()}:{settings.folder.resolve()}".encode()).hexdigest()[:16]
        handler = MessageHandler(settings.name, connection_id, agent.answer, agent.log_app, note, agent.log_event)
        serve_messages(settings.server, handler, stop)
    finally:
        agent.close()
