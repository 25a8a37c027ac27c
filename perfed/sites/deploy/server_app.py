"""The server's program of a deployment: what sites tell, what is agreed, and then a run as any other."""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfed.codec import flatten
from perfed.data.client import Client
from perfed.data.federation import Federation, federation_of
from perfed.data.federation_schema import FederationSchema
from perfed.data.reading import checked, read_json
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.comparison import folder_names
from perfed.experiment.config import Experiment, read
from perfed.experiment.start import resume, start
from perfed.maths.blending import EXCHANGES
from perfed.methods.blending import Blending
from perfed.plugins import BLEND
from perfed.privacy.client import set_noise_secret
from perfed.report import load_runs, write_report
from perfed.run.callback import Callback, Running
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.sites.deploy.candidates import (
    CandidateRun,
    build_blending,
    build_weights_evaluation,
    drop_inputs,
    is_blend,
    list_candidate_runs,
    make_placeholder_model,
    rehearse_weights,
)
from perfed.sites.deploy.opening import AGREED, Opening, make_folder
from perfed.sites.deploy.spending import load_or_create_secret
from perfed.sites.deploy.submit import JOURNAL, LINE
from perfed.sites.deploy.trial import rehearse_study
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.engine import MAX_RATIO, FlowerEngine, Limits, RealTimeServer
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.transport import Transport
from perfed.sites.flower.wire import ROUND
from perfed.system import create_private_files, lock_folder, write_atomic

LOOK = 10.0
"""Seconds between two looks for who is missing."""
REPORT = "report.html"
"""The last file that a run writes."""
_FAILED_OPENINGS = "failed-openings.json"  # in a run's journal: how many agreements some sites have refused


@dataclass(frozen=True)
class Settings:
    """What a submitted run is told beside its study.

    Attributes:
        out: the run's directory, on the server; a run that is there goes on.
        wait: seconds in which all sites must be there.
        deadline: seconds that an exchange may take.
        ratio: see :class:`perfed.sites.flower.engine.Limits`; 0: any.
        at_least: sites with which a run goes on that all have agreed to; 0: all.
    """

    out: str
    wait: float = 300.0
    deadline: float = 600.0
    ratio: float = MAX_RATIO
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


@create_private_files()
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
    out, experiment = Path(settings.out), read(study, "the study")
    transport.note = lambda line: tell(stage=line)
    sites: list[str] = sorted(experiment.data.options["files"])
    submitted = Submitted(transport, settings, out, sites)
    try:
        with lock_folder(make_folder(out / JOURNAL)):
            tell(stage=f"waiting for {len(sites)} sites, {settings.wait:g} seconds at most (--wait)")
            done = (submitted.blend if is_blend(experiment) else submitted.run)(experiment, study, out)
    except BlockingIOError:
        raise PerfedError(
            f"{out}: this run is going on already; 'perfed submit' follows it once it has begun"
        ) from None
    tell(done=done, out=str(out))


@dataclass(frozen=True)
class Submitted:
    """What has been submitted, as long as this program is at work on it.

    Attributes:
        transport: the network.
        settings: beside the study.
        place: directory of all results.
        sites: names of all sites of the study.
    """

    transport: Transport
    settings: Settings
    place: Path
    sites: list[str]

    def run(self, experiment: Experiment, study: str, out: Path) -> int:
        """Do one run, or what is left of it; the last round.

        Args:
            experiment, study: parsed and as text.
            out: its directory.
        """
        clients, agreement, doubts = self._opened(experiment, study, out)
        federation = federation_of(clients, agreement, experiment.data.name, notes={"doubts": doubts})
        allowed = None if experiment.secure_aggregation is None else rehearse_study(study, federation.task)
        journal = Journal(out / JOURNAL, _id(study, out))
        server = self._server(study, out, journal, allowed)
        going = _run(experiment, federation, out, partial(_with_noise, experiment, out / JOURNAL, server))
        return self._to_its_end(going, journal, out, experiment.name)

    def blend(self, experiment: Experiment, study: str, out: Path) -> int:
        """Do the run of each candidate, on all training rows and in each fold; then learn the weights."""
        runs = list_candidate_runs(experiment)
        places = [(run, _place(run, experiment, out)) for run in runs]
        for number, (run, place) in enumerate(places, 1):
            if not (place / REPORT).exists():
                tell(stage=f"{run.title} (run {number} of {len(runs)})")
                self.run(run.study, run.study.to_toml(), place)
        tell(stage="weights of the candidates")
        weights = out / BLEND / f"seed-{experiment.seed}"
        done = self._weights(experiment, study, weights)
        whole = [place for run, place in places if run.fold is None]
        write_report(load_runs([*whole, weights]), out / REPORT, title=experiment.name)
        return done

    def _weights(self, experiment: Experiment, study: str, out: Path) -> int:
        """Learn the pooled weights, a round for each set of them that sites are asked about; the last round."""
        clients, agreement, _ = self._opened(experiment, study, out)
        federation = federation_of(clients, drop_inputs(agreement), experiment.data.name)
        secure, journal = experiment.secure_aggregation, Journal(out / JOURNAL, _id(study, out))
        allowed = None if secure is None else rehearse_weights(experiment, federation.task, federation.num_outputs)
        going = Run(
            federation,
            build_blending(experiment, federation.task),
            make_placeholder_model(federation.num_outputs),
            name=BLEND,
            rounds=EXCHANGES,
            seed=experiment.seed,
            dtype=torch.float64,
            evaluation=build_weights_evaluation(experiment),
            plan=experiment.plan.build(),
            server=self._server(study, out, journal, allowed),
            secure=secure,
            callbacks=[StopWhenConverged()],
        )
        text = experiment.model_copy(update={"method": BLEND}).to_toml()
        begun = (out / "config.toml").exists()
        going.directory = RunDirectory(out) if begun else RunDirectory.create(out)
        going.path, going.config = out, tomllib.loads(text)
        if begun:
            with going.directory.lock():
                going.restore()
        going.directory.write_config(text)
        going.checkpoint_seconds = 0.0
        return self._to_its_end(going, journal, out, experiment.name)

    def _opened(
        self, experiment: Experiment, study: str, out: Path
    ) -> tuple[tuple[Client, ...], FederationSchema, list[str]]:
        """Return the clients of a run in ``out``, what holds at all of them, and doubts, once its sites are there."""
        least = int(self.settings.at_least) or len(self.sites)
        begun = (out / AGREED).exists()
        missing = _gather(self.transport, self.sites, self.settings.wait, least if begun else len(self.sites))
        there = [site for site in self.sites if site not in missing]
        deadline = self.settings.deadline
        opening = Opening(self.transport, there, experiment, study, _id(study, out), self.place, deadline)
        try:
            clients, agreement = opening.collect_clients(out / AGREED)
        except PerfedError:
            if not begun and opening.sent_agreement:
                _count_failed_opening(out)
            raise
        for doubt in opening.doubts if not begun else ():
            tell(stage=doubt)
        return clients, agreement, opening.doubts

    def _server(
        self, study: str, out: Path, journal: Journal, allowed: AllowList | None
    ) -> Callable[..., RealTimeServer]:
        """What makes the server of a run in ``out``."""
        settings = self.settings
        limits = Limits(settings.deadline, ratio=settings.ratio or None, least=int(settings.at_least))
        engine = partial(
            FlowerEngine,
            transport=self.transport,
            journal=journal,
            run=_id(study, out),
            limits=limits,
            allowed=allowed,
        )
        return partial(RealTimeServer, engine=engine)

    def _to_its_end(self, going: Run, journal: Journal, out: Path, title: str) -> int:
        if going.resumed is not None:
            tell(stage=f"continues from round {going.resumed} of {going.rounds}")
        going.execute(_progress(journal, going))
        lacking = [client.id for client in going.federation if client.split("test") is None]
        if lacking:  # which makes their own models too
            going.server.evaluate("train", lacking, going.done)
        write_report(load_runs([out]), out / REPORT, title=title)
        return going.done


