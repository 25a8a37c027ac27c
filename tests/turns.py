"""Which methods `make test` runs the tests of every method with."""

from __future__ import annotations

import os
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
