"""The clock and policy of a run, which decide which clients are used in each round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from perfed import rng
from perfed.participation.clock import Clock, Population, Rows, Timer
from perfed.participation.policy import Arrivals, PolicyContext
from perfed.participation.settings import Participation


@dataclass(frozen=True)
class Choice:
    """The clients that are used in a round.

    Attributes:
        ids: the sorted ids of the clients; empty if no reply came in time.
        seconds: the seconds until the server has the replies of the first exchange.
        replied: the seconds of every invited client's reply, by id.
    """

    ids: list[str]
    seconds: float
    replied: dict[str, float]


class Selection:
    """The clock and policy of a run, which in a simulation choose clients before anything is computed.

    Args:
        participation, clock: the settings.
        who: the clients.
        seed: the seed of the run.
        rounds: the number of rounds of the run.

    Raises:
        PerfedError: the settings of the policy or the clock do not fit the clients.
    """

    def __init__(self, participation: Participation, clock: Clock, who: Population, seed: int, rounds: int) -> None:
        self.clock = clock
        self.who = who
        self.seed = seed
        self.timer = Timer(clock, who, seed, rounds)
        count, everyone_last = participation.count(len(who)), participation.last_round == "all"
        context = PolicyContext(who, seed, rounds, count, everyone_last)
        self.policy = participation.entry.policy(participation.policy_settings, context)

    def choose(self, round_: int) -> Choice:
        """Choose the clients of round ``round_``, from 1; it must be called once for each round, in order."""
        replied: dict[str, float] = {}

        def ask(rows: Rows) -> Arrivals:
            seconds = self.timer.compute_times(rows, round_) + self.clock.communication
            # Simultaneous replies arrive in a random order, rather than always in the order of ids.
            ties = rng.key(self.seed, "arrival", round_, self.who.words[torch.from_numpy(rows)]).numpy()
            order = np.lexsort((ties, seconds))
            replied.update(zip((self.who.ids[row] for row in rows), seconds.tolist(), strict=True))
            return Arrivals(rows[order], seconds[order], self.who.num_samples[rows[order]])

        rows, seconds = self.policy.select(round_, ask)
        return Choice([self.who.ids[row] for row in np.sort(rows)], seconds, replied)

    def waiting_for_all(self, round_: int) -> float:
        """Return the seconds of a further exchange with every client after a round.

        Without a model of speeds they are those of communication.
        """
        if self.clock.speeds == "none":
            return self.clock.communication
        return float(self.timer.compute_times(np.arange(len(self.who)), round_).max()) + self.clock.communication
