"""From an experiment to a run: a new one, or one that is continued."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perfed.data.domain_input import completed_by
from perfed.data.facts import ClientFacts
from perfed.data.federation import Federation, federation_of
from perfed.data.federation_schema import FederationSchema
from perfed.data.lazy import lazy_clients, refuse_read
from perfed.datasets.tables import read_site_client
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.method.extension import full_name
from perfed.plugins import BLEND, POOLED, SKLEARN
from perfed.privacy.settings import Privacy
from perfed.run.callback import Callback
from perfed.run.callbacks import build_callbacks
from perfed.run.callbacks.budget import PrivacyBudget
from perfed.run.config_edits import check_edits, find_edits
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.system import installed_version
from perfed.training.plan import PlanSettings


def start(
    experiment: Experiment,
    *,
    data_dir: Path | None = None,
    out: Path | str | None = None,
    federation: Federation | None = None,
    device: torch.device | str | None = None,
    server: Callable[..., Server] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Return a new run of ``experiment``; with ``out``, its directory is made and the configuration written.

    ``device``: in place of the experiment's. ``server``: as in :class:`~perfed.run.run.Run`. ``callbacks``: behind
    those of the experiment; the configuration does not have them.

    Raises:
        PerfedError: bad settings or data, or ``out`` already holds a run; nothing is written then.

    Example:
        >>> from perfed import validate
        >>> table = {"method": "fedavg", "rounds": 2, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> start(validate(table)).execute()["rounds"]
        2
    """
    if federation is None:
        federation = experiment.data.load(experiment.seed, data_dir)
    experiment = _on(experiment, device)
    run = _build(experiment, federation, server, callbacks)
    if out is not None:
        run.directory = RunDirectory.create(Path(out))
        run.path = run.directory.path
        _keep_config(run, experiment, run.directory)
    return run


