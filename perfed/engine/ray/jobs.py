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
"""Seconds that a task has to write its checkpoint after it was told to end."""

Message = tuple[str, Any]
Work = Callable[[bytes, tuple[Any, ...], Callable[[Any], None], int], Message]
"""Does the run of a key with so many threads: from a parcel, key, and what is told how far it is; says how it ended."""


class RayTasks:
    """Workers on a Ray cluster whose machines share this one's files: each run is a task, in this working directory.

    Args:
        address: HOST:PORT of the cluster, left as it is where this process is on a cluster already.
        work: what a task does.
        parcel: what it is made of, the same for all.
        number: of tasks at the same time; the processors of the cluster are shared out among them.

    Raises:
        PerfedError: ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str, work: Work, parcel: bytes, number: int) -> None:
        self._ray = ray = optional_package("ray", "--ray-address", "ray")
        from perfed.engine.ray.cluster import connect

        self._own = not ray.is_initialized() and connect(Cluster(address=address), threads=1)
        each = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        self._threads = max(1, min(int(sum(each)) // number, int(max(each))))
        self._inbox = ray.remote(num_cpus=0)(_Inbox).remote()
        self._task = ray.remote(num_cpus=self._threads, max_retries=0)(_run)
        inherited = {k: v for k, v in os.environ.items() if k.startswith("PERFED_") or k in THREAD_VARIABLES}
        place = (str(Path.cwd()), list(sys.path), inherited)
        self._sent = ray.put((work, parcel, self._threads, place))
        self._doing: dict[Any, int] = {}

    def give(self, worker: int, key: tuple[Any, ...]) -> None:
        """Begin a task on some node."""
        self._doing[self._task.remote(self._sent, worker, key, self._inbox)] = worker

    def news(self) -> list[tuple[int, str, Any]]:
        """What came since the last time: worker, kind and value of each message."""
        ray = self._ray
        ended, _ = ray.wait(list(self._doing), num_returns=len(self._doing), timeout=0) if self._doing else ([], [])
        try:
            heard: list[tuple[int, str, Any]] = ray.get(self._inbox.take.remote())  # what ended tasks said is there
        except ray.exceptions.RayError as error:
            raise PerfedError(f"jobs: the Ray cluster is lost: {str(error).splitlines()[0]}") from None
        for task in ended:
            worker = self._doing.pop(task)
            try:
                heard.append((worker, *ray.get(task)))
            except ray.exceptions.RayError as error:
                heard.append((worker, "lost", str(error).splitlines()[0]))
        return heard

    def stop(self) -> None:
        """End all tasks; each leaves a checkpoint of its last whole round."""
        ray, left = self._ray, list(self._doing)
        for task in left:
            ray.cancel(task)
        deadline = time.monotonic() + GRACE
        while left and time.monotonic() < deadline:
            _, left = ray.wait(left, num_returns=len(left), timeout=0.5)
        for task in left:
            ray.cancel(task, force=True)
        ray.kill(self._inbox)
        if self._own:
            ray.shutdown()


class _Inbox:
    """Where tasks say how far they are."""

    def __init__(self) -> None:
        self._said: list[tuple[int, str, Any]] = []

    def put(self, worker: int, kind: str, value: Any) -> None:
        self._said.append((worker, kind, value))

    def take(self) -> list[tuple[int, str, Any]]:
        said, self._said = self._said, []
        return said


def _run(sent: tuple[Work, bytes, int, Any], worker: int, key: tuple[Any, ...], inbox: Any) -> Message:
    work, parcel, threads, (folder, path, environment) = sent
    os.chdir(folder)
    for name in THREAD_VARIABLES:  # Ray sets one of them, which would look like a choice of the user's
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.path += [place for place in path if place not in sys.path]
    ray = import_module("ray")

    def tell(news: Any) -> None:
        ray.get(inbox.put.remote(worker, "news", news))

    ray.get(inbox.put.remote(worker, "ready", None))
    return work(parcel, key, tell, threads)
