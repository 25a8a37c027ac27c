"""kNN-Per: FedAvg's model, mixed with the nearest samples of each client's own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from perfed import rng
from perfed.data.labels import no_labels
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.training.cohort import Cohort

# What the search for neighbours may hold at a time; the queries are cut up accordingly.
SEARCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Memory:
    """What clients remember, side by side; clients with less are padded.

    Attributes:
        features: ``(n, m, d)``.
        labels: ``(n, m)``.
        held: ``(n, m)``, False for padding; every client holds at least one sample.
    """

    features: Tensor
    labels: Tensor
    held: Tensor

    def vote(self, queries: Tensor, num_classes: int, k: int, similarity: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Class probabilities by the k nearest samples of each client's own memory.

        Args:
            queries: ``(n, q, d)``.
            num_classes: C.
            k: number of neighbours; all of a memory that is smaller.
            similarity: logarithm of a neighbour's weight, from its Euclidean distance and d.

        Returns:
            ``(n, q, C)``.
        """
        k = min(k, self.features.shape[1])
        norms = self.features.square().sum(2).masked_fill(~self.held, torch.inf)
        if torch.compiler.is_compiling():  # a graph for any number of queries
            return self._vote(queries, norms, num_classes, k, similarity)
        per_query = len(norms) * (norms.shape[1] + k * (self.features.shape[2] + num_classes))
        width = max(1, SEARCH_BYTES // (per_query * queries.element_size()))
        parts = [self._vote(part, norms, num_classes, k, similarity) for part in torch.split(queries, width, dim=1)]
        return torch.cat(parts, dim=1)

    def _vote(
        self, queries: Tensor, norms: Tensor, num_classes: int, k: int, similarity: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        # q.m - |m|^2 / 2 falls with the distance; it is exact enough to choose by, not to weigh by.
        nearness = torch.baddbmm(norms[:, None] / -2, queries, self.features.transpose(1, 2))
        found = nearness.topk(k, dim=2).indices
        found += norms.shape[1] * torch.arange(len(norms), device=norms.device)[:, None, None]
        gaps = self.features.flatten(0, 1).index_select(0, found.flatten()).view(*found.shape, -1)
        distance = gaps.sub_(queries[:, :, None]).norm(dim=3)
        held, labels = self.held.flatten()[found], self.labels.flatten()[found]
        weight = similarity(distance, queries.shape[2]).masked_fill(~held, -torch.inf).softmax(2)
        return (one_hot(labels, num_classes) * weight[..., None]).sum(2)


@register("knnper", title="kNN-Per", needs="class labels")
class KNNPer(FedAvg):
    """FedAvg; a client mixes its softmax with a vote of its nearest training samples (Marfoq et al. 2022, section 3).

    ``p(c) = interpolation * kNN(c) + (1 - interpolation) * softmax(c)``, the outputs are ``log p``. Neighbours are
    the nearest in what the head gets; they vote with the kernel of their distance, normalised. The paper tunes the
    interpolation per client on validation data; it is one number here.

    Scoring a client on its own training data finds each sample in the memory.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS}, refused={"sample": "its clients' own models hold their rows"}
    )

    neighbours: int = Field(10, ge=1, description="k, or the whole memory where it is smaller")
    interpolation: float = Field(0.5, ge=0, le=1, description="weight of the neighbours (FedPAC: from 0.5 to 0.8)")
    kernel: Literal["exponential", "gaussian"] = Field(
        "exponential",
        description="exp(-distance / scale), or exp(-distance^2 / (features * scale)) (authors' program)",
    )
    scale: float = Field(1.0, gt=0, description="length scale of the kernel")
    capacity: float = Field(1.0, gt=0, le=1, description="share of its training data that a client remembers")

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train as FedAvg does; there must be classes."""
        if cohort.num_classes is None:
            raise no_labels("knnper needs", cohort.task)
        return super().train(cohort, shared)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """The global model, and the memory of its features."""
        cohort.load(payload["shared"])
        cohort.scratch["memory"] = asdict(self.remember(cohort))

    def remember(self, cohort: Cohort) -> Memory:
        """Features and labels of each client's training data, of a random ``capacity`` of it (rounded up)."""
        samples = cohort.samples()
        position = np.arange(int(samples.counts.max()))
        inside = torch.from_numpy(position < samples.counts[:, None])
        keys = rng.key(cohort.key("memory").cpu()[:, None], torch.from_numpy(position))
        kept = np.ceil(self.capacity * samples.counts - 1e-9).astype(np.int64)
        drawn = rng.draw_permutation(keys.masked_fill(~inside, torch.iinfo(torch.int64).max))[:, : int(kept.max())]
        held = torch.from_numpy(position[: int(kept.max())] < kept[:, None])
        index = (torch.from_numpy(samples.starts)[:, None] + drawn).masked_fill(~held, 0).to(cohort.device)
        return Memory(cohort.representation().flatten(1)[index], samples.y[index], held.to(cohort.device))

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """``log(interpolation * kNN + (1 - interpolation) * softmax)``."""
        if "memory" not in cohort.scratch:  # the model as local training left it
            cohort.scratch["memory"] = asdict(self.remember(cohort))
        before = cohort.chain.stages_before("head")
        features = cohort.forward(x, stages=before)
        logits = cohort.forward(features, stages=cohort.chain.stages[len(before) :])
        memory = Memory(**cohort.scratch["memory"])
        vote = memory.vote(features.flatten(2), logits.shape[-1], self.neighbours, self.similarity)
        share = torch.tensor([self.interpolation, 1 - self.interpolation], dtype=logits.dtype, device=logits.device)
        smallest = torch.finfo(logits.dtype).tiny  # a class without a neighbour, where nothing else counts
        return torch.logaddexp(share[0].log() + vote.clamp_min(smallest).log(), share[1].log() + logits.log_softmax(-1))

    def similarity(self, distance: Tensor, width: int) -> Tensor:
        """Logarithm of the kernel of distances between features of ``width`` numbers."""
        return -distance / self.scale if self.kernel == "exponential" else -distance.square() / (width * self.scale)
