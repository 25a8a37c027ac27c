"""Time to accuracy: the first evaluated round in which the mean accuracy was at least a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Target = dict[str, Any]
"""``accuracy`` (the target, a fraction) and ``WHEN`` it was reached, None where it never was."""

WHEN = ("round", "virtual_time", "training_seconds")
# Three clients at 0.7 each have the mean 0.6999999999999998: rounding alone must not miss a target.
ROUNDING = 1e-9


def unreached(targets: Sequence[float]) -> list[Target]:
    """The targets before training, none of them reached."""
    return [{"accuracy": target, **dict.fromkeys(WHEN)} for target in targets]


def updated(found: Sequence[Target], record: Mapping[str, Any]) -> list[Target]:
    """``found`` after one more round: targets that it is the first to reach get its number and times.

    Args:
        found: the targets so far.
        record: the round's line of ``rounds.jsonl``; a round that was not evaluated reaches nothing.
    """
    if "accuracy" not in record:
        return list(found)
    mean, when = record["accuracy"]["mean"], {key: record[key] for key in WHEN}
    return [
        {**target, **when} if target["round"] is None and mean >= target["accuracy"] - ROUNDING else target
        for target in found
    ]


def percent(target: float) -> str:
    """A target as text, such as ``70 %``."""
    return f"{100 * target:g} %"


def duration(value: float) -> str:
    """Virtual time as text: four digits, and all those before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def described(found: Sequence[Target]) -> list[str]:
    """One line per target: the round and virtual time in which it was reached, or that it was not.

    Without a clock virtual time is the round's number, which is then said once.
    """
    return [f"{percent(t['accuracy'])}: {_reached(t)}" for t in found]


def _reached(target: Target) -> str:
    if target["round"] is None:
        return "not reached"
    time = target["virtual_time"]
    return f"round {target['round']}" + (f", virtual time {duration(time)} s" if time != target["round"] else "")
