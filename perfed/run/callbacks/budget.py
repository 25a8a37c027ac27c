"""The privacy budget of a run: the epsilon that each client has spent, and the end of the run at the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import ConfigDict, SkipValidation

from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics
from perfed.errors import PerfedError
from perfed.run.callback import Callback, Running
from perfed.run.round_log import was_evaluated
from perfed.settings import STRICT


class _MetricsNoise(Protocol):
    """The interface of noisy metrics that a run uses (:class:`perfed.privacy.metrics.NoisyMetrics`)."""

    @property
    def noise(self) -> float:
        """The standard deviation of the noise over what a test row, or a client, can change."""

    def describe_noise(self, federation: Federation, split: str, recent: Sequence[Metrics]) -> dict[str, Any]:
        """Return the noise multiplier and standard deviations for a summary."""


class PrivacyPlan(Protocol):
    """The interface of a private method that a run uses (:class:`perfed.privacy.apply.PrivateMethod`)."""

    @property
    def notes(self) -> Sequence[str]:
        """The notes for the summary."""

    @property
    def budget(self) -> float | None:
        """The epsilon that each client may spend; ``None``: it is only reported."""

    @property
    def noise(self) -> float:
        """The standard deviation of the noise over what a row or client can change."""

    @property
    def affordable_rounds(self) -> int:
        """The number of rounds that the budget of a client allows."""

    @property
    def has_closed_form(self) -> bool:
        """Whether :meth:`compute_spending` takes no time."""

    def compute_spending(self, rounds: int, evaluated: int = 0) -> float:
        """Return the epsilon of a client after so many rounds, ``evaluated`` of which released its metrics."""

    @property
    def metrics(self) -> _MetricsNoise | None:
        """The metrics that real sites send with noise; ``None`` if they send none."""

    def explicit_settings(self) -> dict[str, Any]:
        """Return the privacy settings for a summary."""


class PrivacyBudget(Callback):
    """A callback that counts the rounds of each client, reports their epsilon, and ends the run at the budget.

    The counts are saved in checkpoints, so that a resumed run continues from what was spent.
    """

    model_config = ConfigDict(**STRICT, arbitrary_types_allowed=True)

    name = "privacy"
    plan: SkipValidation[PrivacyPlan]

    def begin(self, run: Running) -> None:
        """Check that the budget allows one round, and end a resumed run whose budget is spent.

        Raises:
            PerfedError: if the budget does not allow a single round.
        """
        if not self.plan.affordable_rounds:
            raise PerfedError(
                f"privacy.epsilon = {self.plan.budget or 0:g} does not pay for one round with noise = "
                f"{self.plan.noise:g} (it costs {self.plan.compute_spending(1):.3g}); give more of either"
            )
        if "rounds" not in self.state:
            self.state["rounds"] = dict.fromkeys(run.federation.ids, 0)
            run.notes += self.plan.notes
        if self._is_spent and not run.at_its_end:
            run.progress.stopped_by = self.name

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Count the round for its participants; if the method finishes rounds at all clients, for all of them."""
        participants = run.federation.ids if run.server.method.finishes else record["participants"]
        counts = self.state["rounds"]
        self.state["rounds"] = {client: rounds + (client in set(participants)) for client, rounds in counts.items()}
        self.state["evaluated"] = self.state.get("evaluated", 0) + ("metrics" in record)
        if "metrics" in record or self.plan.has_closed_form:
            record["epsilon"] = self._compute_spending()
        return self._is_spent

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Add the settings, the spent epsilon and notes to the summary."""
        evaluated = was_evaluated(run.done, run.history, run.evaluation, run.rounds)
        if run.progress.stopped_by and not evaluated and run.evaluation.one_model_each:
            self.state["evaluated"] = self.state.get("evaluated", 0) + 1  # that of the model that is taken
        stated, spent = self.plan.explicit_settings(), self._compute_spending()
        summary["privacy"] = {**stated, "spent": spent}
        unit = "row" if stated["unit"] == "sample" else "client"
        is_real = run.server.speeds == "wall"
        metrics = "metrics are of this simulation and are not counted"
        if is_real:
            metrics = "losses and metrics stay at the sites: only a site can evaluate its model"
        if (noisy := self.plan.metrics) is not None:
            split, totals = run.evaluation.split, run.progress.totals
            deviations = noisy.describe_noise(run.server.federation, split, totals.recent)
            metrics = f"metrics are exact, as in any simulation; at real sites they have noise {noisy.noise:.4g}"
            if is_real:
                summary["privacy"]["noisy_metrics"] = deviations
                metrics = f"losses stay at the sites, metrics left with noise {noisy.noise:.4g}"
        summary["notes"].append(
            f"privacy of each {unit}: the largest epsilon spent is {max(spent.values()):.4g} at delta "
            f"{stated['delta']:g}, noise {self.plan.noise:.4g}; {metrics}"
        )
        if is_real:
            summary["notes"].append(
                "before round 1 each site disclosed its number of rows, which is the same for any content; all else "
                "is declared in the study (data.public)"
            )
        if run.progress.stopped_by == self.name:
            summary["notes"].append(
                f"the privacy budget is spent: training ended after round {run.done} of at most {run.rounds}"
            )

    def describe_client(self, client: str) -> dict[str, Any]:
        """Return the settings and the epsilon spent by ``client`` and by all clients, for the card of its model."""
        spent = self._compute_spending()
        return {**self.plan.explicit_settings(), "spent": spent.get(client, 0.0), "contributors": spent}

    def describe_joined_client(self, client: str, rounds: int) -> dict[str, Any]:
        """Return the same for a client that joined the finished run and trained for so many rounds.

        It sends nothing. With ``unit = "client"`` it has spent nothing; with ``unit = "sample"``, its personal model
        discloses something about its rows.
        """
        stated = self.describe_client(client)
        return {**stated, "spent": self.plan.compute_spending(rounds) if stated["unit"] == "sample" else 0.0}

    @property
    def _is_spent(self) -> bool:
        """Whether another round would cost a client more than its budget."""
        return self.plan.budget is not None and max(self.state["rounds"].values()) >= self.plan.affordable_rounds

    def _compute_spending(self) -> dict[str, float]:
        evaluated = self.state.get("evaluated", 0)
        return {i: self.plan.compute_spending(n, evaluated) for i, n in self.state["rounds"].items()}
