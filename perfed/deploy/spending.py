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

from perfed.data.reading import checked, read_json
from perfed.engine.flower.refusal import Refused, Said
from perfed.errors import PerfedError
from perfed.privacy.accountant import Releases, epsilon
from perfed.privacy.apply import PrivateMethod
from perfed.rng import Noise
from perfed.system import sync_folder, write_atomic

LEDGER = "spent.json"
"""File of a site's folder: what each run was told."""
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
    """

    run: str
    noise_of: str
    study: str
    unit: str
    delta: float
    noise: float
    ahead: int
    rounds: dict[str, int] = field(default_factory=dict)

    @property
    def squares(self) -> float:
        """Releases over the square of the noise: what adds up over runs (Dong et al. 2022, corollary 2)."""
        return sum(self.rounds.values(), self.ahead) / self.noise**2


def ledger(folder: Path) -> list[Told]:
    """Return what all runs were told by the site in ``folder``.

    Raises:
        PerfedError: the file that says so is damaged.
    """
    file = folder / LEDGER
    return checked(list[Told], read_json(file), file) if file.exists() else []


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
        self._new = Told(run.name, _name(self._secret), study, unit, stated.delta, plan.noise, plan.ahead.whole)

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
        known = replace(known, rounds={**known.rounds, **told})
        budget, stated = self._plan.budget, self._plan.settings
        spent = total([known], stated.unit, stated.delta)
        if budget is not None and spent > budget * _SLACK:
            raise Refused(Said.BUDGET, f"round {round_} would make epsilon {spent:.4g}; privacy.epsilon is {budget:g}")
        check_most([*others, known], stated.unit, self._most, self._delta)
        write_atomic(self._folder / LEDGER, json.dumps([asdict(one) for one in (*others, known)], indent=1) + "\n")
        sync_folder(self._folder)

    def stated(self) -> dict[str, Any]:
        """Return the settings of the study and what the run has spent, for a model's card."""
        mine, settings = self._lines()[0], self._plan.settings
        told = [] if mine is None else [mine]
        spent, most = total(told, settings.unit, settings.delta), self._plan.spent(self._plan.affordable)
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
    ahead = Told("", "", "", settings.unit, settings.delta, plan.noise, plan.told(plan.affordable).whole)
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
