"""Callbacks: classes whose methods a run calls at its start, after each round and at its end.

A callback sees the run through :class:`Running`, may end it, and keeps in ``state`` what a resumed run needs.
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
    """The attributes of a run that its callbacks may use.

    Attributes:
        name: name of the method.
        rounds: largest number of rounds of the run.
        seed: seed of all random numbers.
        federation, server: the clients, and the server with its parameter sets.
        directory: directory of the results; ``None`` for a run in memory.
        evaluation: settings of the evaluation.
        progress: progress of the run, with sums over its rounds.
        latest: the outcome of the latest round; ``None`` until a round has finished since the run was started or
            resumed.
        history: one record per round, as in ``rounds.jsonl``, in the order of the rounds.
        notes: notes for the summary.
        config: configuration of the run, as in ``config.toml``; empty if the run was created from objects.
        checkpoint_seconds: shortest time between two checkpoints, in seconds.
        callbacks: all callbacks, in the order in which they are called.
        resumed: the round after which a resumed run continues; ``None`` if the run was not resumed.
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
        """The number of the last finished round, or of the round that is being finished; 0 is the preparation."""

    @property
    def at_its_end(self) -> bool:
        """Whether no round follows."""

    def client_table(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and rows of ``clients.csv``."""


class Callback(BaseModel):
    """The base class of all callbacks, which does nothing.

    Settings are fields; values that change and that a resumed run needs are in ``state``. ``name`` is the name of the
    class unless the class sets it. Callbacks are called in their order as part of the round: if one raises an
    exception, the round is undone, and all states are restored to those before it.

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
    """The module that the callback needs, from a library in the extra of the callback's name; empty: none."""
    _state: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the callback: nested dictionaries of JSON values and tensors.

        It is saved in checkpoints, and restored if a round is undone. Values may be replaced, but a tensor or a list in
        the state must not be modified in place.
        """
        return self._state

    def begin(self, run: Running) -> None:
        """Run before the first round, after the preparation or after a resumed run has been restored."""

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Run after each round.

        Args:
            run: the run.
            record: the round's line of ``rounds.jsonl``, which is also the last entry of ``run.history``.

        Returns:
            True to end the run with this round. The run then writes a checkpoint, and ``stopped_by`` in its summary is
            the name of the callback.
        """
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Run at the end; may add entries to ``summary``, the content of ``summary.json``."""


def collect_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a round's record by name, for experiment trackers.

    Example:
        >>> collect_numbers({"round": 1, "train_loss": 0.5, "metrics": {"accuracy": {"mean": 0.75}}})
        {'train_loss': 0.5, 'accuracy/mean': 0.75}
    """
    names = ("train_loss", "virtual_time", "training_seconds", "wall_seconds", "exchanges", "bytes_up", "bytes_down")
    numbers = {name: float(record[name]) for name in names if name in record}
    for metric, spread in record.get("metrics", {}).items():
        numbers |= {f"{metric}/{statistic}": float(value) for statistic, value in spread.items()}
    return {name: value for name, value in numbers.items() if isfinite(value)}


def require_unique_names(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return ``callbacks`` after checking that their names differ, since states are stored by name.

    Raises:
        PerfedError: if an item is not a callback, or two callbacks have the same name.
    """
    names: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise PerfedError(f"callbacks: {callback!r} is not a perfed.Callback")
        if callback.name in names:
            raise PerfedError(f"callbacks: '{callback.name}' occurs twice; each may occur once")
        names.add(callback.name)
    return [*callbacks]


def check_installed(callbacks: Sequence[Callback]) -> None:
    """Check that the libraries of all callbacks are installed.

    Raises:
        PerfedError: if a library is missing; says which extra installs it.
    """
    for callback in callbacks:
        if callback.needs and find_spec(callback.needs) is None:
            raise PerfedError(f"callback '{callback.name}' needs {callback.needs}: {extra_command(callback.name)}")


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a callback's state in which dictionaries are copied and other values are shared."""
    return {name: copy_state(value) if type(value) is dict else value for name, value in state.items()}


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a callback's state as two trees of the same structure: the JSON values, and the tensors."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        if type(value) is dict:
            plain[name], inner_tensors = split_state(value)
            tensors |= {name: inner_tensors} if inner_tensors else {}
        elif isinstance(value, Tensor | Mapping):  # a mapping other than dict contains tensors, possibly on disk
            tensors[name] = value
        else:
            plain[name] = value
    return plain, tensors


def join_state(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state from the two trees of :func:`split_state`."""
    merged = {name: join_state(plain[name], tensors[name]) for name in tensors if name in plain}
    return {**plain, **tensors, **merged}


def restore_states(callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the state of each callback by that of its name in ``states``, or by an empty one."""
    for callback in callbacks:
        callback.state.clear()
        callback.state.update(states.get(callback.name, {}))
