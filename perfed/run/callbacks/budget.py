"""The privacy budget of a run: what each client has spent, and the end of the run where it is gone."""

from __future__ import annotations

from typing import Any

from pydantic import InstanceOf

from perfed.errors import PerfedError
from perfed.privacy.apply import PrivateMethod
from perfed.run.callback import Callback, Running


class PrivacyBudget(Callback):
    """Counts the rounds of each client, says what they have cost, and ends the run before a budget is exceeded.

    The counts are in the checkpoint: a resumed run goes on from what was spent.
    """

    name = "privacy"
    plan: InstanceOf[PrivateMethod]

    def begin(self, run: Running) -> None:
        """Refuse a budget that does not last a round, and rounds beyond it.

        Raises:
            PerfedError: it does not pay for the first round.
        """
        if not self.plan.affordable:
            settings = self.plan.settings
            raise PerfedError(
                f"privacy.epsilon = {settings.epsilon:g} does not pay for one round with noise = {self.plan.noise:g} "
                f"(it costs {self.plan.spent(1):.3g}); give more of either"
            )
        if "rounds" not in self.state:
            self.state["rounds"] = dict.fromkeys(run.federation.ids, 0)
            run.notes += self.plan.notes
        if self._gone and not run.at_its_end:
            run.progress.stopped_by = self.name

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Count the round for those who took part, or for all where all work after it."""
        used = run.federation.ids if run.server.method.finishes else record["participants"]
        counts = self.state["rounds"]
        self.state["rounds"] = {i: n + (i in set(used)) for i, n in counts.items()}
        if "metrics" in record or self.plan.settings.sampling == "full":  # cheap, or worth it
            record["epsilon"] = self._spent()
        return self._gone

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Say what was spent, of which mechanism, and whether that ended the run."""
        settings = self.plan.settings
        summary["privacy"] = {**settings.model_dump(exclude_none=True), "spent": self._spent()}
        if run.progress.stopped_by == self.name:
            summary["notes"].append(
                f"the privacy budget is spent: training ended after round {run.done} of at most {run.rounds}"
            )

    @property
    def _gone(self) -> bool:
        """Whether another round would cost a client more than its budget."""
        lasts = self.plan.affordable
        return self.plan.settings.epsilon is not None and max(self.state["rounds"].values()) >= lasts

    def _spent(self) -> dict[str, float]:
        return {i: self.plan.spent(n) for i, n in self.state["rounds"].items()}
