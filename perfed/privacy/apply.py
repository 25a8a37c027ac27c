"""From a method and a budget to the same method in private, and what it will have told after so many rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any

from perfed.errors import PerfedError
from perfed.method.disclosure import Disclosure, Mechanism
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.methods.flic.anchors import Anchors
from perfed.privacy.accountant import Releases, epsilon, noise_for
from perfed.privacy.client import ClientPrivacy
from perfed.privacy.mechanisms import check_disclosure
from perfed.privacy.metrics import UNMEASURED, Measured, NoisyMetrics, check_measured
from perfed.privacy.sample import SamplePrivacy
from perfed.privacy.settings import Privacy

PRETRAIN_EPOCHS = 5
"""Of FLIC's alignment where rows are private: how long it helps would be read off held-out rows."""

_FARTHEST = 10.0
"""Standard deviations that no noise of 53 bits reaches."""


@dataclass(frozen=True)
class ClientPlan:
    """What a client tells in the planned rounds, and with which noise.

    Attributes:
        noise: standard deviation over what a row or client can change.
        ahead: releases that do not belong to a round: preparation, counts, and the client's own model at the end.
        rounds: releases in each round that the client takes part in.
    """

    noise: float
    ahead: Releases
    rounds: tuple[Releases, ...]

    def in_round(self, number: int) -> Releases:
        """Return what is told in round ``number``; beyond the plan as in its last one."""
        return self.rounds[min(number, len(self.rounds)) - 1]

    def told(self, rounds: int) -> Releases:
        """Return what is told in so many rounds, as if they were the first."""
        return sum((self.in_round(number) for number in range(1, rounds + 1)), self.ahead)


@dataclass(frozen=True)
class PrivateMethod:
    """A method in private, and the plan of what it tells.

    Attributes:
        method: with the extension that keeps it private.
        settings: with the noise that was found, the largest of all clients.
        plans: of clients that differ in their number of rows, where a plan depends on it.
        notes: for the summary.
        metrics: that leave real sites with noise; ``None``: none do.
    """

    method: Method
    settings: Privacy
    plans: tuple[ClientPlan, ...]
    notes: Sequence[str] = ()
    metrics: NoisyMetrics | None = None

    @property
    def noise(self) -> float:
        """Standard deviation of the noise over what a row or client can change, the largest of all clients."""
        assert self.settings.noise is not None
        return self.settings.noise

    @property
    def budget(self) -> float | None:
        """Epsilon of each client; ``None``: it is reported alone."""
        return self.settings.epsilon

    @property
    def quick(self) -> bool:
        """Whether epsilon takes no time: it has a closed form but for Poisson sampling."""
        return self.settings.sampling == "full"

    def stated(self) -> dict[str, Any]:
        """Return the settings, as a summary has them."""
        return self.settings.model_dump(exclude_none=True)

    @property
    def ahead(self) -> Releases:
        """Releases of a client that do not belong to a round."""
        return self.plans[0].ahead

    def told(self, rounds: int) -> Releases:
        """Return what a client has told that took part in so many rounds, as if they were the first."""
        return self.plans[0].told(rounds)

    def in_round(self, number: int) -> Releases:
        """Return what a client tells that takes part in round ``number``; beyond the plan as in its last one."""
        return self.plans[0].in_round(number)

    def spent(self, rounds: int, evaluated: int = 0) -> float:
        """Return the epsilon of a client that took part in so many rounds, ``evaluated`` of which told its metrics.

        It is the largest of all numbers of rows. Of rows it is that of a training row or of a test row, whichever is
        more: no row is both.
        """
        delta, measured, apart = self.settings.delta, Releases(), 0.0
        if self.metrics is not None:
            measured = self.metrics.releases(evaluated)
            if self.settings.unit == "sample":
                apart, measured = epsilon(self.metrics.noise, measured, delta), Releases()
        return max(apart, *(epsilon(plan.noise, plan.told(rounds) + measured, delta) for plan in self.plans))

    def evaluations(self, rounds: int) -> int:
        """Return how often metrics leave with noise where training ends after ``rounds``."""
        return 0 if self.metrics is None else self.metrics.evaluations(rounds)

    def check_room(self, largest: float, bounds: Mapping[str, float]) -> None:
        """Check that a client's change and metrics fit into a sum, whatever its rows are and whatever noise it draws.

        A client refuses numbers that do not fit. If that depended on its change or its metrics, the refusal would tell
        of them with the client's share of the noise alone.

        Args:
            largest: the largest number that fits into a sum.
            bounds: the most that a row counts in each metric (:meth:`NoisyMetrics.bounds`).

        Raises:
            PerfedError: one of them may be too large; names it.
        """
        shares = max((e.shares for e in self.method.extensions if isinstance(e, ClientPrivacy)), default=0)
        if not shares:
            return
        spread = 1 + _FARTHEST * self.noise / sqrt(shares)
        rooms = {"privacy.clip": (self.settings.clip, largest / 2)}  # what the server sends takes the other half
        rooms |= {f"the bound of metric '{name}'": (bound, largest) for name, bound in bounds.items()}
        for name, (size, room) in rooms.items():
            if size * spread > room:
                raise PerfedError(
                    f"{name} is {size:.6g}; with a site's share of the noise at most {room / spread:.6g} fits into a "
                    "sum (fewer secure_aggregation.bits allow more)"
                )

    def _spent_by(self, rounds: int) -> float:
        return self.spent(rounds, self.evaluations(rounds))

    @property
    def affordable(self) -> int:
        """How many rounds the budget of a client lasts; all of them where there is no budget."""
        budget = self.settings.epsilon
        low, high = 0, len(self.plans[0].rounds)
        if budget is None or self._spent_by(high) <= budget:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._spent_by(middle) <= budget else (low, middle)
        return low


