"""Participation of clients in rounds, and virtual time."""

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
