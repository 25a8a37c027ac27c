"""Who takes part in a round, and how long it takes."""

from perfed.participation.policy import (
    POLICIES,
    Arrivals,
    Ask,
    Policy,
    PolicyContext,
    PolicySettings,
    policy_names,
    register_policy,
    take_first,
    take_without,
)
from perfed.participation.settings import Participation

__all__ = [
    "POLICIES",
    "Arrivals",
    "Ask",
    "Participation",
    "Policy",
    "PolicyContext",
    "PolicySettings",
    "policy_names",
    "register_policy",
    "take_first",
    "take_without",
]
