"""Who takes part in a round, and how long it takes."""

from perfed.participation.settings import POLICIES, Deadline, Flanp, OverSelection, Participation, PolicyName, Srpfl

__all__ = ["POLICIES", "Deadline", "Flanp", "OverSelection", "Participation", "PolicyName", "Srpfl"]
