"""Policies that go around any method: who is invited to a round, and whose replies are used.

A policy sees what a server would see: replies, when they arrive, and what they carry; never the speeds in advance. What
it remembers between rounds is plain data in ``state``, kept in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perfed import rng
from perfed.errors import PerfedError
from perfed.participation.clock import Clock, Population, Rows, Seconds, Timer
from perfed.participation.schedule import Phases, check_first, stage_lengths
from perfed.participation.settings import Participation


@dataclass(frozen=True)
class Arrivals:
    """Replies in the order in which they arrive.

    Attributes:
        rows: of the population, ``(replies,)``.
        seconds: since the start of the round, ``(replies,)``, not falling.
        num_samples: training samples, ``(replies,)``.
    """

    rows: Rows
    seconds: Seconds
    num_samples: Rows


Ask = Callable[[Rows], Arrivals]


class Policy:
    """Uniform participation, and what all policies have in common.

    Attributes:
        wanted: replies of a round, by the rate.
        state: what is remembered between rounds, plain data.
        wants_gradient: whether :meth:`observe` needs the gradient.
        strict: whether a round needs every client that is invited; else it does without those that do not reply.
        limit: seconds after which replies no longer count.
    """

    wants_gradient = False
    strict = True
    limit = math.inf

    def __init__(self, settings: Participation, who: Population, seed: int, rounds: int) -> None:
        self.settings = settings
        self.who = who
        self.seed = seed
        self.rounds = rounds
        self.wanted = settings.count(len(who))
        self.state: dict[str, Any] = {}

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Invite clients and choose among their replies.

        Args:
            round_: from 1.
            ask: invites clients by row and gives their replies.

        Returns:
            Rows of the clients whose replies are used, and the seconds until the server has them.
        """
        return _first(ask(self.invited(round_)))

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        """Take note of a finished round.

        Args:
            train_loss: mean over the clients used.
            gradient: squared norm of the gradient of their mean loss at the new model, if it was wanted.
            num_samples: of the clients used.
        """

    def for_all(self, round_: int) -> bool:
        """Whether everyone is invited to the round; not by policies in stages and the cyclic one."""
        never = self.settings.policy in ("srpfl", "flanp", "cyclic")
        return round_ == self.rounds and self.settings.last_round == "all" and not never

    def invited(self, round_: int, count: int | None = None, *words: int) -> Rows:
        """``count`` rows (default: by the rate), or everyone; equal ``words`` (default: the round) draw the same."""
        count = self.wanted if count is None else count
        if self.for_all(round_) or count >= len(self.who):
            return np.arange(len(self.who))
        keys = rng.key(self.seed, "participation", *(words or (round_,)), self.who.words)
        return np.sort(rng.first(keys, count).numpy())


def _first(arrivals: Arrivals, count: int | None = None) -> tuple[Rows, float]:
    """The first ``count`` replies (default: all) and when the last of them arrives."""
    count = len(arrivals.rows) if count is None else min(count, len(arrivals.rows))
    return arrivals.rows[:count], float(arrivals.seconds[count - 1])


class _OverSelection(Policy):
    strict = False

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        if self.for_all(round_):
            return super().select(round_, ask)
        invited = math.ceil(min(self.settings.overselection.factor * self.wanted, len(self.who)) - 1e-9)
        return _first(ask(self.invited(round_, invited)), self.wanted)


class _Deadline(Policy):
    strict = False

    def __init__(self, settings: Participation, who: Population, seed: int, rounds: int) -> None:
        super().__init__(settings, who, seed, rounds)
        if settings.deadline.seconds is None:
            raise PerfedError("participation.policy = 'deadline' needs participation.deadline.seconds")
        self.limit = settings.deadline.seconds

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        arrivals = ask(self.invited(round_))
        intime = int((arrivals.seconds <= self.limit).sum())
        if intime == len(arrivals.rows):
            return _first(arrivals)
        return arrivals.rows[:intime], self.limit


class _Srpfl(Policy):
    strict = False

    def __init__(self, settings: Participation, who: Population, seed: int, rounds: int) -> None:
        super().__init__(settings, who, seed, rounds)
        own = settings.srpfl
        check_first("participation.srpfl", own.first, self.wanted)
        lengths = None
        if (own.rule == "theory") != (own.contraction is not None):
            raise PerfedError("participation.srpfl.rule = 'theory' needs participation.srpfl.contraction, others none")
        if own.contraction is not None:
            lengths = stage_lengths(self.wanted, own.first, own.contraction, excess=own.excess)
        self.phases = Phases(own, lengths, "participation.srpfl")
        self.state = self.phases.state

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        own, stage = self.settings.srpfl, self.phases.number
        words = (-1 - stage,) if own.redraw == "stage" else ()
        arrivals = ask(self.invited(round_, None, *words))
        if own.double == "clients":
            self.phases.final = own.first << stage >= len(arrivals.rows)
            return _first(arrivals, own.first << stage)
        total = np.cumsum(arrivals.num_samples)
        if "samples" not in self.state:  # of the first n_0 replies of all
            self.state["samples"] = int(total[min(own.first, len(total)) - 1])
        wanted = min(self.state["samples"] << stage, int(total[-1]))
        self.phases.final = wanted == total[-1]
        return _first(arrivals, int(np.searchsorted(total, wanted)) + 1)

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        self.phases.observe(train_loss)


