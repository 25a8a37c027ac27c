"""What a site has spent of privacy: a secret for each run, and a ledger over all of them in the site's folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

from perfed.data.reading import check_seal, checked, read_json, seal
from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Outputs
from perfed.engine.flower.refusal import Refused, Said
from perfed.engine.flower.store import Stored
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.privacy.accountant import Releases, epsilon
from perfed.privacy.apply import PrivateMethod
from perfed.rng import Noise
from perfed.system import sync_folder, write_atomic

LEDGER = "spent.json"
"""File of a site's folder: what each run was told."""
RUNS = "runs"
"""Folder of a site's folder with a folder for each run."""
SECRET = "secret"
"""File of a run: 32 bytes that its noise is made with. It never leaves, and is in no log."""
_BYTES = 32
_SLACK = 1 + 1e-9


def secret_in(folder: Path) -> bytes:
    """Return the secret of a run that ``folder`` is of; made of the system's randomness where there is none yet.

    Raises:
        PerfedError: it is damaged, or others than its user may read it.
    """
    file = folder / SECRET
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_atomic(file, os.urandom(_BYTES), mode=0o600)
        sync_folder(folder)
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise PerfedError(f"{file}: others may read the secret of this run's noise; chmod 600 {file}")
    found = file.read_bytes()
    if len(found) != _BYTES:
        raise PerfedError(f"{file} is damaged: {len(found)} bytes; {_BYTES} are needed")
    return found


@dataclass(frozen=True)
class Told:
    """What a run was told, as one line of the ledger.

    Attributes:
        run: its id.
        noise_of: names its secret, without saying it; a run with another one is told anew.
        study: its name.
        unit, delta, noise: of its table ``[privacy]``, with the noise that was found.
        ahead: releases that belong to no round.
        rounds: releases by the number of the round.
        metrics: releases of test rows by the number of the round: metrics that left with noise.
        metrics_noise: of these.
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

    @property
    def squares(self) -> float:
        """Releases over the square of the noise: what adds up over runs (Dong et al. 2022, corollary 2).

        A row is in training or in the test, and what a run tells of it is the larger of both; of a site it is both.
        In another run it may be the other, so that over runs the larger ones add up.
        """
        training = sum(self.rounds.values(), self.ahead) / self.noise**2
        told = sum(self.metrics.values())
        measured = told / self.metrics_noise**2 if told else 0.0
        return max(training, measured) if self.unit == "sample" else training + measured


def ledger(folder: Path) -> list[Told]:
    """Return what all runs were told by the site in ``folder``.

    Raises:
        PerfedError: the file that says so is damaged, or lacks a run of which the site has answered exchanges.
    """
    file = folder / LEDGER
    entries = read_json(file) if file.exists() else []
    if isinstance(entries, list):
        entries = [check_seal(entry, file) for entry in entries]
    lines = checked(list[Told], entries, file)
    known = {line.run for line in lines}
    for secret in sorted((folder / RUNS).glob(f"*/{SECRET}")):
        run = secret.parent.name
        if run not in known and Stored(folder / RUNS, run).sequences():
            raise PerfedError(
                f"{file}: lacks what run '{run}' was told, whose exchanges this site has answered; restore the file "
                "from a backup"
            )
    return lines


def total(told: Sequence[Told], unit: str, delta: float, more: float = 0.0) -> float:
    """Return epsilon of all runs that protect a ``unit``, at ``delta``.

    Args:
        told: of the ledger.
        unit: whose runs count.
        delta: at which.
        more: releases over the square of their noise that are added.
    """
    squares = sum(one.squares for one in told if one.unit == unit) + more
    return 0.0 if squares == 0 else epsilon(1 / sqrt(squares), Releases(1), delta)


class SiteBudget:
    """What one site may tell in one run (:class:`perfed.engine.flower.site.Budget`).

    Args:
        folder: of the site.
        run: id of the run, and the folder of what is kept of it.
        study: its name.
        plan: of the study.
        most: epsilon of all runs that the site's policy allows; ``None``: any.
        delta: at which that is counted; ``None``: that of the study.
    """

    def __init__(
        self,
        folder: Path,
        run: Path,
        study: str,
        plan: PrivateMethod,
        most: float | None = None,
        delta: float | None = None,
    ) -> None:
        self._folder, self._plan = folder, plan
        self._most, self._delta = most, plan.settings.delta if delta is None else delta
        self._secret = secret_in(run)
        stated, unit = plan.settings, plan.settings.unit
        kept = (run.name, _name(self._secret), study, unit, stated.delta, plan.noise, plan.ahead.whole)
        self._new = Told(*kept, metrics_noise=0.0 if plan.metrics is None else plan.metrics.noise)

    def noise(self, message: bytes) -> Noise:
        """Return where the noise of the answer to ``message`` comes from."""
        return Noise(self._secret, message)

    def spend(self, round_: int) -> None:
        """Note that the site answers in round ``round_``; 0 is the preparation. A round counts once.

        Raises:
            Refused: the budget of the study, or that of the policy over all runs, would be exceeded.
        """
        mine, others = self._lines()
        known = mine or self._new
        if mine is not None and (not round_ or str(round_) in known.rounds):
            return
        told = {str(round_): self._plan.in_round(round_).whole} if round_ else {}
        self._write(replace(known, rounds={**known.rounds, **told}), others, round_)

    def measured(
        self, round_: int, message: bytes, outputs: Outputs, info: FederationInfo, scale: TargetScale | None
    ) -> dict[str, float]:
        """Return the metrics that leave after a round, with noise, and note them before; a round counts once.

        Args:
            round_: number of the round.
            message: names the message that is answered.
            outputs: what the site's model says of its test rows, in the unit of the data.
            info: of the federation.
            scale: what targets were standardised by.

        Raises:
            Refused: as :meth:`spend`.
        """
        metrics = self._plan.metrics
        assert metrics is not None
        mine, others = self._lines()
        known = mine or self._new
        if str(round_) not in known.metrics:
            told = {**known.metrics, str(round_): metrics.each}
            self._write(replace(known, metrics=told), others, round_)
        return metrics.told(outputs, metrics.bounds(info.task, info.num_classes, scale), self.noise(message))

    def _write(self, known: Told, others: Sequence[Told], round_: int) -> None:
        """Let the ledger say what this run was told, if it may be.

        Raises:
            Refused: it may not.
        """
        budget, stated = self._plan.budget, self._plan.settings
        spent = total([known], stated.unit, stated.delta)
        if budget is not None and spent > budget * _SLACK:
            raise Refused(Said.BUDGET, f"round {round_} would make epsilon {spent:.4g}; privacy.epsilon is {budget:g}")
        check_most([*others, known], stated.unit, self._most, self._delta)
        write_atomic(
            self._folder / LEDGER, json.dumps([seal(asdict(one)) for one in (*others, known)], indent=1) + "\n"
        )
        sync_folder(self._folder)

    def stated(self) -> dict[str, Any]:
        """Return the settings of the study and what the run has spent, for a model's card."""
        mine, settings = self._lines()[0], self._plan.settings
        told = [] if mine is None else [mine]
        rounds = self._plan.affordable
        most = self._plan.spent(rounds, self._plan.evaluations(rounds))
        spent = total(told, settings.unit, settings.delta)
        return {**self._plan.stated(), "spent": spent, "most": most}

    def _lines(self) -> tuple[Told | None, list[Told]]:
        """This run's line of the ledger, and the others'."""
        found = ledger(self._folder)
        key = (self._new.run, self._new.noise_of)
        mine = [one for one in found if (one.run, one.noise_of) == key]
        return next(iter(mine), None), [one for one in found if one not in mine]


