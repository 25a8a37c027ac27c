"""The server's program of a deployment: the sites agree on a schema, then the study runs like any other."""

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
"""Seconds between two checks for missing sites."""
REPORT = "report.html"
"""The last file that a run writes."""
_FAILED_OPENINGS = "failed-openings.json"  # in a run's journal: the number of agreements that some sites refused


@dataclass(frozen=True)
class Settings:
    """The settings of a submitted run that are not part of its study.

    Attributes:
        out: the run's directory on the server; a run that is already there is continued.
        wait: seconds within which all sites must be connected.
        deadline: seconds that an exchange may take.
        ratio: see :class:`perfed.sites.flower.engine.Limits`; 0: no limit.
        at_least: the number of sites with which a run continues once all sites have agreed to it; 0: all sites.
    """

    out: str
    wait: float = 300.0
    deadline: float = 600.0
    ratio: float = MAX_RATIO
    at_least: float = 0.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Return the settings in the configuration of a Flower run.

        Raises:
            PerfedError: ``out`` is missing, or another setting is not a number of at least 0.
        """
        fields = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        if not isinstance(fields.get("out"), str) or not fields["out"]:
            raise PerfedError("the run's configuration names no directory (out)")
        numbers = {name: value for name, value in fields.items() if name != "out"}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise PerfedError(f"{name} is {value!r}; a number of seconds, at least 0, is needed")
        return cls(fields["out"], **{name: float(value) for name, value in numbers.items()})


@create_private_files()
def main(transport: Transport, config: Mapping[str, Any], *, study: str) -> None:
    """Run the study with the sites of ``transport``.

    Args:
        transport: the connection to the sites.
        config: the fields of :class:`Settings`.
        study: the experiment, as TOML.

    Raises:
        PerfedError: sites are missing, their tables do not fit the study, or the run cannot continue. The message is
            also printed for the submitter.
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
            last_round = (submitted.blend if is_blend(experiment) else submitted.run)(experiment, study, out)
    except BlockingIOError:
        raise PerfedError(
            f"{out}: this run is going on already; 'perfed submit' follows it once it has begun"
        ) from None
    tell(done=last_round, out=str(out))


