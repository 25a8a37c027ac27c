"""MLflow: settings as parameters, the numbers of every round as metrics (extra ``mlflow``)."""

from __future__ import annotations

import time
from typing import Any

from pydantic import PrivateAttr

from perfed.errors import PerfedError
from perfed.run.callback import Callback, Running, collect_numbers
from perfed.settings import flatten_keys

_LONGEST = 500  # characters of a parameter that MLflow takes


class MLflow(Callback):
    """Makes a run of an MLflow experiment; a run that is resumed goes on in it.

    Attributes:
        uri: of the tracking server or store; empty: what MLflow is set to (``MLFLOW_TRACKING_URI``).
        experiment: the name of the experiment, which is made where it is missing.
    """

    name = "mlflow"
    needs = "mlflow"
    uri: str = ""
    experiment: str = "perfed"
    _client: Any = PrivateAttr(None)

    def begin(self, run: Running) -> None:
        """Create the run in MLflow with its settings, or continue the existing one."""
        from mlflow import MlflowClient, MlflowException

        try:
            self._client = MlflowClient(self.uri or None)
            if "run" not in self.state:
                experiment = self._client.get_experiment_by_name(self.experiment)
                home = experiment.experiment_id if experiment else self._client.create_experiment(self.experiment)
                self.state["run"] = self._client.create_run(home, run_name=f"{run.name} seed {run.seed}").info.run_id
                settings = flatten_keys({"method": run.name, "seed": run.seed, "rounds": run.rounds} | run.config)
                for path, value in settings.items():
                    self._client.log_param(self.state["run"], ".".join(path), str(value)[:_LONGEST])
        except MlflowException as error:
            raise PerfedError(f"callbacks.mlflow: {str(error).splitlines()[0]}") from None

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Log the round's numbers."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, record["round"]) for name, value in collect_numbers(record).items()]
        self._client.log_batch(self.state["run"], metrics=metrics)
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Mark the run in MLflow as finished."""
        self._client.set_terminated(self.state["run"])
