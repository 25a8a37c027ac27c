"""How the server combines the clients' replies: the mean, or an estimator that dishonest clients cannot move far."""

from perfed.aggregation.aggregator import (
    AGGREGATORS,
    Aggregator,
    AggregatorSettings,
    aggregator_names,
    register_aggregator,
)
from perfed.aggregation.settings import Aggregation

__all__ = [
    "AGGREGATORS",
    "Aggregation",
    "Aggregator",
    "AggregatorSettings",
    "aggregator_names",
    "register_aggregator",
]
