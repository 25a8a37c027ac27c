"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import perfed


def test_examples_in_docstrings_are_true():
    tried = 0
    for info in pkgutil.walk_packages(perfed.__path__, "perfed."):
        if not info.name.endswith("__main__"):
            found = doctest.testmod(importlib.import_module(info.name))
            assert found.failed == 0, info.name
            tried += found.attempted
    assert tried > 30
