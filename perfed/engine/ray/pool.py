"""The driver's pool of Ray workers of a run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from perfed.data.client import Client
from perfed.engine.executor import Background, ChunkResult, ChunkTask
from perfed.engine.initial import Initialiser
from perfed.engine.metrics import METRICS
from perfed.engine.ray import keeping
from perfed.engine.ray.cluster import connect, count_free, has_room, plan_workers
from perfed.engine.ray.queue import Job, TaskQueue, WorkerHandle
from perfed.engine.ray.where import Cluster
from perfed.engine.ray.worker import Outcome, Task, Worker, count_bytes, pack, unpack
from perfed.engine.states import States
from perfed.errors import PerfedError, shorten_list
from perfed.system import installed_version
from perfed.training.plan import Plan, describe_arithmetic
from perfed.tree import Tree

_DEATHS = 3
_START_SECONDS = 120.0
_AHEAD = 4
_SMALL = 64 << 10


class Pool:
    """The workers of a run, with the clients and states that each of them stores.

    Args:
        where: the number and place of the workers.
        clients: the clients of the federation by id.
        background, initialiser: the data from which every worker creates its executor.
        plan: the plan, to which the paths that workers choose are added.
        notes: a list to which notes on the workers are added.
        holder: stores the clients' new states. Once it has written a state to disk, workers store none.

    Raises:
        PerfedError: Ray cannot be reached, does not have enough free cores, or has another version of perfed.
    """

    def __init__(
        self,
        where: Cluster,
        clients: Mapping[str, Client],
        background: Background,
        initialiser: Initialiser,
        plan: Plan,
        notes: list[str],
        holder: States,
    ) -> None:
        self._clients, self._plan, self._notes, self._holder = clients, plan, notes, holder
        self._arithmetic = {describe_arithmetic(initialiser.device)}
        self._client_refs: dict[str, Any] = {}
        self._payload: tuple[Any, Any] = (None, None)
        self._homes: dict[str, WorkerHandle] = {}
        self._numbers: dict[str, tuple[Tree, int]] = {}
        self._count = 0
        self._members: list[WorkerHandle] = []
        self._waiting = keeping.get_waiting_workers() if initialiser.device.type == "cpu" else None
        self._is_connection_owner = connect(where, plan.threads)
        self._free_cores = 0
        if self._waiting is not None and self._is_connection_owner:  # waiting workers ended with an earlier Ray
            self._waiting.actors, self._waiting.ours, self._is_connection_owner = [], True, False
        reused = [] if self._waiting is None else self._waiting.take(plan.threads)
        try:
            count, gpus = plan_workers(where, plan.threads, initialiser.device, len(reused))
            self._free_cores = count_free() + plan.threads * len(reused)
            self._actor = ray.remote(Worker).options(num_cpus=plan.threads, num_gpus=gpus, max_restarts=0)
            self._background = ray.put(pack((background, initialiser)))
            self._members = [WorkerHandle(actor) for actor in reused]
            self._members = self._reset_members(count)
            self._members += [self._start_worker() for _ in range(count - len(self._members))]
            self._check_members(self._members)
        except BaseException:
            for member in self._members:
                member.abandoned = True
            self.close()
            raise
        resources = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}{f' and {gpus:g} GPU' if gpus else ''}"
        notes.append(f"Ray: {count} worker{'s' if count > 1 else ''} of {resources}{' each' if count > 1 else ''}")

    def close(self) -> None:
        """Kill the workers and the Ray instance of this run; workers that can be reused wait for the next run."""
        reusable = [m.actor for m in self._members if self._waiting is not None and not (m.jobs or m.abandoned)]
        for member in self._members:
            if member.actor not in reusable:
                ray.kill(member.actor)
        if self._waiting is not None:
            self._waiting.actors = reusable
        self._members, self._client_refs, self._payload = [], {}, (None, None)
        if self._is_connection_owner:
            ray.shutdown()
        elif self._free_cores:
            has_room(self._free_cores - self._plan.threads * len(reusable))  # wait until Ray has noticed the free cores

    def perform(self, works: Iterable[ChunkTask]) -> Iterator[ChunkResult]:
        """Execute the tasks of one exchange on all workers in parallel, and yield the results in the order of tasks.

        If the plan lacks the path of a kind of work, the task is returned and executed again while no other task is
        running, with permission to choose the path. The other tasks wait for this choice, so that all workers use the
        same path.

        Raises:
            PerfedError: workers died repeatedly during a task. Errors of client programs are raised, too.
        """
        flow = TaskQueue(works, _AHEAD * len(self._members))
        jobs: list[Job]
        outcome: Outcome | None
        try:
            while flow.fill() or self._is_busy:
                if flow.pilot is not None and not self._is_busy:
                    jobs, outcome = self._run_pilot(flow.pilot)
                    flow.pilot = None
                else:
                    self._distribute(flow)
                    jobs, outcome = self._wait_for_job()
                if outcome is None:
                    flow.requeue(jobs)
                elif outcome.error is not None:
                    raise outcome.error
                elif outcome.result is None:
                    flow.requeue_undecided(jobs[0])
                else:
                    yield from flow.add_result(jobs[0], outcome.result)
        finally:
            self._abandon()

    # Jobs --------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(member.jobs for member in self._members)

    def _distribute(self, flow: TaskQueue) -> None:
        """Send jobs to the workers that store their clients; while many jobs wait, each worker gets a second one."""
        reserve = int(len(flow.waiting) > len(self._members))
        for job in [] if flow.pilot else list(flow.waiting):
            free = [member for member in self._members if len(member.jobs) <= reserve]
            home = self._find_home(job) or min(free, key=lambda member: len(member.jobs), default=None)
            if home in free:
                flow.waiting.remove(job)
                self._send(home, job)
        for member in [] if flow.pilot else self._members:
            if flow.waiting and not member.jobs:  # an idle worker gets a job of other clients
                self._send(member, flow.waiting.pop(0))

    def _find_home(self, job: Job) -> WorkerHandle | None:
        """Return the worker that stores most of the job's clients; ``None`` if no worker stores any."""
        homes = Counter(home for client in job.work.ids if (home := self._homes.get(client)) is not None)
        return homes.most_common(1)[0][0] if homes else None

    def _run_pilot(self, job: Job) -> tuple[list[Job], Outcome]:
        """Execute a job that may choose paths while no other job is running; return it with its outcome."""
        job.chooses, outcome = True, None
        with self._plan.trying():
            while outcome is None:  # the worker died
                self._send(self._find_home(job) or self._members[0], job)
                _, outcome = self._wait_for_job()
        return [job], outcome

    def _send(self, member: WorkerHandle, job: Job) -> None:
        self._count += 1
        work, job.number = job.work, self._count
        parcels = {i: self._pack_client(i) for i in work.ids if self._homes.get(i) is not member}
        references = {i: sent for i, sent in parcels.items() if isinstance(sent, ray.ObjectRef)}
        numbers = {i: self._number_state(i, state) for i, state in work.states.items()}
        task = Task(
            work=replace(work, shared={}, states={}),
            states={i: (n, None if member.states.get(i) == n else work.states[i]) for i, n in numbers.items()},
            number=job.number,
            remembers=not self._holder.overflowed,
            clients={i: sent for i, sent in parcels.items() if i not in references},
            gone=member.gone,
            paths=self._plan.paths,
            chooses=job.chooses,
            metrics={name: METRICS[name] for name in work.scoring.metrics if METRICS[name].is_user_defined},
        )
        member.gone = []
        for client in parcels:
            self._move_client(client, member)
        if task.remembers:
            member.states.update(numbers)
        else:
            member.states.clear()
        member.jobs.append(job)
        job.ref = member.actor.run.remote(pack(task), self._put_payload(work), references)

    def _wait_for_job(self) -> tuple[list[Job], Outcome | None]:
        """Wait for a job to end; return it with its outcome, or the jobs of a worker that died and ``None``."""
        heads = {member.jobs[0].ref: member for member in self._members if member.jobs}
        (ready, *_), _ = ray.wait(list(heads))
        member = heads[ready]
        try:
            outcome: Outcome = unpack(ray.get(ready), copy=True)
        except RayTaskError:
            raise
        except RayError as error:
            return self._replace_worker(member, error), None
        job = member.jobs.popleft()
        if outcome.result is not None:
            for client, state in outcome.result.states.items():
                outcome.result.states[client] = stored = self._holder.keep(state)
                self._numbers[client] = stored, job.number
                if not self._holder.overflowed:
                    member.states[client] = job.number
        if job.chooses and outcome.paths.keys() - self._plan.paths.keys():
            self._plan.paths.update(outcome.paths)
            self._plan.on_choice()
        return [job], outcome

    def _abandon(self) -> None:
        """Discard jobs whose results are not needed any more; workers finish them before they start later jobs."""
        for member in self._members:
            for job in member.jobs:
                for client in job.work.ids:
                    member.states.pop(client, None)
            member.abandoned |= bool(member.jobs)
            member.jobs.clear()

    # Clients and states ------------------------------------------------------------------------------------

    def _pack_client(self, client: str) -> Any:
        """Return a client's packed data; large data are stored in Ray once, and a reference is returned."""
        if client not in self._client_refs:
            parcel = pack(replace(self._clients[client], table=None))
            if count_bytes(parcel) <= _SMALL:
                return parcel
            self._client_refs[client] = ray.put(parcel)
        return self._client_refs[client]

    def _move_client(self, client: str, member: WorkerHandle) -> None:
        before = self._homes.get(client)
        if before is not None:
            before.gone.append(client)
            before.states.pop(client, None)
        self._homes[client] = member

    def _number_state(self, client: str, state: Tree) -> int:
        """Return the number of a client's state; an object without a number gets a new one."""
        numbered = self._numbers.get(client)
        if numbered is None or numbered[0] is not state:
            self._count += 1
            numbered = self._numbers[client] = state, self._count
        return numbered[1]

    def _put_payload(self, work: ChunkTask) -> Any:
        """Return a reference to the payload that is the same for all clients, which is stored in Ray once."""
        if self._payload[0] is not work.shared:
            self._payload = work.shared, ray.put(pack(work.shared))
        return self._payload[1]

    # Workers -----------------------------------------------------------------------------------------------

    def _reset_members(self, limit: int) -> list[WorkerHandle]:
        """Reset at most ``limit`` workers of the previous run, and return those that still work; kill the others."""
        for member in self._members[limit:]:
            ray.kill(member.actor)
        answers = [(member, member.actor.begin.remote(sys.path, self._background)) for member in self._members[:limit]]
        working = []
        for member, answer in answers:
            try:
                ray.get(answer, timeout=_START_SECONDS)
            except RayError:
                ray.kill(member.actor)
            else:
                working.append(member)
        return working

    def _start_worker(self) -> WorkerHandle:
        return WorkerHandle(self._actor.remote(sys.path, self._background, self._plan.threads))

    def _check_members(self, members: list[WorkerHandle]) -> None:
        """Wait until workers have started, and check that they have the same version of perfed."""
        try:
            descriptions = ray.get([member.actor.describe.remote() for member in members], timeout=_START_SECONDS)
        except GetTimeoutError:
            raise PerfedError(f"Ray has started no worker within {_START_SECONDS:.0f} s: is it busy?") from None
        except RayError as error:
            raise PerfedError(f"a Ray worker cannot start: {_last_line(error)}") from None
        for version, digits in descriptions:
            if version != installed_version():
                raise PerfedError(f"a Ray worker has perfed {version}, here is {installed_version()}; install the same")
            if digits not in self._arithmetic:
                self._arithmetic.add(digits)
                self._notes.append(f"a worker computes on {digits}: the last digits depend on who does what")

    def _replace_worker(self, member: WorkerHandle, error: RayError) -> list[Job]:
        """Start a new worker in place of one that died, if there are free cores, and return the dead worker's jobs."""
        jobs = list(member.jobs)
        jobs[0].deaths += 1
        work, reason = jobs[0].work, _last_line(error)
        when = f"round {work.exchange.round}" if work.exchange.round > 0 else "the preparation"
        self._homes = {client: home for client, home in self._homes.items() if home is not member}
        self._members.remove(member)
        ray.kill(member.actor)
        if jobs[0].deaths == _DEATHS:
            raise PerfedError(
                f"{_DEATHS} Ray workers died one after the other in {when} during the work on "
                f"client{'s' * (len(work.ids) > 1)} "
                f"{shorten_list(work.ids)} ({reason}); they need more memory: fewer workers (--workers), "
                "a smaller plan.chunk"
            )
        if self._members and not has_room(self._plan.threads):
            self._notes.append(f"a worker died in {when}; the others do its work, for lack of free cores")
            return jobs
        new = self._start_worker()
        self._check_members([new])
        self._members.append(new)
        self._notes.append(f"a worker died in {when} and was replaced")
        return jobs


def _last_line(error: RayError) -> str:
    """Return the last line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
