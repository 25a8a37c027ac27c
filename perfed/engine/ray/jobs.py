"""Whole runs as tasks on a Ray cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from perfed.data.files import optional_package
from perfed.engine.ray.where import Cluster
from perfed.errors import PerfedError
from perfed.training.plan import THREAD_VARIABLES

GRACE = 60.0
"""Seconds that a task has for writing its checkpoint after it was asked to end."""

Message = tuple[str, Any]
Work = Callable[[bytes, tuple[Any, ...], Callable[[Any], None], int], Message]
"""Executes a run, given the parcel, its key, a function that receives its progress, and the number of threads."""


class RayTasks:
    """Workers on a Ray cluster whose machines share the files of this machine.

    Each run is a Ray task, which is executed in the current working directory.

    Args:
        address: HOST:PORT of the cluster; ignored if this process is already connected to a cluster.
        work: the function that executes a run.
        parcel: the bytes from which the run factory is unpacked, the same for all tasks.
        number: the number of parallel tasks, among which the processors of the cluster are divided.

    Raises:
        PerfedError: ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str, work: Work, parcel: bytes, number: int) -> None:
        self._ray = ray = optional_package("ray", "--ray-address", "ray")
        from perfed.engine.ray.cluster import connect

        self._is_connection_owner = not ray.is_initialized() and connect(Cluster(address=address), threads=1)
        processors = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        self._threads = max(1, min(int(sum(processors)) // number, int(max(processors))))
        self._inbox = ray.remote(num_cpus=0)(_Inbox).remote()
        self._task = ray.remote(num_cpus=self._threads, max_retries=0)(_run_task)
        inherited = {k: v for k, v in os.environ.items() if k.startswith("PERFED_") or k in THREAD_VARIABLES}
        process_settings = (str(Path.cwd()), list(sys.path), inherited)
        self._task_arguments = ray.put((work, parcel, self._threads, process_settings))
        self._running: dict[Any, int] = {}

    def assign(self, worker: int, key: tuple[Any, ...]) -> None:
        """Start a task that executes the run ``key``, on any node."""
        self._running[self._task.remote(self._task_arguments, worker, key, self._inbox)] = worker

    def receive_messages(self) -> list[tuple[int, str, Any]]:
        """Return the worker, kind and content of each message that arrived since the last call."""
        ray = self._ray
        ended, _ = (
            ray.wait(list(self._running), num_returns=len(self._running), timeout=0) if self._running else ([], [])
        )
        try:
            # Tasks that have ended have sent all their messages, so that none arrives after the result of its task.
            messages: list[tuple[int, str, Any]] = ray.get(self._inbox.take.remote())
        except ray.exceptions.RayError as error:
            raise PerfedError(f"jobs: the Ray cluster is lost: {str(error).splitlines()[0]}") from None
        for task in ended:
            worker = self._running.pop(task)
            try:
                messages.append((worker, *ray.get(task)))
            except ray.exceptions.RayError as error:
                messages.append((worker, "lost", str(error).splitlines()[0]))
        return messages

    def stop(self) -> None:
        """Stop all tasks; each writes a checkpoint of its last complete round."""
        ray, running = self._ray, list(self._running)
        for task in running:
            ray.cancel(task)
        deadline = time.monotonic() + GRACE
        while running and time.monotonic() < deadline:
            _, running = ray.wait(running, num_returns=len(running), timeout=0.5)
        for task in running:
            ray.cancel(task, force=True)
        ray.kill(self._inbox)
        if self._is_connection_owner:
            ray.shutdown()


class _Inbox:
    """An actor that collects the messages of all tasks."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, str, Any]] = []

    def put(self, worker: int, kind: str, value: Any) -> None:
        self._messages.append((worker, kind, value))

    def take(self) -> list[tuple[int, str, Any]]:
        messages, self._messages = self._messages, []
        return messages


def _run_task(arguments: tuple[Work, bytes, int, Any], worker: int, key: tuple[Any, ...], inbox: Any) -> Message:
    """Execute a run in the environment of the process that started the task, and return its last message."""
    work, parcel, threads, (folder, path, environment) = arguments
    os.chdir(folder)
    for name in THREAD_VARIABLES:  # Ray sets one of them, which would look like a choice of the user
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.path += [directory for directory in path if directory not in sys.path]
    ray = import_module("ray")

    def tell(event: Any) -> None:
        ray.get(inbox.put.remote(worker, "news", event))

    ray.get(inbox.put.remote(worker, "ready", None))
    return work(parcel, key, tell, threads)
