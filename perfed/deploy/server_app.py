"""The server's program of a deployment: what sites tell, what is agreed, and then a run as any other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from perfed.data.facts import ClientFacts
from perfed.data.federation import Federation, federation_of
from perfed.data.federation_schema import FederationSchema, SiteMetadata, agreed
from perfed.data.lazy import lazy_clients, refuse_read
from perfed.data.reading import checked, read_json
from perfed.deploy.part import table_options
from perfed.deploy.spending import secret_in
from perfed.deploy.submit import JOURNAL, LINE, goes_on
from perfed.deploy.trial import allowed_in
from perfed.engine.flower.engine import RATIO, FlowerEngine, Limits, RealTimeServer
from perfed.engine.flower.journal import Journal
from perfed.engine.flower.message import pack, unpack
from perfed.engine.flower.transport import Transport
from perfed.engine.flower.wire import ROUND
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.config import Experiment, read
from perfed.experiment.start import resume, start
from perfed.privacy.client import with_secret
from perfed.report import load_runs, write_report
from perfed.run.run import Run
from perfed.system import locked, private_files, write_atomic

AGREED = "agreed.json"
"""File of a run's directory: what sites told, what was agreed, and the facts of each."""
LOOK = 10.0
"""Seconds between two looks for who is missing."""
_SAID = 2000  # characters of what a site says of an error, at most


class _Known(BaseModel):
    """What the file ``agreed.json`` holds."""

    study: str
    agreement: dict[str, Any]
    facts: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What a submitted run is told beside its study.

    Attributes:
        out: the run's directory, on the server; a run that is there goes on.
        wait: seconds in which all sites must be there.
        deadline: seconds that an exchange may take.
        norm: longest Euclidean norm of one reply; 0: any.
        ratio: see :class:`perfed.engine.flower.engine.Limits`; 0: any.
        at_least: sites with which a run goes on that all have agreed to; 0: all.
    """

    out: str
    wait: float = 300.0
    deadline: float = 600.0
    norm: float = 0.0
    ratio: float = RATIO
    at_least: float = 0.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Of the configuration of a Flower run.

        Raises:
            PerfedError: no ``out``, or numbers that are none.
        """
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        if not isinstance(known.get("out"), str) or not known["out"]:
            raise PerfedError("the run's configuration names no directory (out)")
        numbers = {name: value for name, value in known.items() if name != "out"}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise PerfedError(f"{name} is {value!r}; a number of seconds, at least 0, is needed")
        return cls(known["out"], **{name: float(value) for name, value in numbers.items()})


@private_files()
def main(transport: Transport, config: Mapping[str, Any], *, study: str) -> None:
    """Run the study with the sites of ``transport``.

    Args:
        transport: the network.
        config: see :class:`Settings`.
        study: the experiment, as TOML.

    Raises:
        PerfedError: sites that are missing, or whose tables do not fit; a run that cannot go on. It is printed too.
    """
    try:
        _main(transport, Settings.of(config), study)
    except PerfedError as error:
        tell(error=str(error))
        raise


def _main(transport: Transport, settings: Settings, study: str) -> None:
    out = Path(settings.out)
    try:
        with locked(_made(out / JOURNAL)):
            _alone(transport, settings, study, out)
    except BlockingIOError:
        raise PerfedError(
            f"{out}: this run is going on already; 'perfed submit' follows it once it has begun"
        ) from None


def _alone(transport: Transport, settings: Settings, study: str, out: Path) -> None:
    experiment = read(study, "the study")
    sites: list[str] = sorted(experiment.data.options["files"])
    transport.note = lambda line: tell(stage=line)
    least = int(settings.at_least) or len(sites)
    missing = _gather(transport, sites, settings.wait, least if (out / AGREED).exists() else len(sites))
    run = hashlib.sha256(f"{out.resolve()} {study}".encode()).hexdigest()[:16]
    there = [site for site in sites if site not in missing]
    opening = Opening(transport, there, experiment, study, run, out, settings.deadline)
    federation = opening.federation(out / AGREED)
    journal = Journal(out / JOURNAL)
    norm, ratio = settings.norm or None, settings.ratio or None
    limits = Limits(settings.deadline, norm=norm, ratio=ratio, least=int(settings.at_least))
    allowed = None if experiment.secure_aggregation is None else allowed_in(study, federation.task)
    engine = partial(FlowerEngine, transport=transport, journal=journal, run=run, limits=limits, allowed=allowed)
    server = partial(_server, experiment, out / JOURNAL, engine=engine)
    going = _run(experiment, federation, out, server)
    going.notes += journal.notes
    if going.resumed is not None:
        tell(stage=f"continues from round {going.resumed} of {going.rounds}")
    going.execute(_progress(journal, going))
    lacking = [client.id for client in federation if client.split("test") is None]
    if lacking:  # which makes their own models too
        going.server.evaluate("train", lacking, going.done)
    write_report(load_runs([out]), out / "report.html", title=experiment.name)
    tell(done=going.done, out=str(out))


