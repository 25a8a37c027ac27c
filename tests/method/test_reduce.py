"""Replies folded as they come: in the order of ids, one client's at a time, whatever the engine."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import ENGINES, blobs, cohort, every_tensor, make, quick, serve

from perfed.errors import PerfedError
from perfed.method.declared import ParameterSet
from perfed.method.exchange import Reply
from perfed.method.method import Method
from perfed.methods.feddar import heads
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp

SIZES = (3, 9, 1, 4, 7, 2)
IDS = [f"c{i}" for i in range(len(SIZES))]
WAYS = {**ENGINES, **{f"chunk {n}": {"engine": "stacked", "chunk": n} for n in (1, 2, 4)}}
# Inputs of two lengths, by turns, each with an embedding of its own kind: two chunks cannot come in the order of ids.
SHAPES = {"alike": (4,), "two kinds": (4, 3)}


def embedding(shape):
    return mlp((6,) if shape == (4,) else (6, 6), 3)(shape)


MODEL = Model(embedding=embedding, body=mlp((), 5), head=linear(3))


class Folding(Method):
    """The first exchange folds a large entry and counts at the client, the second reports the counter."""

    fail: str = ""
    lazy: bool = True

    def sets(self):
        zero = lambda info, key: {"value": torch.zeros((), dtype=info.dtype)}  # noqa: E731
        return {"counter": ParameterSet("client", init=zero), "seen": ParameterSet("server", init=zero)}

    def round(self, server, clients):
        # Halving what was there makes every other order give another result.
        def fold(total, reply):
            if self.fail == "fold" and total is not None:
                raise RuntimeError("the server stumbled")
            part = reply["large"] * reply["scale"]
            return part if total is None else total / 2 + part

        name = "other" if self.fail == "name" else "large"
        first = clients.run(self.add, reduce={name: fold}, amount=torch.tensor(2.0))
        assert first.ids == clients.ids and first.scale.shape == (len(first.ids),)
        second = clients.run(self.report, reduce={"after": lambda total, reply: (total or 0) + float(reply["after"])})
        server.seen = {"value": first.large, "after": torch.tensor(second.after)}

    def add(self, cohort, amount):
        cohort.state["counter"] = {"value": cohort.state["counter"]["value"] + amount}
        scale = torch.tensor([1.0 + float(i[1:]) / 3 for i in cohort.ids], dtype=cohort.dtype)

        def large(row):
            x = cohort.clients[row].train.x[:, :3]
            return x.T @ x

        return Reply(scale=scale, large=large if self.lazy else torch.stack([large(row) for row in range(cohort.n)]))

    def report(self, cohort):
        return Reply(after=cohort.state["counter"]["value"])


def server_of(way, shapes="alike", rate=1.0, **settings):
    settings["placement"] = {"embedding": "personal"}
    return serve(quick(Folding, **settings), blobs(SIZES, dims=SHAPES[shapes]), model=MODEL, rate=rate, **WAYS[way])


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_the_fold_is_a_loop_over_sorted_ids_bit_for_bit(way, shapes, lazy):
    server = server_of(way, shapes, lazy=lazy)
    record = server.round(1)
    total = None
    for client in sorted(server.engine.federation, key=lambda c: c.id):
        x = client.train.x[:, :3]
        part = x.T @ x * (1.0 + float(client.id[1:]) / 3)
        total = part if total is None else total / 2 + part
    assert torch.equal(server.state.seen["value"], total)
    assert float(server.state.seen["after"]) == 12.0  # the second exchange saw the pending states of the first
    assert record.bytes_up == len(IDS) * 8 * (9 + 1 + 1)


@pytest.mark.parametrize("way", WAYS)
def test_only_those_who_take_part_are_folded(way):
    server = server_of(way, rate=0.5)
    record = server.round(1)
    assert len(record.participants) == 3
    assert float(server.state.seen["after"]) == 6.0 and record.bytes_up == 3 * 8 * 11


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [("fold", RuntimeError, "stumbled"), ("name", PerfedError, "hold no 'other' to fold; they hold: .*large")],
)
def test_a_fold_that_fails_leaves_nothing_behind(way, fail, error, message):
    server = server_of(way, "two kinds")
    server.round(1)
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    server.initialiser.method = quick(Folding, fail=fail, placement={"embedding": "personal"})
    with pytest.raises(error, match=message):
        server.round(2)
    after = every_tensor(server)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items())


class Watched(Method):
    """Sends one large entry per client and checks, whenever one is made, that no other exists any more."""

    def round(self, server, clients):
        made, folded, order = [], [], []

        def fold(total, reply):
            folded.append(weakref.ref(reply["large"].untyped_storage()))
            order.append(int(reply["large"][0]))

        def watch(client):
            assert all(ref() is None for ref in (*made, *folded)), f"more than one client's when {client} had its turn"
            array = np.full(1000, float(client[1:]))
            made.append(weakref.ref(array))  # lives as long as the memory that tensors share with it
            return torch.from_numpy(array)

        type(self).watch = staticmethod(watch)
        clients.run(self.reply, reduce={"large": fold})
        assert order == list(range(len(IDS))) and len(made) == len(IDS)

    def reply(self, cohort):
        ids = cohort.ids
        return Reply(small=torch.zeros(cohort.n), large=lambda row: type(self).watch(ids[row]))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_one_clients_large_entry_exists_at_a_time(way, shapes):
    method = quick(Watched, placement={"embedding": "personal"})
    serve(method, blobs(SIZES, dims=SHAPES[shapes]), model=MODEL, **WAYS[way]).round(1)


def test_chunks_that_are_folded_come_in_the_order_of_ids():
    chunks = []

    class Looking(Folding):
        def add(self, cohort, amount):
            chunks.append(cohort.ids)
            return super().add(cohort, amount)

    method = quick(Looking, placement={"embedding": "personal"})
    serve(method, blobs(SIZES, dims=SHAPES["two kinds"]), model=MODEL, **WAYS["chunk 2"]).round(1)
    assert chunks == [["c0", "c2"], ["c1", "c3"], ["c4"], ["c5"]]


# FedDAR ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("regression", [False, True])
def test_one_clients_hessians_exist_at_a_time(engine, regression, monkeypatch):
    name = "squared_error_hessian" if regression else "softmax_hessian"
    original, made = getattr(heads, name), []

    def watched(*args):
        assert all(ref() is None for ref in made)
        found = original(*args)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(heads, name, watched)
    server = serve(make("feddar-sa"), blobs(SIZES, regression=regression), **ENGINES[engine])
    server.prepare()
    server.round(1)
    assert len(made) == len(IDS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hessian_at", ["trained", "received"])
@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_folded_heads_are_those_of_all_hessians_at_once(engine, hessian_at, damping):
    """Against eq. 8 in its correction form, from all clients' replies stacked, in numpy."""
    method, federation = make("feddar-sa", damping=damping, hessian_at=hessian_at), blobs((12, 7, 5, 9))
    server = serve(method, federation, **ENGINES[engine])
    server.prepare()
    old = dict(server.state.shared)
    group = cohort(method, federation)
    received = {name: t.expand(group.n, *t.shape) for name, t in old.items()}
    reply = method.train_heads(group, received, None)
    hessians = np.stack([reply["hessians"](row).numpy() for row in range(group.n)])
    counts = reply["domain_counts"].numpy()

    def flat(heads):
        both = np.concatenate([heads["head.weight"], heads["head.bias"][..., None]], axis=-1)
        return both.reshape(*both.shape[:-2], -1)

    server.round(1)
    found, before, local = flat(server.state.shared), flat(old), flat(reply["heads"])
    for m in range(2):
        share = counts[:, m] / counts[:, m].sum()
        matrix = np.einsum("i,ide->de", share, hessians[:, m])
        change = np.einsum("i,ide,ie->d", share, hessians[:, m], local[:, m] - before[m])
        delta = damping * np.trace(matrix) / 18
        inverse = np.linalg.inv(matrix + delta * np.eye(18)) if damping else np.linalg.pinv(matrix, rcond=1e-12)
        np.testing.assert_allclose(found[m], before[m] + inverse @ change, rtol=1e-6, atol=1e-8)
        assert np.abs(found[m] - before[m]).max() > 1e-3


