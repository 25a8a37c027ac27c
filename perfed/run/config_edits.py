"""Differences between the configuration of a run and that of the rounds that are done."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from perfed.errors import PerfedError
from perfed.run.directory import RunDirectory
from perfed.settings import leaves


def check_edits(directory: RunDirectory) -> None:
    """Refuse a configuration that differs in more than the number of rounds from that of the rounds that are done.

    Raises:
        PerfedError: it does; names the key.
    """
    edits = find_edits(directory)
    before, now = edits.get("rounds", (0, 0))
    if type(now) is int and now >= before:
        edits.pop("rounds", None)
    if edits:
        key, (before, now) = next(iter(edits.items()))
        more = f" (and {len(edits) - 1} more)" if len(edits) > 1 else ""
        config = directory.path / "config.toml"
        raise PerfedError(
            f"{config}: {key} is {_show_value(now)} and was {_show_value(before)} in the rounds that are done{more}; "
            f"only rounds may grow; give it back its value, or start another run: 'perfed run {config} --out OTHER'"
        )


def find_edits(directory: RunDirectory) -> dict[str, tuple[Any, Any]]:
    """Return what ``config.toml`` says otherwise than the newest checkpoint: key -> before and now, ``None`` for none.

    Left out are the device and the memory that states may take, which a run may change, and choices of the plan, which
    checkpoints may not have yet.

    Raises:
        PerfedError: the configuration is no TOML.
    """
    made_with = directory.newest()[1].get("config")
    if not made_with:  # no checkpoint, or one of a run that was not made of a configuration
        return {}
    try:
        now = _flatten_keys(tomllib.loads(directory.read_config()))
    except tomllib.TOMLDecodeError as error:
        raise PerfedError(f"{directory.path / 'config.toml'}: not valid TOML: {error}") from None
    before = _flatten_keys(made_with)
    if before.get("data.missing") == []:  # a checkpoint of an older perfed, for which that was the default
        before |= {"data.missing": now.get("data.missing")}
    free = ("device", "plan.hold_megabytes")
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in free and not key.startswith("plan.paths.")]
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _flatten_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(path): value for path, value in leaves(table).items()}


def _show_value(value: Any) -> str:
    return "not there" if value is None else repr(value)
