"""FedMinMax: weights of the domains that ascend by their risks."""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import blobs, difference, make, network, serve, train

from perfed.data.federation import Federation
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.maths.simplex import nearest_on_simplex
from perfed.methods.fedminmax import ascend_weights
from perfed.model.chain import Model
from perfed.model.presets import linear

FULL = {"optimizer": "sgd", "lr": 0.1, "batch_size": 1000, "local_epochs": 1}


def risks(server: Server, federation: Federation) -> torch.Tensor:
    """Mean loss of each domain's training samples at the server's model, by a plain forward pass."""
    chain = network().build(federation.clients[0].input_shape).double()
    chain.load_state_dict(server.state.shared)
    x, y, domain = (torch.cat([getattr(c.train, part) for c in federation]) for part in ("x", "y", "domain"))
    losses = F.cross_entropy(chain.eval()(x), y, reduction="none").detach()
    return torch.stack([losses[domain == m].mean() for m in range(federation.num_domains)])


# Projection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_projection_is_cvxpys(seed):
    rng = np.random.default_rng(seed)
    point = rng.normal(size=rng.integers(1, 9)) * 10.0 ** rng.integers(-2, 3)
    a = cvxpy.Variable(len(point))
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(a - point)), [a >= 0, cvxpy.sum(a) == 1]).solve(solver="CLARABEL")
    np.testing.assert_allclose(nearest_on_simplex(point), a.value, atol=1e-6)