def resume(
    path: Path | str,
    *,
    data_dir: Path | None = None,
    federation: Federation | None = None,
    device: torch.device | str | None = None,
    rounds: int | None = None,
    server: Callable[..., Server] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Return the run in ``path``, at its last whole checkpoint; ends with the same bits as if never interrupted.

    A run whose ``config.toml`` asks for more rounds than it was made with, or that is given more ``rounds``, goes on to
    those, finished or not.

    ``device``: in place of the one that it was started on. ``server``: as in :class:`~perfed.run.run.Run`.
    ``callbacks``: those that it was started with in Python.

    Raises:
        PerfedError: no run in ``path``, another process works on it, all its checkpoints are damaged, its
            configuration was changed in anything but the number of rounds, or a version of perfed wrote it whose
            directories are not read.

    Example:
        >>> from perfed import validate
        >>> from tempfile import TemporaryDirectory
        >>> table = {"method": "fedavg", "rounds": 2, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> with TemporaryDirectory() as folder:
        ...     done = start(validate(table), out=f"{folder}/one").execute()  # interrupted, perhaps
        ...     resume(f"{folder}/one").execute()["accuracy"] == done["accuracy"]
        True
    """
    run, experiment, directory = _found(path, data_dir, federation, device, rounds, server, callbacks)
    run.directory = directory
    with directory.lock():
        run.restore()
        if (before := directory.layout.perfed) != (now := installed_version()):
            run.notes.append(f"begun with perfed {before}, continued with {now}: bits may differ from there")
        _keep_config(run, experiment, directory)
    return run


def opened(
    path: Path | str,
    *,
    data_dir: Path | None = None,
    federation: Federation | None = None,
    site: str | None = None,
) -> Run:
    """Return the run in ``path`` as its last whole checkpoint has it, to be looked at: nothing is written.

    ``site``: whose model is wanted alone. Where sites have tables, no other site's is then read, if the run has
    finished.

    Raises:
        PerfedError: as :func:`resume`, there is no checkpoint yet, or the newest one is damaged or missing.
    """
    alone = None if site is None or federation is not None else _site_alone(RunDirectory(Path(path)), site)
    run, _, directory = _found(path, data_dir, alone or federation, None, None)
    found = directory.load(run.server.hold)
    if found is None:
        raise PerfedError(f"{path}: no checkpoint is there yet, and so no site's model")
    if found.notes:
        problem = found.notes[0].partition(";")[0]
        raise PerfedError(f"{path}: {problem}; 'perfed resume {path}' goes back to the one before it")
    if directory.finished and found.round < (rounds := directory.read_summary()["rounds"]):
        raise PerfedError(f"{path}: the checkpoint of round {rounds} is missing; 'perfed resume {path}' restores it")
    run.resume_from(found, compared=alone is not None)
    return run


def _site_alone(directory: RunDirectory, site: str) -> Federation | None:
    """What :meth:`perfed.run.own_model.PersonalModels.site` needs for ``site``; no other site's table is read.

    Returns:
        ``None`` where all data are needed: the run is not of tables or has not finished, does not have the site, or
        makes something of the data of all clients.

    Raises:
        PerfedError: the site's table cannot be read, or is another than that of the run.
    """
    kept = directory.read_sites()
    if kept is None or site not in kept["facts"]:
        return None
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if "files" not in experiment.data.options:  # a named data set of tables is read as a whole
        return None
    if experiment.built_method.changes_data or experiment.evaluation.split == "validation":
        return None
    where = str(directory.path / "sites.json")
    agreement = FederationSchema.of_plain(kept["agreement"], where)
    try:
        facts = {name: ClientFacts.of_plain(values) for name, values in kept["facts"].items()}
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    options = experiment.data.options
    own = read_site_client(options, experiment.seed, site, agreement)
    alone = federation_of([own], agreement, experiment.data.name)
    made = completed_by(alone, options, experiment.seed)
    (client,) = made
    if replace(client.facts(made.survival), feature_names=None) != facts.pop(site):
        raise PerfedError(f"site '{site}': its data are not those that the run in {directory.path} was begun with")
    return replace(made, clients=(client, *lazy_clients(refuse_read, facts.values(), agreement)))


def _found(
    path: Path | str,
    data_dir: Path | None,
    federation: Federation | None,
    device: torch.device | str | None,
    rounds: int | None,
    server: Callable[..., Server] | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[Run, Experiment, RunDirectory]:
    """The run of the configuration in ``path``, at its start."""
    directory = RunDirectory(Path(path))
    check_edits(directory)
    _check_models(directory)
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if rounds is not None and rounds < experiment.rounds:
        raise PerfedError(f"rounds = {rounds} is less than the {experiment.rounds} that {path} was begun with")
    if federation is None:
        federation = experiment.data.load(experiment.seed, data_dir)
    experiment = _on(experiment, device).model_copy(update={} if rounds is None else {"rounds": rounds})
    run = _build(experiment, federation, server, callbacks)
    run.path = directory.path
    return run, experiment, directory


def _check_models(directory: RunDirectory) -> None:
    """Refuse a run of scikit-learn's models, which has no rounds to go on with."""
    name = directory.method
    if name.startswith((SKLEARN, POOLED)):
        raise PerfedError(f"{name}: scikit-learn's models have no rounds; perfed predict and perfed export use them")
    if name == BLEND:
        raise PerfedError(f"{name}: has no rounds; perfed predict and perfed export use it")


def is_done(path: Path) -> bool:
    """Return whether the run in ``path`` has finished, and its configuration and files are unchanged.

    With a changed configuration, :func:`resume` continues the run or raises an error; damaged files it restores as far
    as possible.
    """
    directory = RunDirectory(path)
    if not directory.finished:
        return False
    done, progress = directory.newest()
    try:  # what an earlier ending left is there until the rounds added since are done
        at_its_end = bool(progress.get("stopped_by")) or done >= progress.get("config", {}).get("rounds", done)
        return at_its_end and not find_edits(directory) and not directory.find_damage()
    except PerfedError:
        return False


def _on(experiment: Experiment, device: torch.device | str | None) -> Experiment:
    return experiment if device is None else experiment.model_copy(update={"device": str(device)})


def _build(
    experiment: Experiment, federation: Federation, server: Callable[..., Server] | None, callbacks: Sequence[Callback]
) -> Run:
    private = experiment.in_private(len(federation), [len(client.train) for client in federation])
    return Run(
        federation,
        private.method if private else experiment.built_method,
        experiment.build_model(federation.num_outputs, federation.words or ()),
        name=experiment.method,
        rounds=experiment.rounds,
        seed=experiment.seed,
        dtype=experiment.torch_dtype,
        device=experiment.device,
        participation=experiment.build_participation(),
        clock=experiment.clock,
        evaluation=experiment.evaluation,
        snapshots=experiment.snapshots,
        plan=experiment.plan.build(),
        checkpoint_seconds=experiment.checkpoint_seconds,
        server=server,
        secure=experiment.secure_aggregation,
        aggregation=experiment.aggregation,
        callbacks=[
            *([PrivacyBudget(plan=private)] if private else []),
            *build_callbacks(experiment.callbacks),
            *callbacks,
        ],
    )


def _keep_config(run: Run, experiment: Experiment, directory: RunDirectory) -> None:
    """Write the configuration now and whenever the plan gains a choice: the same plan gives the same bits."""

    def write() -> None:
        used: dict[str, Any] = {
            "plan": PlanSettings.model_validate(run.plan.to_dict()),
            "participation": run.server.participation,
        }
        for callback in run.callbacks:
            if isinstance(callback, PrivacyBudget):  # with the noise that was found, whatever rounds follow
                used["privacy"] = Privacy.model_validate(callback.plan.explicit_settings())
        methods = {name: _with_modules(table) for name, table in experiment.methods.items()}
        text = experiment.model_copy(update={**used, "methods": methods}).to_toml()
        run.config = tomllib.loads(text)
        directory.write_config(text)

    run.plan.on_choice = write
    write()


def _with_modules(table: dict[str, Any]) -> dict[str, Any]:
    """A method's table whose own extensions say their module, so that another process finds them."""
    return (
        {**table, "extensions": [full_name(name) for name in table["extensions"]]} if "extensions" in table else table
    )
