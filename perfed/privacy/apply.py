"""Conversion of a method to differential privacy within a budget, and the epsilon that it will have spent."""

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
from perfed.privacy.accountant import Releases, compute_epsilon, find_noise_multiplier
from perfed.privacy.client import ClientPrivacy
from perfed.privacy.mechanisms import check_disclosure
from perfed.privacy.metrics import NO_EVALUATIONS, EvaluationPlan, NoisyMetrics, check_metrics
from perfed.privacy.sample import SamplePrivacy
from perfed.privacy.settings import Privacy

PRETRAIN_EPOCHS = 5
"""Epochs of FLIC's pre-training where rows are protected: choosing the number on held-out rows would reveal them."""

_LARGEST_DEVIATION = 10.0
"""A number of standard deviations that no noise generated from 53 bits reaches."""


@dataclass(frozen=True)
class ClientPlan:
    """The releases of a client in the planned rounds, and their noise.

    Attributes:
        noise: standard deviation of the noise over what one row or client can change.
        ahead: releases that do not belong to a round: preparation, counts, and the client's personal model at the end.
        rounds: releases in each round in which the client takes part.
    """

    noise: float
    ahead: Releases
    rounds: tuple[Releases, ...]

    def releases_in_round(self, number: int) -> Releases:
        """Return the releases of round ``number``; rounds beyond the plan have the releases of its last round."""
        return self.rounds[min(number, len(self.rounds)) - 1]

    def sum_releases(self, rounds: int) -> Releases:
        """Return the releases of a client that takes part in the first ``rounds`` rounds."""
        return sum((self.releases_in_round(number) for number in range(1, rounds + 1)), self.ahead)


@dataclass(frozen=True)
class PrivateMethod:
    """A method with differential privacy, and the plan of its releases.

    Attributes:
        method: the method, with the extension that makes it private.
        settings: the privacy settings; their noise is the largest of all clients.
        plans: the plan of each number of rows, if plans depend on it; otherwise a single plan.
        notes: notes for the summary.
        metrics: the metrics that real sites send with noise; ``None``: they send none.
    """

    method: Method
    settings: Privacy
    plans: tuple[ClientPlan, ...]
    notes: Sequence[str] = ()
    metrics: NoisyMetrics | None = None

    @property
    def noise(self) -> float:
        """The standard deviation of the noise over what a row or client can change, the largest of all clients."""
        assert self.settings.noise is not None
        return self.settings.noise

    @property
    def budget(self) -> float | None:
        """The epsilon that each client may spend; ``None``: there is no limit, and epsilon is only reported."""
        return self.settings.epsilon

    @property
    def has_closed_form(self) -> bool:
        """Whether epsilon has a closed form, which takes no time; with Poisson sampling it has none."""
        return self.settings.sampling == "full"

    def explicit_settings(self) -> dict[str, Any]:
        """Return the settings for a summary, without those that are ``None``."""
        return self.settings.model_dump(exclude_none=True)

    @property
    def ahead(self) -> Releases:
        """The releases of a client that do not belong to a round."""
        return self.plans[0].ahead

    def sum_releases(self, rounds: int) -> Releases:
        """Return the releases of a client that takes part in the first ``rounds`` rounds."""
        return self.plans[0].sum_releases(rounds)

    def releases_in_round(self, number: int) -> Releases:
        """Return the releases of round ``number``; rounds beyond the plan have the releases of its last round."""
        return self.plans[0].releases_in_round(number)

    def compute_spending(self, rounds: int, evaluated: int = 0) -> float:
        """Return the epsilon that a client has spent, the largest over all numbers of rows.

        If rows are protected, it is the larger of the epsilons of a training row and a test row, since no row is both.

        Args:
            rounds: the number of rounds in which the client took part.
            evaluated: the number of these rounds after which its metrics were released.
        """
        delta, metric_releases, test_epsilon = self.settings.delta, Releases(), 0.0
        if self.metrics is not None:
            metric_releases = self.metrics.count_releases(evaluated)
            if self.settings.unit == "sample":
                test_epsilon = compute_epsilon(self.metrics.noise, metric_releases, delta)
                metric_releases = Releases()
        training_epsilons = (
            compute_epsilon(plan.noise, plan.sum_releases(rounds) + metric_releases, delta) for plan in self.plans
        )
        return max(test_epsilon, *training_epsilons)

    def count_evaluations(self, rounds: int) -> int:
        """Return the number of times that noisy metrics are released if training ends after ``rounds`` rounds."""
        return 0 if self.metrics is None else self.metrics.count_evaluations(rounds)

    def check_room(self, largest: float, bounds: Mapping[str, float]) -> None:
        """Check that every change and metric of a client fits into a secure sum, for all rows and all noise.

        A client refuses to send numbers that do not fit. If that depended on its change or its metrics, the refusal
        would reveal them protected only by the client's share of the noise.

        Args:
            largest: the largest number that fits into a sum.
            bounds: the largest contribution of a row to each metric (:meth:`NoisyMetrics.compute_bounds`).

        Raises:
            PerfedError: if a change or a metric may be too large; names it.
        """
        shares = max((e.shares for e in self.method.extensions if isinstance(e, ClientPrivacy)), default=0)
        if not shares:
            return
        spread = 1 + _LARGEST_DEVIATION * self.noise / sqrt(shares)
        limits = {"privacy.clip": (self.settings.clip, largest / 2)}  # what the server sends takes the other half
        limits |= {f"the bound of metric '{name}'": (bound, largest) for name, bound in bounds.items()}
        for name, (size, limit) in limits.items():
            if size * spread > limit:
                raise PerfedError(
                    f"{name} is {size:.6g}; with a site's share of the noise at most {limit / spread:.6g} fits into a "
                    "sum (fewer secure_aggregation.bits allow more)"
                )

    def _compute_planned_spending(self, rounds: int) -> float:
        """Return the epsilon spent if training ends after ``rounds`` rounds, with the evaluations of the plan."""
        return self.compute_spending(rounds, self.count_evaluations(rounds))

    @property
    def affordable_rounds(self) -> int:
        """The number of planned rounds that the budget of a client allows; all of them without a budget."""
        budget = self.settings.epsilon
        low, high = 0, len(self.plans[0].rounds)
        if budget is None or self._compute_planned_spending(high) <= budget:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._compute_planned_spending(middle) <= budget else (low, middle)
        return low


