from __future__ import annotations

import threading

import pytest
import torch

from perfed.training.trials import Trial, find_fastest


class FakeMachine:
    """Work whose steps take seconds of a clock that only they move, in as many threads as are at it."""

    def __init__(self, seconds, threads_save=1.0):
        self.seconds, self.threads_save = seconds, threads_save
        self.wall = self.processor = 0.0
        self.steps: dict[tuple[int, int], int] = {}
        self.threads: set[int] = set()
        self.lock = threading.Lock()

    def begin(self, chunk: int):
        while True:
            with self.lock:
                count = torch.get_num_threads()
                self.threads.add(threading.get_ident())
                self.steps[chunk, count] = self.steps.get((chunk, count), 0) + 1
                took = self.seconds(chunk) / (self.threads_save if count > 1 else 1)
                self.wall, self.processor = self.wall + took, self.processor + took * count
            yield chunk

    def fastest(self, clients, steps=10**6, threads=1, *, parallel=True):
        clocks = {"wall": lambda: self.wall, "processor": lambda: self.processor}
        return find_fastest(Trial(self.begin, steps), clients, threads, parallel=parallel, **clocks)

    @property
    def tried(self):
        return [chunk for chunk, _ in self.steps]


def bound_by_calls(chunk):
    return 1e-3 + 1e-5 * chunk


def bound_by_the_cache(chunk):
    """Calls cost a client less and less; from five clients on the caches are too small."""
    return 1e-3 + 5e-4 * chunk + 5e-4 * max(0, chunk - 5)


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        (bound_by_calls, 0, [1, 4, 16, 100]),
        (bound_by_the_cache, 4, [1, 4, 16, 8]),  # one that is clearly worse ends the search
        (lambda chunk: 1e-3 * chunk**1.5, 1, [1, 4, 2]),
        (lambda chunk: 1e-2 + 1e-3 * max(0, chunk - 8) ** 2, 8, [1, 4, 16, 8]),  # twice the best
    ],
)
def test_stacks_grow_until_one_is_clearly_worse(seconds, best, tried):
    machine = FakeMachine(seconds)
    assert machine.fastest(100) == (best, 1)
    assert machine.tried == tried


def test_a_slow_step_among_quick_ones_decides_nothing():
    machine = FakeMachine(lambda chunk: 0.5 if machine.steps[chunk, 1] % 2 == 0 else bound_by_calls(chunk))
    assert machine.fastest(100) == (0, 1)


def test_preparation_is_no_part_of_a_step():
    """A fit of few steps is begun again and again; a stack that takes long to prepare, and steps fast, is best."""
    machine = FakeMachine(lambda chunk: (1.0 if machine.steps[chunk, 1] == 1 else 0) + bound_by_calls(chunk))
    assert machine.fastest(100) == (0, 1)


@pytest.mark.parametrize("steps", [60, 600, 6000])
def test_trials_take_a_share_of_the_work_at_hand(steps):
    machine = FakeMachine(lambda chunk: 0.01 * chunk)
    machine.fastest(100, steps)
    assert machine.wall <= 0.5 * 0.01 * steps + 0.01 * 4  # and what warms up
    assert (100 in machine.tried) == (steps == 6000)


def test_small_work_is_tried_in_all_ways_whatever_its_share():
    machine = FakeMachine(lambda chunk: 1e-6 + 1e-6 * chunk)
    machine.fastest(100, 100)
    assert machine.tried == [1, 4, 16, 100]


def test_what_takes_long_is_stepped_as_often_as_it_must_be():
    slow, brief = FakeMachine(lambda chunk: 1.0 * chunk), FakeMachine(lambda chunk: 1e-4 * chunk)
    for machine in (slow, brief):
        machine.fastest(100)
    assert slow.steps[1, 1] == 3 and brief.steps[1, 1] == 6  # one of each warms up


def test_one_step_is_enough_for_a_stack_that_is_clearly_faster():
    machine = FakeMachine(bound_by_calls)
    machine.fastest(100)
    assert [machine.steps[chunk, 1] for chunk in (4, 16, 100)] == [2, 2, 2]  # one of each warms up
    machine = FakeMachine(lambda chunk: 1e-5 + 4e-6 * chunk)
    machine.fastest(100)
    assert [machine.steps[chunk, 1] for chunk in (4, 16, 100)] == [2, 6, 6]


@pytest.mark.parametrize(("clients", "tried"), [(7, [1, 7]), (8, [1, 4, 8]), (127, [1, 4, 16, 127])])
def test_a_stack_is_tried_where_there_are_two_of_it(clients, tried):
    machine = FakeMachine(bound_by_calls)
    machine.fastest(clients)
    assert machine.tried == tried


def test_clients_that_are_done_do_not_count():
    """Half of the clients have one step, then the others go on: a step of four takes twice as long for each."""

    def begin(chunk):
        for active in (chunk, (chunk + 1) // 2):
            clock[0] += 1e-3 * (active if chunk > 1 else 1.5)
            yield active

    clock = [0.0]
    assert find_fastest(Trial(begin, 10**6), 4, 1, parallel=False, wall=lambda: clock[0]) == (0, 1)


@pytest.mark.parametrize(("save", "threads"), [(2.0, 2), (1.05, 1)])
def test_more_threads_must_pay_clearly(save, threads):
    machine = FakeMachine(bound_by_the_cache, save)
    assert machine.fastest(100, threads=2, parallel=False) == (4, threads)
    assert {count for _, count in machine.steps} == {1, 2}


def test_chunks_that_are_worked_on_at_the_same_time_are_tried_so():
    machine = FakeMachine(bound_by_calls)
    machine.fastest(100, threads=2)
    assert machine.steps[4, 1] == 4 and len(machine.threads) > 1  # twice one that warms up and one
    alone = FakeMachine(bound_by_calls)
    alone.fastest(100, threads=2, parallel=False)
    assert alone.steps[4, 1] == 2 and len(alone.threads) == 1


@pytest.mark.parametrize(("save", "threads"), [(3.0, 3), (1.05, 1), (0.5, 1)])
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_of_a_fixed_chunk_only_the_threads_are_tried(chunk, save, threads):
    machine = FakeMachine(bound_by_calls, save)
    trial, wall = Trial(machine.begin, 100), lambda: machine.wall
    assert find_fastest(trial, 30, 3, parallel=False, chunk=chunk, wall=wall) == (chunk, threads)
    assert set(machine.steps) == {(chunk or 30, 1), (chunk or 30, 3)}