@dataclass(frozen=True)
class Submitted:
    """A submitted study, which this program runs.

    Attributes:
        transport: the connection to the sites.
        settings: the settings of the run that are not part of the study.
        place: the directory of all results.
        sites: the names of all sites of the study.
    """

    transport: Transport
    settings: Settings
    place: Path
    sites: list[str]

    def run(self, experiment: Experiment, study: str, out: Path) -> int:
        """Start or continue one run, and return the number of its last round.

        Args:
            experiment, study: the study, parsed and as TOML.
            out: the directory of the run.
        """
        clients, agreement, doubts = self._open_run(experiment, study, out)
        federation = federation_of(clients, agreement, experiment.data.name, notes={"doubts": doubts})
        allowed = None if experiment.secure_aggregation is None else rehearse_study(study, federation.task)
        journal = Journal(out / JOURNAL, _compute_run_id(study, out))
        server = self._make_server_factory(study, out, journal, allowed)
        run = _start_or_resume_run(
            experiment, federation, out, partial(_create_server, experiment, out / JOURNAL, server)
        )
        return self._complete_run(run, journal, out, experiment.name)

    def blend(self, experiment: Experiment, study: str, out: Path) -> int:
        """Run each candidate on all training rows and without each fold, then learn the weights.

        Returns:
            the number of the last round in which weights were learnt.
        """
        runs = list_candidate_runs(experiment)
        folders = [(run, _candidate_folder(run, experiment, out)) for run in runs]
        for number, (run, folder) in enumerate(folders, 1):
            if not (folder / REPORT).exists():
                tell(stage=f"{run.title} (run {number} of {len(runs)})")
                self.run(run.study, run.study.to_toml(), folder)
        tell(stage="weights of the candidates")
        weights_folder = out / BLEND / f"seed-{experiment.seed}"
        last_round = self._learn_weights(experiment, study, weights_folder)
        candidate_folders = [folder for run, folder in folders if run.fold is None]
        write_report(load_runs([*candidate_folders, weights_folder]), out / REPORT, title=experiment.name)
        return last_round

    def _learn_weights(self, experiment: Experiment, study: str, out: Path) -> int:
        """Learn the pooled weights, one round for each set of weights sent to the sites; return the last round."""
        clients, agreement, _ = self._open_run(experiment, study, out)
        federation = federation_of(clients, drop_inputs(agreement), experiment.data.name)
        secure, journal = experiment.secure_aggregation, Journal(out / JOURNAL, _compute_run_id(study, out))
        allowed = None if secure is None else rehearse_weights(experiment, federation.task, federation.num_outputs)
        run = Run(
            federation,
            build_blending(experiment, federation.task),
            make_placeholder_model(federation.num_outputs),
            name=BLEND,
            rounds=EXCHANGES,
            seed=experiment.seed,
            dtype=torch.float64,
            evaluation=build_weights_evaluation(experiment),
            plan=experiment.plan.build(),
            server=self._make_server_factory(study, out, journal, allowed),
            secure=secure,
            callbacks=[StopWhenConverged()],
        )
        text = experiment.model_copy(update={"method": BLEND}).to_toml()
        is_continued = (out / "config.toml").exists()
        run.directory = RunDirectory(out) if is_continued else RunDirectory.create(out)
        run.path, run.config = out, tomllib.loads(text)
        if is_continued:
            with run.directory.lock():
                run.restore()
        run.directory.write_config(text)
        run.checkpoint_seconds = 0.0
        return self._complete_run(run, journal, out, experiment.name)

    def _open_run(
        self, experiment: Experiment, study: str, out: Path
    ) -> tuple[tuple[Client, ...], FederationSchema, list[str]]:
        """Wait for the sites; return the clients of the run in ``out``, their agreed schema, and doubts about it."""
        least = int(self.settings.at_least) or len(self.sites)
        is_agreed = (out / AGREED).exists()
        missing = _wait_for_sites(
            self.transport, self.sites, self.settings.wait, least if is_agreed else len(self.sites)
        )
        connected = [site for site in self.sites if site not in missing]
        deadline = self.settings.deadline
        opening = Opening(
            self.transport, connected, experiment, study, _compute_run_id(study, out), self.place, deadline
        )
        try:
            clients, agreement = opening.collect_clients(out / AGREED)
        except PerfedError:
            if not is_agreed and opening.sent_agreement:
                _record_failed_opening(out)
            raise
        for doubt in opening.doubts if not is_agreed else ():
            tell(stage=doubt)
        return clients, agreement, opening.doubts

    def _make_server_factory(
        self, study: str, out: Path, journal: Journal, allowed: AllowList | None
    ) -> Callable[..., RealTimeServer]:
        """Return a function that creates the server of a run in ``out``."""
        settings = self.settings
        limits = Limits(settings.deadline, ratio=settings.ratio or None, least=int(settings.at_least))
        engine = partial(
            FlowerEngine,
            transport=self.transport,
            journal=journal,
            run=_compute_run_id(study, out),
            limits=limits,
            allowed=allowed,
        )
        return partial(RealTimeServer, engine=engine)

    def _complete_run(self, run: Run, journal: Journal, out: Path, title: str) -> int:
        """Execute the remaining rounds, write the report, and return the number of the last round."""
        if run.resumed is not None:
            tell(stage=f"continues from round {run.resumed} of {run.rounds}")
        run.execute(_make_progress_callback(journal, run))
        clients_without_test_rows = [client.id for client in run.federation if client.split("test") is None]
        if clients_without_test_rows:  # the sites store their personal models when they are evaluated
            run.server.evaluate("train", clients_without_test_rows, run.done)
        write_report(load_runs([out]), out / REPORT, title=title)
        return run.done