class _Flanp(Policy):
    strict = False

    def __init__(self, settings: Participation, who: Population, seed: int, rounds: int) -> None:
        super().__init__(settings, who, seed, rounds)
        own = settings.flanp
        self.candidates = self.invited(0)  # drawn once: the clients of a stage stay in all later ones
        check_first("participation.flanp", own.first, len(self.candidates))
        if (own.rule == "gradient") != (own.mu is not None):
            raise PerfedError("participation.flanp.rule = 'gradient' needs participation.flanp.mu, others none")
        self.wants_gradient = own.rule == "gradient"
        self.phases = Phases(own, None, "participation.flanp")
        self.state = self.phases.state
        self.state["members"] = []

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        members: list[int] = self.state["members"]
        wanted = min(self.settings.flanp.first << self.phases.number, len(self.candidates))
        self.phases.final = wanted == len(self.candidates)
        if len(members) == wanted:
            return _first(ask(np.array(members, np.int64)))
        arrivals = ask(self.candidates)
        new = arrivals.rows[~np.isin(arrivals.rows, members)][: wanted - len(members)]
        self.state["members"] = sorted([*members, *new.tolist()])
        used = np.isin(arrivals.rows, self.state["members"])
        return arrivals.rows[used], float(arrivals.seconds[used].max())

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        own = self.settings.flanp
        if gradient is None or own.mu is None:
            self.phases.observe(train_loss)
        else:
            self.phases.observe(train_loss, over=gradient <= 2 * own.mu * own.accuracy / num_samples)


class _Cyclic(Policy):
    def invited(self, round_: int, count: int | None = None, *words: int) -> Rows:
        """The client whose turn it is."""
        cycle, turn = divmod(round_ - 1, len(self.who))
        if self.settings.cyclic.order == "fixed":
            return np.array([turn])
        return rng.order(rng.key(self.seed, "cycle", cycle, self.who.words))[turn : turn + 1].numpy()


_POLICIES: dict[str, type[Policy]] = {
    "uniform": Policy,
    "overselection": _OverSelection,
    "deadline": _Deadline,
    "srpfl": _Srpfl,
    "flanp": _Flanp,
    "cyclic": _Cyclic,
}


@dataclass(frozen=True)
class Choice:
    """Who is used in a round.

    Attributes:
        ids: sorted; empty where no reply came in time.
        seconds: until the server has the replies of the first exchange.
        replied: seconds of every invited client's reply, by id.
    """

    ids: list[str]
    seconds: float
    replied: dict[str, float]


class Selection:
    """Clock and policy of a run: in simulation they decide who is used before anything is computed.

    Args:
        participation, clock: the settings.
        who: the clients.
        seed: of the run.
        rounds: of the whole run.

    Raises:
        PerfedError: settings of the policy or the clock that do not fit the clients.
    """

    def __init__(self, participation: Participation, clock: Clock, who: Population, seed: int, rounds: int) -> None:
        self.clock = clock
        self.who = who
        self.seed = seed
        self.timer = Timer(clock, who, seed, rounds)
        self.policy = _POLICIES[participation.policy](participation, who, seed, rounds)

    def choose(self, round_: int) -> Choice:
        """The clients of round ``round_``, from 1; to be called once for each round, in order."""
        replied: dict[str, float] = {}

        def ask(rows: Rows) -> Arrivals:
            seconds = self.timer.times(rows, round_) + self.clock.communication
            # Replies of the same moment come in a random order, not always in that of the ids.
            ties = rng.key(self.seed, "arrival", round_, self.who.words[torch.from_numpy(rows)]).numpy()
            order = np.lexsort((ties, seconds))
            replied.update(zip((self.who.ids[row] for row in rows), seconds.tolist(), strict=True))
            return Arrivals(rows[order], seconds[order], self.who.num_samples[rows[order]])

        used, seconds = self.policy.select(round_, ask)
        return Choice([self.who.ids[row] for row in np.sort(used)], seconds, replied)

    def waiting_for_all(self, round_: int) -> float:
        """Seconds of an exchange with every client besides the round's; without a speed model only communication."""
        if self.clock.speeds == "none":
            return self.clock.communication
        return float(self.timer.times(np.arange(len(self.who)), round_).max()) + self.clock.communication
