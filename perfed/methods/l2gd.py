"""L2GD: local models that are pulled to their mean, with a random number of local iterations between exchanges."""

from __future__ import annotations

from math import floor, log1p
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.data.federation import Federation
from perfed.method.declared import ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Model, stage_of
from perfed.training.cohort import Cohort
from perfed.training.optim import Proximal


@register("l2gd", title="L2GD")
class L2GD(Method):
    """Loopless local gradient descent on a mixture of global and local models (Hanzely & Richtarik 2020, Algorithm 1).

    The method minimises ``(1/n) sum_i f_i(x_i) + (lam / 2n) sum_i |x_i - mean|^2``. With probability 1 - p an iteration
    is local, ``x_i <- x_i - eta / (n (1 - p)) grad f_i``; otherwise it averages, ``x_i <- x_i - eta lam / (n p) (x_i -
    mean)``. The mean does not change during averaging iterations, so a round consists of a sequence of local iterations
    and a sequence of averaging ones, both of draw_run_length length (at least 1).

    Scaling with n: ``lr`` is the *effective* local step ``eta / (n (1 - p))``, that is ``eta = lr n (1 - p)``; an
    averaging iteration then has the strength ``a = lam lr (1 - p) / p`` for any n. (The paper's step sizes grow with n
    too: eta = n / (2 max(L / (1 - p), lam / p)), local steps near 1 / (2 L).)

    Departures: a local iteration is an epoch of s mini-batch steps of the run's optimiser (then ``a`` is multiplied by
    s, and for SGD by 1 / (1 - momentum), to match the length of such steps). For a >= 2 the paper's factor ``1 - a``
    would diverge; a client's ``x_i - mean`` is then multiplied by ``1 / (1 + a)`` (for any a with ``proximal =
    "implicit"``). The mean is over the round's clients. Personal parameters are trained as well, but not averaged.
    """

    needs_mean: ClassVar[str] = ""
    moves_shared: ClassVar[bool] = False  # server.shared is the mean; clients continue from their own models
    fits_unused: ClassVar[str] = "train_from_mean"

    lam: float = Field(1.0, ge=0, description="lambda: how strongly the local models are pulled to their mean")
    p: float | None = Field(
        None, gt=0, lt=1, description="probability of an averaging iteration; default 1 / local_epochs, at most 1/2"
    )
    local_epochs: int = Field(
        10, ge=1, description="mean number of local epochs per round (at least 2), unless p is set"
    )
    proximal: Proximal = Field(
        "explicit", description="averaging by 1 - a where it is stable (clients with a < 2), or always by 1 / (1 + a)"
    )

    @property
    def probability(self) -> float:
        """The probability p; by default it gives ``local_epochs`` local iterations per round on average."""
        return 1 / max(2, self.local_epochs) if self.p is None else self.p

    def epochs_in(self, round_: int) -> int:
        """Return the mean number of local epochs of a round."""
        return round(1 / self.probability)

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``local``: each client's x_i."""
        return {"local": ParameterSet("client", like="shared")}

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run the local iterations, then the averaging iterations in a second exchange."""
        count = draw_run_length(clients.key("local iterations"), self.probability)
        repeats = draw_run_length(clients.key("averaging iterations"), 1 - self.probability)
        reply = clients.train(self.train, epochs=torch.tensor(count))
        server.shared = clients.mean(reply.local, current=server.shared)
        clients.run(self.average, mean=server.shared, repeats=torch.tensor(repeats))

    def train(self, cohort: Cohort, epochs: Tensor) -> Reply:
        """Run the round's local iterations."""
        cohort.load(cohort.state["local"])
        cohort.fit(STAGES, epochs=int(epochs[0]))
        cohort.state["local"] = cohort.shared()
        return Reply(local=cohort.shared())

    def train_from_mean(self, cohort: Cohort, shared: dict[str, Any]) -> None:
        """Run ``local_epochs`` local iterations, starting at the newest mean."""
        cohort.load(shared)
        cohort.state["local"] = cohort.shared()
        self.train(cohort, torch.tensor([self.local_epochs]))

    def average(self, cohort: Cohort, mean: dict[str, Any], repeats: Tensor) -> Reply:
        """Multiply ``x_i - mean`` by the factor of an averaging iteration, ``repeats`` times."""
        averaged = {}
        for name, x in cohort.state["local"].items():
            strength = self.strength(cohort.num_samples, stage_of(name))
            factor = 1 / (1 + strength)
            if self.proximal == "explicit":
                factor = torch.where(strength < 2, 1 - strength, factor)
            shrinkage = factor.pow(repeats).view(-1, *([1] * (x.ndim - 1)))
            averaged[name] = mean[name] + shrinkage * (x - mean[name]) if x.is_floating_point() else x
        cohort.state["local"] = averaged
        cohort.load(averaged)
        return Reply()

    def strength(self, num_samples: Tensor, stage: str) -> Tensor:
        """Return a ``(n,)`` of clients with ``num_samples`` ``(n,)``, for the parameters of ``stage``."""
        passes = (num_samples / self.batch_size).ceil()
        steps = passes if self.epoch_steps is None else torch.full_like(passes, self.epoch_steps)
        if self.optimizer == "sgd":
            steps = steps / (1 - self.momentum)
        return self.lam * self.lr_of(stage) * (1 - self.probability) / self.probability * steps

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return notes on the clients that average implicitly because explicit steps would diverge."""
        if self.proximal == "implicit":
            return []
        sizes = torch.tensor([len(client.train) for client in federation], dtype=torch.float64)
        implicit = {stage: int((self.strength(sizes, stage) >= 2).sum()) for stage in model.factories}
        return [
            f"{stage}: {count} of {len(sizes)} clients average implicitly, by 1 / (1 + a); 1 - a diverges for their a, "
            "which is 2 or more"
            for stage, count in implicit.items()
            if count
        ]

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return nothing, because every client has its own model."""
        return {}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load x_i, the client's own model."""
        cohort.load(cohort.state["local"])


def draw_run_length(key: Tensor, stop: float) -> int:
    """Return the number of iterations of a run that ends after each with probability ``stop``."""
    return 1 + floor(log1p(-float(rng.uniform(key, 1, torch.float64))) / log1p(-stop))
