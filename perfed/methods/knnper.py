"""kNN-Per: FedAvg's model, combined with the nearest samples of each client's own data."""

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

# The memory that the search for neighbours may use at a time; queries are split accordingly.
SEARCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Memory:
    """The stored samples of several clients; clients with fewer samples are padded.

    Attributes:
        features: ``(n, m, d)``.
        labels: ``(n, m)``.
        held: ``(n, m)``, False for padding; every client has at least one sample.
    """

    features: Tensor
    labels: Tensor
    held: Tensor

    def vote(self, queries: Tensor, num_classes: int, k: int, similarity: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the class probabilities by the k nearest samples in each client's memory.

        Args:
            queries: ``(n, q, d)``.
            num_classes: C.
            k: number of neighbours; a smaller memory votes as a whole.
            similarity: function that maps Euclidean distances and d to logarithms of the neighbours' weights.

        Returns:
            ``(n, q, C)``.
        """
        k = min(k, self.features.shape[1])
        norms = self.features.square().sum(2).masked_fill(~self.held, torch.inf)
        if torch.compiler.is_compiling():  # The graph must work for any number of queries.
            return self._vote(queries, norms, num_classes, k, similarity)
        per_query = len(norms) * (norms.shape[1] + k * (self.features.shape[2] + num_classes))
        width = max(1, SEARCH_BYTES // (per_query * queries.element_size()))
        parts = [self._vote(part, norms, num_classes, k, similarity) for part in torch.split(queries, width, dim=1)]
        return torch.cat(parts, dim=1)

    def _vote(
        self, queries: Tensor, norms: Tensor, num_classes: int, k: int, similarity: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        # q.m - |m|^2 / 2 decreases with the distance; it is exact enough to choose neighbours, not to weight them.
        nearness = torch.baddbmm(norms[:, None] / -2, queries, self.features.transpose(1, 2))
        nearest = nearness.topk(k, dim=2).indices
        nearest += norms.shape[1] * torch.arange(len(norms), device=norms.device)[:, None, None]
        gaps = self.features.flatten(0, 1).index_select(0, nearest.flatten()).view(*nearest.shape, -1)
        distance = gaps.sub_(queries[:, :, None]).norm(dim=3)
        is_sample, labels = self.held.flatten()[nearest], self.labels.flatten()[nearest]
        weight = similarity(distance, queries.shape[2]).masked_fill(~is_sample, -torch.inf).softmax(2)
        return (one_hot(labels, num_classes) * weight[..., None]).sum(2)


@register("knnper", title="kNN-Per", needs="class labels")
class KNNPer(FedAvg):
    """FedAvg; clients mix the softmax with a vote of their nearest training samples (Marfoq et al. 2022, section 3).

    ``p(c) = interpolation * kNN(c) + (1 - interpolation) * softmax(c)``, and the outputs are ``log p``. Distances are
    between the inputs of the head; the neighbours' votes are weighted by the kernel of the distance, normalised. The
    paper tunes the interpolation per client on validation data; here it is one setting.

    When a client is scored on its training data, each sample is its own nearest neighbour.
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"shared": PARAMETERS, "num_samples": ROWS}, refused={"sample": "the clients' models contain their rows"}
    )

    neighbours: int = Field(10, ge=1, description="number k of neighbours; a smaller memory votes as a whole")
    interpolation: float = Field(0.5, ge=0, le=1, description="weight of the neighbours (FedPAC: from 0.5 to 0.8)")
    kernel: Literal["exponential", "gaussian"] = Field(
        "exponential",
        description="exp(-distance / scale), or exp(-distance^2 / (features * scale)) (authors' program)",
    )
    scale: float = Field(1.0, gt=0, description="length scale of the kernel")
    capacity: float = Field(1.0, gt=0, le=1, description="share of its training data that a client stores")

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train as FedAvg does, after checking that there are class labels."""
        if cohort.num_classes is None:
            raise no_labels("knnper needs", cohort.task)
        return super().train(cohort, shared)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the global model, and store the features of the training data."""
        cohort.load(payload["shared"])
        cohort.scratch["memory"] = asdict(self.build_memory(cohort))

    def build_memory(self, cohort: Cohort) -> Memory:
        """Return features and labels of a random ``capacity`` (rounded up) of each client's training data."""
        samples = cohort.samples()
        positions = np.arange(int(samples.counts.max()))
        inside = torch.from_numpy(positions < samples.counts[:, None])
        keys = rng.key(cohort.key("memory").cpu()[:, None], torch.from_numpy(positions))
        sizes = np.ceil(self.capacity * samples.counts - 1e-9).astype(np.int64)
        order = rng.draw_permutation(keys.masked_fill(~inside, torch.iinfo(torch.int64).max))[:, : int(sizes.max())]
        is_sample = torch.from_numpy(positions[: int(sizes.max())] < sizes[:, None])
        index = (torch.from_numpy(samples.starts)[:, None] + order).masked_fill(~is_sample, 0).to(cohort.device)
        return Memory(cohort.representation().flatten(1)[index], samples.y[index], is_sample.to(cohort.device))

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return ``log(interpolation * kNN + (1 - interpolation) * softmax)``."""
        if "memory" not in cohort.scratch:  # right after local training
            cohort.scratch["memory"] = asdict(self.build_memory(cohort))
        before = cohort.chain.stages_before("head")
        features = cohort.forward(x, stages=before)
        logits = cohort.forward(features, stages=cohort.chain.stages[len(before) :])
        memory = Memory(**cohort.scratch["memory"])
        vote = memory.vote(features.flatten(2), logits.shape[-1], self.neighbours, self.similarity)
        share = torch.tensor([self.interpolation, 1 - self.interpolation], dtype=logits.dtype, device=logits.device)
        smallest = torch.finfo(logits.dtype).tiny  # avoids log(0) for a class without a neighbour
        return torch.logaddexp(share[0].log() + vote.clamp_min(smallest).log(), share[1].log() + logits.log_softmax(-1))

    def similarity(self, distance: Tensor, width: int) -> Tensor:
        """Return the logarithm of the kernel of distances between features of ``width`` values."""
        return -distance / self.scale if self.kernel == "exponential" else -distance.square() / (width * self.scale)
