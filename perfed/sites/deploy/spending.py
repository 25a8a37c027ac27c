"""The privacy budget of a site: the source of its noise, and a ledger of its releases over all runs.

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
"""File in a site's folder with the releases to each run; a symbolic link if several deployments share a ledger."""
RUNS = "runs"
"""Folder in a site's folder with one folder for each run."""
SECRET = "secret"
"""File of a run with 32 bytes from which its noise is generated. They are never sent or logged."""
_NOTED = ".noted"
"""Suffix of a run's file with the count of one ledger line, by which an older ledger is noticed."""
_BYTES = 32
_LOCK_SECONDS = 30.0  # longest wait for another process that is writing a shared ledger
_TOLERANCE = 1 + 1e-9  # for rounding errors in comparisons of epsilon


def load_or_create_secret(folder: Path) -> bytes:
    """Return the secret of the run in ``folder``, which is created from the system's randomness if there is none yet.

    Raises:
        PerfedError: the secret is damaged, or other users may read it.
    """
    return read_secret(folder / SECRET, _BYTES, "others may read the secret of this run's noise")


@dataclass(frozen=True)
class LedgerLine:
    """A line of the ledger: what a site has released to one run.

    Attributes:
        run: id of the run.
        noise_of: name of the secret of the run's noise, which is bound to the site, the study, the agreement and
            the rows. Releases with different secrets add up, even if the run has the same id.
        study: name of the study.
        unit, delta, noise: unit and delta of the study's table ``[privacy]``, and the noise multiplier derived from it.
        ahead, rounds: releases outside rounds, and releases by the number of the round, as planned by the study. Only
            older versions of perfed write them.
        releases: releases of training rows by their purpose: the number of an exchange, an evaluation
            (:func:`~perfed.sites.flower.site.metrics_of_round`), the site's model
            (:data:`~perfed.sites.flower.site.SITE_MODEL`), or a number of rows whose noise the run draws only once.
        metrics: releases of test rows by the number of the round, that is, metrics sent with noise.
        metrics_noise: noise multiplier of these metrics.
        answers: hash of the state and the message of each answered exchange, by the number of the exchange.
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
    def squared_mu(self) -> float:
        """The squared privacy parameter mu: releases over squared noise, which adds up over runs.

        See Dong et al. 2022, corollary 2. Within a run a row is either a training row or a test row, so that the larger
        of both sums protects it; with ``unit = "client"`` both sums count. In another run the row may have the other
        role, so that the larger sums of all runs are added.
        """
        training = (self.ahead + sum(self.rounds.values()) + sum(self.releases.values())) / self.noise**2
        releases = sum(self.metrics.values())
        testing = releases / self.metrics_noise**2 if releases else 0.0
        return max(training, testing) if self.unit == "sample" else training + testing

    @property
    def count(self) -> int:
        """How many answers and releases the line has; it only grows."""
        return len(self.answers) + sum(self.releases.values()) + sum(self.metrics.values())


def read_ledger(folder: Path) -> list[LedgerLine]:
    """Return the lines of the ledger of the site in ``folder``.

    Raises:
        PerfedError: the ledger is damaged, or lacks answers or releases of the site's runs, for example because it was
            restored from an old backup.
    """
    file = folder / LEDGER
    entries = read_json(file) if file.exists() else []
    if isinstance(entries, list):
        entries = [check_seal(entry, file) for entry in entries]
    lines = checked(list[LedgerLine], entries, file)
    counts = {line.noise_of: line.count for line in lines}
    for noted in sorted((folder / RUNS).glob(f"*/*{_NOTED}")):
        if checked(int, read_json(noted), noted) > counts.get(noted.stem, 0):
            raise PerfedError(
                f"{file}: exchanges of run '{noted.parent.name}' that this site has answered are missing; restore the "
                "file from a newer backup"
            )
    return lines


@contextmanager
def _lock_ledger(folder: Path) -> Iterator[Path]:
    """Yield the file of a site's ledger, locked against changes by other processes.

    Raises:
        Refused: another process holds the lock for too long.
    """
    file = (folder / LEDGER).resolve()  # replacing a symbolic link would leave the shared file unchanged
    lock, deadline = file.with_name(f"{LEDGER}.lock"), time.monotonic() + _LOCK_SECONDS
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


def compute_ledger_epsilon(lines: Sequence[LedgerLine], unit: str, delta: float) -> float:
    """Return epsilon of all runs for a ``unit`` at ``delta``.

    Args:
        lines: lines of the ledger.
        unit: what is protected. For samples all runs count, because protection of a client also protects its samples.
        delta: delta of the privacy guarantee.
    """
    squares = sum(line.squared_mu for line in lines if unit in ("sample", line.unit))
    return 0.0 if squares == 0 else compute_epsilon(1 / sqrt(squares), Releases(1), delta)


class SiteBudget:
    """The privacy budget of one site in one run (:class:`perfed.sites.flower.site.Budget`).

    Args:
        folder: folder of the site.
        run: folder with the site's files of the run; its name is the run's id.
        study: name of the study.
        plan: privacy plan of the study.
        binding: 32 bytes that identify the site, the study, the agreement and the rows.
        most: epsilon that the site's policy allows for all runs; ``None`` for no limit.
        delta: delta at which this epsilon is computed; ``None`` for that of the study.
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
        self._max_epsilon, self._delta = most, plan.settings.delta if delta is None else delta
        self._secret = hmac.digest(load_or_create_secret(run), binding, "sha256")
        self._empty_line = LedgerLine(
            run=run.name,
            noise_of=hashlib.sha256(b"name of " + self._secret).hexdigest()[:16],
            study=study,
            unit=plan.settings.unit,
            delta=plan.settings.delta,
            noise=plan.noise,
            ahead=0,
            metrics_noise=0.0 if plan.metrics is None else plan.metrics.noise,
        )
        self._noted = run / f"{self.line_name}{_NOTED}"

    @property
    def line_name(self) -> str:
        """The name of the ledger line of this budget (:attr:`LedgerLine.noise_of`)."""
        return self._empty_line.noise_of

    def make_noise(self, message: bytes) -> Noise:
        """Return the source of noise for the answer to ``message``, which is the hash of a state and a message."""
        return Noise(self._secret, message)

    def accept_message(self, exchange: str, message: bytes) -> None:
        """Record that the site answers ``message`` in an exchange; call this before any row is used.

        Each exchange is answered for one message only, because the releases to another one would not be counted.

        Raises:
            Refused: the exchange was already accepted with another message.
        """
        with self._update_line(exchange) as line:
            if line.answers.setdefault(exchange, message.hex()) != message.hex():
                raise Refused(
                    RefusalReason.MESSAGE,
                    f"the server's message: exchange {exchange} was requested with another payload before; a server "
                    "that continues a run repeats its requests",
                )

    def add_releases(self, exchange: str, counter: ReleaseCounter) -> None:
        """Record the releases of an exchange; call this before the reply is sent.

        The releases that were computed count, not those that the study plans for the round, because a server may ask a
        site to train from any earlier state, and more often than planned. A repeated exchange counts once.

        Raises:
            Refused: the budget of the study, or that of the site's policy over all runs, would be exceeded.
        """
        with self._update_line(exchange) as line:
            counts = {f"number of {name}": 1 for name in counter.counts}
            for name, releases in {**counts, exchange: counter.releases}.items():
                if releases > line.releases.get(name, 0):
                    line.releases[name] = releases

    def release_metrics(
        self, round_: int, message: bytes, outputs: Outputs, info: FederationInfo, scale: TargetScale | None
    ) -> dict[str, float]:
        """Record the release of the metrics of a round, and return the metrics with noise; each round counts once.

        Args:
            round_: number of the round.
            message: hash of the answered state and message.
            outputs: outputs of the site's model for its test rows, in the unit of the data.
            info: description of the federation.
            scale: scale by which targets were standardised.

        Raises:
            Refused: under the same conditions as in :meth:`add_releases`.
        """
        metrics = self._plan.metrics
        assert metrics is not None
        with self._update_line(metrics_of_round(round_)) as line:
            line.metrics.setdefault(str(round_), metrics.releases_per_round)
        return metrics.add_noise(
            outputs, metrics.compute_bounds(info.task, info.num_classes, scale), self.make_noise(message)
        )

    @contextmanager
    def _update_line(self, exchange: str) -> Iterator[LedgerLine]:
        """Yield this run's ledger line for changes, and write it afterwards if the budgets allow it.

        Raises:
            Refused: the changed line exceeds the budget of the study or of the policy.
        """
        budget, settings = self._plan.budget, self._plan.settings
        with _lock_ledger(self._folder) as file:
            lines = read_ledger(self._folder)
            line = self._find_line(lines)
            if line is None:
                line = deepcopy(self._empty_line)
                lines.append(line)
            before = deepcopy(line)
            yield line
            spent = compute_ledger_epsilon([line], settings.unit, settings.delta)
            if budget is not None and spent > budget * _TOLERANCE:
                reason = f"exchange {exchange} would make epsilon {spent:.4g}; privacy.epsilon is {budget:g}"
                raise Refused(RefusalReason.BUDGET, reason)
            check_total_epsilon(lines, self._max_epsilon, self._delta)
            if line != before or not file.exists():
                write_atomic(file, json.dumps([seal(asdict(entry)) for entry in lines], indent=1) + "\n", mode=0o600)
                sync_folder(file.parent)
                write_atomic(self._noted, str(line.count))
                sync_folder(self._noted.parent)

    def _find_line(self, lines: Sequence[LedgerLine]) -> LedgerLine | None:
        """Return this run's line of the ledger, or ``None`` if it has none yet."""
        return next((line for line in lines if line.noise_of == self.line_name), None)

    def describe(self) -> dict[str, Any]:
        """Return the study's privacy settings, and the epsilon that the run has spent and may spend."""
        line, settings = self._find_line(read_ledger(self._folder)), self._plan.settings
        rounds = self._plan.affordable_rounds
        max_epsilon = self._plan.compute_spending(rounds, self._plan.count_evaluations(rounds))
        spent = compute_ledger_epsilon([] if line is None else [line], settings.unit, settings.delta)
        return {**self._plan.explicit_settings(), "spent": spent, "most": max_epsilon}


