"""The tests and cases that `make test` runs of those that have very many cases. `make test-long` runs the others."""

from __future__ import annotations

import zlib

from test_golden import METHODS

SHORT_METHODS = frozenset(METHODS)
"""One method for each shape of program: `make test` runs the tests of every method with these."""


def is_sampled(case: str, share: int) -> bool:
    """Return whether the test case named ``case`` is one of the ``1 / share`` that `make test` runs."""
    return zlib.crc32(case.encode()) % share == 0
