"""L2GD: its objective on quadratics, its two ends, the lengths of its runs, and FLIC on top of it."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, make, serve, train
from planes import LINEAR, flat, planes, quadratic

from perfed import rng
from perfed.errors import PerfedError
from perfed.methods.flic.anchors import Anchors
from perfed.methods.l2gd import L2GD, draw_run_length
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear

FULL = {"optimizer": "sgd", "batch_size": 100}


def minimiser(federation, lam):
    """All x_i, one after the other: ``H_i x_i - b_i + lam (x_i - mean) = 0``."""
    h, b = zip(*(quadratic(client) for client in federation), strict=True)
    n, d = len(h), len(b[0])
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    matrix = torch.block_diag(*h) + lam * torch.kron(centring, torch.eye(d, dtype=torch.float64))
    return torch.linalg.solve(matrix, torch.cat(b)).view(n, d)


def models(server):
    states = [server.engine.states[client]["local"] for client in server.engine.federation.ids]
    return torch.stack([flat(s) for s in states])


def objective(federation, x, lam):
    total = 0.0
    for row, client in zip(x, federation, strict=True):
        residual = client.train.x @ row[:-1] + row[-1] - client.train.y
        total += float(residual.square().mean() + lam / 2 * (row - x.mean(0)).square().sum())
    return total / len(x)


@pytest.mark.long
@pytest.mark.parametrize(("lam", "p", "lr"), [(1.0, 0.5, 0.02), (3.0, 0.3, {"head": 0.01})])
def test_it_minimises_the_mixture_of_local_losses_and_distance_to_the_mean(lam, p, lr):
    """The objective falls to near its minimum, and the mean iterate is the closed-form minimiser for this lambda."""
    federation = planes((12, 17, 22), 2, more=0.0, seed=2)
    server = serve(make("l2gd", lam=lam, p=p, lr=lr, **FULL), federation, model=LINEAR)
    target = minimiser(federation, lam)
    server.prepare()
    values, late = [], []
    for number in range(1, 301):
        server.round(number)
        values.append(objective(federation, models(server), lam))
        if number > 150:
            late.append(models(server))
    best = objective(federation, target, lam)
    assert values[0] - best > 20 * (sum(values[-100:]) / 100 - best) >= 0
    wrong = min(float((minimiser(federation, other) - target).norm()) for other in (lam / 2, 2 * lam))
    assert float((torch.stack(late).mean(0) - target).norm()) < wrong / 3


def test_without_pull_it_is_local_training():
    method = make("l2gd", lam=0.0, p=0.999, lr=0.05)  # one local iteration per round, many that average
    own = train(serve(method, blobs(), model=Model(body=hidden_layer(5), head=linear(3))), 3)
    local = make("local", local_epochs=1, lr=0.05)
    alone = train(serve(local, blobs(), model=Model(body=hidden_layer(5), head=linear(3))), 3)
    for client, state in alone.engine.states.items():
        for name, tensor in state["model"].items():
            torch.testing.assert_close(own.engine.states[client]["local"][name], tensor, rtol=1e-10, atol=1e-12)
    scores = own.evaluate("test")
    for client, values in alone.evaluate("test").items():
        assert scores[client] == pytest.approx(values, rel=1e-10)


@pytest.mark.parametrize(("lam", "least", "most"), [(0.0, 1e-2, 1e9), (1.0, 1e-6, 1e9), (1e9, 0.0, 1e-6)])
def test_a_strong_pull_ends_in_consensus(lam, least, most):
    server = train(
        serve(make("l2gd", lam=lam, lr=0.1, **FULL), planes((12, 17, 22), 2, more=0.0, seed=2), model=LINEAR), 5
    )
    x = models(server)
    assert least <= float((x - x.mean(0)).norm()) <= most
    shared = torch.cat([server.state.shared["head.weight"].flatten(), server.state.shared["head.bias"]])
    if lam != 1.0:  # data sizes, and with them nothing here, differ by whole batches: the mean stays
        torch.testing.assert_close(shared, x.mean(0), rtol=1e-6, atol=1e-6)


def implicit_note(count):
    return (
        f"head: {count} of 2 clients average implicitly, by 1 / (1 + a); 1 - a diverges for their a, which is 2 or more"
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("lr", "proximal", "clients"),
    [(0.1, "implicit", 0), (0.1, "explicit", 0), (0.2, "explicit", 1), (4, "explicit", 2)],
)
def test_averaging_contracts_by_the_documented_factor(momentum, lr, proximal, clients):
    """By 1 - a, the paper's, where that is below 1 in size (not for the larger client with 0.2), else 1 / (1 + a)."""
    lam, p, lr = 2.0, 0.25, lr * (1 - momentum)
    method = make("l2gd", lam=lam, p=p, lr=lr, batch_size=4, optimizer="sgd", momentum=momentum, proximal=proximal)
    server = serve(method, blobs((12, 4), num_classes=2, labels=[[0, 1]]), model=Model(head=linear(2)))
    (group,) = list(server.engine.cohorts(["c0", "c1"], {}))
    own = {name: torch.randn_like(t) for name, t in group.state["local"].items()}
    mean = {name: t.mean(0, keepdim=True).expand_as(t) for name, t in own.items()}
    group.state["local"] = dict(own)
    method.average(group, mean, torch.tensor([3, 3]))
    for row, steps in enumerate((3, 1)):  # mini-batch steps of an epoch
        a = lam * lr * (1 - p) / p * steps / (1 - momentum)
        keep = (1 - a if proximal == "explicit" and a < 2 else 1 / (1 + a)) ** 3
        for name, tensor in own.items():
            expected = mean[name][row] + keep * (tensor[row] - mean[name][row])
            torch.testing.assert_close(group.state["local"][name][row], expected)
            torch.testing.assert_close(group.model[name][row], expected)
    assert method.notes(server.engine.federation, server.initialiser.model) == [implicit_note(clients)] * bool(clients)


