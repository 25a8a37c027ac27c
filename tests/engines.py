"""Small federations, models and servers for the tests, and an engine that sends everything through bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import perfed.methods  # noqa: F401 - registers every method
from perfed.codec import decode, encode
from perfed.data.federation import Federation
from perfed.engine.engine import Engine, InProcessEngine
from perfed.engine.evaluate import Metrics
from perfed.engine.host import Done, Exchange, Work
from perfed.engine.server import Server
from perfed.engine.setup import Setup
from perfed.method.method import Method
from perfed.method.registry import entry
from perfed.method.term import Term
from perfed.methods.fedbn import FedBN
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear, mlp
from perfed.participation.clock import Clock
from perfed.participation.invitation import Invitation
from perfed.participation.settings import Participation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan


class Sent(Done):
    """Replies that cross a wire, one client's at a time."""

    def reply(self, row: int) -> dict[str, Any]:
        return decode(encode(super().reply(row)))


class CodecEngine(InProcessEngine):
    """Every payload, reply and client state becomes bytes and is read back, as it would over a network."""

    def perform(self, works: Iterable[Work], invitation: Invitation | None = None) -> Iterator[Done]:
        for work in works:
            rows, states = ({i: decode(encode(v)) for i, v in of.items()} for of in (work.rows, work.states))
            done = self.host.attempt(replace(work, shared=decode(encode(work.shared)), rows=rows, states=states))
            yield Sent(**{**vars(done), "states": {i: decode(encode(s)) for i, s in done.states.items()}})


# name -> arguments of ``serve``
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "stacked": {"engine": "stacked"},
    "codec": {"engine": "stacked", "chunk": 2, "runner": CodecEngine},
}


def blobs(
    sizes=(12, 7, 5), *, dims=(4,), num_classes=3, labels=None, test=6, validation=0, seed=0, regression=False
) -> Federation:
    """Gaussian blobs; client i has ``sizes[i]`` samples of dimension ``dims[i]`` (cyclic) and classes ``labels[i]``.

    Samples belong to one of two domains at random.
    """
    generator = np.random.default_rng(seed)
    clients: dict[str, dict[str, Any]] = {}
    for i, size in enumerate(sizes):
        dim, held = dims[i % len(dims)], list(range(num_classes)) if labels is None else labels[i % len(labels)]
        centres = 2 * np.random.default_rng(dim).normal(size=(num_classes, dim))
        arrays: dict[str, Any] = {}
        parts = {"train": size, "validation": validation, "test": test[i] if isinstance(test, tuple) else test}
        for split, count in parts.items():
            if count == 0:
                continue
            y = generator.permutation(np.resize(held, count)).astype(np.int64)
            x = centres[y] + generator.normal(size=(count, dim))
            arrays |= {f"x_{split}": x, f"y_{split}": x.sum(1) if regression else y}
            arrays[f"domain_{split}"] = np.random.default_rng([seed, i, len(split)]).integers(0, 2, count)
        clients[f"c{i}"] = arrays
    return Federation.from_arrays(clients, num_classes=None if regression else num_classes)


def awkward_domains() -> Federation:
    """A client with one domain, a domain with one sample at one client, a domain in test data alone."""
    one, two, three = blobs((6, 5, 4))

    def with_domains(client, train, test):
        domains = {"train": train, "test": test}
        parts = {n: replace(client.split(n), domain=torch.tensor(ids)) for n, ids in domains.items()}
        return replace(client, **parts)

    clients = (
        with_domains(one, [0] * 6, [0] * 6),
        with_domains(two, [1, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1]),
        with_domains(three, [0, 1, 1, 0], [0, 1, 1, 0, 0, 0]),
    )
    return Federation(clients, 3)


