"""The Ray worker, which stores clients and their states, and the serialisation of the data that are sent to it."""

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
    """A pickler that stores only the values of tensors that are views, not their whole storage."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return super().reducer_override(obj)
        flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
        return _restore_tensor, (flat.numpy(), obj.dtype, tuple(obj.shape), obj.device.type)


def _restore_tensor(flat: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> Tensor:
    if flat.size == 0:
        return torch.empty(shape, dtype=dtype, device=kind)
    return torch.from_numpy(flat).view(dtype).view(shape).to(kind)


def pack(content: Any) -> Parcel:
    """Return ``content`` as a pickle and separate buffers of its tensors, which still share its memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(content)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(parcel: Parcel, *, copy: bool) -> Any:
    """Return the content of :func:`pack`.

    Without ``copy``, its tensors share the memory of the parcel and must not be written to.
    """
    data, buffers = parcel
    return pickle.loads(data, buffers=[_copy_aligned(buffer) for buffer in buffers] if copy else buffers)


def _copy_aligned(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy with torch's memory alignment, on which the last digits of results may depend."""
    copy = torch.empty(buffer.size, dtype=torch.uint8).numpy()
    copy[:] = buffer
    return copy


def count_bytes(parcel: Parcel) -> int:
    """Return the number of bytes of the pickle and all buffers."""
    return len(parcel[0]) + sum(buffer.nbytes for buffer in parcel[1])


class Undecided(Exception):
    """An error: the plan lacks the path of a kind of work, and this worker may not choose it."""


@dataclass(frozen=True)
class Task:
    """The task of a chunk as it is sent to a worker.

    Attributes:
        work: the task, without states and without the payload that is the same for all clients.
        states: the number of the state from which each client starts, and the state unless the worker has it, by id.
        number: the number of the clients' new states.
        remembers: whether the worker stores the new states; otherwise it deletes all its states.
        clients: packed small clients that the worker does not have yet, by id.
        gone: clients that the worker no longer needs to store.
        paths: the paths of the plan.
        chooses: whether the worker may add paths, by timing.
        metrics: the user-defined metrics.
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
    """The outcome of a task.

    Attributes:
        result: the result of the chunk; ``None`` if it failed or a path is missing.
        error: the error if it failed.
        paths: the paths of the plan after the task.
    """

    result: ChunkResult | None = None
    error: Exception | None = None
    paths: Mapping[str, Path] = field(default_factory=dict)


class Worker:
    """A Ray worker, which executes tasks and stores the data and states of some clients.

    Args:
        modules: the driver's search path for Python modules, so that the user's modules can be imported here, too.
        parcel: the packed background and initialiser.
        threads: the number of torch threads.
    """

    def __init__(self, modules: list[str], parcel: Parcel, threads: int) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(threads)
        self._threads, self._metrics = threads, dict(METRICS)
        self.begin(modules, parcel)

    def begin(self, modules: list[str], parcel: Parcel) -> None:
        """Delete everything of the previous run, and prepare for another run."""
        sys.path += [folder for folder in modules if folder not in sys.path]
        METRICS.clear()
        METRICS.update(self._metrics)
        background, initialiser = unpack(parcel, copy=True)
        assert isinstance(background, Background) and isinstance(initialiser, Initialiser)
        initialiser.device = torch.device(initialiser.device.type)  # Ray shows a worker only its assigned GPUs
        self._plan = Plan("ray", threads=self._threads, remember=False)
        self._host = LocalExecutor((), background, initialiser, self._plan)
        self._states: dict[str, tuple[int, Tree]] = {}

    def describe(self) -> tuple[str, str]:
        """Return the version of perfed and a description of the processor on which arithmetic depends."""
        return installed_version(), describe_arithmetic(self._host.initialiser.device)

    def run(self, parcel: Parcel, shared: Parcel, clients: Mapping[str, Any]) -> Parcel:
        """Execute a :class:`Task` and return its packed :class:`Outcome`.

        Args:
            parcel: the packed task.
            shared: the packed payload that is the same for all clients.
            clients: references to packed clients that the worker does not have yet, by id.
        """
        try:
            task: Task = unpack(parcel, copy=True)
            self._update_clients(task, dict(zip(clients, ray.get(list(clients.values())), strict=True)))
            return pack(self._execute(task, unpack(shared, copy=False)))
        except Undecided:
            return pack(Outcome())
        except Exception as error:
            return _pack_error(error)

    def _update_clients(self, task: Task, clients: Mapping[str, Parcel]) -> None:
        """Store the clients and states that were sent, and delete clients that other workers store now."""
        for client in task.gone:
            self._host.clients.pop(client, None)
            self._states.pop(client, None)
        for client, parcel in {**task.clients, **clients}.items():
            self._host.clients[client] = unpack(parcel, copy=False)
        self._states.update({i: (number, state) for i, (number, state) in task.states.items() if state is not None})

    def _execute(self, task: Task, shared: Mapping[str, Any]) -> Outcome:
        METRICS.update(task.metrics)
        states: dict[str, Tree] = {}
        for client, (number, _) in task.states.items():
            stored_number, states[client] = self._states[client]
            assert stored_number == number, f"client '{client}' is in state {stored_number}, not {number}"
        self._plan.paths = dict(task.paths)
        self._plan.trying = nullcontext if task.chooses else _refuse_trial
        result = self._host.attempt(replace(task.work, shared=shared, states=states)).with_computed_entries()
        if task.remembers:
            self._states.update({client: (task.number, state) for client, state in result.states.items()})
        else:
            self._states.clear()
        return Outcome(result, paths=self._plan.paths)


@contextmanager
def _refuse_trial() -> Iterator[None]:
    """Raise :class:`Undecided` where the plan would time several paths."""
    raise Undecided
    yield


def _pack_error(error: Exception) -> Parcel:
    """Return a packed outcome with the error that the driver raises.

    An exception from a user's module is replaced by a one-line error that names the place.
    """
    description = None if isinstance(error, PerfedError | MemoryError) else describe_user_error(error)
    packable = error.with_traceback(None) if description is None else PerfedError(description)
    try:
        return pack(Outcome(error=packable))
    except Exception:  # some exceptions cannot be pickled
        return pack(Outcome(error=RuntimeError(f"{type(error).__name__}: {error}")))
