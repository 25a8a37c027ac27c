"""pFedMe: personal models are proximal points of a global model that descends on the clients' Moreau envelopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from perfed.data.federation import Federation
from perfed.method.declared import ParameterSet
from perfed.method.disclosure import PARAMETERS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.proximal import STEP, ProximalKind, implicit_notes
from perfed.model.chain import STAGES, Model, Parameters, stage_of
from perfed.training.cohort import Cohort
from perfed.training.optim import OptimizerState
from perfed.training.step import Step
from perfed.training.steprules import CustomStep, Gradient


@register("pfedme", title="pFedMe")
class PFedMe(Method):
    """Personalised federated learning with Moreau envelopes (Dinh et al. 2020, Algorithm 1).

    On every mini-batch, theta results from ``inner_steps`` steps from w on ``f(theta) + (lam / 2) |theta - w|^2``; then
    ``w <- w - eta lam (w - theta)``. theta is the evaluated model. The server's step is ``w <- (1 - beta) w + beta
    mean_i w_i``. Inner steps use the run's optimiser, with fresh state for every mini-batch. Personal parameters take
    the inner steps without the quadratic term. By default SGD's inner steps are explicit, along the gradient of the
    complete objective. Implicit steps on the quadratic term (``proximal = "implicit"``) are stable for any ``lam``;
    they have the same fixed point, but do not reach it in a few steps.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS})
    fits_unused: ClassVar[str] = "train"

    lam: float = Field(10.0, gt=0, description="lambda: strength of the quadratic term")
    inner_steps: int = Field(5, ge=1, description="K: steps on theta per mini-batch")
    eta: float | None = Field(
        None, gt=0, validate_default=True, description="learning rate of w; default: lr, which is that of theta"
    )
    beta: float = Field(1.0, gt=0, description="step of the server")
    proximal: ProximalKind = Field("explicit", description=STEP)

    @field_validator("eta")
    @classmethod
    def _check_step(cls, eta: float | None, info: ValidationInfo) -> float | None:
        lr = info.data.get("lr", 0.0)
        largest = eta or (max(lr.get(stage, 1e-3) for stage in STAGES) if isinstance(lr, dict) else lr)
        if largest * info.data.get("lam", 0.0) > 1 + 1e-9:
            raise ValueError(
                f"eta * lam = {largest * info.data['lam']:g} would carry w beyond theta; at most 1 allowed"
            )
        return eta

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``theta``: each client's personal model."""
        return {"theta": ParameterSet("client", like="shared")}

    def epochs_in(self, round_: int) -> int:
        """Return the local epochs times K, because every mini-batch takes K gradients."""
        return self.inner_steps * self.local_epochs

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then take the server's step to the plain mean over the round's clients."""
        reply = clients.train(self.train, shared=server.shared)
        mean = clients.mean(reply.shared, current=server.shared)
        old = server.shared
        server.shared = {
            name: (1 - self.beta) * old[name] + self.beta * t if t.is_floating_point() else t
            for name, t in mean.items()
        }

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train theta and w, mini-batch by mini-batch."""
        cohort.load(shared)
        trained = cohort.trainable_names(STAGES)
        settings = cohort.optimizer(trained)
        theta = {name: cohort.model[name].clone() for name in cohort.shared_parameters}

        def step(params: Parameters, gradient: Gradient, batches: Sequence[Step]) -> Parameters:
            w = {name: params[name] for name in theta}
            inner = OptimizerState(settings, {name: params[name].clone() for name in trained})
            for _ in range(self.inner_steps):
                inner.step(gradient(inner.params, batches[0]), w, self.lam, self.proximal)
            new_w = {name: t.lerp(inner.params[name], self._step_fraction(name)) for name, t in w.items()}
            return {**inner.params, **new_w, **{f"theta/{name}": inner.params[name] for name in theta}}

        cohort.fit(STAGES, epochs=self.local_epochs, also={"theta": theta}, update=CustomStep(step))
        cohort.close_extensions()  # They measure w.
        reply = Reply(shared=cohort.shared())
        cohort.state["theta"] = {**cohort.shared(), **theta}
        cohort.load(theta)
        return reply

    def _step_fraction(self, name: str) -> float:
        """Return ``eta lam``, the fraction of the way from w to theta that a step takes."""
        return self.lam * (self.eta or self.lr_of(stage_of(name)))

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return notes on the stages in which explicit proximal steps would diverge."""
        return implicit_notes(self, model, self.lam, self.proximal)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return nothing, because every client has its own model."""
        return {}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load theta, the client's own model."""
        cohort.load(cohort.state["theta"])
