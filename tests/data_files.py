"""Real data files in tests: used where present, skipped where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perfed.data.files import find_file
from perfed.errors import PerfedError


def require_file(name: str) -> Path:
    """The path of a data file; without it the test is skipped, or fails if PERFED_REQUIRE_DATA=1."""
    try:
        return find_file(name)
    except PerfedError as error:
        if os.environ.get("PERFED_REQUIRE_DATA") == "1":
            pytest.fail(f"PERFED_REQUIRE_DATA=1 but {error}")
        pytest.skip(str(error))
