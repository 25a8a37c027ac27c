"""All that would leave a site, found without a server, and the administrator's consent to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.sites.deploy.candidates import is_blend, list_candidate_runs, rehearse_all_runs, rehearse_weights
from perfed.sites.deploy.part import (
    SiteRun,
    create_site_facts,
    create_site_metadata,
    make_schema_of_one_site,
    read_study_content,
    read_table_options,
)
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.checks import TensorSpec
from perfed.sites.flower.hash_chain import LOG
from perfed.system import write_atomic
from perfed.tables.site_data import read_site_data

ANY = "any"
"""Consent to whatever the server's study asks for."""
CONSENT = "consent.json"
"""File of a site: the hash of what its administrator has agreed to, and when."""
_CHANGING = ("sums",)  # of what is told: other numbers with every new row


@dataclass(frozen=True)
class Preview:
    """What would leave a site in a study.

    Attributes:
        site: its name.
        study: as TOML.
        told: what it tells before it trains, as it would leave.
        facts: what it tells once all have agreed, as it would leave if there were no other sites; ``None``: that
            depends on the others.
        why: what it depends on then.
        entries: of its replies: ``name``, ``shape`` (``None`` for an axis that is not always the same) and ``dtype``.
        bytes: of its largest reply.
        metrics: names of what is measured of its model.
        summed: products of entries of which the server gets sums over sites; empty where it gets the replies.
        doubts: what makes the site's metrics doubtful; nobody but its administrator reads it.
    """

    site: str
    study: str
    told: Mapping[str, Any]
    facts: Mapping[str, Any] | None
    why: str
    entries: Sequence[Mapping[str, Any]]
    bytes: int
    metrics: Sequence[str]
    summed: Sequence[str] = ()
    doubts: Sequence[str] = ()

    @classmethod
    def of(cls, site: str, data: Path, study: str) -> Preview:
        """That of the site whose data are in the file or folder ``data``.

        Raises:
            PerfedError: the data do not fit the study, or its method refuses such sites.
        """
        own = read_site_data(site, data, options := read_table_options(read(study, "the study")))
        told, facts, why = create_site_metadata(own), None, ""
        try:
            agreement = make_schema_of_one_site(site, told, options)
            site_run = SiteRun(site, data, "preview", study, agreement, "", "", own)
            (client,) = site_run.federation
            facts = create_site_facts(client, agreement, None if site_run.private_method is None else b"")
        except PerfedError as error:
            why = str(error)
        found = rehearse_all_runs(study, told["task"]) if facts is None else _allowed(site_run)
        entries = list(dict.fromkeys(of for allowed in found for of in allowed.reply_entries))
        measured, summed = (
            list(dict.fromkeys(name for names in of for name in names))
            for of in ([allowed.reported_metrics for allowed in found], [allowed.sum_names for allowed in found])
        )
        most = max(allowed.max_reply_bytes for allowed in found)
        sent = [_plain(*of) for of in entries]
        return cls(site, study, told, facts, why, sent, most, measured, summed, own.describe_copies())

    @cached_property
    def experiment(self) -> Experiment:
        """The study, parsed and checked."""
        return read(self.study, "the study")

    @cached_property
    def digest(self) -> str:
        """Hash of the study and of what would leave; numbers that change with every new row do not change it."""
        told = {name: value for name, value in self.told.items() if name not in _CHANGING}
        inputs = None if self.facts is None else self.facts["feature_names"]
        form = {"site": self.site, "study": read_study_content(self.study), "told": told, "inputs": inputs}
        form |= {"entries": list(self.entries), "metrics": list(self.metrics)}
        form |= {"summed": list(self.summed)} if self.summed else {}
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        left = {"told": self.told, "facts": self.facts, "entries": list(self.entries), "bytes": self.bytes}
        named = {"site": self.site, "study": self.experiment.name}
        summed = {"summed": list(self.summed)} if self.summed else {}
        return {**named, **left, **summed, "metrics": list(self.metrics), "consent": self.digest}


def _allowed(site_run: SiteRun) -> list[AllowList]:
    """What the site answers in each run of its study."""
    study, task = site_run.experiment, site_run.agreement.task
    if not is_blend(study):
        return [site_run.allow_list]
    runs = [
        replace(site_run, study=run.study.to_toml()).allow_list
        for run in list_candidate_runs(study)
        if run.fold is None
    ]
    return [*runs, rehearse_weights(study, task, len(site_run.agreement.classes or (0,)))]


def _plain(name: str, entry: TensorSpec) -> dict[str, Any]:
    """An entry as the site's log has it."""
    return {"name": name, "shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch.")}


def consented(folder: Path) -> str:
    """Hash of what the administrator of the site in ``folder`` has agreed to last; empty: of nothing.

    Raises:
        PerfedError: the file that says so is damaged.
    """
    file = folder / CONSENT
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["consent"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}; remove it, and you are asked once more") from None


def consent(folder: Path, digest: str) -> None:
    """Keep in the site's log and in ``folder`` that its administrator has agreed to what has the hash ``digest``.

    Raises:
        PerfedError: another process is this site, or its log is broken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with OutgoingLog(folder / LOG) as log:
        log.record_consent(digest)
    content = {"consent": digest, "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    write_atomic(folder / CONSENT, json.dumps(content) + "\n")
