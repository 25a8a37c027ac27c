"""The Ray workers of a run, as the driver sees them."""

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
from perfed.engine.ray.cluster import connect, free, has_room, room
from perfed.engine.ray.queue import Job, TaskQueue, WorkerHandle
from perfed.engine.ray.where import Cluster
from perfed.engine.ray.worker import Outcome, Task, Worker, pack, size, unpack
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
    """Workers, and who of them has which clients in which state.

    Args:
        where: how many, and where.
        clients: of the federation, by id.
        background, initialiser: as every host has them.
        plan: gains the paths that workers choose.
        notes: gains what is to be told of the workers.
        holder: keeps the clients' new states. Once it has put one on disk, workers remember none.

    Raises:
        PerfedError: Ray is not there, has no room, or another perfed.
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
        self._put: dict[str, Any] = {}
        self._payload: tuple[Any, Any] = (None, None)
        self._homes: dict[str, WorkerHandle] = {}
        self._numbers: dict[str, tuple[Tree, int]] = {}
        self._count = 0
        self._members: list[WorkerHandle] = []
        self._kept = keeping.waiting() if initialiser.device.type == "cpu" else None
        self._ours = connect(where, plan.threads)
        self._free = 0
        if self._kept is not None and self._ours:  # whoever waited went with a Ray that is gone
            self._kept.actors, self._kept.ours, self._ours = [], True, False
        there = [] if self._kept is None else self._kept.take(plan.threads)
        try:
            count, gpus = room(where, plan.threads, initialiser.device, len(there))
            self._free = free() + plan.threads * len(there)
            self._actor = ray.remote(Worker).options(num_cpus=plan.threads, num_gpus=gpus, max_restarts=0)
            self._background = ray.put(pack((background, initialiser)))
            self._members = [WorkerHandle(actor) for actor in there]
            self._members = self._begun(count)
            self._members += [self._started() for _ in range(count - len(self._members))]
            self._welcome(self._members)
        except BaseException:
            for member in self._members:
                member.abandoned = True
            self.close()
            raise
        each = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}{f' and {gpus:g} GPU' if gpus else ''}"
        notes.append(f"Ray: {count} worker{'s' if count > 1 else ''} of {each}{' each' if count > 1 else ''}")

    def close(self) -> None:
        """Let the workers go, and the Ray that was started for them; where workers are kept, both wait for a run."""
        kept = [m.actor for m in self._members if self._kept is not None and not (m.jobs or m.abandoned)]
        for member in self._members:
            if member.actor not in kept:
                ray.kill(member.actor)
        if self._kept is not None:
            self._kept.actors = kept
        self._members, self._put, self._payload = [], {}, (None, None)
        if self._ours:
            ray.shutdown()
        elif self._free:
            has_room(self._free - self._plan.threads * len(kept))  # or the next run would see too little of it

    def perform(self, works: Iterable[ChunkTask]) -> Iterator[ChunkResult]:
        """Works of one exchange on all workers at once; what was done, in their order.

        A work that comes upon a kind that the plan does not know comes back undone, and is done again alone with leave
        to choose a path; the others wait for that choice, so that every worker takes the same.

        Raises:
            PerfedError: workers died over a work again and again; or what the clients' programs raise.
        """
        flow = TaskQueue(works, _AHEAD * len(self._members))
        jobs: list[Job]
        outcome: Outcome | None
        try:
            while flow.fill() or self._busy:
                if flow.pilot is not None and not self._busy:
                    jobs, outcome = self._piloted(flow.pilot)
                    flow.pilot = None
                else:
                    self._distribute(flow)
                    jobs, outcome = self._next()
                if outcome is None:
                    flow.back(jobs)
                elif outcome.error is not None:
                    raise outcome.error
                elif outcome.done is None:
                    flow.undecided(jobs[0])
                else:
                    yield from flow.came(jobs[0], outcome.done)
        finally:
            self._abandon()

    # Jobs --------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return any(member.jobs for member in self._members)

    def _distribute(self, flow: TaskQueue) -> None:
        """Give jobs to the workers that have their clients; while there are many, each has one in reserve."""
        reserve = int(len(flow.waiting) > len(self._members))
        for job in [] if flow.pilot else list(flow.waiting):
            free = [member for member in self._members if len(member.jobs) <= reserve]
            home = self._home(job) or min(free, key=lambda member: len(member.jobs), default=None)
            if home in free:
                flow.waiting.remove(job)
                self._send(home, job)
        for member in [] if flow.pilot else self._members:
            if flow.waiting and not member.jobs:  # rather than idle
                self._send(member, flow.waiting.pop(0))

    def _home(self, job: Job) -> WorkerHandle | None:
        """The worker that has most of the job's clients."""
        homes = Counter(home for client in job.work.ids if (home := self._homes.get(client)) is not None)
        return homes.most_common(1)[0][0] if homes else None

    def _piloted(self, job: Job) -> tuple[list[Job], Outcome]:
        """A job that goes out alone and may choose paths, and what came of it."""
        job.chooses, outcome = True, None
        with self._plan.trying():
            while outcome is None:  # the worker died
                self._send(self._home(job) or self._members[0], job)
                _, outcome = self._next()
        return [job], outcome

    def _send(self, member: WorkerHandle, job: Job) -> None:
        self._count += 1
        work, job.number = job.work, self._count
        parcels = {i: self._packed(i) for i in work.ids if self._homes.get(i) is not member}
        references = {i: sent for i, sent in parcels.items() if isinstance(sent, ray.ObjectRef)}
        numbers = {i: self._number(i, state) for i, state in work.states.items()}
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
            self._move(client, member)
        if task.remembers:
            member.states.update(numbers)
        else:
            member.states.clear()
        member.jobs.append(job)
        job.ref = member.actor.run.remote(pack(task), self._shared(work), references)

    def _next(self) -> tuple[list[Job], Outcome | None]:
        """The next job that came back, and what came of it; nothing where a worker died with these jobs."""
        heads = {member.jobs[0].ref: member for member in self._members if member.jobs}
        (ready, *_), _ = ray.wait(list(heads))
        member = heads[ready]
        try:
            outcome: Outcome = unpack(ray.get(ready), copy=True)
        except RayTaskError:
            raise
        except RayError as error:
            return self._replaced(member, error), None
        job = member.jobs.popleft()
        if outcome.done is not None:
            for client, state in outcome.done.states.items():
                outcome.done.states[client] = kept = self._holder.keep(state)
                self._numbers[client] = kept, job.number
                if not self._holder.overflowed:
                    member.states[client] = job.number
        if job.chooses and outcome.paths.keys() - self._plan.paths.keys():
            self._plan.paths.update(outcome.paths)
            self._plan.on_choice()
        return [job], outcome

    def _abandon(self) -> None:
        """Forget jobs that nobody waits for any longer; workers do them before what is sent next."""
        for member in self._members:
            for job in member.jobs:
                for client in job.work.ids:
                    member.states.pop(client, None)
            member.abandoned |= bool(member.jobs)
            member.jobs.clear()

    # What is where -----------------------------------------------------------------------------------------

    def _packed(self, client: str) -> Any:
        """A client's data: a small parcel itself, a reference to any other, which is kept by Ray once."""
        if client not in self._put:
            parcel = pack(replace(self._clients[client], table=None))
            if size(parcel) <= _SMALL:
                return parcel
            self._put[client] = ray.put(parcel)
        return self._put[client]

    def _move(self, client: str, member: WorkerHandle) -> None:
        before = self._homes.get(client)
        if before is not None:
            before.gone.append(client)
            before.states.pop(client, None)
        self._homes[client] = member

    def _number(self, client: str, state: Tree) -> int:
        """Of this very state."""
        known = self._numbers.get(client)
        if known is None or known[0] is not state:
            self._count += 1
            known = self._numbers[client] = state, self._count
        return known[1]

    def _shared(self, work: ChunkTask) -> Any:
        """A reference to the payload that is the same for all, which is sent once."""
        if self._payload[0] is not work.shared:
            self._payload = work.shared, ray.put(pack(work.shared))
        return self._payload[1]

    # Workers -----------------------------------------------------------------------------------------------

    def _begun(self, most: int) -> list[WorkerHandle]:
        """At most so many of those that are there after the run before, with nothing left of it; who died is none."""
        for member in self._members[most:]:
            ray.kill(member.actor)
        asked = [(member, member.actor.begin.remote(sys.path, self._background)) for member in self._members[:most]]
        found = []
        for member, answer in asked:
            try:
                ray.get(answer, timeout=_START_SECONDS)
            except RayError:
                ray.kill(member.actor)
            else:
                found.append(member)
        return found

    def _started(self) -> WorkerHandle:
        return WorkerHandle(self._actor.remote(sys.path, self._background, self._plan.threads))

    def _welcome(self, members: list[WorkerHandle]) -> None:
        """Wait until they are there."""
        try:
            found = ray.get([member.actor.about.remote() for member in members], timeout=_START_SECONDS)
        except GetTimeoutError:
            raise PerfedError(f"Ray has started no worker within {_START_SECONDS:.0f} s: is it busy?") from None
        except RayError as error:
            raise PerfedError(f"a Ray worker cannot start: {_reason(error)}") from None
        for version, digits in found:
            if version != installed_version():
                raise PerfedError(f"a Ray worker has perfed {version}, here is {installed_version()}; install the same")
            if digits not in self._arithmetic:
                self._arithmetic.add(digits)
                self._notes.append(f"a worker computes on {digits}: the last digits depend on who does what")

    def _replaced(self, member: WorkerHandle, error: RayError) -> list[Job]:
        """The jobs of a worker that died, after another has taken its place, or none where there is no room."""
        jobs = list(member.jobs)
        jobs[0].deaths += 1
        work, reason = jobs[0].work, _reason(error)
        when = f"round {work.exchange.round}" if work.exchange.round > 0 else "the preparation"
        self._homes = {client: home for client, home in self._homes.items() if home is not member}
        self._members.remove(member)
        ray.kill(member.actor)
        if jobs[0].deaths == _DEATHS:
            raise PerfedError(
                f"{_DEATHS} Ray workers died one after the other in {when} over client{'s' * (len(work.ids) > 1)} "
                f"{shorten_list(work.ids)} ({reason}); they need more memory: fewer workers (--workers), "
                "a smaller plan.chunk"
            )
        if self._members and not has_room(self._plan.threads):
            self._notes.append(f"a worker died in {when}; without room for another the others do its work")
            return jobs
        new = self._started()
        self._welcome([new])
        self._members.append(new)
        self._notes.append(f"a worker died in {when} and was replaced")
        return jobs


def _reason(error: RayError) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
