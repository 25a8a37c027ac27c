from __future__ import annotations

import threading
import time

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from perfed import Model, Run, linear
from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.testing.federations import make_blobs
from perfed.testing.runs import build_server, run_rounds
from perfed.training.plan import THREAD_VARIABLES, Path, Plan, PlanSettings, use_threads
from perfed.training.trials import Trial


def test_auto_takes_the_fastest_way_per_client_and_remembers_it():
    begun: list[int] = []
    plan = Plan("auto", threads=1)
    slow_alone = sleeping(lambda chunk: 0.004 + 0.0005 * chunk, begun)
    assert plan.path("fit", 40, slow_alone) == Path(0, 1)
    assert set(begun) == {1, 4, 16, 40}
    count = len(begun)
    assert plan.path("fit", 40, slow_alone) == plan.path("fit", 3, slow_alone) == Path(0, 1)
    assert len(begun) == count  # decided once
    assert plan.path("other fit", 9, sleeping(lambda chunk: 0.002 * chunk**2)) == Path(1, 1)


def sleeping(seconds, begun=None):
    def begin(chunk: int):
        if begun is not None:
            begun.append(chunk)
        while True:
            time.sleep(seconds(chunk))
            yield chunk

    return Trial(begin, 10**6)


def never(chunk: int):
    raise AssertionError("timed")


def test_what_cannot_be_stacked_runs_alone_and_is_not_timed():
    for engine in ("auto", "stacked", "sequential"):
        assert Plan(engine, threads=1).path("fit", 40, Trial(never, 1), stackable=False) == Path(1, 1)


def test_fixed_engines_do_not_time_anything():
    trial = Trial(never, 1)
    assert Plan("sequential", threads=1).path("fit", 40, trial) == Path(1, 1)
    assert Plan("stacked", 7, threads=3).path("fit", 40, trial) == Path(7, 3)
    assert Plan("stacked", threads=1).path("fit", 40, trial).size(40) == 40
    assert Plan("auto", threads=1).path("fit", 1, trial) == Path(1, 1)  # nothing to choose


def test_a_path_never_takes_more_clients_than_there_are():
    assert [Path(c, 1).size(5) for c in (0, 1, 4, 5, 9)] == [5, 1, 4, 5, 5]


@pytest.mark.parametrize(
    ("path", "parallel", "most"), [(Path(2, 1), True, 3), (Path(2, 2), True, 1), (Path(2, 1), False, 1)]
)
def test_free_threads_work_on_other_chunks_and_results_stay_in_order(path, parallel, most):
    running, peak, lock = 0, 0, threading.Lock()

    def work(first: int, stop: int) -> tuple[int, int]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.02 if first else 0.05)  # the first chunk ends last
        with lock:
            running -= 1
        return stop - first, torch.get_num_threads()

    found = Plan("auto", threads=3).run_chunks(path, 7, work, parallel=parallel)
    assert found == [
        (0, 2, (2, path.threads)),
        (2, 4, (2, path.threads)),
        (4, 6, (2, path.threads)),
        (6, 7, (1, path.threads)),
    ]
    assert peak == most


def test_an_error_in_one_of_several_chunks_arrives():
    def work(first: int, stop: int) -> None:
        raise KeyError(first)

    before = torch.get_num_threads()
    with pytest.raises(KeyError, match="0"):
        Plan("auto", threads=2).run_chunks(Path(1, 1), 4, work, parallel=True)
    assert torch.get_num_threads() == before


def test_plain_values_round_trip():
    plan = Plan("auto", threads=2)
    plan.paths = {"fit head": Path(8, 1), "forward": Path(0, 2)}
    data = plan.to_dict()
    assert data == {
        "engine": "auto",
        "chunk": 0,
        "threads": 2,
        "paths": {"fit head": {"chunk": 8, "threads": 1}, "forward": {"chunk": 0, "threads": 2}},
    }
    back = PlanSettings.model_validate(data).build()
    assert back.to_dict() == data and back.path("fit head", 99, Trial(never, 1)) == Path(8, 1)


def test_description_says_what_was_chosen_and_why():
    plan = Plan("auto", threads=1)
    plan.paths = {"fit head": Path(8, 1), "forward": Path(0, 2), "fit body": Path(1, 1)}
    plan.reasons = {"body.1 (BatchNorm1d)": "batch-norm in training"}
    text = plan.describe()
    assert text[0] == "engine: auto, 1 threads"
    assert Plan(threads=4, untimed_threads=1).describe() == [
        "engine: auto, 4 threads at most, 1 where no trial chose more"
    ]
    assert (
        "fit head: 8 clients stacked, 1 thread each" in text and "forward: all clients stacked, 2 threads each" in text
    )
    assert "fit body: one client at a time, 1 thread each" in text
    assert "body.1 (BatchNorm1d): one client at a time (batch-norm in training)" in text


