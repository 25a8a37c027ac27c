"""What passes between a deployment's server and its sites before the first round."""

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
from perfed.sites.deploy.part import table_options
from perfed.sites.deploy.submit import goes_on
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.transport import Transport
from perfed.system import write_atomic
from perfed.tables.agreement import agree_on_schema
from perfed.tables.site_differences import describe_differences

AGREED = "agreed.json"
"""File of a run's directory: what sites told, what was agreed, and the facts of each."""
_SAID = 2000  # characters of what a site says of an error, at most


class _Known(BaseModel):
    """What the file ``agreed.json`` holds."""

    study: str
    agreement: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    doubts: list[str] = []


class Opening:
    """What passes between server and sites before the first round.

    Args:
        transport: the network.
        sites: all of them; of a run that all have agreed to those that are there.
        experiment, study: parsed and as text.
        run: id of the run.
        place: what the sites are told of where the results are.
        deadline: seconds of an exchange.

    Attributes:
        sent_agreement: whether an agreement was sent, so that some sites may have joined the run.
        doubts: what makes results doubtful, a line each, once :meth:`clients` has asked the sites: columns that some
            of them seem to have in another unit or with other codes.
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
        self._heard: dict[str, dict[str, Any]] = {}  # the header of each site's last reply, or an error in its place

    def clients(self, file: Path) -> tuple[tuple[Client, ...], FederationSchema]:
        """The clients as the server knows them, and what holds at all; it is written to ``file``, or as it is there.

        Raises:
            PerfedError: a site that does not answer, that is busy with another run, whose table does not fit, or whose
                data have changed since.
        """
        known = checked(_Known, check_seal(read_json(file), file), file).model_dump() if file.exists() else None
        study = hashlib.sha256(self._fields["study"].encode()).hexdigest()
        if known is not None and known["study"] != study:
            raise PerfedError(f"{file.parent}: holds a run of another study; submit with another --out")
        agreement = self._agreement() if known is None else FederationSchema.of_plain(known["agreement"], str(file))
        self.sent_agreement = True
        self.doubts = self.doubts if known is None else known["doubts"]
        told = self._ask("agreement", {"agreement": agreement.plain()}, "facts")
        facts = {site: ClientFacts.of_plain(values, site) for site, values in told.items()}
        plain = {site: facts[site].plain() for site in sorted(facts)}
        if known is not None:
            facts = {site: ClientFacts.of_plain(values) for site, values in (known["facts"] | plain).items()}
        before = plain if known is None else known["facts"]
        if changed := [site for site in plain if plain[site] != before.get(site)]:
            raise PerfedError(
                f"site '{changed[0]}': its data are not those that the run in {file.parent} was begun with"
            )
        if known is None:
            content = {"study": study, "agreement": agreement.plain(), "facts": plain, "doubts": self.doubts}
            write_atomic(made(file.parent) / file.name, json.dumps(seal(content), indent=1) + "\n")
        return lazy_clients(refuse_read, facts.values(), agreement), agreement

    def _agreement(self) -> FederationSchema:
        told = {site: SiteMetadata.of_plain(v, f"site '{site}'") for site, v in self._ask("study", {}, "told").items()}
        options = table_options(self._experiment)
        self.doubts = describe_differences(told, options.target)
        return agree_on_schema(told, options)

    def _ask(self, kind: str, fields: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """The field ``answer`` of each site's reply; one that refuses for a run that is over is asked once more."""
        content = {"kind": kind, **self._fields, **fields}
        self._send(self._sites, content)
        if refused := [site for site in self._sites if "error" in self._heard[site] and self._over(site)]:
            self._send(refused, content)
        failed: dict[str, list[str]] = {}
        for site in self._sites:
            header = self._heard[site]
            if "error" in header or (header.get("refuses") and not self._over(site)):
                failed.setdefault(str(header.get("error", header.get("refuses")))[:_SAID], []).append(f"'{site}'")
        if failed:
            lines = (f"site{'s' if len(of) > 1 else ''} {shorten_list(of)}: {error}" for error, of in failed.items())
            raise PerfedError("; ".join(lines))
        return {site: self._heard[site].get(answer) for site in self._sites}

    def _send(self, sites: list[str], content: Mapping[str, Any]) -> None:
        """Hear what the sites reply; one that was in another run is told where that is over, as it is now."""
        messages = {site: pack({**content, "ended": self._over(site)}, {}) for site in sites}
        for reply in self._transport.exchange(messages, self._deadline):
            error = reply.error.removeprefix(f"site '{reply.site}': ")
            try:
                self._heard[reply.site] = {"error": error} if reply.body is None else unpack(reply.body)[0]
            except PerfedError as nonsense:
                self._heard[reply.site] = {"error": str(nonsense)}

    def _over(self, site: str) -> str:
        """The run that the site has said it is in, where no other program on this machine is at work on it; else empty.

        A site talks with one server at a time, so that a run that goes on elsewhere would not reach it either.
        """
        header = self._heard.get(site, {})
        run, place = header.get("busy"), header.get("place")
        if not isinstance(run, str) or not isinstance(place, str):
            return ""
        try:
            return run if place == self._fields["place"] or not goes_on(Path(place)) else ""
        except (OSError, ValueError):  # nobody can look there
            return ""


def made(folder: Path) -> Path:
    """Return ``folder``, which is there then."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
