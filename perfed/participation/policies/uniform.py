"""Uniform participation, the default."""

from __future__ import annotations

from perfed.participation.policy import Policy, PolicySettings, register_policy


@register_policy("uniform")
class Uniform(Policy[PolicySettings]):
    """All replies of ``rate`` x N clients are used, which are drawn in each round."""
