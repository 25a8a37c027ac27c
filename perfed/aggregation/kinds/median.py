"""The weighted median of the clients' values, coordinate by coordinate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from perfed.aggregation.aggregator import Aggregator, AggregatorSettings, register_aggregator
from perfed.maths.robust import map_coordinates, weighted_median
from perfed.tree import Tree


@register_aggregator("median")
class Median(Aggregator[AggregatorSettings]):
    """The weighted median over clients of every coordinate (Yin et al. 2018, definition 1).

    It stays among the values of honest clients as long as these have more than half of the weight. Where clients hold
    different labels, honest clients disagree too, and the median can be far from their mean.
    """

    def combine(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        """Return the weighted median of every coordinate."""
        return map_coordinates(stacked, lambda x: weighted_median(x, weights))
