"""What runs in a Ray worker: a host of clients, which remembers their data and states; and how things travel to it."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.cloudpickle import CloudPickler
from torch import Tensor

from perfed.engine.executor import Background, ChunkResult, ChunkTask, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import METRICS, Metric
from perfed.errors import PerfedError
from perfed.plugins import describe_user_error
from perfed.system import installed_version
from perfed.training.plan import Path, Plan, describe_arithmetic
from perfed.tree import Tree

Parcel = tuple[bytes, list[NDArray[np.uint8]]]
"""A pickle, and the memory of the tensors in it."""


class _Pickler(CloudPickler):  # type: ignore[misc]
    """Takes tensors for what is seen of them, whatever storage they are views of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return super().reducer_override(obj)
        flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
        return _restored, (flat.numpy(), obj.dtype, tuple(obj.shape), obj.device.type)


def _restored(flat: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> Tensor:
    if flat.size == 0:
        return torch.empty(shape, dtype=dtype, device=kind)
    return torch.from_numpy(flat).view(dtype).view(shape).to(kind)


def pack(content: Any) -> Parcel:
    """``content`` with its tensors apart; they still share its memory."""
    found: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=found.append).dump(content)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in found]


def unpack(parcel: Parcel, *, copy: bool) -> Any:
    """What was packed; tensors of which no ``copy`` was made must not be written to, and keep the parcel alive."""
    data, buffers = parcel
    return pickle.loads(data, buffers=[_aligned(buffer) for buffer in buffers] if copy else buffers)


def _aligned(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy where torch would have put it: the last digits may depend on where a tensor begins."""
    made = torch.empty(buffer.size, dtype=torch.uint8).numpy()
    made[:] = buffer
    return made


def size(parcel: Parcel) -> int:
    """Bytes of all its buffers together."""
    return len(parcel[0]) + sum(buffer.nbytes for buffer in parcel[1])


class Undecided(Exception):
    """A kind of work came up whose path the plan does not know, and this worker may not choose it."""


@dataclass(frozen=True)
class Task:
    """A chunk's work as it is sent to a worker.

    Attributes:
        work: without states and what is the same for all.
        states: by id the number of the state that a client starts from, and the state unless the worker has it.
        number: of the states that the clients have afterwards.
        remembers: whether the worker keeps these; else it forgets all that it has.
        clients: small clients that the worker does not have yet, packed, by id.
        gone: clients that the worker need not keep any longer.
        paths: of the plan.
        chooses: whether the worker may add paths, by timing.
        metrics: the user's own.
    """

    work: ChunkTask
    states: Mapping[str, tuple[int, Tree | None]]
    number: int
    remembers: bool
    clients: Mapping[str, Parcel]
    gone: Sequence[str]
    paths: Mapping[str, Path]
    chooses: bool
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Outcome:
    """What came of a task.

    Attributes:
        done: what the chunk has done; ``None`` where it failed or a path is missing.
        error: why it failed.
        paths: those of the plan now.
    """

    done: ChunkResult | None = None
    error: Exception | None = None
    paths: Mapping[str, Path] = field(default_factory=dict)


class Worker:
    """One Ray worker.

    Args:
        modules: where Python looks for modules on the driver, so that the user's own are found here too.
        parcel: background and initialiser.
        threads: torch threads.
    """

    def __init__(self, modules: list[str], parcel: Parcel, threads: int) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(threads)
        self._threads, self._metrics = threads, dict(METRICS)
        self.begin(modules, parcel)

    def begin(self, modules: list[str], parcel: Parcel) -> None:
        """Forget the run before, and be there for another."""
        sys.path += [folder for folder in modules if folder not in sys.path]
        METRICS.clear()
        METRICS.update(self._metrics)
        background, initialiser = unpack(parcel, copy=True)
        assert isinstance(background, Background) and isinstance(initialiser, Initialiser)
        initialiser.device = torch.device(initialiser.device.type)  # Ray shows a worker its own GPUs alone
        self._plan = Plan("ray", threads=self._threads, remember=False)
        self._host = LocalExecutor((), background, initialiser, self._plan)
        self._states: dict[str, tuple[int, Tree]] = {}

    def about(self) -> tuple[str, str]:
        """Version of perfed, and what arithmetic depends on here."""
        return installed_version(), describe_arithmetic(self._host.initialiser.device)

    def run(self, parcel: Parcel, shared: Parcel, clients: Mapping[str, Any]) -> Parcel:
        """Do a :class:`Task`; its :class:`Outcome`, packed.

        Args:
            parcel: the task.
            shared: payload that is the same for all.
            clients: references to clients that the worker does not have yet, packed, by id.
        """
        try:
            task: Task = unpack(parcel, copy=True)
            self._keep(task, dict(zip(clients, ray.get(list(clients.values())), strict=True)))
            return pack(self._outcome(task, unpack(shared, copy=False)))
        except Undecided:
            return pack(Outcome())
        except Exception as error:
            return _packed_error(error)

    def _keep(self, task: Task, clients: Mapping[str, Parcel]) -> None:
        """Take in what was sent, and let go of clients that others have now."""
        for client in task.gone:
            self._host.clients.pop(client, None)
            self._states.pop(client, None)
        for client, parcel in {**task.clients, **clients}.items():
            self._host.clients[client] = unpack(parcel, copy=False)
        self._states.update({i: (number, state) for i, (number, state) in task.states.items() if state is not None})

    def _outcome(self, task: Task, shared: Mapping[str, Any]) -> Outcome:
        METRICS.update(task.metrics)
        states: dict[str, Tree] = {}
        for client, (number, _) in task.states.items():
            has, states[client] = self._states[client]
            assert has == number, f"client '{client}' is in state {has}, not {number}"
        self._plan.paths = dict(task.paths)
        self._plan.trying = nullcontext if task.chooses else _never
        done = self._host.attempt(replace(task.work, shared=shared, states=states)).with_computed_entries()
        if task.remembers:
            self._states.update({client: (task.number, state) for client, state in done.states.items()})
        else:
            self._states.clear()
        return Outcome(done, paths=self._plan.paths)


@contextmanager
def _never() -> Iterator[None]:
    raise Undecided
    yield


def _packed_error(error: Exception) -> Parcel:
    """What the driver raises: an exception that arose in a file of the user's own says where, in one line."""
    mistake = None if isinstance(error, PerfedError | MemoryError) else describe_user_error(error)
    sent = error.with_traceback(None) if mistake is None else PerfedError(mistake)
    try:
        return pack(Outcome(error=sent))
    except Exception:  # some cannot be pickled
        return pack(Outcome(error=RuntimeError(f"{type(error).__name__}: {error}")))