def test_the_projection_has_the_closed_form_of_a_common_shift():
    """``max(v - tau, 0)`` with the one tau that makes it sum to one, here by bisection; also for points far away."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        point = rng.normal(size=7) * 10.0 ** rng.integers(-3, 7) + 10.0 ** rng.integers(0, 5)
        low, high = point.max() - 1, point.max()
        for _ in range(200):
            tau = (low + high) / 2
            low, high = (tau, high) if (point - tau).clip(0).sum() > 1 else (low, tau)
        np.testing.assert_allclose(nearest_on_simplex(point), (point - low).clip(0), atol=1e-9 + 1e-14 * abs(low))


def test_domains_that_nobody_reports_keep_their_weight():
    mu = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    losses, counts = torch.tensor([4.0, 0.0, 30.0]).double(), torch.tensor([4.0, 0.0, 10.0]).double()
    found = ascend_weights(mu, losses, counts, 0.1)
    # Risks 1 and 3: the two move apart by eta (3 - 1) / 2 each around their mean, and still sum to 0.8.
    torch.testing.assert_close(found, torch.tensor([0.4, 0.2, 0.4]).double())
    found = ascend_weights(mu, losses, counts, 10.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.2, 0.8]).double())
    assert torch.equal(ascend_weights(mu, torch.zeros(3).double(), torch.zeros(3).double(), 10.0), mu)


# Rounds ------------------------------------------------------------------------------------------------------


def test_a_round_is_a_gradient_step_on_the_weighted_risks_and_an_ascent_by_those_at_the_received_model():
    federation = blobs((9, 8, 7))
    server = serve(make("fedminmax", domain_lr=0.3, **FULL), federation)
    server.prepare()
    counts = torch.bincount(torch.cat([c.train.domain for c in federation])).double()
    mu = counts / counts.sum()
    torch.testing.assert_close(server.state.domains["mu"], mu)
    for number in (1, 2, 3):
        chain = network().build((4,)).double()
        chain.load_state_dict(server.state.shared)
        x, y, z = (torch.cat([getattr(c.train, part) for c in federation]) for part in ("x", "y", "domain"))
        losses = F.cross_entropy(chain(x), y, reduction="none")
        each = torch.stack([losses[z == m].mean() for m in range(2)])
        (mu @ each).backward()
        server.round(number)
        for name, p in chain.named_parameters():
            torch.testing.assert_close(server.state.shared[name], p.detach() - 0.1 * p.grad)
        mu = torch.from_numpy(nearest_on_simplex((mu + 0.3 * each.detach()).numpy()))
        torch.testing.assert_close(server.state.domains["mu"], mu)


def test_without_ascent_it_is_fedavg_and_with_it_not():
    plain = train(serve(make("fedavg"), blobs()), 3)
    for lr, equal in ((0.0, True), (0.5, False)):
        run = train(serve(make("fedminmax", domain_lr=lr), blobs()), 3)
        gap = max(float((run.state.shared[name] - t).norm() / t.norm()) for name, t in plain.state.shared.items())
        assert (gap < 1e-9) == equal


@pytest.mark.long
def test_it_finds_the_minimax_of_a_rare_domain():
    """Targets 0 in nine of ten samples and 1 in the others: FedAvg predicts 0.1, the minimax is 0.5."""
    clients = {}
    for i in range(2):
        domain = np.array([0] * 9 + [1])
        clients[f"c{i}"] = {"x_train": np.zeros((10, 1)), "y_train": domain.astype(float), "domain_train": domain}
    federation, model = Federation.from_arrays(clients, task="regression"), Model(head=linear(1))
    found = {}
    for name in ("fedavg", "fedminmax"):
        more = {"domain_lr": 0.05} if name == "fedminmax" else {}
        server = train(serve(make(name, **FULL, **more), federation, model=model), 400)
        found[name] = float(server.state.shared["head.bias"])
    assert found["fedavg"] == pytest.approx(0.1, abs=1e-6)
    assert found["fedminmax"] == pytest.approx(0.5, abs=1e-3)
    torch.testing.assert_close(server.state.domains["mu"], torch.tensor([0.5, 0.5]).double(), atol=1e-3, rtol=0)


@pytest.mark.long
def test_the_worst_domain_is_better_than_with_fedavg():
    federation = blobs((30, 30), seed=3)
    rare = []
    for client in federation:
        domain = (torch.arange(len(client.train)) < 3).long()  # a tenth, whose labels are shifted
        split = {"x": client.train.x, "y": (client.train.y + domain) % 3, "domain": domain}
        rare.append({f"{key}_train": value for key, value in split.items()})
    federation = Federation.from_arrays(rare, num_classes=3)
    worst = {}
    for name, more in (("fedavg", {}), ("fedminmax", {"domain_lr": 0.5})):
        server = train(serve(make(name, **{**FULL, "lr": 0.5}, **more), federation), 40)
        worst[name] = float(risks(server, federation).max())
    assert worst["fedminmax"] < 0.8 * worst["fedavg"]


def test_a_domain_without_training_samples_weighs_nothing():
    first, *others = blobs((9, 8))
    clients = {"c0": {"x_train": first.train.x, "y_train": first.train.y, "domain_train": 2 * first.train.domain}}
    clients["c1"] = {f"{part}_train": getattr(others[0].train, part) for part in ("x", "y")}
    clients["c1"]["domain_train"] = torch.zeros(8, dtype=torch.int64)
    run = train(serve(make("fedminmax"), Federation.from_arrays(clients, num_classes=3)), 3)
    mu = run.state.domains["mu"]
    assert mu[1] == 0 and mu.sum() == pytest.approx(1) and torch.isfinite(run.state.shared["head.weight"]).all()


def test_engines_agree_under_partial_participation_with_domains_at_few_clients():
    clients = {
        c.id: {"x_train": c.train.x, "y_train": c.train.y, "domain_train": torch.full((len(c.train),), i % 3)}
        for i, c in enumerate(blobs((5, 4, 3, 6)))
    }
    federation = Federation.from_arrays(clients, num_classes=3)
    runs = [train(serve(make("fedminmax"), federation, engine=e, rate=0.5), 4) for e in ("stacked", "sequential")]
    assert difference(*runs) < 1e-8
    assert float(runs[0].state.domains["mu"].sum()) == pytest.approx(1)


def test_it_needs_domains():
    plain = {c.id: {"x_train": c.train.x, "y_train": c.train.y} for c in blobs()}
    with pytest.raises(PerfedError, match=r"needs domains; .* \(client 'c0': train samples without domain ids\)"):
        serve(make("fedminmax"), Federation.from_arrays(plain))
