"""What a site has spent of privacy: the source of its noise, and a ledger of its releases over all runs.

Two releases with the same noise would reveal their difference. Noise and ledger entries are therefore bound to
everything that a reply depends on: the study, the agreement, the site's rows (together the *binding* of a run), the
site's state, and the whole message.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

from perfed.data.reading import check_seal, checked, read_json, seal
from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Outputs
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.privacy.accountant import Releases, compute_epsilon
from perfed.privacy.apply import PrivateMethod
from perfed.rng import Noise
from perfed.sites.flower.refusal import RefusalReason, Refused
from perfed.sites.flower.site import metrics_of_round
from perfed.system import lock_folder, read_secret, sync_folder, write_atomic
from perfed.training.private import ReleaseCounter

LEDGER = "spent.json"
"""File of a site's folder that lists what each run was told; a symbolic link where several deployments share one."""
RUNS = "runs"
"""Folder of a site's folder with a folder for each run."""
SECRET = "secret"
"""File of a run: 32 bytes that its noise is made with. It never leaves, and is in no log."""
_NOTED = (
    ".noted"  # suffix of a run's file, named after a line of the ledger: its count, so that an older one is noticed
)
_BYTES = 32
_PATIENCE = 30.0  # seconds in which another process must have finished writing a shared ledger
_SLACK = 1 + 1e-9


def secret_in(folder: Path) -> bytes:
    """Return the secret of a run that ``folder`` is of; made of the system's randomness where there is none yet.

    Raises:
        PerfedError: it is damaged, or others than its user may read it.
    """
    return read_secret(folder / SECRET, _BYTES, "others may read the secret of this run's noise")


@dataclass(frozen=True)
class Told:
    """What a run was told, as one line of the ledger.

    Attributes:
        run: its id.
        noise_of: name of the secret of its noise, which is bound to the study, the agreement and the rows. What is
            told with another secret adds up, also in a run with the same id.
        study: its name.
        unit, delta, noise: of its table ``[privacy]``, with the noise that was found.
        ahead, rounds: releases that belong to no round, and those by the number of the round, as older versions wrote
            them, which counted what a study plans.
        releases: releases of training rows by what they were for: the number of an exchange, an evaluation
            (:func:`~perfed.sites.flower.site.metrics_of_round`), the model that the site keeps
            (:data:`~perfed.sites.flower.site.SITE_MODEL`), or a number of rows whose noise the run draws once.
        metrics: releases of test rows by the number of the round: metrics that left with noise.
        metrics_noise: of these.
        answers: by exchange the hash of the state and the message that was answered.
    """

    run: str
    noise_of: str
    study: str
    unit: str
    delta: float
    noise: float
    ahead: int
    rounds: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=dict)
    metrics_noise: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)

    @property
    def squares(self) -> float:
        """Releases over the square of the noise: what adds up over runs (Dong et al. 2022, corollary 2).

        A row is in training or in the test, and what a run tells of it is the larger of both; of a site it is both.
        In another run it may be the other, so that over runs the larger ones add up.
        """
        training = (self.ahead + sum(self.rounds.values()) + sum(self.releases.values())) / self.noise**2
        told = sum(self.metrics.values())
        measured = told / self.metrics_noise**2 if told else 0.0
        return max(training, measured) if self.unit == "sample" else training + measured

    @property
    def count(self) -> int:
        """How many answers and releases the line has; it only grows."""
        return len(self.answers) + sum(self.releases.values()) + sum(self.metrics.values())


def ledger(folder: Path) -> list[Told]:
    """Return what all runs were told by the site in ``folder``.

    Raises:
        PerfedError: the ledger is damaged, or lacks answers or releases of the site's runs, as one from a backup does.
    """
    file = folder / LEDGER
    entries = read_json(file) if file.exists() else []
    if isinstance(entries, list):
        entries = [check_seal(entry, file) for entry in entries]
    lines = checked(list[Told], entries, file)
    counts = {line.noise_of: line.count for line in lines}
    for noted in sorted((folder / RUNS).glob(f"*/*{_NOTED}")):
        if checked(int, read_json(noted), noted) > counts.get(noted.stem, 0):
            raise PerfedError(
                f"{file}: lacks what run '{noted.parent.name}' was told, whose exchanges this site has answered; "
                "restore the file from a backup"
            )
    return lines


