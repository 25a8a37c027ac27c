"""The opening of a deployed run: the messages between server and sites before the first round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from perfed.data.client import Client
from perfed.data.facts import ClientFacts
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.lazy import lazy_clients, refuse_read
from perfed.data.reading import check_seal, checked, read_json, seal
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.config import Experiment
from perfed.sites.deploy.part import read_table_options
from perfed.sites.deploy.submit import is_running
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.transport import Transport
from perfed.system import write_atomic
from perfed.tables.agreement import agree_on_schema
from perfed.tables.site_differences import describe_differences

AGREED = "agreed.json"
"""File in a run's directory with the agreement of the sites and the facts of each."""
_MAX_ERROR_LENGTH = 2000  # characters of a site's error message that are shown


class _AgreedFile(BaseModel):
    """The content of the file ``agreed.json``."""

    study: str
    agreement: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    doubts: list[str] = []


class Opening:
    """The opening of a run, in which the sites agree on a schema and send their facts.

    Args:
        transport: the network.
        sites: names of all sites; when a run is resumed, of those that are connected.
        experiment, study: the study, parsed and as TOML.
        run: id of the run.
        place: directory of the results, which the sites are told.
        deadline: seconds that an exchange may take.

    Attributes:
        sent_agreement: whether an agreement was sent, so that some sites may have joined the run.
        doubts: one line for each column that some sites seem to have in another unit or with other codes, set by
            :meth:`collect_clients`.
    """

    def __init__(
        self,
        transport: Transport,
        sites: list[str],
        experiment: Experiment,
        study: str,
        run: str,
        place: Path,
        deadline: float,
    ) -> None:
        self._transport, self._sites, self._deadline = transport, sites, deadline
        self._experiment = experiment
        self._fields = {"run": run, "study": study, "place": str(place.resolve()), "opening": uuid4().hex}
        self.sent_agreement = False
        self.doubts: list[str] = []
        self._headers: dict[str, dict[str, Any]] = {}  # the header of each site's last reply, or its error

    def collect_clients(self, file: Path) -> tuple[tuple[Client, ...], FederationSchema]:
        """Return the clients as the server sees them, and the schema that all sites agreed on.

        A new agreement is written to ``file``; when a run is resumed, the agreement is read from there.

        Raises:
            PerfedError: a site does not answer or is busy with another run, or its table does not fit or has changed.
        """
        stored = checked(_AgreedFile, check_seal(read_json(file), file), file).model_dump() if file.exists() else None
        study = hashlib.sha256(self._fields["study"].encode()).hexdigest()
        if stored is not None and stored["study"] != study:
            raise PerfedError(f"{file.parent}: holds a run of another study; submit with another --out")
        agreement = (
            self._agree_on_schema() if stored is None else FederationSchema.of_plain(stored["agreement"], str(file))
        )
        self.sent_agreement = True
        self.doubts = self.doubts if stored is None else stored["doubts"]
        replies = self._request_field("agreement", {"agreement": agreement.plain()}, "facts")
        facts = {site: ClientFacts.of_plain(values, site) for site, values in replies.items()}
        plain = {site: facts[site].plain() for site in sorted(facts)}
        if stored is not None:
            facts = {site: ClientFacts.of_plain(values) for site, values in (stored["facts"] | plain).items()}
        stored_facts = plain if stored is None else stored["facts"]
        if changed := [site for site in plain if plain[site] != stored_facts.get(site)]:
            raise PerfedError(f"site '{changed[0]}': its data have changed since the run in {file.parent} was started")
        if stored is None:
            content = {"study": study, "agreement": agreement.plain(), "facts": plain, "doubts": self.doubts}
            write_atomic(make_folder(file.parent) / file.name, json.dumps(seal(content), indent=1) + "\n")
        return lazy_clients(refuse_read, facts.values(), agreement), agreement

    def _agree_on_schema(self) -> FederationSchema:
        """Return the schema on which the metadata of all sites agree, and record doubts about columns."""
        metadata = {
            site: SiteMetadata.of_plain(fields, f"site '{site}'")
            for site, fields in self._request_field("study", {}, "told").items()
        }
        options = read_table_options(self._experiment)
        self.doubts = describe_differences(metadata, options.target)
        return agree_on_schema(metadata, options)

    def _request_field(self, kind: str, fields: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Return the field ``answer`` of each site's reply to a message of this kind.

        A site that refuses because of another run is asked once more if that run has ended.
        """
        content = {"kind": kind, **self._fields, **fields}
        self._exchange_messages(self._sites, content)
        if refused := [site for site in self._sites if "error" in self._headers[site] and self._find_ended_run(site)]:
            self._exchange_messages(refused, content)
        failed: dict[str, list[str]] = {}
        for site in self._sites:
            header = self._headers[site]
            if "error" in header or (header.get("refuses") and not self._find_ended_run(site)):
                failed.setdefault(str(header.get("error", header.get("refuses")))[:_MAX_ERROR_LENGTH], []).append(
                    f"'{site}'"
                )
        if failed:
            lines = (
                f"site{'s' if len(names) > 1 else ''} {shorten_list(names)}: {error}" for error, names in failed.items()
            )
            raise PerfedError("; ".join(lines))
        return {site: self._headers[site].get(answer) for site in self._sites}

    def _exchange_messages(self, sites: list[str], content: Mapping[str, Any]) -> None:
        """Send a message to the sites, and store the headers of their replies.

        Each site is told whether the other run that it reported has ended.
        """
        messages = {site: pack({**content, "ended": self._find_ended_run(site)}, {}) for site in sites}
        for reply in self._transport.exchange(messages, self._deadline):
            error = reply.error.removeprefix(f"site '{reply.site}': ")
            try:
                self._headers[reply.site] = {"error": error} if reply.body is None else unpack(reply.body)[0]
            except PerfedError as problem:
                self._headers[reply.site] = {"error": str(problem)}

    def _find_ended_run(self, site: str) -> str:
        """Return the id of the other run that the site reported, if that run has ended, and an empty text otherwise.

        A site is connected to one server at a time, so that only runs on this machine need to be considered.
        """
        header = self._headers.get(site, {})
        run, place = header.get("busy"), header.get("place")
        if not isinstance(run, str) or not isinstance(place, str):
            return ""
        try:
            return run if place == self._fields["place"] or not is_running(Path(place)) else ""
        except (OSError, ValueError):  # the directory cannot be read
            return ""


def make_folder(folder: Path) -> Path:
    """Create ``folder`` if it does not exist, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