class StopWhenConverged(Callback):
    """Ends the run when the weights of a blend are learnt."""

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Whether nothing is left to gain."""
        method = run.server.method
        return isinstance(method, Blending) and method.descent(run.server.state).converged


def _id(study: str, out: Path) -> str:
    """Return the id of the run of a study in a directory.

    A site accepts one agreement per run, so that the id changes after an agreement that some sites refused.
    """
    failed = _failed_openings(out)
    return hashlib.sha256(f"{out.resolve()} {study}{f' {failed}' if failed else ''}".encode()).hexdigest()[:16]


def _failed_openings(out: Path) -> int:
    """Return how many agreements of the run in a directory some of its sites have refused."""
    file = out / JOURNAL / _FAILED_OPENINGS
    return checked(int, read_json(file), file) if file.exists() else 0


def _count_failed_opening(out: Path) -> None:
    write_atomic(make_folder(out / JOURNAL) / _FAILED_OPENINGS, str(_failed_openings(out) + 1))


def _place(run: CandidateRun, study: Experiment, out: Path) -> Path:
    """Where the results of a candidate's run are, as in a comparison."""
    folder = folder_names(study.blend.candidates)[run.name]
    where = out if run.fold is None else out / "folds" / f"{run.fold + 1}-of-{study.blend.folds}"
    return where / folder / f"seed-{study.seed}"


def _gather(transport: Transport, sites: list[str], seconds: float, least: int) -> list[str]:
    """Wait until all sites are connected, and say whenever others are missing than before.

    Returns:
        those that are not there in time, where so many as ``least`` are.

    Raises:
        PerfedError: fewer are there.
    """
    ends, told, missing = time.monotonic() + seconds, list[str](), sites
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

    def checkpointed_states(site: str) -> list[int]:
        return [int(flatten(state)["sequence"]) for client, state in run.best_models.clients.items() if client == site]

    run.server.keep_states(checkpointed_states)
    return run


def _with_noise(
    experiment: Experiment,
    secret: Path,
    server: Callable[..., RealTimeServer],
    federation: Federation,
    initialiser: Initialiser,
    *args: Any,
    **options: Any,
) -> RealTimeServer:
    """The run's server; its noise, if any, is made with what is in ``secret`` and in nothing that leaves it."""
    if experiment.privacy is not None and experiment.privacy.unit == "client":
        initialiser.method = set_noise_secret(initialiser.method, load_or_create_secret(secret))
    return server(federation, initialiser, *args, **options)


def _progress(journal: Journal, run: Run) -> Callable[[int, int, float | None], None]:
    def progress(number: int, rounds: int, accuracy: float | None) -> None:
        journal.remove_before(sequence=(number - 1) * ROUND)
        tell(round=number, rounds=rounds, accuracy=accuracy, counts=(run.history or [{}])[-1].get("counts", {}))

    return progress


def tell(**what: Any) -> None:
    """Print a line for who has submitted the run."""
    print(LINE + json.dumps(what), flush=True)