@pytest.mark.long
def test_lengths_of_runs_aregeometric_and_keyed():
    keys = [rng.key(0, "test", i) for i in range(4000)]
    for stop in (0.9, 0.5, 0.1):
        lengths = [draw_run_length(key, stop) for key in keys]
        assert min(lengths) == 1
        assert sum(lengths) / len(lengths) == pytest.approx(1 / stop, rel=0.08)
        assert lengths.count(1) / len(lengths) == pytest.approx(stop, rel=0.1)
        assert lengths == [draw_run_length(key, stop) for key in keys]


def test_a_round_has_local_epochs_on_average():
    assert make("l2gd", local_epochs=10).probability == 0.1
    assert make("l2gd", local_epochs=1).probability == 0.5
    assert make("l2gd", local_epochs=10, p=0.3).probability == 0.3
    with pytest.raises((ValueError, PerfedError), match="greater than or equal to 1"):
        L2GD(local_epochs=0)


def test_clients_that_do_not_take_part_keep_their_model():
    server = serve(make("l2gd"), blobs((6, 5, 4, 3)), rate=0.5)
    server.prepare()
    record = server.round(1)
    assert len(record.participants) == 2
    start = serve(make("l2gd"), blobs((6, 5, 4, 3)))
    for client in set(server.engine.federation.ids) - set(record.participants):
        (group,) = server.engine.cohorts([client], {})
        for name, tensor in start.state.shared.items():
            assert torch.equal(group.model[name][0], tensor)


@pytest.mark.parametrize("engine", ENGINES)
def test_flic_runs_on_it(engine):
    """FLIC's Table 2: personal embeddings, anchors, and x_i for everything behind the embedding."""
    anchors = Anchors(pretrain_epochs=2, pretrain_batch_size=4)
    method = make("l2gd", placement={"embedding": "personal"}, more_extensions=(anchors,))
    server = serve(method, blobs((12, 8, 1), dims=(3, 6)), **ENGINES[engine])
    server.prepare()
    before = {client: state["model"]["embedding.0.weight"].clone() for client, state in server.engine.states.items()}
    mean = server.state.anchors["mean"].clone()
    server.round(1)
    for client, start in before.items():
        state = server.engine.states[client]
        assert not torch.equal(state["model"]["embedding.0.weight"], start)
        assert set(state["local"]) == set(server.state.shared) and not any("embedding" in n for n in state["local"])
    assert not torch.equal(server.state.anchors["mean"], mean)
    assert len(server.evaluate("test")) == 3
