"""Time to accuracy of several runs: when each method reached the targets, and how much sooner than its base method."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.methods.presets import method_and_policy
from perfed.report.runs import Run, methods_of
from perfed.report.text import UNKNOWN, TextTable, mean_std
from perfed.run.callbacks.targets import duration, percent
from perfed.run.records import Target

_FITTED = (
    "Clients that were not used yet are evaluated after fitting what is their own, which takes no virtual time "
    "(participation.fit_unused)."
)

Times = dict[int, float | None]
"""Virtual time by seed, of the runs that had the target; None where it was never reached."""


def target_table(runs: Sequence[Run]) -> TextTable | None:
    """One row per method, a column per target, and one per target for the speed-up over base methods.

    The speed-up of a method under a policy is the base method's virtual time divided by its own, for each seed in which
    both reached the target. Without a clock virtual time is the number of rounds, and the table says so. None where no
    finished run had targets.
    """
    targets = sorted({target.accuracy for run in runs for target in _targets(run)})
    if not targets:
        return None
    methods = methods_of(runs)
    times = {method: [_times(runs, method, target) for target in targets] for method in methods}
    bases = _bases(methods)
    what, ratio = ("Virtual time", "Speed-up") if any(run.clocked for run in runs) else ("Rounds", "Speed-up in rounds")
    header = ["Method", *(f"{what} to {percent(target)}" for target in targets)]
    header += [f"{ratio} at {percent(target)}" for target in targets] if bases else []
    rows = []
    for method in methods:
        row = [method, *(_time_cell(times_) for times_ in times[method])]
        if method in bases:
            base = bases[method]
            row += [_speed_up_cell(base, *pair) for pair in zip(times[base], times[method], strict=True)]
        elif bases:
            row += [UNKNOWN] * len(targets)
        rows.append(row)
    return TextTable(f"{what.lower()} to accuracy", header, rows, _FITTED if any(map(_fits_unused, runs)) else "")


def _bases(methods: Sequence[str]) -> dict[str, str]:
    """The same method without a policy, of the methods under one that have it beside them."""
    said = {name: method_and_policy(name) for name in methods}
    plain = {method: name for name, (method, policy) in said.items() if policy in ("", "uniform")}
    staged = {name: method for name, (method, policy) in said.items() if policy not in ("", "uniform")}
    return {name: plain[method] for name, method in staged.items() if method in plain}


def _fits_unused(run: Run) -> bool:
    participation = run.config.get("participation", {})
    return bool(participation.get("fit_unused", participation.get("policy") == "srpfl"))


def _targets(run: Run) -> list[Target]:
    return (run.summary.targets or []) if run.summary else []


def _times(runs: Sequence[Run], method: str, accuracy: float) -> Times:
    members = [run for run in runs if run.method == method]
    return {run.seed: t.virtual_time for run in members for t in _targets(run) if t.accuracy == accuracy}


def _time_cell(times: Times) -> str:
    """Mean ± std over the seeds; a method that failed in some seeds must not look as if it had none."""
    if not times:
        return UNKNOWN
    reached = [time for time in times.values() if time is not None]
    if not reached:
        return "not reached"
    text = mean_std(reached, duration)
    return text if len(reached) == len(times) else f"reached by {len(reached)} of {len(times)} seeds: {text}"


def _speed_up_cell(base: str, base_times: Times, times: Times) -> str:
    common = sorted(base_times.keys() & times.keys())
    pairs = [(base_times[seed], times[seed]) for seed in common]
    # A measured trace may say that work takes no time at all; nothing can be divided by that.
    ratios = [before / after for before, after in pairs if before is not None and after]
    return mean_std(ratios, "{:.2f}".format, len(common)) + (f" over {base}" if ratios else "")
