"""The weighted mean of the clients' values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from perfed.aggregation.aggregator import Aggregator, AggregatorSettings, register_aggregator
from perfed.maths.aggregate import masked_mean, weighted_mean
from perfed.tree import Tree


@register_aggregator("mean")
class Mean(Aggregator[AggregatorSettings]):
    """The weighted mean over clients; a single dishonest client can move it anywhere.

    It is the default, and needs only sums over clients.
    """

    is_mean = True

    def aggregate(self, stacked: Tree, weights: Tensor | None, current: Tree) -> dict[str, Any]:
        """Return the weighted mean, also where only sums over clients are known."""
        if weights is None or weights.ndim == 1:
            return weighted_mean(stacked, weights)
        return {
            name: masked_mean(value, weights, current[name])  # type: ignore[arg-type]
            if isinstance(value, Tensor)
            else self.aggregate(value, weights, current[name])  # type: ignore[arg-type]
            for name, value in stacked.items()
        }

    def combine(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        """Return the weighted mean."""
        return weighted_mean(stacked, weights)
