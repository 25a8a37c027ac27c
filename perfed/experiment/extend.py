"""A comparison that there is with more methods or seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perfed.errors import PerfedError
from perfed.experiment.compare import Comparison, check_starts, federated, is_comparison
from perfed.experiment.config import validate
from perfed.experiment.overrides import override
from perfed.plugins import bare_name
from perfed.run.directory import RunDirectory
from perfed.settings import leaves, stated


@dataclass(frozen=True)
class More:
    """What a comparison is to have as well.

    Attributes:
        methods, seeds: new ones and, if the user names them, those that are there.
        experiment: if it was given anew: it must be the same.
        settings: assignments; they may be about new methods alone.
    """

    methods: list[str]
    seeds: list[int]
    experiment: dict[str, Any] | None
    settings: list[str]


def extend(path: Path, more: More, data_dir: Path | None, device: torch.device | None) -> Comparison:
    """Add methods and seeds to the comparison in ``path``; runs that are done stay as they are.

    Raises:
        PerfedError: no comparison there, nothing new, settings or data that are not those of its runs, or a method that
            cannot start. Nothing is written then.
    """
    if not is_comparison(path):
        raise PerfedError(f"--extend {path}: no comparison is there (comparison.toml is missing)")
    before = Comparison.read(path)
    if {*more.methods} <= {*before.methods} and {*more.seeds} <= {*before.seeds}:
        raise PerfedError(
            f"--extend {path}: nothing to add; it has the methods {', '.join(before.methods)} and the seeds "
            f"{', '.join(map(str, before.seeds))}; name others with --methods and --seeds"
        )
    given = before.table if more.experiment is None else more.experiment
    methods = list(dict.fromkeys([*before.methods, *more.methods]))
    table = override(given, more.settings, federated(methods))
    return with_more(before, table, more.methods, more.seeds, data_dir, device)


def with_more(
    before: Comparison,
    table: dict[str, Any],
    methods: list[str],
    seeds: list[int],
    data_dir: Path | None,
    device: torch.device | None,
) -> Comparison:
    """The comparison with those of ``methods`` and ``seeds`` that it lacks, which is written down.

    Args:
        before: what there is.
        table: the experiment, which may differ in the tables of new methods alone.
        methods, seeds: new ones and others.
        data_dir, device: as in :meth:`Comparison.create`.

    Raises:
        PerfedError: as :func:`extend`, but that nothing may be new.
    """
    added = [name for name in methods if name not in before.methods]
    more = [seed for seed in seeds if seed not in before.seeds]
    after = replace(before, methods=[*before.methods, *added], seeds=[*before.seeds, *more])
    after = replace(after, table=_same(before.path, before.table, table, added))
    if added or more:
        _check_data(before, data_dir)
        check_starts(after.table, after.methods, after.seeds[-1], data_dir, device)
        after.write()
    return after


def _same(path: Path, before: dict[str, Any], after: dict[str, Any], added: list[str]) -> dict[str, Any]:
    """``after``, if it differs in nothing but the tables of the methods that were added, and the device."""
    was, now = leaves(before), leaves(after)
    new = {bare_name(name) for name in added}
    for key in dict.fromkeys([*was, *now]):
        own = key[0] == "methods" and len(key) > 1 and bare_name(key[1]) in new
        if was.get(key) != now.get(key) and key[0] not in ("method", "seed", "device") and not own:
            raise PerfedError(
                f"{path}: {'.'.join(key)} is {stated(now.get(key))} and was {stated(was.get(key))} in the "
                "runs that are there; give the same, or begin another comparison"
            )
    return {**after, **({"device": before["device"]} if "device" in before else {})}


def _check_data(before: Comparison, data_dir: Path | None) -> None:
    """Refuse clients that are not those of the runs that have finished."""
    for seed in before.seeds:
        places = [RunDirectory(before.directory(method, seed)) for method in federated(before.methods)]
        known = {place.newest()[1].get("data") for place in places if place.finished} - {None}
        if known:
            data = validate({**before.table, "seed": seed}).data.load(seed, data_dir)
            if data.fingerprint not in known:
                raise PerfedError(
                    f"{before.path}: the data have other clients, samples or targets than when its runs with "
                    f"seed {seed} were made; begin another comparison"
                )
            return
