"""Checkpoints: when they are written, what they contain besides tensors, and how a run resumes from one."""

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
    """A callback that writes checkpoints: every ``checkpoint_seconds``, after the last round, and on a failure."""

    name = "checkpoint"
    _round: int = PrivateAttr(-1)
    _written: float = PrivateAttr(0.0)

    def begin(self, run: Running) -> None:
        """Write a checkpoint of the preparation if it took longer than ``checkpoint_seconds``."""
        self._written = time.perf_counter()
        if run.done == 0 and run.progress.wall >= run.checkpoint_seconds:
            self._save(run)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write a checkpoint if it is due."""
        if run.at_its_end or time.perf_counter() - self._written >= run.checkpoint_seconds:
            self._save(run)
            self._written = time.perf_counter()
        return False

    def save_interrupted(self, run: Running, error: BaseException) -> None:
        """Save the finished rounds of a failed run; without any, remove its directory."""
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

    def resume_from(self, run: Running, checkpoint: Checkpoint, *, compared: bool) -> None:
        """Restore a run from a checkpoint; ``compared``: its data are known to be those of the checkpoint."""
        run.progress = restore_checkpoint(checkpoint, run.server, run.callbacks, None if compared else run.federation)
        self._round = checkpoint.round

    def resume_latest(self, run: Running) -> None:
        """Restore a run from the newest undamaged checkpoint of its directory; without one, it starts again.

        Raises:
            PerfedError: if the run has no directory, lacks a callback of the checkpoint, or :func:`restore_checkpoint`
                refuses the checkpoint.
        """
        if run.directory is None:
            raise PerfedError("this run has no directory, so that there is no checkpoint to restore")
        run.server.put_states_in(run.directory.path)
        checkpoint = run.directory.load_to_resume(run.server.hold)
        run.resumed = 0 if checkpoint is None else checkpoint.round
        if checkpoint is None:
            run.directory.restore_rounds(None)
            run.notes.append("no checkpoint was found: started again from round 0")
            return
        _check_callbacks(checkpoint, run.callbacks)
        self.resume_from(run, checkpoint, compared=False)
        run.history, damaged = run.directory.restore_rounds(checkpoint)
        continued = _describe_resumption(checkpoint, run.server, run.rounds)
        run.notes = [*checkpoint.progress["notes"], *checkpoint.notes, *damaged, *continued]


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
        directory: directory of the run.
        server: the server after the last finished round.
        progress: the progress after the last finished round.
        callbacks: callbacks whose states are saved.
        data: the fingerprint of the clients' data.
        notes: notes of the run.
        config: configuration of the run.
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
    checkpoint: Checkpoint, server: Server, callbacks: Sequence[Callback], federation: Federation | None
) -> RunProgress:
    """Restore ``server``, its plan and ``callbacks`` from a checkpoint, and return the progress of the run.

    Args:
        checkpoint: the checkpoint.
        server: the server of a new run with the same configuration.
        callbacks: the callbacks of that run.
        federation: the clients; ``None``: they are known to be those of the checkpoint.

    Returns:
        The progress of the run at the checkpoint.

    Raises:
        PerfedError: if the data differ from those of the checkpoint, or it was written by another version. Nothing is
            changed then.
    """
    progress, now = checkpoint.progress, server.snapshot()
    if federation is not None and progress.get("data", federation.fingerprint) != federation.fingerprint:
        raise PerfedError(
            f"{checkpoint.path}: this run was on other clients, samples or targets than those of "
            f"'{federation.name}'; continue it with the same (in Python, resume(..., federation=...))"
        )
    sets: dict[str, Any] = map_leaves(checkpoint.server, lambda _, t: t.to(server.device))
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
            clients={**now.clients, **{i: server.hold(state) for i, state in checkpoint.clients.items()}},
            policy={**now.policy, **progress["policy"]},
            trace=progress.get("trace", now.trace),
        )
    )
    server.plan.paths.update(checked(PlanSettings, progress["plan"], checkpoint.path / "checkpoint").paths)
    restore_states(callbacks, states)
    wall, training = progress["wall_seconds"], progress["training_seconds"]
    return RunProgress(totals, checkpoint.round, wall, training, progress["stopped_by"])


def _describe_resumption(checkpoint: Checkpoint, server: Server, rounds: int) -> list[str]:
    """Return notes on a resumed run: the round, a changed number of rounds, and another processor or torch."""
    notes, planned_rounds = [], checkpoint.progress.get("config", {}).get("rounds", rounds)
    if checkpoint.round == 0:
        notes.append("continued from round 0: the preparation was done")
    if planned_rounds < rounds:
        notes.append(f"continued from round {checkpoint.round} to {rounds}; begun with rounds = {planned_rounds}")
    before, now = checkpoint.progress.get("arithmetic"), describe_arithmetic(server.device)
    if before not in (None, now):
        notes.append(
            f"continued after round {checkpoint.round} on another processor or torch ({now}; before: {before}): from "
            "here on the last digits may differ from those of a run that was never interrupted"
        )
    return notes


def _check_callbacks(checkpoint: Checkpoint, callbacks: Sequence[Callback]) -> None:
    """Check that the run has every callback whose state the checkpoint contains.

    Raises:
        PerfedError: if a callback is missing; names it.
    """
    if lacking := checkpoint.progress.get("callbacks", {}).keys() - {callback.name for callback in callbacks}:
        raise PerfedError(
            f"{checkpoint.path}: this run had the callback '{min(lacking)}', whose state is saved; continue with "
            "this callback (in Python, resume(..., callbacks=[...]))"
        )