def wide(outputs, **before):
    return Model(body=mlp((), outputs), head=linear(3), **before)


def test_hessians_over_the_limit_are_refused_before_anything_runs():
    # 2 domains x (3 x (84 + 1))^2 x 8 bytes are 1040400, one output more has 1065024; 1 MB are 1048576 bytes.
    settings = {"hessian_limit_mb": 1, "placement": {"embedding": "personal"}}
    model = wide(85, embedding=mlp((), 4))
    refused = serve(make("feddar-sa", **settings, more_extensions=(quick(Anchors),)), blobs(), model=model)
    refused.engine.run = None
    with pytest.raises(
        PerfedError, match=r"take 2 MB \(2 domains, .*3 x \(85 \+ 1\).*hessian_limit_mb = 1; .*at most 84"
    ):
        refused.prepare()
    for settings, outputs in (
        ({}, 84),
        ({"aggregation": "weighted"}, 85),
        ({"alternate": False}, 85),
        ({"hessian_limit_mb": 2}, 85),
    ):
        server = serve(make("feddar-sa", **{"hessian_limit_mb": 1, **settings}), blobs(), model=wide(outputs))
        server.prepare()
        server.round(1)
    clients = [
        replace(c, **{s: replace(c.split(s), y=c.split(s).y[:, None].repeat(1, 3)) for s in ("train", "test")})
        for c in blobs(regression=True)
    ]
    threefold = replace(blobs(regression=True), clients=tuple(clients))
    regression = serve(make("feddar-sa", hessian_limit_mb=1), threefold, model=wide(85))
    regression.prepare()  # one Hessian of 86 x 86 for all three outputs


def test_a_head_without_bias_is_refused_before_anything_runs():
    model = Model(body=mlp((), 4), head=lambda shape: torch.nn.Linear(4, 3, bias=False))
    server = serve(make("feddar-sa"), blobs(), model=model)
    server.engine.run = None
    with pytest.raises(PerfedError, match="needs a linear head with bias"):
        server.prepare()
