"""Time to accuracy: the first evaluated round in which the mean accuracy was at least a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfed.run.callback import Callback, Running
from perfed.run.round_log import find_lost_rounds

Target = dict[str, Any]
"""``accuracy`` (the target, a fraction), ``WHEN`` it was reached, after how many ``BYTES``; None where it never was."""

WHEN = ("round", "virtual_time", "training_seconds")
BYTES = ("bytes_up", "bytes_down")
# Three clients at 0.7 each have the mean 0.6999999999999998: rounding alone must not miss a target.
ROUNDING = 1e-9


class Targets(Callback):
    """A callback that records when each target accuracy is reached; with ``stop`` the run ends after the last."""

    name = "targets"
    targets: tuple[float, ...]
    stop: bool = False

    def begin(self, run: Running) -> None:
        """Initialise the targets as not reached, unless the run is resumed."""
        self.state.setdefault("targets", init_targets(self.targets))

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Record the targets that the round is the first to reach."""
        self.state["targets"] = update_targets(self.state["targets"], run.history)
        return self.stop and all(target["round"] is not None for target in self.state["targets"])

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Add the targets to the summary, with a note if they ended the run."""
        summary["targets"] = self.state["targets"]
        if run.progress.stopped_by == self.name:
            ended = f"training ended after round {run.done} of at most {run.rounds}"
            summary["notes"].append(f"every target was reached: {ended}")


def init_targets(targets: Sequence[float]) -> list[Target]:
    """Return the targets before training, none of them reached."""
    return [{"accuracy": target, **dict.fromkeys((*WHEN, *BYTES))} for target in targets]


def update_targets(targets: Sequence[Target], records: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return the targets after one more round; newly reached ones have its number, times and bytes.

    Args:
        targets: the targets so far.
        records: the lines of ``rounds.jsonl`` so far, that of the round at the end; a round that was not evaluated
            reaches nothing. If some are lost, the bytes are ``None``.
    """
    record = records[-1]
    if "accuracy" not in record:
        return list(targets)
    mean, when = record["accuracy"]["mean"], {key: record[key] for key in WHEN}
    if not find_lost_rounds(records, record["round"]):
        when |= {key: sum(line[key] for line in records) for key in BYTES}
    return [
        {**target, **when} if target["round"] is None and mean >= target["accuracy"] - ROUNDING else target
        for target in targets
    ]


def format_percent(target: float) -> str:
    """Return a target as text, such as ``70 %``."""
    return f"{100 * target:g} %"


def format_duration(value: float) -> str:
    """Return a virtual time as text with four significant digits, or all digits before the decimal point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def describe_targets(targets: Sequence[Target]) -> list[str]:
    """Return one line per target: the round, virtual time and bytes after which it was reached, or that it was not.

    Without a clock, the virtual time is the number of the round, which is then written only once.
    """
    return [f"{format_percent(t['accuracy'])}: {_describe_target(t)}" for t in targets]


def _describe_target(target: Target) -> str:
    if target["round"] is None:
        return "not reached"
    time = target["virtual_time"]
    clock = f", virtual time {format_duration(time)} s" if time != target["round"] else ""
    moved = sum(target.get(key) or 0 for key in BYTES)
    return f"round {target['round']}{clock}" + (f", {moved / 1e6:.3g} MB up and down" if moved else "")
