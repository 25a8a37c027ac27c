"""What a search makes of its runs: scores of each point, and the experiment with the best one of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfed.engine.metrics import main_metric
from perfed.errors import PerfedError
from perfed.experiment.overrides import override


def chosen_table(
    given: Mapping[str, Any], methods: Sequence[str], chosen: Mapping[str, list[str]], points: int
) -> dict[str, Any]:
    """The experiment ``given`` with each method's chosen settings in the method's own table, and as many tries for
    models of scikit-learn as each method had: ``points``.
    """
    given = dict(given)
    result = {**given, "baseline_tries": points, "methods": dict(given.get("methods", {}))}
    if given.get("method") not in methods:
        result["method"] = methods[0]
    for method, assignments in chosen.items():
        picked = override(given, assignments, [method])
        own = dict(picked.get("methods", {}).get(method, {}))
        training, model = (_changed(picked.get(part, {}), given.get(part, {})) for part in ("training", "model"))
        # Chosen values that equal the experiment's too: a method under a policy would else take its base's choice.
        named = {assignment.partition("=")[0].removeprefix("training.") for assignment in assignments}
        training |= {key: value for key, value in picked.get("training", {}).items() if key in named}
        own = {**training, **own}
        if model:
            own["model"] = {**model, **own.get("model", {})}
        result["methods"][method] = own
        rest = {key: value for key, value in picked.items() if key not in ("training", "model", "methods")}
        result.update(_changed(rest, given))
    return result


def _changed(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def judged(method: str, point: tuple[str, ...], outcomes: dict[int, Any]) -> dict[str, Any]:
    """One point's scores over seeds; ``mean`` is ``None`` where a run failed, as with rates that diverge."""
    scores, metric, failed = [], None, ""
    for seed, outcome in outcomes.items():
        try:
            if isinstance(outcome, PerfedError):
                raise outcome
            metric, value = _score(outcome)
            scores.append(value)
        except PerfedError as error:
            failed = f"seed {seed}: {error}"
    found = {"mean": None, "failed": failed} if failed else {"mean": float(np.mean(scores))}
    return {"method": method, "settings": [*point], "metric": metric, "scores": scores, **found}


def _score(summary: dict[str, Any]) -> tuple[str, float]:
    """Name and mean of the metric that points are compared by: ``evaluation.compare_by``, else the task's own."""
    name = main_metric(summary["metrics"], summary.get("evaluation", {}).get("compare_by", ""))
    if name is None:
        raise PerfedError("nothing was evaluated")
    return name, float(summary["metrics"][name]["mean"])