@contextmanager
def _locked_ledger(folder: Path) -> Iterator[Path]:
    """Yield the file of a site's ledger, which no other process changes meanwhile.

    Raises:
        Refused: another process has been changing it for too long.
    """
    file = (folder / LEDGER).resolve()  # replacing a symbolic link would leave the shared file unchanged
    lock, deadline = file.with_name(f"{LEDGER}.lock"), time.monotonic() + _PATIENCE
    lock.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(lock))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refused(RefusalReason.BUDGET, f"{file}: another process is changing the ledger") from None
                time.sleep(0.01)
        yield file


def total(told: Sequence[Told], unit: str, delta: float) -> float:
    """Return epsilon of all runs for a ``unit``, at ``delta``.

    Args:
        told: of the ledger.
        unit: what is protected. For a sample all runs count, for what protects a client protects each of its samples.
        delta: at which.
    """
    squares = sum(one.squares for one in told if unit in ("sample", one.unit))
    return 0.0 if squares == 0 else compute_epsilon(1 / sqrt(squares), Releases(1), delta)


class SiteBudget:
    """What one site may tell in one run (:class:`perfed.sites.flower.site.Budget`).

    Args:
        folder: of the site.
        run: folder of what the site keeps of the run; its name is the run's id.
        study: name of the study.
        plan: of the study.
        binding: 32 bytes that name the study, the agreement and the site's rows.
        most: epsilon of all runs that the site's policy allows; ``None``: any.
        delta: at which that is counted; ``None``: that of the study.
    """

    def __init__(
        self,
        folder: Path,
        run: Path,
        study: str,
        plan: PrivateMethod,
        binding: bytes,
        most: float | None = None,
        delta: float | None = None,
    ) -> None:
        self._folder, self._plan = folder, plan
        self._most, self._delta = most, plan.settings.delta if delta is None else delta
        self._secret = hmac.digest(secret_in(run), binding, "sha256")
        self._unspent = Told(
            run=run.name,
            noise_of=hashlib.sha256(b"name of " + self._secret).hexdigest()[:16],
            study=study,
            unit=plan.settings.unit,
            delta=plan.settings.delta,
            noise=plan.noise,
            ahead=0,
            metrics_noise=0.0 if plan.metrics is None else plan.metrics.noise,
        )
        self._noted = run / f"{self.line}{_NOTED}"

    @property
    def line(self) -> str:
        """Name of the ledger's line that counts what is told with this budget (:attr:`Told.noise_of`)."""
        return self._unspent.noise_of

    def make_noise(self, message: bytes) -> Noise:
        """Return the source of the noise in the answer to ``message``, the hash of a state and a message."""
        return Noise(self._secret, message)

    def accept_message(self, exchange: str, message: bytes) -> None:
        """Write down that the site answers ``message`` in an exchange, before it looks at its rows.

        Each exchange is answered for one message only: what another one releases would not be counted.

        Raises:
            Refused: the exchange was accepted with another message.
        """
        with self._line_to_write(exchange) as line:
            if line.answers.setdefault(exchange, message.hex()) != message.hex():
                raise Refused(
                    RefusalReason.MESSAGE,
                    f"the server's message: exchange {exchange} was asked with another payload already; a server that "
                    "goes on asks the same again",
                )

    def add_releases(self, exchange: str, counter: ReleaseCounter) -> None:
        """Write down what an exchange has released, before anything of it leaves.

        It is what was computed that counts, and not what the plan of the study has for the round: a server may ask a
        site to train from any earlier state, and more often than planned. Asked again, an exchange counts once.

        Raises:
            Refused: the budget of the study, or that of the policy over all runs, would be exceeded.
        """
        with self._line_to_write(exchange) as line:
            counts = {f"number of {name}": 1 for name in counter.counts}
            for name, releases in {**counts, exchange: counter.releases}.items():
                if releases > line.releases.get(name, 0):
                    line.releases[name] = releases

    def release_metrics(
        self, round_: int, message: bytes, outputs: Outputs, info: FederationInfo, scale: TargetScale | None
    ) -> dict[str, float]:
        """Return the metrics that leave after a round, with noise, and note them before; a round counts once.

        Args:
            round_: number of the round.
            message: hash of the state and the message that is answered.
            outputs: what the site's model says of its test rows, in the unit of the data.
            info: of the federation.
            scale: what targets were standardised by.

        Raises:
            Refused: as :meth:`add_releases`.
        """
        metrics = self._plan.metrics
        assert metrics is not None
        with self._line_to_write(metrics_of_round(round_)) as line:
            line.metrics.setdefault(str(round_), metrics.releases_per_round)
        return metrics.add_noise(outputs, metrics.compute_bounds(info.task, info.num_classes, scale), self.make_noise(message))

    @contextmanager
    def _line_to_write(self, exchange: str) -> Iterator[Told]:
        """Yield this run's line of the ledger to be changed; write it if an exchange may release what it then says.

        Raises:
            Refused: it may not.
        """
        budget, settings = self._plan.budget, self._plan.settings
        with _locked_ledger(self._folder) as file:
            lines = ledger(self._folder)
            line = self._find_line(lines)
            if line is None:
                line = deepcopy(self._unspent)
                lines.append(line)
            before = deepcopy(line)
            yield line
            spent = total([line], settings.unit, settings.delta)
            if budget is not None and spent > budget * _SLACK:
                beyond = f"exchange {exchange} would make epsilon {spent:.4g}; privacy.epsilon is {budget:g}"
                raise Refused(RefusalReason.BUDGET, beyond)
            check_most(lines, self._most, self._delta)
            if line != before or not file.exists():
                write_atomic(file, json.dumps([seal(asdict(each)) for each in lines], indent=1) + "\n", mode=0o600)
                sync_folder(file.parent)
                write_atomic(self._noted, str(line.count))
                sync_folder(self._noted.parent)

    def _find_line(self, lines: Sequence[Told]) -> Told | None:
        """Return this run's line of the ledger."""
        return next((line for line in lines if line.noise_of == self.line), None)

    def stated(self) -> dict[str, Any]:
        """Return the settings of the study and what the run has spent, for a model's card."""
        line, settings = self._find_line(ledger(self._folder)), self._plan.settings
        rounds = self._plan.affordable_rounds
        most = self._plan.compute_spending(rounds, self._plan.count_evaluations(rounds))
        spent = total([] if line is None else [line], settings.unit, settings.delta)
        return {**self._plan.explicit_settings(), "spent": spent, "most": most}