def opposite_labels(clients=6, samples=24) -> Federation:
    """Even and odd clients have the same inputs with opposite labels: no single model can serve both."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(clients):
        x = torch.randn(samples, 2, generator=generator)
        y = ((x[:, 0] > 0) ^ bool(i % 2)).long()
        arrays[f"c{i}"] = {"x_train": x[:16], "y_train": y[:16], "x_test": x[16:], "y_test": y[16:]}
    return Federation.from_arrays(arrays, num_classes=2)


def network(num_classes: int = 3, *, dropout: float = 0.0, batch_norm: bool = False) -> Model:
    """Embedding to 3 numbers, body to 5, linear head."""
    embedding = mlp((6,), 3, dropout=dropout, batch_norm=batch_norm)
    return Model(embedding=embedding, body=hidden_layer(5), head=linear(num_classes))


def network_for(method: Method, num_classes: int = 3, *, dropout: float = 0.0) -> Model:
    """:func:`network`, with batch-norm for the method that is about it."""
    return network(num_classes, dropout=dropout, batch_norm=isinstance(method, FedBN))


def quick(kind: type[Method] | type[Term], **settings: Any) -> Any:
    """A method or term with its defaults, but at most two epochs of everything, and mini-batches of four."""
    short: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        is_number = isinstance(field.default, int) and not isinstance(field.default, bool)
        if name.endswith("epochs") and is_number:
            short[name] = min(2, field.default)
    if "pretrain_epochs" in kind.model_fields:
        short |= {"pretrain_epochs": 1, "pretrain_batch_size": 4}
    if issubclass(kind, Method):
        short |= {"batch_size": 4, "lr": 1e-2}
    return kind(**{**short, **settings})


def make(name: str, *, more_terms: tuple[Term, ...] = (), **settings: Any) -> Method:
    """The registered method ``name`` with the terms it always has."""
    found = entry(name)
    defaults = dict(found.defaults or {})
    own = []
    for term in found.terms:
        own.append(quick(term, **{k: defaults.pop(k) for k in list(defaults) if k in term.model_fields}))
    return quick(found.method, **{**defaults, "terms": (*own, *more_terms), **settings})


def serve(
    method: Method,
    federation: Federation,
    *,
    model: Model | None = None,
    engine: str = "stacked",
    chunk: int = 0,
    plan: Plan | None = None,
    runner: type[Engine] = InProcessEngine,
    dtype: torch.dtype = torch.float64,
    rate: float = 1.0,
    rounds: int = 10,
    seed: int = 0,
    participation: Participation | None = None,
    clock: Clock | None = None,
) -> Server:
    """A server before its preparation; ``participation`` is in place of ``rate``."""
    setup = Setup(method, model or network_for(method, federation.num_classes or 1), seed, dtype)
    plan = plan or Plan(engine, chunk)
    policy = participation or Participation(rate=rate)
    return Server(federation, setup, plan, policy, rounds, engine=runner, clock=clock)


def train(server: Server, rounds: int) -> Server:
    """Prepare and run ``rounds`` rounds."""
    server.prepare()
    for number in range(1, rounds + 1):
        server.round(number)
    return server


def cohort(
    method: Method, federation: Federation, *, ids: list[str] | None = None, round_: int = 1, **options: Any
) -> Cohort:
    """A cohort of ``ids`` (default: all) with their initial personal parameters, before anything was loaded."""
    runner = serve(method, federation, **options).engine
    clients = [runner.clients[i] for i in ids or federation.ids]
    return runner.host.cohort(clients, Exchange("test", round_, 0), {})


def leaves(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor of nested dictionaries with its path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def every_tensor(server: Server) -> dict[tuple[str, ...], Tensor]:
    """All state of a run: the server's sets and every client's committed state."""
    found = {("server", *path): t for path, t in leaves(server.state.tree())}
    for client, state in server.engine.states.items():
        found |= {(client, *path): t for path, t in leaves(state)}
    return found


def difference(one: Server, other: Server) -> float:
    """Largest relative difference ``|a - b| / |b|`` over all tensors of two runs; 0 only for equal bits."""
    a, b = every_tensor(one), every_tensor(other)
    assert a.keys() == b.keys()
    worst = 0.0
    for name, x in a.items():
        y = b[name]
        assert x.shape == y.shape and x.dtype == y.dtype, name
        assert torch.isfinite(x.double()).all(), name
        if x.numel():
            gap, size = (x.double() - y.double()).norm(), y.double().norm()
            worst = max(worst, float(gap / size.clamp_min(1e-30)))
    return worst


def assert_same_metrics(found: Metrics, expected: Metrics) -> None:
    """Equal to rounding, for float64 runs: bits are the same only for the same work in the same cohort."""
    assert found.keys() == expected.keys()
    for client, values in found.items():
        assert values == pytest.approx(expected[client], rel=1e-10), client


def mean_accuracy(server: Server) -> float:
    metrics = server.evaluate("test")
    return sum(values["accuracy"] for values in metrics.values()) / len(metrics)