def privately(
    method: Method,
    settings: Privacy,
    rounds: int,
    rows: Sequence[int] | None,
    *,
    name: str = "",
    policy: str = "all",
    shares: int = 0,
    measured: Measured = UNMEASURED,
) -> PrivateMethod:
    """Return ``method`` under ``settings``, with the noise for ``rounds`` rounds.

    Args:
        method: as the experiment has it.
        settings: the budget.
        rounds: that are planned.
        rows: training rows of each client; ``None``: not known, as where sites are elsewhere.
        name: of the method, for messages.
        policy: of participation.
        shares: fewest clients in a sum, where the server sees sums alone: for ``unit = "client"`` they add the noise.
        measured: metrics beside those that the task always has, and the rounds after which they are taken.

    Raises:
        PerfedError: something leaves that has no mechanism; names it. Settings that do not fit.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> found = privately(FedAvg(local_epochs=1), Privacy(epsilon=6.0, delta=1e-3), 200, [50, 60])
        >>> round(found.noise, 1), found.affordable
        (8.5, 200)
    """
    name = name or type(method).__name__
    method, notes = _fitting(method, settings, name)
    declared = _declared(method, settings, name)
    if settings.unit == "client" and shares:
        for extension in method.extensions:
            if type(extension).outgoing is not Extension.outgoing:
                raise PerfedError(
                    f"privacy.unit = 'client' under [secure_aggregation] cannot be used with the extension "
                    f"'{extension.name}', which changes replies: a single reply has only a share of the noise, and the "
                    "noise of a sum is known only if replies are added as they are"
                )
    if policy not in ("uniform", "all"):
        raise PerfedError(
            f"privacy: participation.policy = '{policy}' may follow what clients tell of their training, which has no "
            "mechanism; allowed: uniform, all"
        )
    metrics = _metrics(settings, measured, shares)
    times = 0 if metrics is None else len(measured.rounds)
    together = Releases()  # with what training tells
    numbers = [None] if settings.unit == "client" else _row_numbers(settings, rows)
    if settings.unit == "client":
        sends = any(disclosure.sent_entries(part) for part, disclosure in declared)
        told: list[_Told] = [(Releases(), tuple([Releases(int(sends))] * rounds))]
        together = Releases() if metrics is None else metrics.releases(times)
    else:
        told = [_of_rows(method, declared, number, rounds, max(1, times)) for number in numbers]
    plans = tuple(
        ClientPlan(_noise(settings, number, sum(each, ahead) + together), ahead, each)
        for number, (ahead, each) in zip(numbers, told, strict=True)
    )
    by_rows = {number or 0: plan.noise for number, plan in zip(numbers, plans, strict=True)}
    low, high = min(by_rows.values()), max(by_rows.values())
    settings = settings.model_copy(update={"noise": high, "noises": by_rows if low < high else {}})
    if low < high:
        notes = [*notes, f"privacy: noise {low:.4g} to {high:.4g}, by a client's number of rows"]
    if metrics is not None and settings.unit == "client":
        metrics = replace(metrics, noise=high)
    entries = tuple(dict.fromkeys(entry for _, of in declared for entry in of.entries))
    made = _with(method, settings, entries, shares)
    return PrivateMethod(made, settings, plans, (*notes, *_warned(settings, rows)), metrics)


def _metrics(settings: Privacy, measured: Measured, shares: int) -> NoisyMetrics | None:
    """The metrics that leave with noise; where rows are protected, that of a budget of the test rows' own."""
    if settings.metrics == "none":
        return None
    names, rows = check_measured(measured.metrics), settings.unit == "sample"
    common = (settings.unit, settings.noise or 0.0, settings.metrics_bound, tuple(measured.rounds))
    found = NoisyMetrics(names, *common, 0 if rows else shares)
    if not rows or settings.epsilon is None:
        return found
    return replace(found, noise=_found(settings.epsilon, settings.delta, found.releases(len(measured.rounds))))