def _gather(transport: Transport, sites: list[str], seconds: float, least: int) -> list[str]:
    """Wait until all sites are connected, and say whenever others are missing than before.

    Returns:
        those that are not there in time, where so many as ``least`` are.

    Raises:
        PerfedError: fewer are there.
    """
    ends, told, missing = time.monotonic() + seconds, list[str](), sites
    tell(stage=f"waiting for {len(sites)} sites, {seconds:g} seconds at most (--wait)")
    while missing := transport.wait_for(missing, min(LOOK, max(ends - time.monotonic(), 0.0))):
        if time.monotonic() >= ends and len(sites) - len(missing) >= least:
            tell(stage=f"goes on without {shorten_list(missing)}")
            return missing
        if time.monotonic() >= ends:
            said = f"not there after {seconds:g} seconds: {', '.join(missing)}"
            raise PerfedError(f"{said}; is 'perfed site' running there, and what does it print?")
        if missing != told:
            tell(stage=f"still waiting for {shorten_list(missing)}")
            told = missing
    return []


def _run(experiment: Experiment, federation: Federation, out: Path, server: Callable[..., Any]) -> Run:
    """The run in ``out``, which goes on, or a new one; every round leaves a checkpoint."""
    if (out / "config.toml").exists():
        run = resume(out, federation=federation, server=server)
    else:
        run = start(experiment, federation=federation, out=out, server=server)
    run.checkpoint_seconds = 0.0
    assert isinstance(run.server, RealTimeServer)
    run.server.keep(lambda site: [_number(state) for i, state in run.taken.clients.items() if i == site])
    return run


def _server(
    experiment: Experiment, secret: Path, federation: Federation, initialiser: Initialiser, *args: Any, **options: Any
) -> RealTimeServer:
    """The run's server; its noise, if any, is made with what is in ``secret`` and in nothing that leaves it."""
    if experiment.privacy is not None and experiment.privacy.unit == "client":
        initialiser.method = with_secret(initialiser.method, secret_in(secret))
    return RealTimeServer(federation, initialiser, *args, **options)


def _number(state: Any) -> int:
    """Of the exchange whose state a site has, as the server's states say it."""
    return int(state["sequence"])


def _progress(journal: Journal, run: Run) -> Callable[[int, int, float | None], None]:
    def progress(number: int, rounds: int, accuracy: float | None) -> None:
        journal.forget(before=(number - 1) * ROUND)
        tell(round=number, rounds=rounds, accuracy=accuracy, counts=(run.history or [{}])[-1].get("counts", {}))

    return progress


class Opening:
    """What passes between server and sites before the first round.

    Args:
        transport: the network.
        sites: all of them; of a run that all have agreed to those that are there.
        experiment, study: parsed and as text.
        run: id of the run.
        out: its directory.
        deadline: seconds of an exchange.
    """

    def __init__(
        self,
        transport: Transport,
        sites: list[str],
        experiment: Experiment,
        study: str,
        run: str,
        out: Path,
        deadline: float,
    ) -> None:
        self._transport, self._sites, self._deadline = transport, sites, deadline
        self._experiment = experiment
        self._fields = {"run": run, "study": study, "place": str(out.resolve()), "opening": uuid4().hex}
        self._heard: dict[str, dict[str, Any]] = {}  # the header of each site's last reply, or an error in its place

    def federation(self, file: Path) -> Federation:
        """The clients as the server knows them; what is agreed is written to ``file``, or as it is there.

        Raises:
            PerfedError: a site that does not answer, that is busy with another run, whose table does not fit, or whose
                data have changed since.
        """
        known = checked(_Known, read_json(file), file).model_dump() if file.exists() else None
        study = hashlib.sha256(self._fields["study"].encode()).hexdigest()
        if known is not None and known["study"] != study:
            raise PerfedError(f"{file.parent}: holds a run of another study; submit with another --out")
        agreement = self._agreement() if known is None else FederationSchema.of_plain(known["agreement"], str(file))
        told = self._ask("agreement", {"agreement": agreement.plain()}, "facts")
        facts = {site: ClientFacts.of_plain(values, site) for site, values in told.items()}
        plain = {site: facts[site].plain() for site in sorted(facts)}
        if known is not None:
            facts = {site: ClientFacts.of_plain(values) for site, values in (known["facts"] | plain).items()}
        before = plain if known is None else known["facts"]
        if changed := [site for site in plain if _nameless(plain[site]) != _nameless(before.get(site, {}))]:
            raise PerfedError(
                f"site '{changed[0]}': its data are not those that the run in {file.parent} was begun with"
            )
        if known is None:
            content = {"study": study, "agreement": agreement.plain(), "facts": plain}
            write_atomic(_made(file.parent) / file.name, json.dumps(content, indent=1) + "\n")
        clients = lazy_clients(refuse_read, facts.values(), agreement)
        return federation_of(clients, agreement, self._experiment.data.name)

    def _agreement(self) -> FederationSchema:
        told = {site: SiteMetadata.of_plain(v, f"site '{site}'") for site, v in self._ask("study", {}, "told").items()}
        return agreed(told, table_options(self._experiment))

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


def _nameless(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without names of inputs, in whose place older sites sent others."""
    return {name: value for name, value in facts.items() if name != "feature_names"}


def tell(**what: Any) -> None:
    """Print a line for who has submitted the run."""
    print(LINE + json.dumps(what), flush=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
