"""Learning the weights of a blend: pooled weights from sums over clients, and local weights of each client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from perfed.data.labels import Task
from perfed.maths.blending import (
    ROWS,
    Descent,
    Prior,
    Rows,
    Sums,
    drop_small_weights,
    guard_weights,
    prepare_outputs,
    shrink_site_weights,
)
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.model.chain import STAGES
from perfed.model.placement import FROZEN, Placement
from perfed.training.cohort import Cohort

Numbers = dict[str, Tensor]


class Blending(Method):
    """Learning how to mix K candidate models at each client (:mod:`perfed.maths.blending`); nothing else is trained.

    The inputs of a client are the candidates' outputs for its samples, where the output for a training sample comes
    from a model that was fitted without the sample: K blocks of C outputs (logits, values or log hazards), and in the
    last column the number of the fold. A round is one exchange: the server sends weights, and clients reply with the
    number of samples, the loss, its gradient and its Hessian, each summed over samples. Each client derives weights of
    its own from the pooled weights and the loss around them. For regression, a client uses only its best local model if
    its weights have a larger error (:func:`~perfed.maths.blending.guard_weights`).

    The method is not registered under a name, because only the caller knows the candidates.
    """

    needs_mean: ClassVar[str] = "the pooled weights of a blend follow sums over all rows"
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, FROZEN)
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = None

    candidates: int = Field(ge=1, description="K, the number of candidates")
    task: Task = Field(description="task of the targets")
    prior_rows: float = Field(50.0, ge=0, description="number of rows that the pooled weights are worth at a client")
    own: tuple[int, ...] = Field((), description="indices of the candidates that are local models of the client")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``told``: the sums over clients in each round so far."""
        return {"told": ParameterSet("server", init=self._init_sums)}

    def _init_sums(self, info: FederationInfo, key: Tensor) -> Numbers:
        k = self.candidates
        shapes = {"rows": (0,), "value": (0,), "gradient": (0, k), "hessian": (0, k, k)}
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def epochs_in(self, round_: int) -> int:
        """Return 0, because no model is trained."""
        return 0

    # Server ------------------------------------------------------------------------------------------------

    def descent(self, server: ServerState) -> Descent:
        """Return the state of the descent after the rounds so far."""
        descent, sums = Descent.start(self.candidates, mixture=self.task == "classification"), server.told
        for rows, value, gradient, hessian in zip(*(sums[name].numpy() for name in _SUMS), strict=True):
            descent = descent.advance(Sums(float(rows), float(value), gradient, hessian))
        return descent

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange: send weights, and add the sums of the replies to the state."""
        reply = clients.run(self.blend_sums, weights=torch.from_numpy(self.descent(server).trial_weights))
        new = {name: reply.blend[name].double().sum(0)[None] for name in _SUMS}
        server.told = {name: torch.cat([server.told[name], new[name]]) for name in _SUMS}

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the pooled weights, and the quadratic model of the mean loss around them."""
        prior = self.descent(server).prior
        return {"pooled": {name: torch.tensor(getattr(prior, name), dtype=torch.float64) for name in _PRIOR}}

    # Clients -----------------------------------------------------------------------------------------------

    def blend_sums(self, cohort: Cohort, weights: Tensor) -> Reply:
        """Return each client's sums over its samples at ``weights``, the only data that leave a client."""
        sums = [
            rows.compute_sums(weights[row].cpu().double().numpy())
            for row, rows in enumerate(self._iterate_rows(cohort))
        ]
        stacked = {
            name: np.stack([np.asarray(getattr(client_sums, name), dtype=np.float64) for client_sums in sums])
            for name in _SUMS
        }
        return Reply(blend={name: torch.from_numpy(values).to(cohort.device) for name, values in stacked.items()})

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Compute the weights of each client, ``cohort.scratch["weights"]`` ``(clients, K)``."""
        client_weights = []
        for row, rows in enumerate(self._iterate_rows(cohort)):
            weights, value, gradient, hessian = (payload["pooled"][name][row].cpu().numpy() for name in _PRIOR)
            prior = Prior(weights, float(value), gradient, hessian)
            learnt_weights = drop_small_weights(shrink_site_weights(rows, prior, self.prior_rows))
            client_weights.append(guard_weights(rows, learnt_weights, self.own))
        cohort.scratch["weights"] = torch.from_numpy(np.stack(client_weights)).to(cohort.device)

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the mixture's outputs: log-probabilities, values or log hazards."""
        outputs = x[..., :-1].unflatten(2, (self.candidates, -1))
        weights = cohort.scratch.get("weights")
        if weights is None:  # not personalised yet
            weights = outputs.new_full((len(outputs), self.candidates), 1 / self.candidates)
        if self.task == "classification":
            mixed = torch.einsum("nbkc,nk->nbc", outputs.softmax(-1), weights.to(outputs.dtype))
            return mixed.clamp_min(torch.finfo(outputs.dtype).tiny).log()
        return torch.einsum("nbkc,nk->nbc", outputs, weights.to(outputs.dtype))

    def _iterate_rows(self, cohort: Cohort) -> Iterator[Rows]:
        """Yield the candidates' outputs and the targets of each client's training samples."""
        samples = cohort.samples()
        for start, count in zip(samples.starts.tolist(), samples.counts.tolist(), strict=True):
            x, y = (part[start : start + count].cpu().numpy() for part in (samples.x, samples.y))
            outputs = x[:, :-1].reshape(count, self.candidates, -1).astype(np.float64)
            rows, targets = prepare_outputs(self.task, y, list(outputs.swapaxes(0, 1)))
            yield ROWS[self.task](rows, targets, x[:, -1].astype(np.int64))


_SUMS = ("rows", "value", "gradient", "hessian")
_PRIOR = ("weights", "value", "gradient", "hessian")
