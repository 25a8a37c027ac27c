"""SCAFFOLD: control variates correct the drift of clients in federated averaging."""

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

    ``y <- y - lr (g - c_i + c)``; ``c_i+ = c_i - c + (x - y) / (K lr)``; the server's steps are ``x <- x + server_lr
    mean_S (y - x)`` and ``c <- c + (1/N) sum_S (c_i+ - c_i)``. The global model is evaluated. Divided by K lr, the
    difference x - y is the mean of the corrected gradients. With momentum m, which is not in the paper, gradient k of K
    moves y by ``(1 - m^(K-k+1)) / (1 - m)`` steps; K is then replaced by the sum of these factors, so that c_i+ is
    still a (weighted) mean of the client's own gradients. Weight decay is part of the client's loss. Adam is refused,
    because its steps are no such mean. Personal parameters are trained without correction. For per-domain parameters K
    is the number of mini-batches with a sample of the domain.
    """

    needs_mean: ClassVar[str] = "SCAFFOLD's control variate is a sum of the clients' changes"

    optimizer: Literal["adam", "sgd"] = Field("sgd", description="local optimiser; only sgd is possible")
    lr: float | dict[str, float] = Field(1e-2, description="learning rate, or one per stage (missing stages: 1e-3)")
    server_lr: float = Field(1.0, gt=0, description="eta_g: step of the server")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``control``: c on the server; ``own_control``: c_i on the clients; and ``size``: N."""
        if self.optimizer != "sgd":
            name = type(self).__name__.lower()
            raise PerfedError(
                f"{name} needs plain gradient steps, not optimizer = '{self.optimizer}': add "
                f"methods.{name}.optimizer=sgd and a learning rate for it, methods.{name}.lr=0.01 or another"
            )
        return {
            "control": ParameterSet("server", like="shared", init="zeros"),
            "own_control": ParameterSet("client", like="shared", init="zeros"),
            "size": ParameterSet("server", init=_init_size),
        }

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then take the steps on x and c."""
        reply = clients.train(self.train, shared=server.shared, control=server.control)
        server.shared = self.take_server_step(server.shared, weighted_mean(reply.shared))
        change = {name: t.sum(0) / server.size["clients"] for name, t in reply.change.items()}
        server.control = {name: c + change[name] if name in change else c for name, c in server.control.items()}

    def take_server_step(self, x: Parameters, mean: Parameters) -> Parameters:
        """Return ``x`` after the server's step towards the clients' ``mean``."""
        return {
            name: x[name] + self.server_lr * (y - x[name]) if y.is_floating_point() else y for name, y in mean.items()
        }

    def train(self, cohort: Cohort, shared: dict[str, Any], control: dict[str, Any]) -> Reply:
        """Take corrected local steps, and update the client's control."""
        cohort.load(shared)
        own_control = cohort.state["own_control"]
        drift = {name: control[name] - own_control[name] for name in cohort.shared_parameters}
        means = self.corrected_steps(cohort, drift, otherwise=control)
        change = {name: mean - control[name] for name, mean in means.items()}
        cohort.state["own_control"] = {**own_control, **{name: own_control[name] + t for name, t in change.items()}}
        return Reply(shared=cohort.shared(), change=change)

    def corrected_steps(self, cohort: Cohort, drift: Parameters, *, otherwise: Parameters) -> Parameters:
        """Train local epochs along ``g + drift``.

        Returns:
            The mean of these directions, ``(x - y) / (K lr)``, and ``otherwise`` where no step was taken.
        """
        received, means = cohort.received, {}
        domain_steps = cohort.num_samples.new_zeros(cohort.n, cohort.num_domains)

        def correct(step: Step, grads: Parameters) -> Parameters:
            if step.present_domains:
                domain_steps[torch.from_numpy(step.rows)] += next(iter(step.present_domains.values()))
            return {name: g + step.select_rows(drift[name]) if name in drift else g for name, g in grads.items()}

        cohort.fit(STAGES, epochs=self.local_epochs, update=GradientTransform(correct))
        for name in drift:
            steps = domain_steps if stage_of(name) in cohort.per_domain else cohort.steps_done
            rate = (self.total_weight(steps) * self.lr_of(stage_of(name))).to(drift[name])
            rate = rate.view(*rate.shape, *([1] * (drift[name].ndim - rate.ndim)))
            mean = (received[name] - cohort.model[name]) / rate
            means[name] = torch.where(rate > 0, mean, otherwise[name])
        return means

    def total_weight(self, steps: Tensor) -> Tensor:
        """Return ``sum_k (1 - m^(K-k+1)) / (1 - m)``, the distance, in steps, by which K equal gradients move y.

        It is K without momentum.
        """
        m = self.momentum
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


def _init_size(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"clients": torch.tensor(len(info.ids))}