def check_planned_run(folder: Path, line: str, plan: PrivateMethod, most: float | None, delta: float | None) -> None:
    """Check that a complete run stays within what the site's policy allows for all runs.

    Args:
        folder: folder of the site.
        line: name of the ledger line that already counts a part of the run (:attr:`SiteBudget.line_name`); empty if the
            site has not joined the run.
        plan: privacy plan of the run's study.
        most, delta: epsilon that the policy allows, and its delta, as for :class:`SiteBudget`.

    Raises:
        Refused: all runs together would exceed the policy's epsilon.
    """
    settings = plan.settings
    rounds, metrics = plan.affordable_rounds, plan.metrics
    planned_line = LedgerLine("", "", "", settings.unit, settings.delta, plan.noise, plan.sum_releases(rounds).full)
    if metrics is not None:
        planned_line = replace(
            planned_line,
            metrics={"": metrics.releases_per_round * plan.count_evaluations(rounds)},
            metrics_noise=metrics.noise,
        )
    other_runs = [entry for entry in read_ledger(folder) if entry.noise_of != line]
    check_total_epsilon([*other_runs, planned_line], most, settings.delta if delta is None else delta)


def check_total_epsilon(lines: Sequence[LedgerLine], most: float | None, delta: float) -> None:
    """Check that the releases of all runs together stay within the site's policy.

    Epsilon is computed for a sample, which all runs concern, whatever unit they protect.

    Args:
        lines: lines of the ledger.
        most: epsilon that the policy allows; ``None`` for no limit.
        delta: delta at which epsilon is computed.

    Raises:
        Refused: epsilon of all runs exceeds ``most``.
    """
    spent = 0.0 if most is None else compute_ledger_epsilon(lines, "sample", delta)
    if spent > (inf if most is None else most * _TOLERANCE):
        reason = f"all runs of this site would make epsilon {spent:.4g} at delta {delta:g}; allowed: at most {most:g}"
        raise Refused(RefusalReason.POLICY, f"epsilon: {reason}", "epsilon")