def _with(method: Method, settings: Privacy, entries: tuple[str, ...], shares: int) -> Method:
    """The method with the extension, first of all: what others make of a reply is made of what is private."""
    own: Extension
    common: dict[str, Any] = {"clip": settings.clip, "noise": settings.noise, "entries": entries}
    common["of_classes"] = any(isinstance(extension, Anchors) for extension in method.extensions)
    if settings.unit == "sample":
        poisson = settings.sampling == "poisson"
        own = SamplePrivacy(rows=settings.rows, poisson=poisson, noises=settings.noises, **common)
    else:
        own = ClientPrivacy(shares=shares, **common)
    return method.model_copy(update={"extensions": (own, *method.extensions)})


def _declared(method: Method, settings: Privacy, name: str) -> list[tuple[Method | Extension, Disclosure]]:
    parts: list[tuple[Method | Extension, str]] = [(method, name)]
    parts += [(extension, f"extension '{extension.name}'") for extension in method.extensions]
    return [(part, check_disclosure(part, called, settings.unit)) for part, called in parts]


def _fitting(method: Method, settings: Privacy, name: str) -> tuple[Method, list[str]]:
    """The method with settings that choose nothing by rows, and what was changed.

    Raises:
        PerfedError: settings that cannot be private.
    """
    if settings.unit == "client":
        return method, []
    if method.class_weights != "none":
        raise PerfedError(
            f"privacy.unit = 'sample' refuses class_weights = '{method.class_weights}': it counts all rows"
        )
    if method.local_steps is not None and settings.sampling == "full":
        raise PerfedError(
            "privacy.sampling = 'full' counts passes over the rows, and local_steps has none; use local_epochs, or "
            "sampling = 'poisson'"
        )
    made, notes = [], []
    for extension in method.extensions:
        if isinstance(extension, Anchors) and extension.pretrain_epochs == "validated":
            extension = extension.model_copy(update={"pretrain_epochs": PRETRAIN_EPOCHS})
            notes.append(f"{name}: {PRETRAIN_EPOCHS} epochs of private pre-training; 'validated' would choose by rows")
        if getattr(extension, "unknown_class", "skip") == "own":
            raise PerfedError(
                "privacy.unit = 'sample' refuses unknown_class = 'own': it looks at rows in each exchange"
            )
        if isinstance(extension, Anchors) and (extension.distance != "w2" or extension.covariance != "fixed"):
            raise PerfedError(
                "privacy.unit = 'sample' has a mechanism for anchors with distance = 'w2' and covariance = 'fixed'"
            )
        made.append(extension)
    return method.model_copy(update={"extensions": tuple(made)}), notes


_Told = tuple[Releases, tuple[Releases, ...]]
"""Releases of a client apart from rounds, and in each round."""


def _noise(settings: Privacy, number: int | None, total: Releases) -> float:
    """The noise multiplier, given, or found for a client of so many rows that tells ``total``."""
    if settings.noise is not None:
        return settings.noises.get(number or 0, settings.noise)
    assert settings.epsilon is not None
    return _found(settings.epsilon, settings.delta, total)


def _found(budget: float, delta: float, total: Releases) -> float:
    return noise_for(budget, delta, total) if total.whole or total.drawn else 1.0


def _row_numbers(settings: Privacy, rows: Sequence[int] | None) -> list[int | None]:
    """Numbers of rows on which releases depend; ``None`` where they depend on none.

    Raises:
        PerfedError: they would, and are not known.
    """
    if settings.sampling == "full":
        return [None]
    if rows is None:
        raise PerfedError(
            "privacy.sampling = 'poisson' needs the number of rows of each client, and mini-batches that nobody else "
            "knows; at sites use 'full'"
        )
    return [*sorted(set(rows))]


def _of_rows(
    method: Method, declared: Sequence[tuple[Method | Extension, Disclosure]], number: int | None, rounds: int, own: int
) -> _Told:
    """Plan of a client with so many rows, whose mini-batches are drawn by coins; ``None``: in passes over the rows.

    ``own``: how many models of its own are told of: the one that it keeps, or each whose metrics leave.
    """
    kinds: list[Mechanism] = [kind for _, of in declared for kind in (*of.counts, *of.entries.values()) if kind.once]
    counts = len({kind.counts for kind in kinds})

    def passes(count: int) -> Releases:
        if number is None:
            return Releases(count)
        steps, rate = count * (method.epoch_steps or ceil(number / method.batch_size)), method.batch_size / number
        return Releases(0, steps, rate) if rate < 1 else Releases(steps)

    ahead = Releases(counts)
    for part, of in declared:
        ahead += passes(of.before_rounds(part) + own * of.after_run(part))
    extra = Releases(sum(of.per_round(part) for part, of in declared))
    return ahead, tuple(passes(method.in_round(r).epochs_in(r)) + extra for r in range(1, rounds + 1))


def _warned(settings: Privacy, rows: Sequence[int] | None) -> list[str]:
    if rows is None:
        return []
    number = min(rows) if settings.unit == "sample" else len(rows)
    if settings.delta * number <= 1:
        return []
    what = "rows of a client" if settings.unit == "sample" else "clients"
    return [
        f"warning: privacy.delta = {settings.delta:g} is above one over the number of {what} ({number}): giving "
        "away one of them whole would be allowed"
    ]
