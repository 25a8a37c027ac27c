"""Create, resume and open runs of experiments."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perfed.data.domain_input import apply_options
from perfed.data.facts import ClientFacts
from perfed.data.federation import Federation, federation_of
from perfed.data.federation_schema import FederationSchema
from perfed.data.lazy import lazy_clients, refuse_read
from perfed.datasets.tables import read_site_client
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.method.extension import qualified_extension_name
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
    """Return a new run of ``experiment``.

    Args:
        experiment: the experiment.
        data_dir: the first folder in which data files are looked for.
        out: the directory of the run, which is created with the configuration; if not given, nothing is written.
        federation: the clients; if not given, the experiment's data set is loaded.
        device: the device, in place of the experiment's.
        server: the class of the server, as in :class:`~perfed.run.run.Run`.
        callbacks: callbacks that are called after those of the experiment; the configuration does not contain them.

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
    experiment = _with_device(experiment, device)
    run = _build(experiment, federation, server, callbacks)
    if out is not None:
        run.directory = RunDirectory.create(Path(out))
        run.path = run.directory.path
        _write_config(run, experiment, run.directory)
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
    """Return the run in ``path`` as it was at its last complete checkpoint.

    When it is executed, its results are bit-identical to those of an uninterrupted run.

    Args:
        path: the directory of the run.
        data_dir: the first folder in which data files are looked for.
        federation: the clients; if not given, the data set in ``config.toml`` is loaded.
        device: the device, in place of the one on which the run was started.
        rounds: the new number of rounds, at least the number in ``config.toml``. A finished run continues if this
            number, or an edited one in ``config.toml``, is greater than before.
        server: the class of the server, as in :class:`~perfed.run.run.Run`.
        callbacks: the callbacks with which the run was started in Python.

    Raises:
        PerfedError: there is no run in ``path``, another process works on it, all its checkpoints are damaged,
            anything but the number of rounds was changed in its configuration, or it was written by a version of
            perfed whose run directories this version cannot read.

    Example:
        >>> from perfed import validate
        >>> from tempfile import TemporaryDirectory
        >>> table = {"method": "fedavg", "rounds": 2, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> with TemporaryDirectory() as folder:
        ...     done = start(validate(table), out=f"{folder}/one").execute()  # interrupted, perhaps
        ...     resume(f"{folder}/one").execute()["accuracy"] == done["accuracy"]
        True
    """
    run, experiment, directory = _build_from_directory(path, data_dir, federation, device, rounds, server, callbacks)
    run.directory = directory
    with directory.lock():
        run.restore()
        if (before := directory.layout.perfed) != (now := installed_version()):
            run.notes.append(f"started with perfed {before}, resumed with {now}: results may differ in their last bits")
        _write_config(run, experiment, directory)
    return run


def open_method_run(
    path: Path | str,
    *,
    data_dir: Path | None = None,
    federation: Federation | None = None,
    site: str | None = None,
) -> Run:
    """Return the run in ``path`` as it was at its last complete checkpoint, for reading; nothing is written.

    Args:
        path: the directory of the run.
        data_dir: the first folder in which data files are looked for.
        federation: the clients; if not given, the data set in ``config.toml`` is loaded.
        site: the only site whose model will be used. If the sites have tables and the run has finished, only the table
            of this site is read.

    Raises:
        PerfedError: for the reasons of :func:`resume`, or if there is no checkpoint yet or the newest one is damaged
            or missing.
    """
    site_only = None if site is None or federation is not None else _load_single_site(RunDirectory(Path(path)), site)
    run, _, directory = _build_from_directory(path, data_dir, site_only or federation, None, None)
    checkpoint = directory.load(run.server.hold)
    if checkpoint is None:
        raise PerfedError(f"{path}: no checkpoint is there yet, and so no site's model")
    if checkpoint.notes:
        problem = checkpoint.notes[0].partition(";")[0]
        raise PerfedError(f"{path}: {problem}; 'perfed resume {path}' goes back to the one before it")
    if directory.finished and checkpoint.round < (rounds := directory.read_summary()["rounds"]):
        raise PerfedError(f"{path}: the checkpoint of round {rounds} is missing; 'perfed resume {path}' restores it")
    run.resume_from(checkpoint, compared=site_only is not None)
    return run


