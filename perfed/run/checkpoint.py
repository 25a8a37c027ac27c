"""What a checkpoint holds besides tensors, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfed.data.federation import Federation
from perfed.data.reading import checked
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.run.checkpoint_files import Checkpoint
from perfed.run.directory import RunDirectory
from perfed.run.memory import Memory
from perfed.run.taken import Taken
from perfed.run.tally import Tally
from perfed.training.device import arithmetic
from perfed.training.plan import PlanSettings
from perfed.tree import map_leaves

_TAKEN = ":taken"  # beside the server's parameter sets, whose names are identifiers


@dataclass
class Standing:
    """How far a run has come.

    Attributes:
        tally: what it has added up.
        done: the last finished round; 0 is the preparation, -1 is before it.
        wall, training: seconds since the start, and those of training alone.
        taken: the models that it takes, where it stops by validation.
    """

    tally: Tally
    done: int = -1
    wall: float = 0.0
    training: float = 0.0
    taken: Taken | None = None

    def copy(self) -> Standing:
        """One that later rounds do not change."""
        return replace(self, tally=self.tally.copy(), taken=None if self.taken is None else self.taken.copy())


def save(
    directory: RunDirectory | Memory,
    server: Server,
    standing: Standing,
    data: int,
    notes: Sequence[str],
    config: Mapping[str, Any],
) -> None:
    """Write a checkpoint.

    Args:
        directory: of the run.
        server, standing: after the last finished round.
        data: fingerprint of the clients' data.
        notes: of the run.
        config: what the run was made of.
    """
    now = server.snapshot()
    progress = {
        "tally": standing.tally.plain(),
        "policy": now.policy,
        "wall_seconds": standing.wall,
        "training_seconds": standing.training,
        "notes": notes,
        "plan": server.plan.to_dict(),
        "data": data,
        "trace": now.trace,
        "arithmetic": arithmetic(server.device),
        "config": config,
    }
    server_sets = now.server
    if standing.taken is not None:
        progress["taken"] = standing.taken.plain()
        server_sets = {**server_sets, _TAKEN: standing.taken.tensors()}
    directory.save(standing.done, server_sets, now.clients, now.changed, progress)
    server.forget_changes()


def restore(found: Checkpoint, server: Server, federation: Federation | None) -> Standing:
    """Bring ``server`` and its plan to where they were.

    Args:
        found: the checkpoint.
        server: of a new run of the same configuration.
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
    sets = map_leaves(found.server, lambda _, t: t.to(server.device))
    taken_tensors: Any = sets.pop(_TAKEN, {})
    clients = {i: server.hold(state) for i, state in found.clients.items()}
    server.restore(
        replace(
            now,
            server={**now.server, **sets},
            clients={**now.clients, **clients},
            policy={**now.policy, **progress["policy"]},
            trace=progress.get("trace", now.trace),
        )
    )
    server.plan.paths.update(checked(PlanSettings, progress["plan"], found.path / "checkpoint").paths)
    wall = progress["wall_seconds"]
    training = progress.get("training_seconds", wall)  # older ones have one time for both
    taken = None if "taken" not in progress else Taken.of(progress["taken"], taken_tensors)
    if taken is not None:
        taken.clients = {i: server.hold(state) for i, state in taken.clients.items()}
    return Standing(Tally.of_plain(progress.get("tally", {})), found.round, wall, training, taken)


def continued(found: Checkpoint, server: Server, rounds: int) -> list[str]:
    """What a run of ``rounds`` rounds that was interrupted has to say beside its results."""
    notes, begun = [], found.progress.get("config", {}).get("rounds", rounds)
    if found.round == 0:
        notes.append("continued from round 0: the preparation was done")
    if begun < rounds:
        notes.append(f"continued from round {found.round} to {rounds}; begun with rounds = {begun}")
    before, now = found.progress.get("arithmetic"), arithmetic(server.device)
    if before not in (None, now):
        notes.append(
            f"continued after round {found.round} on another processor or torch ({now}; before: {before}): from "
            "here on the last digits may differ from those of a run that was never interrupted"
        )
    return notes
