"""Callbacks: what rides along a run and acts after its rounds.

A callback is one class. It sees the run through :class:`Running`, may end it, and keeps in ``state`` what a resumed run
has to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import isfinite
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, PrivateAttr
from torch import Tensor

from perfed.data.federation import Federation
from perfed.engine.record import RoundRecord
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.run.directory import RunDirectory
from perfed.run.settings import Evaluation
from perfed.run.totals import RunProgress
from perfed.settings import STRICT
from perfed.system import extra_command


class Running(Protocol):
    """What a callback sees of its run.

    Attributes:
        name: of the method.
        rounds: of the whole run, at most.
        seed: of everything random.
        federation, server: the clients, and the server with its parameter sets.
        directory: where results go; ``None`` for a run in memory.
        evaluation: when the run is evaluated, and how.
        progress: how far the run has come, and what it has added up.
        latest: what came back in the latest round; of no round before the first of this sitting.
        history: one record per round, as in ``rounds.jsonl``, the latest at the end.
        notes: what the summary will say beside its numbers.
        config: what the run was made of, as in ``config.toml``; empty where it was made of objects.
        checkpoint_seconds: least time between two checkpoints.
        callbacks: all that ride along, in their order.
        resumed: the round behind which a resumed run goes on.
    """

    name: str
    rounds: int
    seed: int
    federation: Federation
    server: Server
    directory: RunDirectory | None
    evaluation: Evaluation
    progress: RunProgress
    latest: RoundRecord | None
    history: list[dict[str, Any]]
    notes: list[str]
    config: dict[str, Any]
    checkpoint_seconds: float
    callbacks: list[Callback]
    resumed: int | None

    @property
    def done(self) -> int:
        """The last finished round, or the one that is being finished; 0 is the preparation."""

    @property
    def at_its_end(self) -> bool:
        """Whether no round follows."""

    def client_table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows of ``clients.csv``."""


class Callback(BaseModel):
    """Base of all callbacks: does nothing. Settings are fields; what changes, and a resumed run needs, is in ``state``.

    ``name`` is that of the class unless it is given. Callbacks are called in their order, inside the round's
    transaction: where one raises, the round never happened, and all states are as they were before it.

    Example:
        >>> class Patience(Callback):
        ...     '''Ends a run whose training loss has not fallen for ``rounds`` rounds.'''
        ...
        ...     rounds: int = 5
        ...
        ...     def after_round(self, run, record):
        ...         if record["train_loss"] < self.state.get("least", float("inf")):
        ...             self.state.update(least=record["train_loss"], round=record["round"])
        ...         return record["round"] - self.state.get("round", 0) >= self.rounds
        >>> Patience(rounds=3).name
        'Patience'
    """

    model_config = STRICT

    name: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    """The module of a library that an extra of the callback's name brings; empty: none."""
    _state: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    @property
    def state(self) -> dict[str, Any]:
        """Nested dictionaries of plain values (as JSON has them) and tensors: in checkpoints, and undone with a round.

        New values take the place of old ones; a tensor or a list that is in it must not be changed.
        """
        return self._state

    def begin(self, run: Running) -> None:
        """Act before the first round of this sitting: after the preparation, or where a resumed run goes on."""

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Act after a round.

        Args:
            run: that it rides along.
            record: the round's line of ``rounds.jsonl``, also the last of ``run.history``.

        Returns:
            True to end the run with this round: with a checkpoint, and a summary whose ``stopped_by`` is the name.
        """
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Act at the run's end; ``summary`` is what ``summary.json`` will hold, to which this may add."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a round's record by name, as trackers take them.

    Example:
        >>> numbers({"round": 1, "train_loss": 0.5, "metrics": {"accuracy": {"mean": 0.75}}})
        {'train_loss': 0.5, 'accuracy/mean': 0.75}
    """
    names = ("train_loss", "virtual_time", "training_seconds", "wall_seconds", "exchanges", "bytes_up", "bytes_down")
    found = {name: float(record[name]) for name in names if name in record}
    for metric, spread in record.get("metrics", {}).items():
        found |= {f"{metric}/{statistic}": float(value) for statistic, value in spread.items()}
    return {name: value for name, value in found.items() if isfinite(value)}


def named_once(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return ``callbacks``, each of which has a name of its own: states are kept by name.

    Raises:
        PerfedError: one is no callback, or two have the same name.
    """
    names: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise PerfedError(f"callbacks: {callback!r} is no perfed.Callback")
        if callback.name in names:
            raise PerfedError(f"callbacks: '{callback.name}' is there twice; once is allowed")
        names.add(callback.name)
    return [*callbacks]


def check_installed(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks whose library is not there.

    Raises:
        PerfedError: says which extra brings it.
    """
    for callback in callbacks:
        if callback.needs and find_spec(callback.needs) is None:
            raise PerfedError(f"callback '{callback.name}' needs {callback.needs}: {extra_command(callback.name)}")


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a callback's state as it is now: dictionaries copied, values by reference."""
    return {name: copied(value) if type(value) is dict else value for name, value in state.items()}


def parted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plain values of a callback's state and its tensors, each in the dictionaries that they were in."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        if type(value) is dict:
            plain[name], found = parted(value)
            tensors |= {name: found} if found else {}
        elif isinstance(value, Tensor | Mapping):  # a mapping that is no dictionary holds tensors, perhaps on disk
            tensors[name] = value
        else:
            plain[name] = value
    return plain, tensors


def joined(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that :func:`parted` has parted."""
    found = {**plain, **tensors}
    both = {name: joined(plain[name], tensors[name]) for name in tensors if name in plain}
    return found | both


def recall(callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give callbacks back the ``states`` that they had, by name; empty where there was none."""
    for callback in callbacks:
        callback.state.clear()
        callback.state.update(states.get(callback.name, {}))
