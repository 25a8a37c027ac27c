"""A preview of everything that a site would send, made without a server, and the administrator's consent to it."""

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
"""The consent to everything that the server's study requests."""
CONSENT = "consent.json"
"""The file in a site's folder with the hash of the preview that its administrator has agreed to, and the time."""
_CHANGING = ("sums",)  # the fields of ``told`` whose numbers change with every new row


@dataclass(frozen=True)
class Preview:
    """A preview of what a site would send in a study.

    Attributes:
        site: the name of the site.
        study: the study as TOML.
        told: the metadata that the site sends before it trains.
        facts: the facts that the site would send after the agreement if it were the only site; ``None`` if they depend
            on the other sites.
        why: the reason why ``facts`` is ``None``; otherwise empty.
        entries: the entries of the site's replies: ``name``, ``shape`` (``None`` for an axis of variable length) and
            ``dtype``.
        bytes: the size of the largest reply in bytes.
        metrics: the names of the metrics that the site reports about its model.
        summed: the products of entries whose sums over the sites the server receives; empty where it receives the
            replies themselves.
        doubts: reasons to doubt the site's metrics; they are shown only to the site's administrator.
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
        """Return the preview of a site without contacting a server.

        Args:
            site: the name of the site.
            data: the file or folder with the site's table.
            study: the study as TOML.

        Raises:
            PerfedError: the data do not fit the study, or its method does not support such sites.
        """
        site_data = read_site_data(site, data, options := read_table_options(read(study, "the study")))
        metadata, facts, why = create_site_metadata(site_data), None, ""
        try:
            agreement = make_schema_of_one_site(site, metadata, options)
            site_run = SiteRun(site, data, "preview", study, agreement, "", "", site_data)
            (client,) = site_run.federation
            facts = create_site_facts(client, agreement, None if site_run.private_method is None else b"")
        except PerfedError as error:
            why = str(error)
        allow_lists = rehearse_all_runs(study, metadata["task"]) if facts is None else _list_allow_lists(site_run)
        entries = list(dict.fromkeys(entry for allowed in allow_lists for entry in allowed.reply_entries))
        metrics = list(dict.fromkeys(name for allowed in allow_lists for name in allowed.reported_metrics))
        summed = list(dict.fromkeys(name for allowed in allow_lists for name in allowed.sum_names))
        max_bytes = max(allowed.max_reply_bytes for allowed in allow_lists)
        described = [_describe_entry(*entry) for entry in entries]
        doubts = site_data.describe_copies()
        return cls(site, study, metadata, facts, why, described, max_bytes, metrics, summed, doubts)

    @cached_property
    def experiment(self) -> Experiment:
        """The study, parsed and checked."""
        return read(self.study, "the study")

    @cached_property
    def digest(self) -> str:
        """The hash of the study and of the preview, without the numbers that change with every new row."""
        metadata = {name: value for name, value in self.told.items() if name not in _CHANGING}
        inputs = None if self.facts is None else self.facts["feature_names"]
        form = {"site": self.site, "study": read_study_content(self.study), "told": metadata, "inputs": inputs}
        form |= {"entries": list(self.entries), "metrics": list(self.metrics)}
        form |= {"summed": list(self.summed)} if self.summed else {}
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """Return the preview in types that JSON can represent."""
        sent = {"told": self.told, "facts": self.facts, "entries": list(self.entries), "bytes": self.bytes}
        names = {"site": self.site, "study": self.experiment.name}
        summed = {"summed": list(self.summed)} if self.summed else {}
        return {**names, **sent, **summed, "metrics": list(self.metrics), "consent": self.digest}


def _list_allow_lists(site_run: SiteRun) -> list[AllowList]:
    """Return what the site answers in each run of its study."""
    study, task = site_run.experiment, site_run.agreement.task
    if not is_blend(study):
        return [site_run.allow_list]
    runs = [
        replace(site_run, study=run.study.to_toml()).allow_list
        for run in list_candidate_runs(study)
        if run.fold is None
    ]
    return [*runs, rehearse_weights(study, task, len(site_run.agreement.classes or (0,)))]


def _describe_entry(name: str, entry: TensorSpec) -> dict[str, Any]:
    """Return an entry of a reply in the form of the site's log."""
    return {"name": name, "shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch.")}


def consented(folder: Path) -> str:
    """Return the hash of the last preview that the administrator of the site in ``folder`` has agreed to.

    Returns:
        the hash, :data:`ANY`, or an empty text if the administrator has not agreed to anything.

    Raises:
        PerfedError: the file of the consent is damaged.
    """
    file = folder / CONSENT
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["consent"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfedError(f"{file}: cannot be read: {error}; remove it, and you are asked once more") from None


def consent(folder: Path, digest: str) -> None:
    """Record in the site's log and in ``folder`` that its administrator has agreed to the preview with this hash.

    Raises:
        PerfedError: another process runs this site, or its log is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with OutgoingLog(folder / LOG) as log:
        log.record_consent(digest)
    content = {"consent": digest, "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    write_atomic(folder / CONSENT, json.dumps(content) + "\n")
