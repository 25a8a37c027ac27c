"""The command that makes a comparison of a shipped experiment again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from perfed.experiment.config import experiment_names, find_experiment
from perfed.settings import leaves


def command_of(table: Mapping[str, Any], methods: Sequence[str], seeds: Sequence[int]) -> str:
    """``perfed compare`` with the assignments in which ``table`` differs from the shipped experiment of its name.

    Empty for other experiments: what they were is in ``comparison.toml``.

    Example:
        >>> table = find_experiment("digits-label-skew")
        >>> command_of({**table, "rounds": 3}, ["local", "fedpac"], [0, 1, 2])
        'perfed compare digits-label-skew --methods local,fedpac --seeds 0..2 rounds=3'
    """
    name = str(table.get("name"))
    if name not in experiment_names():
        return ""
    shipped = leaves(find_experiment(name))
    own = {key: value for key, value in leaves(table).items() if key not in (("method",), ("seed",), ("device",))}
    changed = [f"{'.'.join(key)}={_text(value)}" for key, value in own.items() if shipped.get(key, "") != value]
    run = f"{seeds[0]}..{seeds[-1]}" if [*seeds] == [*range(seeds[0], seeds[-1] + 1)] else ",".join(map(str, seeds))
    parts = ["perfed", "compare", name, "--methods", ",".join(methods), "--seeds", run, *changed]
    return shlex.join(parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