def make_private(
    method: Method,
    settings: Privacy,
    rounds: int,
    rows: Sequence[int] | None,
    *,
    name: str = "",
    policy: str = "all",
    shares: int = 0,
    evaluation: EvaluationPlan = NO_EVALUATIONS,
) -> PrivateMethod:
    """Return ``method`` with differential privacy as in ``settings``, and with the noise for ``rounds`` rounds.

    Args:
        method: the method of the experiment.
        settings: the unit that is protected, the budget and the sampling.
        rounds: number of planned rounds.
        rows: number of training rows of each client; ``None`` if they are unknown, as with real sites.
        name: name of the method in messages.
        policy: participation policy.
        shares: with secure aggregation, the fewest clients in a sum: for ``unit = "client"`` each adds a share of the
            noise. 0: the server adds the noise.
        evaluation: metrics besides the default metrics of the task, and the rounds after which they are released.

    Raises:
        PerfedError: if something that leaves a client has no mechanism (names it), or if settings cannot be combined.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> plan = make_private(FedAvg(local_epochs=1), Privacy(epsilon=6.0, delta=1e-3), 200, [50, 60])
        >>> round(plan.noise, 1), plan.affordable_rounds
        (8.5, 200)
    """
    name = name or type(method).__name__
    method, notes = _adapt_settings(method, settings, name)
    disclosures = _check_disclosures(method, settings, name)
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
            f"privacy: participation.policy = '{policy}' may depend on what clients report of their training, which "
            "has no mechanism; allowed: uniform, all"
        )
    metrics = _plan_metrics(settings, evaluation, shares)
    evaluations = 0 if metrics is None else len(evaluation.rounds)
    metric_releases = Releases()  # those that share the budget with training
    row_counts = [None] if settings.unit == "client" else _list_row_counts(settings, rows)
    if settings.unit == "client":
        sends = any(disclosure.sent_entries(part) for part, disclosure in disclosures)
        releases: list[_ClientReleases] = [(Releases(), tuple([Releases(int(sends))] * rounds))]
        metric_releases = Releases() if metrics is None else metrics.count_releases(evaluations)
    else:
        releases = [_plan_releases(method, disclosures, count, rounds, max(1, evaluations)) for count in row_counts]
    plans = tuple(
        ClientPlan(_choose_noise(settings, count, sum(by_round, ahead) + metric_releases), ahead, by_round)
        for count, (ahead, by_round) in zip(row_counts, releases, strict=True)
    )
    noises = {count or 0: plan.noise for count, plan in zip(row_counts, plans, strict=True)}
    low, high = min(noises.values()), max(noises.values())
    settings = settings.model_copy(update={"noise": high, "noises": noises if low < high else {}})
    if low < high:
        notes = [*notes, f"privacy: noise {low:.4g} to {high:.4g}, by a client's number of rows"]
    if metrics is not None and settings.unit == "client":
        metrics = replace(metrics, noise=high)
    entries = tuple(dict.fromkeys(entry for _, disclosure in disclosures for entry in disclosure.entries))
    private_method = _add_extension(method, settings, entries, shares)
    return PrivateMethod(private_method, settings, plans, (*notes, *_warn_about_delta(settings, rows)), metrics)


