"""FedEM: every client's data is a mixture of a few distributions that all clients share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort


@register("fedem", title="FedEM", needs="labels or values: every sample needs a likelihood of its own")
class FedEM(Method):
    """EM over M shared components with mixture weights of each client (Marfoq et al. 2021, Algorithm 1).

    The likelihood of a sample under a component is ``exp(-loss)``: the softmax's probability of its class, or, for
    regression, a Gaussian of variance 1/2. A client performs one E-step with the received components and one M-step, in
    which component m is trained on the loss weighted by ``q_m``. Mixture weights start uniform and never leave the
    client. The mixture predicts (eq. 5).

    Beyond the paper: before evaluation every client, even one that never took part, performs the E-step and the M-step
    of its mixture weights with the received components. Extensions' penalties act on each component; penalties that are
    means over samples (prototypes) weight a sample by ``q_m``, as the loss does. All components of a client share its
    personal parameters, if there are any: the training of each component starts from the same values, and the new
    values are the mean of the results, weighted by the mixture weights.
    """

    needs_mean: ClassVar[str] = ""
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""

    components: int = Field(3, ge=1, description="number M of shared components")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``components``, a bank of M on the server, and ``mixture``, each client's weights ``(M,)``."""
        return {
            "components": ParameterSet("server", like="shared", bank=self.components),
            "mixture": ParameterSet("client", init=self._init_mixture),
        }

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse survival data, in which single samples have no likelihood."""
        if info.task == "survival":
            raise PerfedError(
                "fedem needs a likelihood of each sample, but the Cox partial likelihood (survival) belongs to all "
                "samples together; allowed: classification, regression"
            )

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of all components, each of which uses all samples."""
        return self.components * self.local_epochs

    def _init_mixture(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        return {"weights": torch.full((self.components,), 1 / self.components, dtype=info.dtype)}

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute the mean of each component."""
        reply = clients.train(self.train, components=server.components)
        server.components = clients.mean(reply.components, reply.num_samples, current=server.components)

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the shared parameters of all components."""
        return {"components": server.components}

    # Clients -----------------------------------------------------------------------------------------------

    def train(self, cohort: Cohort, components: Parameters) -> Reply:
        """Run the E-step, the M-step of the mixture weights, and the M-step of the components."""
        responsibilities = self.expect(cohort, components)
        trained = self.maximise(cohort, components, responsibilities, self.local_epochs)
        self._set_components(cohort, components, trained)
        return Reply(components=trained, num_samples=cohort.num_samples)

    def expect(self, cohort: Cohort, components: Parameters) -> Tensor:
        """Run the E-step and the M-step of the mixture weights.

        Returns:
            ``q_sm`` in proportion to ``pi_m exp(-loss_m(s))``, ``(total, M)``. The mixture weights become ``pi_m =
            mean_s q_sm``.
        """
        clients_of_samples = cohort.client_of(cohort.samples())
        entries = [cohort.sample_losses(_select_component(components, m)) for m in range(self.components)]
        prior = cohort.state["mixture"]["weights"].log()
        q = torch.softmax(prior[clients_of_samples] - torch.stack(entries, 1), 1)
        sums = q.new_zeros(cohort.n, self.components).index_add_(0, clients_of_samples, q)
        cohort.state["mixture"] = {"weights": sums / cohort.num_samples[:, None]}
        return q

    def maximise(self, cohort: Cohort, components: Parameters, q: Tensor, epochs: int) -> Parameters:
        """Train component m on ``sum_s q_sm loss_m(s)``; return the trained components, ``(n, M, ...)``."""
        start = {name: tensor.clone() for name, tensor in cohort.personal().items()}
        trained, personal = [], []
        for m in range(self.components):
            cohort.load(_select_component(components, m))
            cohort.model.update({name: tensor.clone() for name, tensor in start.items()})
            samples = replace(cohort.samples(), weight=q[:, m])
            cohort.fit(STAGES, epochs=epochs, samples=samples)
            trained.append(cohort.shared())
            personal.append(cohort.personal())
        weights = cohort.state["mixture"]["weights"]
        for name, tensor in start.items():
            if tensor.is_floating_point():
                cohort.model[name] = torch.einsum(
                    "nm,nm...->n...", weights, torch.stack([p[name] for p in personal], 1)
                )
        return {name: torch.stack([entry[name] for entry in trained], 1) for name in components}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Compute the mixture weights for the received components."""
        self.expect(cohort, payload["components"])
        self._set_components(cohort, payload["components"], payload["components"])

    def _set_components(self, cohort: Cohort, received: Parameters, components: Parameters) -> None:
        """Store ``components`` for :meth:`predict`, and load each client's component of largest weight as its model."""
        largest = cohort.state["mixture"]["weights"].argmax(1)
        rows = torch.arange(cohort.n)
        cohort.load({name: bank[rows, largest] for name, bank in received.items()})
        cohort.model.update({name: bank[rows, largest] for name, bank in components.items()})
        cohort.scratch["components"] = components

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return log-probabilities ``log sum_m pi_m softmax_m(x)``; in regression ``sum_m pi_m h_m(x)``."""
        components: Parameters = cohort.scratch["components"]
        outputs = torch.stack(
            [cohort.forward(x, params=_select_component(components, m)) for m in range(self.components)]
        )
        weights: Tensor = cohort.state["mixture"]["weights"].T.view(*outputs.shape[:2], *([1] * (outputs.ndim - 2)))
        if cohort.num_classes is None:
            return (weights * outputs).sum(0)
        return torch.logsumexp(weights.log() + F.log_softmax(outputs, -1), 0)


@register("fedem-ft", title="FedEM-FT", needs="labels or values: every sample needs a likelihood of its own")
class FedEMFT(FedEM):
    """FedEM; each client evaluates copies of the components fine-tuned on its own data (Xu et al. 2023, Table 1).

    Fine-tuning is the M-step of the components, on the local loss without extensions.
    """

    finetune_epochs: int = Field(10, ge=0, description="local epochs of fine-tuning before evaluation")

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Compute the mixture weights for the received components, then run their M-step."""
        received = payload["components"]
        trained = self.maximise(cohort, received, self.expect(cohort, received), self.finetune_epochs)
        self._set_components(cohort, received, trained)


def _select_component(components: Parameters, m: int) -> Parameters:
    """Return component m of every client, ``(n, ...)``."""
    return {name: bank[:, m] for name, bank in components.items()}
