"""What tests of runs share beside :mod:`perfed.testing`, whose small federations, models and servers they use."""

from __future__ import annotations

import pytest
import torch

import perfed.methods  # noqa: F401 - registers every method
from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics
from perfed.engine.executor import Exchange
from perfed.engine.server import Server
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.method.registry import entry
from perfed.testing.federations import make_awkward_domains as awkward_domains
from perfed.testing.federations import make_blobs as blobs
from perfed.testing.runs import ENGINES, CodecEngine, make_quick_entry
from perfed.testing.runs import build_network as network
from perfed.testing.runs import build_network_for as network_for
from perfed.testing.runs import build_server as serve
from perfed.testing.runs import collect_tensors as every_tensor
from perfed.testing.runs import make_quick as quick
from perfed.testing.runs import measure_difference as difference
from perfed.testing.runs import run_rounds as train
from perfed.training.cohort import Cohort
from perfed.tree import iterate_leaves as leaves

__all__ = [
    "ENGINES",
    "CodecEngine",
    "assert_same_metrics",
    "awkward_domains",
    "blobs",
    "cohort",
    "difference",
    "every_tensor",
    "leaves",
    "make",
    "mean_accuracy",
    "network",
    "network_for",
    "opposite_labels",
    "quick",
    "serve",
    "train",
]


def opposite_labels(clients=6, samples=24) -> Federation:
    """Even and odd clients have the same inputs with opposite labels: no single model can serve both."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(clients):
        x = torch.randn(samples, 2, generator=generator)
        y = ((x[:, 0] > 0) ^ bool(i % 2)).long()
        arrays[f"c{i}"] = {"x_train": x[:16], "y_train": y[:16], "x_test": x[16:], "y_test": y[16:]}
    return Federation.from_arrays(arrays, num_classes=2)


def make(name: str, *, more_extensions: tuple[Extension, ...] = (), **settings: object) -> Method:
    """The registered method ``name`` with the extensions it always has."""
    return make_quick_entry(entry(name), *more_extensions, **settings)


def cohort(
    method: Method, federation: Federation, *, ids: list[str] | None = None, round_: int = 1, **options: object
) -> Cohort:
    """A cohort of ``ids`` (default: all) with their initial personal parameters, before anything was loaded."""
    runner = serve(method, federation, **options).engine
    clients = [runner.clients[i] for i in ids or federation.ids]
    return runner.executor.cohort(clients, Exchange("test", round_, 0), {})


def assert_same_metrics(found: Metrics, expected: Metrics) -> None:
    """Equal to rounding, for float64 runs: bits are the same only for the same work in the same cohort."""
    assert found.keys() == expected.keys()
    for client, values in found.items():
        assert values == pytest.approx(expected[client], rel=1e-10), client


def mean_accuracy(server: Server) -> float:
    metrics = server.evaluate("test")
    return sum(values["accuracy"] for values in metrics.values()) / len(metrics)
