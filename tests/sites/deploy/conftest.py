"""The tables of three sites."""

from __future__ import annotations

import pytest
from stations import write_tables


@pytest.fixture
def tables(tmp_path):
    """The folder of ``north.csv``, ``south.csv`` and ``west.csv``."""
    write_tables(tmp_path)
    return tmp_path