def _plan_metrics(settings: Privacy, evaluation: EvaluationPlan, shares: int) -> NoisyMetrics | None:
    """Return the metrics that are released with noise; if rows are protected, test rows have a separate budget."""
    if settings.metrics == "none":
        return None
    names, protects_rows = check_metrics(evaluation.metrics), settings.unit == "sample"
    common = (settings.unit, settings.noise or 0.0, settings.metrics_bound, tuple(evaluation.rounds))
    metrics = NoisyMetrics(names, *common, 0 if protects_rows else shares)
    if not protects_rows or settings.epsilon is None:
        return metrics
    noise = _find_noise(settings.epsilon, settings.delta, metrics.count_releases(len(evaluation.rounds)))
    return replace(metrics, noise=noise)


def _add_extension(method: Method, settings: Privacy, entries: tuple[str, ...], shares: int) -> Method:
    """Return the method with the privacy extension in front, so that other extensions work on private replies."""
    extension: Extension
    common: dict[str, Any] = {"clip": settings.clip, "noise": settings.noise, "entries": entries}
    common["of_classes"] = any(isinstance(extension, Anchors) for extension in method.extensions)
    if settings.unit == "sample":
        poisson = settings.sampling == "poisson"
        extension = SamplePrivacy(rows=settings.rows, poisson=poisson, noises=settings.noises, **common)
    else:
        extension = ClientPrivacy(shares=shares, **common)
    return method.model_copy(update={"extensions": (extension, *method.extensions)})


def _check_disclosures(method: Method, settings: Privacy, name: str) -> list[tuple[Method | Extension, Disclosure]]:
    """Return the method and its extensions with their disclosures, after checking that all have a mechanism."""
    parts: list[tuple[Method | Extension, str]] = [(method, name)]
    parts += [(extension, f"extension '{extension.name}'") for extension in method.extensions]
    return [(part, check_disclosure(part, part_name, settings.unit)) for part, part_name in parts]


def _adapt_settings(method: Method, settings: Privacy, name: str) -> tuple[Method, list[str]]:
    """Return the method with settings that are not chosen by looking at rows, and notes on the changes.

    Raises:
        PerfedError: if a setting has no private form.
    """
    if settings.unit == "client":
        return method, []
    if method.class_weights != "none":
        raise PerfedError(
            f"privacy.unit = 'sample' refuses class_weights = '{method.class_weights}': it counts all rows"
        )
    if method.local_steps is not None and settings.sampling == "full":
        raise PerfedError(
            "privacy.sampling = 'full' counts passes over the rows, which local_steps does not set; use local_epochs, "
            "or sampling = 'poisson'"
        )
    extensions, notes = [], []
    for extension in method.extensions:
        if isinstance(extension, Anchors) and extension.pretrain_epochs == "validated":
            extension = extension.model_copy(update={"pretrain_epochs": PRETRAIN_EPOCHS})
            notes.append(
                f"{name}: {PRETRAIN_EPOCHS} epochs of private pre-training; 'validated' would choose the number by "
                "looking at rows"
            )
        if getattr(extension, "unknown_class", "skip") == "own":
            raise PerfedError(
                "privacy.unit = 'sample' refuses unknown_class = 'own': it looks at rows in each exchange"
            )
        if isinstance(extension, Anchors) and (extension.distance != "w2" or extension.covariance != "fixed"):
            raise PerfedError(
                "privacy.unit = 'sample' has a mechanism only for anchors with distance = 'w2' and covariance = 'fixed'"
            )
        extensions.append(extension)
    return method.model_copy(update={"extensions": tuple(extensions)}), notes


