"""FedALA: every client learns, number by number, how much of the global model's last layers it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed.errors import PerfedError
from perfed.method.exchange import FederationInfo, ParameterSet, Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Parameters
from perfed.training.batches import IntArray
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import until_converged
from perfed.training.step import Step
from perfed.training.update import Gradient, Replaced


@register("fedala")
class FedALA(FedAvg):
    """Adaptive local aggregation (Zhang et al. 2023, AAAI, Algorithm 1).

    A client starts local training, and is evaluated, at ``old + (global - old) W`` in its last ``layers`` layers (old:
    its model after its last training) and at the global model below. W starts at 1 and is learnt on a random ``share``
    of the client's samples, ``W <- clip(W - eta (global - old) grad, 0, 1)`` with the loss's gradient at that model:
    the first time until it converges (:func:`perfed.training.early_stopping.until_converged`), later for one epoch.
    Where global and old are the same, as in the first round, W rests. Parameters placed personal are not aggregated.
    """

    fits_unused: ClassVar[str] = "train"

    layers: int = Field(1, ge=1, description="p: the last layers, whose parameters are aggregated")
    share: float = Field(0.8, gt=0, le=1, description="s: part of the training samples on which W is learnt")
    eta: float = Field(1.0, ge=0, description="learning rate of W")

    def sets(self) -> dict[str, ParameterSet]:
        """``local``: the client's model after its last training; ``aggregation``: W, and whether it has been learnt."""
        return {"local": ParameterSet("client", like="shared"), "aggregation": ParameterSet("client", init=self._ones)}

    def _ones(self, info: FederationInfo, key: Tensor) -> dict[str, Any]:
        if not info.shared:
            raise PerfedError("fedala aggregates the shared parameters, but the placement leaves none")
        last = list(dict.fromkeys(name.rpartition(".")[0] for name in info.shared))[-self.layers :]
        shapes = {name: shape for name, shape in info.shared.items() if name.rpartition(".")[0] in last}
        ones = {name: torch.ones(shape, dtype=info.dtype) for name, shape in shapes.items()}
        return {"weights": ones, "learnt": torch.tensor(False)}

    def epochs_in(self, round_: int) -> int:
        """Of W, and of the model."""
        return 1 + self.local_epochs

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Aggregation, then all stages together."""
        self.personalise(cohort, shared=shared)
        cohort.fit(STAGES, epochs=self.local_epochs)
        cohort.state["local"] = cohort.shared()
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Learn W, and aggregate with it."""
        cohort.load(payload["shared"])
        old, known = cohort.state["local"], cohort.state["aggregation"]
        weights = {n: t.clone() for n, t in known["weights"].items() if n in cohort.shared_parameters}
        gaps = {name: cohort.model[name] - old[name] for name in weights}

        def aggregated(w: Parameters, of: Callable[[Tensor], Tensor]) -> Parameters:
            return {name: of(old[name]) + of(gap) * w[name] for name, gap in gaps.items()}

        def step(params: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
            found, of = gradient(params, batches[0]), batches[0].of
            moves = {name: self.eta * of(gap) * found[name] for name, gap in gaps.items()}
            new = {name: (params[f"weights/{name}"] - move).clamp(0, 1) for name, move in moves.items()}
            return aggregated(new, of) | {f"weights/{name}": w for name, w in new.items()}

        def learn(epochs: IntArray) -> None:
            cohort.fit(tuple(weights), epochs=epochs, also={"weights": weights}, samples=samples, update=Replaced(step))

        cohort.model.update(aggregated(weights, lambda tensor: tensor))
        apart = torch.stack([(gap != 0).flatten(1).any(1) for gap in gaps.values()]).any(0)
        samples = cohort.samples().part(self.share, cohort.key("aggregation"))
        with cohort.rehearsal():
            learn((apart & known["learnt"]).long().cpu().numpy())
            until_converged(cohort, learn, (apart & ~known["learnt"]).cpu().numpy())
        cohort.state["aggregation"] = {"weights": {**known["weights"], **weights}, "learnt": known["learnt"] | apart}
