from __future__ import annotations

import os
import sys

import pytest
import torch
from short_part import SHORT_METHODS, is_sampled

# Of Ray's niceness 15 its workers starve beside the other tests; no test depends on what earlier trials chose.
os.environ.update(RAY_worker_niceness="0", PERFED_PLANS="")


def pytest_collection_modifyitems(items):
    """Mark the cases of `every_method` and `sampled` tests that are not in the short part as long."""
    for item in items:
        every_method = item.get_closest_marker("every_method")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if (
            every_method
            and every_method.args[0] in parameters
            and parameters[every_method.args[0]] not in SHORT_METHODS
        ):
            item.add_marker("long")
        sampled = item.get_closest_marker("sampled")
        if sampled and not is_sampled(item.name, sampled.args[0]):
            item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forgotten(tmp_path):
    """What a test registers by name is forgotten after it, and so are the modules in its folder."""
    from perfed import datasets, extensions, methods  # noqa: F401 - register perfed's own
    from perfed.aggregation.settings import AGGREGATORS
    from perfed.datasets import catalogue
    from perfed.engine.metrics import METRICS
    from perfed.method import extension, registry
    from perfed.participation.settings import POLICIES

    # In place: other modules hold the same dictionaries.
    tables = (catalogue.DATASETS, registry.METHODS, extension.EXTENSIONS, POLICIES, AGGREGATORS, METRICS)
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
    for name, imported in list(sys.modules.items()):
        if str(getattr(imported, "__file__", None)).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]