def _load_single_site(directory: RunDirectory, site: str) -> Federation | None:
    """Return a federation in which only ``site`` has data, enough for :meth:`perfed.run.own_model.PersonalModels.site`.

    Returns:
        The federation; ``None`` if the data of all clients are needed, because the run does not use tables, has not
        finished, does not have the site, or computes something from the data of all clients.

    Raises:
        PerfedError: the table of the site cannot be read, or differs from the one that the run used.
    """
    sites = directory.read_sites()
    if sites is None or site not in sites["facts"]:
        return None
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if "files" not in experiment.data.options:  # the tables of a named data set cannot be read one by one
        return None
    if experiment.built_method.changes_data or experiment.evaluation.split == "validation":
        return None
    where = str(directory.path / "sites.json")
    agreement = FederationSchema.of_plain(sites["agreement"], where)
    try:
        facts = {name: ClientFacts.of_plain(values) for name, values in sites["facts"].items()}
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    options = experiment.data.options
    site_client = read_site_client(options, experiment.seed, site, agreement)
    federation = federation_of([site_client], agreement, experiment.data.name)
    federation = apply_options(federation, options, experiment.seed)
    (client,) = federation
    if replace(client.facts(federation.survival), feature_names=None) != facts.pop(site):
        raise PerfedError(f"site '{site}': its data are not those that the run in {directory.path} was begun with")
    return replace(federation, clients=(client, *lazy_clients(refuse_read, facts.values(), agreement)))


def _build_from_directory(
    path: Path | str,
    data_dir: Path | None,
    federation: Federation | None,
    device: torch.device | str | None,
    rounds: int | None,
    server: Callable[..., Server] | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[Run, Experiment, RunDirectory]:
    """Return the run of the configuration in ``path`` before its first round, its experiment and its directory."""
    directory = RunDirectory(Path(path))
    check_edits(directory)
    _check_models(directory)
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if rounds is not None and rounds < experiment.rounds:
        raise PerfedError(f"rounds = {rounds} is less than the {experiment.rounds} that {path} was begun with")
    if federation is None:
        federation = experiment.data.load(experiment.seed, data_dir)
    experiment = _with_device(experiment, device).model_copy(update={} if rounds is None else {"rounds": rounds})
    run = _build(experiment, federation, server, callbacks)
    run.path = directory.path
    return run, experiment, directory


def _check_models(directory: RunDirectory) -> None:
    """Raise an error for a run of scikit-learn models or a blend, which has no rounds to continue."""
    name = directory.method
    if name.startswith((SKLEARN, POOLED)):
        raise PerfedError(f"{name}: scikit-learn's models have no rounds; perfed predict and perfed export use them")
    if name == BLEND:
        raise PerfedError(f"{name}: has no rounds; perfed predict and perfed export use it")


def is_done(path: Path) -> bool:
    """Return whether the run in ``path`` has finished, and its configuration and files are unchanged.

    If the configuration has changed, :func:`resume` continues the run or raises an error. If files are damaged,
    :func:`resume` restores them as far as possible.
    """
    directory = RunDirectory(path)
    if not directory.finished:
        return False
    last_round, progress = directory.newest()
    try:  # the summary of an earlier end remains until the rounds that were added since have been executed
        rounds = progress.get("config", {}).get("rounds", last_round)
        is_at_end = bool(progress.get("stopped_by")) or last_round >= rounds
        return is_at_end and not find_edits(directory) and not directory.find_damage()
    except PerfedError:
        return False


def _with_device(experiment: Experiment, device: torch.device | str | None) -> Experiment:
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


def _write_config(run: Run, experiment: Experiment, directory: RunDirectory) -> None:
    """Write the configuration now and again whenever a choice is added to the plan.

    A resumed run needs the choices, because only the same plan gives bit-identical results.
    """

    def write() -> None:
        effective_settings: dict[str, Any] = {
            "plan": PlanSettings.model_validate(run.plan.to_dict()),
            "participation": run.server.participation,
        }
        for callback in run.callbacks:
            if isinstance(callback, PrivacyBudget):  # keep the noise that was chosen, also if more rounds follow
                effective_settings["privacy"] = Privacy.model_validate(callback.plan.explicit_settings())
        methods = {name: _with_modules(table) for name, table in experiment.methods.items()}
        text = experiment.model_copy(update={**effective_settings, "methods": methods}).to_toml()
        run.config = tomllib.loads(text)
        directory.write_config(text)

    run.plan.on_choice = write
    write()


def _with_modules(table: dict[str, Any]) -> dict[str, Any]:
    """Return a method's table with the modules of the user's extensions, so that another process can import them."""
    return (
        {**table, "extensions": [qualified_extension_name(name) for name in table["extensions"]]}
        if "extensions" in table
        else table
    )
