"""Torch's threads: how many compute one piece of work, and several pieces at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run with ``count`` torch threads and put the number back."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def side_by_side(
    threads: int, workers: int
) -> Iterator[Callable[[Callable[[Item], Result], Sequence[Item]], list[Result]]]:
    """What does work for several items, in order, ``workers`` at a time with ``threads`` torch threads each."""
    with use_threads(threads):
        if workers == 1:
            yield lambda work, items: [work(item) for item in items]
            return
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            yield lambda work, items: list(pool.map(work, items))
