"""FedALA: every client learns, number by number, how much of the global model's last layers it takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import train_until_converged
from perfed.training.step import Step, mean_loss
from perfed.training.steprules import CustomStep, Gradient


@register("fedala", title="FedALA")
class FedALA(FedAvg):
    """Adaptive local aggregation (Zhang et al. 2023, AAAI, Algorithm 1).

    A client starts local training, and is evaluated, with ``m(W) = old + (global - old) W`` in its last ``layers``
    layers (old: its model after its last training) and with the global model in the layers below. W starts at 1 and is
    learnt on a random ``share`` of the client's samples, ``W <- clip(W - eta dloss(m(W))/dW, 0, 1)``: until convergence
    the first time, for one epoch later, and not at all if global and old model are equal. The criterion of convergence
    is perfed's own: five more epochs lower the mean loss by less than 0.01, or 100 epochs are over (authors' program:
    ten losses deviate by less than 0.1).
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS},
        refused={
            "sample": "it uses rows not only in training, so that clipping the gradient of each row does not "
            "bound their influence"
        },
    )
    fits_unused: ClassVar[str] = "train"

    layers: int = Field(1, ge=1, description="p: the last layers, whose parameters are aggregated")
    share: float = Field(0.8, gt=0, le=1, description="s: part of the training samples on which W is learnt")
    eta: float = Field(1.0, ge=0, description="learning rate of W")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``local``, the model after the last training, and ``aggregation``: W, and whether it is learnt."""
        return {
            "local": ParameterSet("client", like="shared"),
            "aggregation": ParameterSet("client", init=self._init_aggregation),
        }

    def _init_aggregation(self, info: FederationInfo, key: Tensor) -> dict[str, Any]:
        shapes = info.shared_parameters("fedala aggregates the shared parameters")
        last = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes))[-self.layers :]
        ones = {n: torch.ones(s, dtype=info.dtype) for n, s in shapes.items() if n.rpartition(".")[0] in last}
        return {"weights": ones, "learnt": torch.tensor(False)}

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of W and of the model."""
        return 1 + self.local_epochs

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Aggregate the received and the local model, then train all stages together."""
        self.personalise(cohort, shared=shared)
        cohort.fit(STAGES, epochs=self.local_epochs)
        cohort.state["local"] = cohort.shared()
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Learn W, and load the model aggregated with it."""
        cohort.load(payload["shared"])
        old, learnt = cohort.state["local"], cohort.state["aggregation"]["learnt"]
        weights = {name: w.clone() for name, w in cohort.state["aggregation"]["weights"].items()}

        def loss(step: Step) -> Tensor:
            w = step.set_parameters("weights")
            return mean_loss(step.with_params({n: step.select_rows(old[n]).lerp(step.params[n], w[n]) for n in w}))

        def clipped_step(w: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
            return {name: (w[name] - self.eta * g).clamp(0, 1) for name, g in gradient(w, batches[0]).items()}

        data = cohort.samples().select_share(self.share, cohort.key("aggregation"))
        learn = partial(
            cohort.fit, (), also={"weights": weights}, loss=loss, samples=data, update=CustomStep(clipped_step)
        )
        differs = torch.stack([(cohort.model[n] != old[n]).flatten(1).any(1) for n in weights]).any(0)
        with cohort.trial_fits():
            learn(epochs=(differs & learnt).long().cpu().numpy())
            train_until_converged(cohort, learn, (differs & ~learnt).cpu().numpy())
        cohort.model.update({name: old[name].lerp(cohort.model[name], w) for name, w in weights.items()})
        cohort.state["aggregation"] = {"weights": weights, "learnt": learnt | differs}
