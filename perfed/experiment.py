"""From an experiment to a run: a new one, or one that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from perfed.config import Experiment, read
from perfed.datasets import load
from perfed.federation import Federation
from perfed.run import Run
from perfed.store import RunDirectory
from perfed.terms import full_name


def start(
    experiment: Experiment,
    *,
    data_dir: Path | None = None,
    out: Path | str | None = None,
    federation: Federation | None = None,
    device: torch.device | str | None = None,
) -> Run:
    """A new run of ``experiment``; with ``out``, its directory is made and the configuration written.

    ``device``: in place of the experiment's.

    Raises:
        PerfedError: bad settings or data, or ``out`` already holds a run; nothing is written then.
    """
    if federation is None:
        federation = load(experiment.data["name"], experiment.data_options, seed=experiment.seed, data_dir=data_dir)
    experiment = _on(experiment, device)
    run = _build(experiment, federation)
    if out is not None:
        run.directory = RunDirectory.create(Path(out))
        _keep_config(run, experiment, run.directory)
    return run


def resume(
    path: Path | str,
    *,
    data_dir: Path | None = None,
    federation: Federation | None = None,
    device: torch.device | str | None = None,
) -> Run:
    """The run in ``path``, at its last whole checkpoint; ends with the same bits as if never interrupted.

    ``device``: in place of the one that it was started on.

    Raises:
        PerfedError: no run in ``path``, another process works on it, or all its checkpoints are damaged.
    """
    directory = RunDirectory(Path(path))
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if federation is None:
        federation = load(experiment.data["name"], experiment.data_options, seed=experiment.seed, data_dir=data_dir)
    experiment = _on(experiment, device)
    run = _build(experiment, federation)
    run.directory = directory
    with directory.alone():
        run.restore()
        _keep_config(run, experiment, directory)
    return run


def _on(experiment: Experiment, device: torch.device | str | None) -> Experiment:
    return experiment if device is None else experiment.model_copy(update={"device": str(device)})


def _build(experiment: Experiment, federation: Federation) -> Run:
    outputs = federation.num_classes or _num_targets(federation)
    return Run(
        federation,
        experiment.build_method(),
        experiment.build_model(outputs, federation.words or ()),
        name=experiment.method,
        rounds=experiment.rounds,
        seed=experiment.seed,
        dtype=experiment.torch_dtype,
        device=experiment.device,
        participation=experiment.build_participation(),
        clock=experiment.clock,
        evaluation=experiment.evaluation,
        snapshots=experiment.snapshots,
        plan=experiment.build_plan(),
        checkpoint_seconds=experiment.checkpoint_seconds,
    )


def _keep_config(run: Run, experiment: Experiment, directory: RunDirectory) -> None:
    """Write the configuration now and whenever the plan gains a choice: the same plan gives the same bits."""

    def write() -> None:
        used = {"plan": run.plan.to_dict(), "participation": run.server.participation}
        methods = {name: _with_modules(table) for name, table in experiment.methods.items()}
        directory.write_config(experiment.model_copy(update={**used, "methods": methods}).to_toml())

    run.plan.on_choice = write
    write()


def _with_modules(table: dict[str, Any]) -> dict[str, Any]:
    """A method's table whose own terms say their module, so that another process finds them."""
    return {**table, "terms": [full_name(name) for name in table["terms"]]} if "terms" in table else table


def _num_targets(federation: Federation) -> int:
    y = federation.clients[0].train.y
    return int(y.shape[1]) if y.ndim > 1 else 1
