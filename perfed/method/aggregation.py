"""Checks of whether a method and its extensions work with a robust kind of aggregation."""

from __future__ import annotations

from perfed.aggregation.settings import Aggregation
from perfed.errors import PerfedError
from perfed.method.method import UNDECLARED, Method


def find_reason_for_mean(method: Method) -> str:
    """Return why the method or one of its extensions needs the mean over clients; empty if neither needs it.

    A class that defines ``round`` without :attr:`Method.needs_mean <perfed.method.method.Method.needs_mean>` counts as
    undeclared, whatever its base class declares.
    """
    declaring_class = next(cls for cls in type(method).__mro__ if {"needs_mean", "round"} & vars(cls).keys())
    if reason := str(vars(declaring_class).get("needs_mean", UNDECLARED)):
        return reason
    reasons = ((extension.name, extension.needs_mean) for extension in method.extensions)
    return next((f"in the extension '{name}', {reason}" for name, reason in reasons if reason), "")


def check_aggregation(aggregation: Aggregation, method: Method, *, sums_only: bool) -> None:
    """Check that ``aggregation`` can replace the mean in the method's rounds.

    Args:
        aggregation: the ``[aggregation]`` table.
        method: the method with its extensions.
        sums_only: whether the server sees only sums of replies (``[secure_aggregation]``).

    Raises:
        PerfedError: it cannot; the message gives the reason.
    """
    if aggregation.aggregator.is_mean:
        return
    reason = find_reason_for_mean(method)
    if sums_only:
        reason = "it needs the replies of single clients, and under [secure_aggregation] the server sees only their sum"
    if reason:
        raise refuse_aggregation(aggregation, reason)


def refuse_aggregation(aggregation: Aggregation, reason: str) -> PerfedError:
    """Return the error which says, with the reason, that ``aggregation`` cannot replace the mean."""
    return PerfedError(f"aggregation.kind = '{aggregation.kind}' cannot replace the mean here: {reason}; allowed: mean")
