"""The weighted mean of the clients' updates after scaling long ones down to a bound."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from perfed.aggregation.aggregator import Aggregator, AggregatorSettings, register_aggregator
from perfed.maths.aggregate import weighted_mean
from perfed.maths.robust import bound_updates
from perfed.tree import Tree


class NormBoundSettings(AggregatorSettings):
    """How long an update may be."""

    bound: float = Field(
        1.0, gt=0, description="largest Euclidean norm of a client's update; longer ones are scaled down to it"
    )


@register_aggregator("norm-bound", settings=NormBoundSettings)
class NormBound(Aggregator[NormBoundSettings]):
    """The weighted mean with every client's update scaled down to a largest norm (Sun et al. 2019, section 4.2).

    A client's update is the difference of everything that is averaged from the server's current values, as one vector.
    Dishonest clients with the share s of the weight move the mean by at most ``s * bound`` in a round.
    """

    def combine(self, stacked: Tree, weights: Tensor, current: Tree) -> dict[str, Any]:
        """Return the weighted mean of the bounded updates, added to the current values."""
        return weighted_mean(bound_updates(stacked, current, self.settings.bound), weights)