class StopWhenConverged(Callback):
    """A callback that ends the run when the weights of a blend have converged."""

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Return whether the weights have converged."""
        method = run.server.method
        return isinstance(method, Blending) and method.descent(run.server.state).converged


def _compute_run_id(study: str, out: Path) -> str:
    """Return the id of the run of a study in a directory.

    A site accepts one agreement per run. The id therefore changes after an agreement that some sites refused.
    """
    failed = _count_failed_openings(out)
    return hashlib.sha256(f"{out.resolve()} {study}{f' {failed}' if failed else ''}".encode()).hexdigest()[:16]


def _count_failed_openings(out: Path) -> int:
    """Return the number of agreements that some sites of the run in ``out`` have refused."""
    file = out / JOURNAL / _FAILED_OPENINGS
    return checked(int, read_json(file), file) if file.exists() else 0


def _record_failed_opening(out: Path) -> None:
    write_atomic(make_folder(out / JOURNAL) / _FAILED_OPENINGS, str(_count_failed_openings(out) + 1))


def _candidate_folder(run: CandidateRun, study: Experiment, out: Path) -> Path:
    """Return the folder of the results of a candidate's run; its layout is that of a comparison."""
    name = folder_names(study.blend.candidates)[run.name]
    parent = out if run.fold is None else out / "folds" / f"{run.fold + 1}-of-{study.blend.folds}"
    return parent / name / f"seed-{study.seed}"


def _wait_for_sites(transport: Transport, sites: list[str], seconds: float, least: int) -> list[str]:
    """Wait until all sites are connected, and print the missing sites whenever they change.

    Returns:
        the sites that are still missing after ``seconds``, if at least ``least`` sites are connected.

    Raises:
        PerfedError: fewer than ``least`` sites are connected in time.
    """
    ends, last_missing, missing = time.monotonic() + seconds, list[str](), sites
    while missing := transport.wait_for(missing, min(LOOK, max(ends - time.monotonic(), 0.0))):
        if time.monotonic() >= ends and len(sites) - len(missing) >= least:
            tell(stage=f"goes on without {shorten_list(missing)}")
            return missing
        if time.monotonic() >= ends:
            message = f"not there after {seconds:g} seconds: {', '.join(missing)}"
            raise PerfedError(f"{message}; is 'perfed site' running there, and what does it print?")
        if missing != last_missing:
            tell(stage=f"still waiting for {shorten_list(missing)}")
            last_missing = missing
    return []


def _start_or_resume_run(experiment: Experiment, federation: Federation, out: Path, server: Callable[..., Any]) -> Run:
    """Resume the run in ``out``, or start a new one; every round writes a checkpoint."""
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


def _create_server(
    experiment: Experiment,
    secret: Path,
    server: Callable[..., RealTimeServer],
    federation: Federation,
    initialiser: Initialiser,
    *args: Any,
    **options: Any,
) -> RealTimeServer:
    """Return the run's server; noise that protects whole clients uses the secret in the folder ``secret``."""
    if experiment.privacy is not None and experiment.privacy.unit == "client":
        initialiser.method = set_noise_secret(initialiser.method, load_or_create_secret(secret))
    return server(federation, initialiser, *args, **options)


def _make_progress_callback(journal: Journal, run: Run) -> Callable[[int, int, float | None], None]:
    def report_round(number: int, rounds: int, accuracy: float | None) -> None:
        journal.remove_before(sequence=(number - 1) * ROUND)
        tell(round=number, rounds=rounds, accuracy=accuracy, counts=(run.history or [{}])[-1].get("counts", {}))

    return report_round


def tell(**fields: Any) -> None:
    """Print ``fields`` as a line that ``perfed submit`` reads."""
    print(LINE + json.dumps(fields), flush=True)
