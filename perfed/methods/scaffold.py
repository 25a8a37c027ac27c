"""SCAFFOLD: control variates take the clients' drift out of federated averaging."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.errors import PerfedError
from perfed.maths.aggregate import weighted_mean
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters, stage_of
from perfed.training.cohort import Cohort
from perfed.training.step import Step
from perfed.training.steprules import GradientTransform


@register(
    "scaffold",
    title="SCAFFOLD",
    differs="nothing",
    needs="SGD as the optimiser",
    example="digits-label-skew methods.scaffold.optimizer=sgd methods.scaffold.lr=0.03",
)
class Scaffold(Method):
    """Stochastic controlled averaging, option II (Karimireddy et al. 2020, Algorithm 1).

    ``y <- y - lr (g - c_i + c)``; ``c_i+ = c_i - c + (x - y) / (K lr)``; the server's steps are
    ``x <- x + server_lr mean_S (y - x)`` and ``c <- c + (1/N) sum_S (c_i+ - c_i)``. The global model is evaluated.
    K lr turns the way x - y into a mean of the corrected gradients. With momentum m, which the paper does not have but
    the other methods of an experiment may, gradient k of K moves y by ``(1 - m^(K-k+1)) / (1 - m)`` steps, and K is
    replaced by the sum of these factors, so that c_i+ is still a (weighted) mean of the client's own gradients. Weight
    decay counts as part of the client's loss. Adam's steps are no such mean: an error.
    Parameters that are placed personal are trained without correction. For those per domain K is the number of
    mini-batches with a sample of the domain.
    """

    needs_mean: ClassVar[str] = "SCAFFOLD's control variate is a sum of the clients' changes"

    optimizer: Literal["adam", "sgd"] = Field("sgd", description="local optimiser; only sgd is possible")
    lr: float | dict[str, float] = Field(1e-2, description="learning rate, or one per stage (missing stages: 1e-3)")
    server_lr: float = Field(1.0, gt=0, description="eta_g: step of the server")

    def sets(self) -> dict[str, ParameterSet]:
        """``control``: c on the server; ``own_control``: c_i on the clients; ``size``: N."""
        if self.optimizer != "sgd":
            name = type(self).__name__.lower()
            raise PerfedError(
                f"{name} needs plain gradient steps, not optimizer = '{self.optimizer}': add "
                f"methods.{name}.optimizer=sgd and a learning rate for it, methods.{name}.lr=0.01 or another"
            )
        return {
            "control": ParameterSet("server", like="shared", init="zeros"),
            "own_control": ParameterSet("client", like="shared", init="zeros"),
            "size": ParameterSet("server", init=_size),
        }

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange, then the steps on x and c."""
        reply = clients.train(self.train, shared=server.shared, control=server.control)
        server.shared = self.stepped(server.shared, weighted_mean(reply.shared))
        change = {name: t.sum(0) / server.size["clients"] for name, t in reply.change.items()}
        server.control = {name: c + change[name] if name in change else c for name, c in server.control.items()}

    def stepped(self, x: Parameters, mean: Parameters) -> Parameters:
        """The server's step from ``x`` towards the mean of what clients made of it."""
        return {
            name: x[name] + self.server_lr * (y - x[name]) if y.is_floating_point() else y for name, y in mean.items()
        }

    def train(self, cohort: Cohort, shared: dict[str, Any], control: dict[str, Any]) -> Reply:
        """Corrected local steps, and the client's new control."""
        cohort.load(shared)
        own = cohort.state["own_control"]
        drift = {name: control[name] - own[name] for name in cohort.shared_parameters}
        means = self.corrected_steps(cohort, drift, otherwise=control)
        change = {name: mean - control[name] for name, mean in means.items()}
        cohort.state["own_control"] = {**own, **{name: own[name] + t for name, t in change.items()}}
        return Reply(shared=cohort.shared(), change=change)

    def corrected_steps(self, cohort: Cohort, drift: Parameters, *, otherwise: Parameters) -> Parameters:
        """Local epochs along ``g + drift``, and the mean of these directions, ``(x - y) / (K lr)``.

        ``otherwise`` has what stands for it where no step was made.
        """
        received, means = cohort.received, {}
        of_domains = cohort.num_samples.new_zeros(cohort.n, cohort.num_domains)

        def correct(step: Step, grads: Parameters) -> Parameters:
            if step.present_domains:
                of_domains[torch.from_numpy(step.rows)] += next(iter(step.present_domains.values()))
            return {name: g + step.select_rows(drift[name]) if name in drift else g for name, g in grads.items()}

        cohort.fit(STAGES, epochs=self.local_epochs, update=GradientTransform(correct))
        for name in drift:
            steps = of_domains if stage_of(name) in cohort.per_domain else cohort.steps_done
            rate = (self.total_weight(steps) * self.lr_of(stage_of(name))).to(drift[name])
            rate = rate.view(*rate.shape, *([1] * (drift[name].ndim - rate.ndim)))
            mean = (received[name] - cohort.model[name]) / rate
            means[name] = torch.where(rate > 0, mean, otherwise[name])
        return means

    def total_weight(self, steps: Tensor) -> Tensor:
        """``sum_k (1 - m^(K-k+1)) / (1 - m)``, how far K equal gradients move y, in steps; K without momentum."""
        m = self.momentum
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


def _size(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"clients": torch.tensor(len(info.ids))}