@pytest.fixture
def four_threads(monkeypatch):
    """Let torch have four threads by default, as on a machine with four processors."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with use_threads(4):
        yield


class Scaling:
    """Work that takes less time on several threads if ``saves``; it counts its trials."""

    workload = dict

    def __init__(self, saves):
        self.saves, self.trials = saves, []

    def find_fastest(self, clients, threads, *, parallel, chunk=None):
        self.trials.append((clients, threads, chunk))
        return chunk, threads if self.saves else 1


WITHOUT_CHOICE = [("sequential", 40, True, 1), ("stacked", 40, True, 0), ("auto", 40, False, 1), ("auto", 1, True, 1)]


@pytest.mark.parametrize(("engine", "clients", "stackable", "chunk"), WITHOUT_CHOICE)
@pytest.mark.parametrize("saves", [True, False])
def test_work_with_a_fixed_chunk_uses_several_threads_only_if_they_save_time(
    four_threads, engine, clients, stackable, chunk, saves
):
    work, plan = Scaling(saves), Plan(engine, remember=False)
    path = plan.path("fit", clients, work, stackable=stackable)
    assert path == Path(chunk, 4 if saves else 1)
    assert plan.untimed_threads == 1 and torch.get_num_threads() == 4
    assert plan.path("fit", clients, work, stackable=stackable) == path
    assert work.trials == [(clients, 4, chunk)]  # chosen once


@pytest.mark.parametrize(("engine", "clients", "stackable", "chunk"), WITHOUT_CHOICE)
def test_recorded_numbers_of_threads_are_used_again(four_threads, engine, clients, stackable, chunk):
    plan = Plan(engine, remember=False)
    path = plan.path("fit", clients, Scaling(True), stackable=stackable)
    with use_threads(1):  # resumed on a smaller machine
        again = PlanSettings.model_validate(plan.to_dict()).build()
    assert again == plan and (again.threads, again.untimed_threads) == (4, 1)
    assert again.path("fit", clients, Trial(never, 1), stackable=stackable) == path


@pytest.mark.parametrize(("engine", "clients", "stackable", "chunk"), WITHOUT_CHOICE)
@pytest.mark.parametrize("variable", [None, *THREAD_VARIABLES])
def test_numbers_of_threads_that_users_set_are_not_tried(
    four_threads, monkeypatch, engine, clients, stackable, chunk, variable
):
    if variable:
        monkeypatch.setenv(variable, "4")
    plan = Plan(engine, threads=0 if variable else 3)
    threads = 4 if variable else 3
    assert plan.path("fit", clients, Trial(never, 1), stackable=stackable) == Path(chunk, threads)
    assert plan.untimed_threads == threads and "untimed_threads" not in plan.to_dict()


def test_the_user_s_number_limits_the_threads_of_recorded_choices(four_threads):
    recorded = Plan("auto", untimed_threads=1, paths={"fit": Path(16, 4)}).to_dict()
    plan = PlanSettings.model_validate({**recorded, "threads": 2}).build()
    assert plan.path("fit", 40, Trial(never, 1)) == Path(16, 2)


def test_a_path_of_another_engine_is_not_taken_over(four_threads):
    plan = Plan("sequential", remember=False, paths={"fit": Path(16, 4)})
    assert plan.path("fit", 40, Scaling(False)) == Path(1, 1)


def test_the_threads_of_one_client_do_not_depend_on_what_came_before(four_threads):
    plan = Plan("auto", remember=False, paths={"fit": Path(16, 4)})
    assert plan.path("fit", 1, Scaling(False)) == Path(1, 1)
    assert plan.path("fit", 40, Trial(never, 1)) == Path(16, 4)


def test_a_trial_draws_nothing_from_the_global_generator(four_threads):
    def begin(chunk: int):
        while True:
            torch.rand(3)
            yield chunk

    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    Plan("sequential", remember=False).path("fit", 1, Trial(begin, 10))
    assert torch.equal(torch.rand(1), first)


class Watched(FedAvg):
    """FedAvg that records the numbers of threads on the server, also of NumPy's linear algebra, and at clients."""

    def round(self, server, clients):
        threads = [number for library, number in blas_threads().items() if library in LOADED_LIBRARIES]
        SERVER_THREADS.update([torch.get_num_threads(), *threads])
        super().round(server, clients)

    def train(self, cohort, shared):
        CLIENT_THREADS.add(torch.get_num_threads())
        return super().train(cohort, shared)


LOADED_LIBRARIES: set[str] = set()
SERVER_THREADS: set[int] = set()
CLIENT_THREADS: set[int] = set()


@pytest.fixture
def watched():
    LOADED_LIBRARIES.clear()
    LOADED_LIBRARIES.update(blas_threads())  # those that are loaded later take their number from the environment
    SERVER_THREADS.clear()
    CLIENT_THREADS.clear()
    return Watched(lr=0.1, local_epochs=1)


def blas_threads():
    return {
        library["filepath"]: library["num_threads"]
        for library in threadpool_info()
        if library["user_api"] == "blas" and library["threading_layer"] != "disabled"  # one that always has one thread
    }


@pytest.mark.parametrize(("settings", "threads"), [({}, 1), ({"threads": 3}, 3)])
@pytest.mark.parametrize("engine", ["auto", "stacked", "sequential"])
def test_everything_else_in_a_run_uses_one_thread_or_the_user_s_number(
    four_threads, watched, engine, settings, threads
):
    plan = Plan(engine, remember=False, **settings)
    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        Run(make_blobs((12, 9), test=9), watched, Model(head=linear(3)), rounds=1, plan=plan).execute()
        # Other code in this process has its threads back. The run may load further libraries.
        assert torch.get_num_threads() == 4 and before.items() <= blas_threads().items()
    assert SERVER_THREADS == CLIENT_THREADS == {threads}
    assert bool(plan.paths) == (engine == "auto" or not settings)


def test_clients_obey_the_plan_outside_a_run_as_real_sites_do(four_threads, watched):
    run_rounds(
        build_server(
            watched, make_blobs((12, 9)), model=Model(head=linear(3)), plan=Plan("sequential", remember=False)
        ),
        1,
    )
    assert {1} == CLIENT_THREADS and torch.get_num_threads() == 4


@pytest.mark.parametrize("wrong", [("fast",), ("stacked", -1), ("stacked", 0, -2)])
def test_impossible_plans_are_refused(wrong):
    with pytest.raises(PerfedError, match=r"unknown engine 'fast'; allowed: auto|at least 0"):
        Plan(*wrong)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), use_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before
