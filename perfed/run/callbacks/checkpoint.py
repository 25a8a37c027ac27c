"""Checkpoints: when they are written, what they hold besides tensors, and how a run goes on from one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr

from perfed.data.federation import Federation
from perfed.data.reading import checked
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.run.callback import Callback, Running, join_state, restore_states, split_state
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RunDirectory
from perfed.run.totals import RunProgress, RunTotals
from perfed.training.plan import PlanSettings, describe_arithmetic
from perfed.tree import map_leaves

_CALLBACK_PREFIX = ":"  # before a callback's name, beside the server's parameter sets, whose names are identifiers


class Checkpoints(Callback):
    """Writes a checkpoint where the last one is ``checkpoint_seconds`` old, after the last round, and on a failure."""

    name = "checkpoint"
    _round: int = PrivateAttr(-1)
    _written: float = PrivateAttr(0.0)

    def begin(self, run: Running) -> None:
        """Keep a preparation that took long."""
        self._written = time.perf_counter()
        if run.done == 0 and run.progress.wall >= run.checkpoint_seconds:
            self._save(run)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write one where it is time."""
        if run.at_its_end or time.perf_counter() - self._written >= run.checkpoint_seconds:
            self._save(run)
            self._written = time.perf_counter()
        return False

    def save_interrupted(self, run: Running, error: BaseException) -> None:
        """Keep what is done; where that is nothing, an empty directory would only be in the way of the next try."""
        if run.directory is None:
            return
        mistake = isinstance(error, Exception) and (run.done < 0 or not isinstance(error, PerfedError))
        if run.done <= 0 and mistake:
            run.directory.abandon()
        elif run.done >= 0:
            with suppress(OSError):  # a full disk has been reported
                run.directory.truncate_rounds(run.done)
                self._save(run)

    def _save(self, run: Running) -> None:
        if run.directory and run.done != self._round:
            data = run.federation.fingerprint
            save_checkpoint(run.directory, run.server, run.progress, run.callbacks, data, run.notes, run.config)
            self._round = run.done

    def resume_from(self, run: Running, found: Checkpoint, *, compared: bool) -> None:
        """Let ``run`` stand where ``found`` was written; ``compared``: the data are known to be those of then."""
        run.progress = restore_checkpoint(found, run.server, run.callbacks, None if compared else run.federation)
        self._round = found.round

    def resume_latest(self, run: Running) -> None:
        """Let ``run`` stand where its directory's last whole checkpoint was written; at the start if there is none.

        Raises:
            PerfedError: it has no directory, or another callback, or as :func:`restore_checkpoint` says.
        """
        if run.directory is None:
            raise PerfedError("this run has no directory, so that there is no checkpoint to go back to")
        run.server.put_states_in(run.directory.path)
        found = run.directory.load_to_resume(run.server.hold)
        run.resumed = 0 if found is None else found.round
        if found is None:
            run.directory.restore_rounds(None)
            run.notes.append("no checkpoint was there: begun again from round 0")
            return
        _check_callbacks(found, run.callbacks)
        self.resume_from(run, found, compared=False)
        run.history, damaged = run.directory.restore_rounds(found)
        continued = _describe_resumption(found, run.server, run.rounds)
        run.notes = [*found.progress["notes"], *found.notes, *damaged, *continued]


def save_checkpoint(
    directory: RunDirectory,
    server: Server,
    progress: RunProgress,
    callbacks: Sequence[Callback],
    data: int,
    notes: Sequence[str],
    config: Mapping[str, Any],
) -> None:
    """Write a checkpoint.

    Args:
        directory: of the run.
        server, progress: after the last finished round.
        callbacks: whose states are kept.
        data: fingerprint of the clients' data.
        notes: of the run.
        config: what the run was made of.
    """
    now = server.snapshot()
    states = {callback.name: split_state(callback.state) for callback in callbacks if callback.state}
    values = {
        "tally": progress.totals.to_dict(),
        "policy": now.policy,
        "wall_seconds": progress.wall,
        "training_seconds": progress.training,
        "stopped_by": progress.stopped_by,
        "callbacks": {name: plain for name, (plain, _) in states.items()},
        "notes": notes,
        "plan": server.plan.to_dict(),
        "data": data,
        "trace": now.trace,
        "arithmetic": describe_arithmetic(server.device),
        "config": config,
        "files": directory.written_files,
    }
    sets = now.server | {_CALLBACK_PREFIX + name: tensors for name, (_, tensors) in states.items() if tensors}
    directory.save(progress.done, sets, now.clients, now.changed, values)
    server.forget_changes()


def restore_checkpoint(
    found: Checkpoint, server: Server, callbacks: Sequence[Callback], federation: Federation | None
) -> RunProgress:
    """Bring ``server``, its plan and ``callbacks`` to where they were.

    Args:
        found: the checkpoint.
        server: of a new run of the same configuration.
        callbacks: of that run.
        federation: its clients; ``None``: they are known to be those of the checkpoint.

    Returns:
        How far the run had come.

    Raises:
        PerfedError: the run was on other data or followed another trace; nothing is changed then.
    """
    progress, now = found.progress, server.snapshot()
    if federation is not None and progress.get("data", federation.fingerprint) != federation.fingerprint:
        raise PerfedError(
            f"{found.path}: this run was on other clients, samples or targets than those of "
            f"'{federation.name}'; continue it with the same (in Python, resume(..., federation=...))"
        )
    sets: dict[str, Any] = map_leaves(found.server, lambda _, t: t.to(server.device))
    totals = RunTotals.from_dict(progress["tally"])
    tensors = {name: sets.pop(name) for name in [*sets] if name.startswith(_CALLBACK_PREFIX)}
    states = {
        name: join_state(values, tensors.get(_CALLBACK_PREFIX + name, {}))
        for name, values in progress["callbacks"].items()
    }
    server.restore(
        replace(
            now,
            server={**now.server, **sets},
            clients={**now.clients, **{i: server.hold(state) for i, state in found.clients.items()}},
            policy={**now.policy, **progress["policy"]},
            trace=progress.get("trace", now.trace),
        )
    )
    server.plan.paths.update(checked(PlanSettings, progress["plan"], found.path / "checkpoint").paths)
    restore_states(callbacks, states)
    wall, training = progress["wall_seconds"], progress["training_seconds"]
    return RunProgress(totals, found.round, wall, training, progress["stopped_by"])


def _describe_resumption(found: Checkpoint, server: Server, rounds: int) -> list[str]:
    """Return what a run of ``rounds`` rounds that was interrupted has to say beside its results."""
    notes, begun = [], found.progress.get("config", {}).get("rounds", rounds)
    if found.round == 0:
        notes.append("continued from round 0: the preparation was done")
    if begun < rounds:
        notes.append(f"continued from round {found.round} to {rounds}; begun with rounds = {begun}")
    before, now = found.progress.get("arithmetic"), describe_arithmetic(server.device)
    if before not in (None, now):
        notes.append(
            f"continued after round {found.round} on another processor or torch ({now}; before: {before}): from "
            "here on the last digits may differ from those of a run that was never interrupted"
        )
    return notes


def _check_callbacks(found: Checkpoint, callbacks: Sequence[Callback]) -> None:
    """Refuse to go on without a callback whose state the checkpoint has.

    Raises:
        PerfedError: one is not there.
    """
    if lacking := found.progress.get("callbacks", {}).keys() - {callback.name for callback in callbacks}:
        raise PerfedError(
            f"{found.path}: this run had the callback '{min(lacking)}', which has kept something; continue it with it "
            "(in Python, resume(..., callbacks=[...]))"
        )