def check_planned(folder: Path, line: str, plan: PrivateMethod, most: float | None, delta: float | None) -> None:
    """Refuse a run that would take the site beyond what its policy allows over all runs.

    Args:
        folder: of the site.
        line: name of the ledger's line that already counts a part of the run (:attr:`SiteBudget.line`); empty for a
            run that the site has not joined.
        plan: of its study.
        most, delta: as of :class:`SiteBudget`.

    Raises:
        Refused: all of it would be more.
    """
    settings = plan.settings
    rounds, metrics = plan.affordable_rounds, plan.metrics
    ahead = Told("", "", "", settings.unit, settings.delta, plan.noise, plan.sum_releases(rounds).full)
    if metrics is not None:
        ahead = replace(
            ahead,
            metrics={"": metrics.releases_per_round * plan.count_evaluations(rounds)},
            metrics_noise=metrics.noise,
        )
    others = [told for told in ledger(folder) if told.noise_of != line]
    check_most([*others, ahead], most, settings.delta if delta is None else delta)


def check_most(told: Sequence[Told], most: float | None, delta: float) -> None:
    """Do nothing where a site may have told all that; of a row all runs tell, whichever unit they protect.

    Raises:
        Refused: it is more than its policy allows.
    """
    spent = 0.0 if most is None else total(told, "sample", delta)
    if spent > (inf if most is None else most * _SLACK):
        why = f"all runs of this site would make epsilon {spent:.4g} at delta {delta:g}; allowed: at most {most:g}"
        raise Refused(RefusalReason.POLICY, f"epsilon: {why}", "epsilon")
