"""The weighted mean of the clients' values without the smallest and largest ones, coordinate by coordinate."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from perfed.aggregation.aggregator import Aggregator, AggregatorSettings, register_aggregator
from perfed.maths.robust import map_coordinates, trimmed_mean
from perfed.tree import Tree


class TrimmedMeanSettings(AggregatorSettings):
    """How much is cut."""

    trim: float = Field(0.1, ge=0, lt=0.5, description="share of the total weight that is cut at each end")


@register_aggregator("trimmed-mean", settings=TrimmedMeanSettings)
class TrimmedMean(Aggregator[TrimmedMeanSettings]):
    """The weighted mean of every coordinate without its smallest and largest values (Yin et al. 2018, definition 2).

    It stays among the values of honest clients as long as dishonest clients have at most the share ``trim`` of the
    weight. A client of which only a part lies in a cut share counts with the rest of its weight.
    """

    def combine(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        """Return the trimmed mean of every coordinate."""
        return map_coordinates(stacked, lambda x: trimmed_mean(x, weights, self.settings.trim))