def check_planned(folder: Path, run: str, plan: PrivateMethod, most: float | None, delta: float | None) -> None:
    """Refuse a run that would take the site beyond what its policy allows over all runs.

    Args:
        folder: of the site.
        run: id of the run; empty where it is not known yet.
        plan: of its study.
        most, delta: as of :class:`SiteBudget`.

    Raises:
        Refused: all of it would be more.
    """
    settings = plan.settings
    rounds, metrics = plan.affordable, plan.metrics
    ahead = Told("", "", "", settings.unit, settings.delta, plan.noise, plan.told(rounds).whole)
    if metrics is not None:
        ahead = replace(ahead, metrics={"": metrics.each * plan.evaluations(rounds)}, metrics_noise=metrics.noise)
    told = [*(one for one in ledger(folder) if one.run != run), ahead]
    check_most(told, settings.unit, most, settings.delta if delta is None else delta)


def check_most(told: Sequence[Told], unit: str, most: float | None, delta: float) -> None:
    """Do nothing where a site may have told all that.

    Raises:
        Refused: it is more than its policy allows.
    """
    spent = 0.0 if most is None else total(told, unit, delta)
    if spent > (inf if most is None else most * _SLACK):
        why = f"all runs of this site would make epsilon {spent:.4g} at delta {delta:g}; allowed: at most {most:g}"
        raise Refused(Said.POLICY, f"epsilon: {why}", "epsilon")


def _name(secret: bytes) -> str:
    return hashlib.sha256(b"name of " + secret).hexdigest()[:16]
