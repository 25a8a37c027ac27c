"""Virtual time: the time that each client needs for its work in a round.

Times are a pure function of seed, client and round, so that they are the same in every engine and in a resumed run. A
participation policy does not know them in advance; it sees only when replies arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor

from perfed import rng
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.participation.csv_rows import CsvPath, read_csv_rows
from perfed.settings import STRICT

Seconds = NDArray[np.float64]
Rows = NDArray[np.int64]

# Bounds that keep sums of times finite: thirty years.
LONGEST = 1e9
_Rate = Annotated[float, Field(ge=1 / LONGEST, description="lambda; the mean is 1 / lambda")]


@dataclass(frozen=True)
class Population:
    """The facts about the clients that clocks and policies use; row i is the i-th id in sorted order.

    Attributes:
        ids: the client ids, sorted.
        words: the ids as words of random keys, int64 ``(N,)``; see :func:`perfed.rng.encode_texts`.
        num_samples: the number of training samples, int64 ``(N,)``.
        batches: the number of mini-batches of an epoch, int64 ``(N,)``.
        group: the label group of each client, int64 ``(N,)``; ``None`` if the data have no groups.
        epochs: returns the number of local epochs of a round, given its number from 1.
    """

    ids: tuple[str, ...]
    words: Tensor
    num_samples: Rows
    batches: Rows
    group: Rows | None = None
    epochs: Callable[[int], int] = lambda round_: 1

    @classmethod
    def from_federation(
        cls, federation: Federation, batch_size: int, epochs: Callable[[int], int], epoch_steps: int | None = None
    ) -> Population:
        """Return the population of a federation's clients.

        Args:
            federation: the clients.
            batch_size: the size of a mini-batch.
            epochs: returns the number of local epochs of a round.
            epoch_steps: the number of mini-batches of an epoch; if not given, it follows from the batch size.
        """
        sizes = np.array([len(client.train) for client in federation], np.int64)
        group = federation.notes.get("group")
        return cls(
            tuple(federation.ids),
            rng.encode_texts(federation.ids),
            sizes,
            -(-sizes // batch_size) if epoch_steps is None else np.full_like(sizes, epoch_steps),
            None if group is None else np.array([group[client] for client in federation.ids], np.int64),
            epochs,
        )

    def __len__(self) -> int:
        return len(self.ids)


class Fixed(BaseModel):
    """Times that are drawn once: T_i ~ Exp(rate)."""

    model_config = STRICT

    rate: _Rate = 1.0

    def compute_times(self, who: Population, rows: Rows, seed: int, round_: int) -> Seconds:
        """Return the seconds of the clients in ``rows``, which are the same in every round."""
        return _draw_exponential(seed, who.words[torch.from_numpy(rows)]) / self.rate


class Dynamic(BaseModel):
    """Times T_i ~ Exp(lambda_i) that are drawn in every round, with lambda_i ~ U[1/N, 1] drawn once per client.

    The paper's text calls lambda_i a rate, but the time axis of its figure 5 fits means.
    """

    model_config = STRICT

    parameter: Literal["rate", "mean"] = Field("rate", description="what lambda_i is of the exponential distribution")

    def compute_times(self, who: Population, rows: Rows, seed: int, round_: int) -> Seconds:
        """Return the seconds of the clients in ``rows`` in round ``round_``."""
        words = who.words[torch.from_numpy(rows)]
        low = 1 / len(who)
        speeds = low + (1 - low) * _draw_uniform(seed, "speed", words)
        times = _draw_exponential(seed, words, round_)
        return times / speeds if self.parameter == "rate" else times * speeds


class Stragglers(BaseModel):
    """Exponential times of two classes of clients, which are drawn once; ``fast`` and ``slow`` are their means.

    The paper gives lambda = 0.1 for the fast class and 10 for the slow one, which can only be means.
    """

    model_config = STRICT

    share: float = Field(0.1, ge=0, le=1, description="of the clients that are slow, rounded to whole clients")
    fast: float = Field(0.1, gt=0, le=LONGEST, description="mean seconds of a fast client")
    slow: float = Field(10.0, gt=0, le=LONGEST, description="mean seconds of a slow client")

    def compute_times(self, who: Population, rows: Rows, seed: int, round_: int) -> Seconds:
        """Return the seconds of the clients in ``rows``, which are the same in every round."""
        slow = rng.draw_subset(rng.key(seed, "straggler", who.words), round(self.share * len(who))).numpy()
        mean: Seconds = np.full(len(who), self.fast)
        mean[slow] = self.slow
        return _draw_exponential(seed, who.words[torch.from_numpy(rows)]) * mean[rows]


class Correlated(BaseModel):
    """Times T ~ Exp(rate) that are drawn once and sorted, the shortest for the clients of the first label group."""

    model_config = STRICT

    rate: _Rate = 1.0

    def compute_times(self, who: Population, rows: Rows, seed: int, round_: int) -> Seconds:
        """Return the seconds of the clients in ``rows``, which are the same in every round."""
        if who.group is None:
            raise PerfedError(
                "clock.speeds = 'correlated' needs data whose clients are in groups; "
                "partitions with groups are 'dominant' and 'pathological' with class_assignment = 'clustered'"
            )
        times = np.sort(_draw_exponential(seed, who.words)) / self.rate
        within = rng.uniform(rng.key(seed, "straggler", who.words), 1, torch.float64)[:, 0].numpy()
        result: Seconds = np.empty(len(who))
        result[np.lexsort((within, who.group))] = times
        return result[rows]


class Steps(BaseModel):
    """Times in proportion to the number of local steps: ``ceil(n_i / batch size) x epochs``, or ``local_steps``."""

    model_config = STRICT

    seconds: float = Field(0.01, gt=0, le=LONGEST, description="of one mini-batch step")

    def compute_times(self, who: Population, rows: Rows, seed: int, round_: int) -> Seconds:
        """Return the seconds of the clients in ``rows`` in round ``round_``."""
        return self.seconds * who.epochs(round_) * who.batches[rows].astype(np.float64)


class Trace(BaseModel):
    """Measured times: a CSV file with the columns client, round (a number, or * for all others) and seconds."""

    model_config = STRICT

    file: CsvPath = Field("", description="path of the CSV file, from the current folder; recorded as an absolute one")

    def read(self, ids: Sequence[str], rounds: int) -> Mapping[str, Mapping[int | None, float]]:
        """Return the seconds by client id and round; ``None`` stands for all rounds without a line.

        Raises:
            PerfedError: the file does not exist, a column, client or round is missing, or a value is not allowed.
        """
        if not self.file:
            raise PerfedError("clock.speeds = 'trace' needs clock.trace.file, a CSV file")
        where = f"clock.trace.file = '{self.file}'"
        times: dict[str, dict[int | None, float]] = {}
        for place, row in read_csv_rows(self.file, where, ("client", "round", "seconds")):
            round_, seconds = _parse_trace_row(row, place)
            if round_ in times.setdefault(row["client"], {}):
                raise PerfedError(f"{place} says this client and round again")
            times[row["client"]][round_] = seconds
        for client in ids:
            if client not in times:
                raise PerfedError(f"{where}: lacks client '{client}'; every client needs a line (round may be *)")
            missing = [r for r in range(1, rounds + 1) if r not in times[client]]
            if missing and None not in times[client]:
                raise PerfedError(
                    f"{where}: lacks round {missing[0]} of client '{client}'; a line with round * would do"
                )
        return times


class Clock(BaseModel):
    """The ``[clock]`` table: a speed model and the cost of communication.

    Attributes:
        speeds: ``none``, with which every client needs one second, so that virtual time counts rounds; or one of the
            models, whose settings are in the table of the same name.
        communication: the seconds that are added to every exchange (C.T. in the SRPFL paper).

    Example:
        >>> from perfed import Model, Run, linear, load
        >>> federation, model = load("toy-linear-map", {"clients": 4}, seed=0), Model(head=linear(20))
        >>> clock = Clock(communication=0.5)  # after the second that everybody works
        >>> Run(federation, "local", model, rounds=2, clock=clock).execute()["virtual_time"]
        3.0
    """

    model_config = STRICT

    speeds: Literal["none", "fixed", "dynamic", "stragglers", "correlated", "steps", "trace"] = "none"
    communication: float = Field(0.0, ge=0, le=LONGEST)
    fixed: Fixed = Fixed()
    dynamic: Dynamic = Dynamic()
    stragglers: Stragglers = Stragglers()
    correlated: Correlated = Correlated()
    steps: Steps = Steps()
    trace: Trace = Trace()


class Timer:
    """The times of a run's clients.

    Args:
        clock: the settings.
        who: the clients.
        seed: the seed of the run.
        rounds: the number of rounds of the run, which a trace must cover.
    """

    def __init__(self, clock: Clock, who: Population, seed: int, rounds: int) -> None:
        self.clock = clock
        self.who = who
        self.seed = seed
        self._trace = clock.trace.read(who.ids, rounds) if clock.speeds == "trace" else {}
        if clock.speeds == "correlated":
            self.compute_times(np.zeros(1, np.int64), 1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the trace's times, which a resumed run compares; empty without a trace."""
        lines = sorted((client, str(round_), s) for client, times in self._trace.items() for round_, s in times.items())
        return hashlib.sha256(repr(lines).encode()).hexdigest() if lines else ""

    def compute_times(self, rows: Rows, round_: int) -> Seconds:
        """Return the seconds of local work of the clients in ``rows`` in round ``round_``, without communication."""
        if self.clock.speeds == "none":
            return np.ones(len(rows))
        if self.clock.speeds == "trace":
            traces = [self._trace[self.who.ids[row]] for row in rows]
            return np.array([times[round_] if round_ in times else times[None] for times in traces])
        model: Fixed | Dynamic | Stragglers | Correlated | Steps = getattr(self.clock, self.clock.speeds)
        return model.compute_times(self.who, rows, self.seed, round_)


def _draw_uniform(seed: int, purpose: str, words: Tensor, *counters: int) -> Seconds:
    """Return one uniform number in (0, 1] per word."""
    numbers: Seconds = rng.uniform(rng.key(seed, purpose, *counters, words), 1, torch.float64)[:, 0].numpy()
    return 1.0 - numbers


def _draw_exponential(seed: int, words: Tensor, *counters: int) -> Seconds:
    """Return one exponential number with mean 1 per word."""
    return -np.log(_draw_uniform(seed, "time", words, *counters))


def _parse_trace_row(row: Mapping[str, str], where: str) -> tuple[int | None, float]:
    text = row["round"].strip()
    try:
        round_ = None if text == "*" else int(text)
        seconds = float(row["seconds"])
    except ValueError:
        raise PerfedError(f"{where}: round must be a number or *, seconds a number") from None
    if not 0 <= seconds <= LONGEST or (round_ is not None and round_ < 1):
        raise PerfedError(
            f"{where}: seconds must be from 0 to {LONGEST:g} and round at least 1 (given: {seconds}, {text})"
        )
    return round_, seconds