_ClientReleases = tuple[Releases, tuple[Releases, ...]]
"""The releases of a client outside rounds, and in each round."""


def _choose_noise(settings: Privacy, row_count: int | None, releases: Releases) -> float:
    """Return the noise multiplier of the settings, or the one that keeps ``releases`` within the budget."""
    if settings.noise is not None:
        return settings.noises.get(row_count or 0, settings.noise)
    assert settings.epsilon is not None
    return _find_noise(settings.epsilon, settings.delta, releases)


def _find_noise(budget: float, delta: float, releases: Releases) -> float:
    return find_noise_multiplier(budget, delta, releases) if releases.full or releases.sampled else 1.0


def _list_row_counts(settings: Privacy, rows: Sequence[int] | None) -> list[int | None]:
    """Return the distinct numbers of rows on which releases depend; ``[None]`` if they do not depend on it.

    Raises:
        PerfedError: if releases depend on the numbers of rows, and these are unknown.
    """
    if settings.sampling == "full":
        return [None]
    if rows is None:
        raise PerfedError(
            "privacy.sampling = 'poisson' needs the number of rows of each client, and mini-batches that nobody else "
            "knows; at sites use 'full'"
        )
    return [*sorted(set(rows))]


def _plan_releases(
    method: Method,
    disclosures: Sequence[tuple[Method | Extension, Disclosure]],
    row_count: int | None,
    rounds: int,
    personal_models: int,
) -> _ClientReleases:
    """Return the releases of a client where rows are protected.

    Args:
        method: the method.
        disclosures: the method and its extensions with their disclosures.
        row_count: number of rows of a client whose mini-batches are drawn by Poisson sampling; ``None``: mini-batches
            come from full passes over the rows.
        rounds: number of planned rounds.
        personal_models: number of personal models that are released: the final one, or one for each release of metrics.
    """
    mechanisms: list[Mechanism] = [
        mechanism
        for _, disclosure in disclosures
        for mechanism in (*disclosure.counts, *disclosure.entries.values())
        if mechanism.once
    ]
    counts = len({mechanism.counts for mechanism in mechanisms})

    def count_pass_releases(passes: int) -> Releases:
        if row_count is None:
            return Releases(passes)
        steps = passes * (method.epoch_steps or ceil(row_count / method.batch_size))
        rate = method.batch_size / row_count
        return Releases(0, steps, rate) if rate < 1 else Releases(steps)

    ahead = Releases(counts)
    for part, disclosure in disclosures:
        ahead += count_pass_releases(disclosure.before_rounds(part) + personal_models * disclosure.after_run(part))
    extra = Releases(sum(disclosure.per_round(part) for part, disclosure in disclosures))
    by_round = (
        count_pass_releases(method.in_round(number).epochs_in(number)) + extra for number in range(1, rounds + 1)
    )
    return ahead, tuple(by_round)


def _warn_about_delta(settings: Privacy, rows: Sequence[int] | None) -> list[str]:
    """Return a warning if delta would permit to release one row (or client) unprotected; otherwise an empty list."""
    if rows is None:
        return []
    number = min(rows) if settings.unit == "sample" else len(rows)
    if settings.delta * number <= 1:
        return []
    unit = "rows of a client" if settings.unit == "sample" else "clients"
    return [
        f"warning: privacy.delta = {settings.delta:g} is above one over the number of {unit} ({number}): it would "
        "permit a mechanism that releases one of them unprotected"
    ]
