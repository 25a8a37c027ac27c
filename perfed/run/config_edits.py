"""Detection of changes to the configuration of a run since its finished rounds."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from perfed.errors import PerfedError
from perfed.run.directory import RunDirectory
from perfed.settings import flatten_keys


def check_edits(directory: RunDirectory) -> None:
    """Raise an error if the configuration has changed since the finished rounds, except for a larger number of rounds.

    Raises:
        PerfedError: a setting has changed; the message names its key.
    """
    edits = find_edits(directory)
    old, new = edits.get("rounds", (0, 0))
    if type(new) is int and new >= old:
        edits.pop("rounds", None)
    if edits:
        key, (old, new) = next(iter(edits.items()))
        count_note = f" (and {len(edits) - 1} more)" if len(edits) > 1 else ""
        config = directory.path / "config.toml"
        raise PerfedError(
            f"{config}: {key} is {_format_value(new)} but was {_format_value(old)} in the finished rounds{count_note}; "
            f"only rounds may be increased; restore the value, or start another run: 'perfed run {config} --out OTHER'"
        )


def find_edits(directory: RunDirectory) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which ``config.toml`` differs from the newest checkpoint.

    The device and the memory for client states may change during a run, and are left out. So are the paths of the plan,
    which a checkpoint may not contain yet.

    Returns:
        The value in the checkpoint and the one in ``config.toml``, by key; ``None`` stands for a missing value.

    Raises:
        PerfedError: ``config.toml`` is not valid TOML.
    """
    checkpoint_config = directory.newest()[1].get("config")
    if not checkpoint_config:  # no checkpoint, or a run that was started without a configuration
        return {}
    try:
        new = _join_keys(tomllib.loads(directory.read_config()))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{directory.path / 'config.toml'}: not valid TOML: {error}") from None
    old = _join_keys(checkpoint_config)
    may_change = ("device", "plan.hold_megabytes")
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in may_change and not key.startswith("plan.paths.")]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _join_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(path): value for path, value in flatten_keys(table).items()}


def _format_value(value: Any) -> str:
    return "not set" if value is None else repr(value)
