"""Which methods `make test` runs the tests of every method with, and which cases of tests that have very many."""

from __future__ import annotations

import os
import zlib
from datetime import date

from test_golden import METHODS as SHAPES

import perfed.methods  # noqa: F401 - registers every method
from perfed.method.registry import method_names

A_DAY = 5
OTHERS = sorted(set(method_names()) - set(SHAPES))


def today() -> date:
    """The day of the run, which the Makefile gives to all its processes: midnight may come."""
    return date.fromisoformat(os.environ.get("TEST_DATE") or date.today().isoformat())


def methods_of(day: date) -> set[str]:
    """One method for each shape of program, and five of the others: tomorrow the next five."""
    first = A_DAY * day.toordinal()
    return {*SHAPES, *(OTHERS[i % len(OTHERS)] for i in range(first, first + A_DAY))}


def has_turn(case: str, share: int, day: date) -> bool:
    """Whether it is the turn of a test's case, which comes every ``share`` days; each has its own place among them."""
    return (zlib.crc32(case.encode()) + day.toordinal()) % share == 0
