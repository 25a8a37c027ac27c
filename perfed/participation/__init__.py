"""Who takes part in a round, and how long it takes."""

from perfed.participation.settings import (
    POLICIES,
    Cyclic,
    Deadline,
    Flanp,
    OverSelection,
    Participation,
    PolicyName,
    Srpfl,
)

__all__ = ["POLICIES", "Cyclic", "Deadline", "Flanp", "OverSelection", "Participation", "PolicyName", "Srpfl"]
