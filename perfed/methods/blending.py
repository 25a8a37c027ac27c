"""The weights of a blend between clients: pooled ones from sums, and each client's own, which stay where it is."""

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
    """Learns how to mix K candidates at each client (:mod:`perfed.maths.blending`); nothing else is trained.

    A client's inputs are what the candidates say of its samples, of training samples while these were held out: K
    blocks of C outputs (logits, values or log hazards), and last the number of the fold. A round is one exchange. The
    server sends weights, and clients reply with sums over their samples: how many, the loss, its gradient and its
    Hessian. With the pooled weights, and the loss around them, each client has its own. Of values it keeps its best own
    model where these err more (:func:`~perfed.maths.blending.guard_weights`).

    It has no name for experiments: who knows the candidates makes it.
    """

    needs_mean: ClassVar[str] = "the pooled weights of a blend follow sums over all rows"
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, FROZEN)
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = None

    candidates: int = Field(ge=1, description="K")
    task: Task = Field(description="of the targets")
    prior_rows: float = Field(50.0, ge=0, description="rows that the pooled weights count as at a client")
    own: tuple[int, ...] = Field((), description="which of the candidates are models of the client alone")

    def sets(self) -> dict[str, ParameterSet]:
        """``told``: the clients' sums in each round so far."""
        return {"told": ParameterSet("server", init=self._nothing)}

    def _nothing(self, info: FederationInfo, key: Tensor) -> Numbers:
        k = self.candidates
        shapes = {"rows": (0,), "value": (0,), "gradient": (0, k), "hessian": (0, k, k)}
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def epochs_in(self, round_: int) -> int:
        """Return 0: nothing is trained."""
        return 0

    # Server ------------------------------------------------------------------------------------------------

    def descent(self, server: ServerState) -> Descent:
        """Return where the rounds so far have led."""
        found, told = Descent.start(self.candidates, mixture=self.task == "classification"), server.told
        for rows, value, gradient, hessian in zip(*(told[name].numpy() for name in _SUMS), strict=True):
            found = found.advance(Sums(float(rows), float(value), gradient, hessian))
        return found

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange: weights down, sums up."""
        reply = clients.run(self.blend_sums, weights=torch.from_numpy(self.descent(server).trial_weights))
        new = {name: reply.blend[name].double().sum(0)[None] for name in _SUMS}
        server.told = {name: torch.cat([server.told[name], new[name]]) for name in _SUMS}

    def download(self, server: ServerState) -> dict[str, Any]:
        """The pooled weights, and the mean loss around them."""
        prior = self.descent(server).prior
        return {"pooled": {name: torch.tensor(getattr(prior, name), dtype=torch.float64) for name in _PRIOR}}

    # Clients -----------------------------------------------------------------------------------------------

    def blend_sums(self, cohort: Cohort, weights: Tensor) -> Reply:
        """Sum over the samples: all that leaves a client."""
        found = [rows.compute_sums(weights[row].cpu().double().numpy()) for row, rows in enumerate(self._rows(cohort))]
        stacked = {name: np.stack([np.asarray(getattr(at, name), dtype=np.float64) for at in found]) for name in _SUMS}
        return Reply(blend={name: torch.from_numpy(values).to(cohort.device) for name, values in stacked.items()})

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Give each client weights of its own: ``cohort.scratch["weights"]`` ``(clients, K)``."""
        found = []
        for row, rows in enumerate(self._rows(cohort)):
            weights, value, gradient, hessian = (payload["pooled"][name][row].cpu().numpy() for name in _PRIOR)
            prior = Prior(weights, float(value), gradient, hessian)
            learnt = drop_small_weights(shrink_site_weights(rows, prior, self.prior_rows))
            found.append(guard_weights(rows, learnt, self.own))
        cohort.scratch["weights"] = torch.from_numpy(np.stack(found)).to(cohort.device)

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the mixture: logarithms of probabilities, values or log hazards."""
        said = x[..., :-1].unflatten(2, (self.candidates, -1))
        weights = cohort.scratch.get("weights")
        if weights is None:  # before there are any
            weights = said.new_full((len(said), self.candidates), 1 / self.candidates)
        if self.task == "classification":
            mixed = torch.einsum("nbkc,nk->nbc", said.softmax(-1), weights.to(said.dtype))
            return mixed.clamp_min(torch.finfo(said.dtype).tiny).log()
        return torch.einsum("nbkc,nk->nbc", said, weights.to(said.dtype))

    def _rows(self, cohort: Cohort) -> Iterator[Rows]:
        """What the candidates say of each client's training samples."""
        samples = cohort.samples()
        for start, count in zip(samples.starts.tolist(), samples.counts.tolist(), strict=True):
            x, y = (part[start : start + count].cpu().numpy() for part in (samples.x, samples.y))
            said = x[:, :-1].reshape(count, self.candidates, -1).astype(np.float64)
            rows, targets = prepare_outputs(self.task, y, list(said.swapaxes(0, 1)))
            yield ROWS[self.task](rows, targets, x[:, -1].astype(np.int64))


_SUMS = ("rows", "value", "gradient", "hessian")
_PRIOR = ("weights", "value", "gradient", "hessian")
