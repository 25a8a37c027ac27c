"""Heads per domain, second-order aggregation, and FedDAR's two exchanges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import blobs, cohort, difference, every_tensor, make, network, quick, serve, train

from perfed.aggregate import second_order_mean
from perfed.cohort import Cohort
from perfed.domains import domain_weights
from perfed.errors import PerfedError
from perfed.federation import Federation, Split
from perfed.hessian import softmax_hessian, squared_error_hessian, with_ones
from perfed.methods.fedavg import FedAvg
from perfed.methods.flic import Anchors
from perfed.methods.local import Local
from perfed.model import Model, linear, mlp

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# Hessians ----------------------------------------------------------------------------------------------------


def test_hessians_are_those_of_autograd():
    x, groups = draw(13, 3), torch.tensor([0] * 5 + [2] * 8)
    features = with_ones(x)
    y = torch.arange(13) % 4
    weights = draw(4, 4, seed=1)
    softmax = softmax_hessian(features, features @ weights.T, groups, 3)
    squared = squared_error_hessian(features, groups, 3, outputs=4)
    targets = draw(13, 4, seed=2)
    for group in (0, 2):
        mine = groups == group

        def loss(w, mine=mine):
            return F.cross_entropy(features[mine] @ w.view(4, 4).T, y[mine])

        def error(w, mine=mine):
            return (features[mine] @ w.view(4, 4).T - targets[mine]).square().mean(1).mean()

        expected = torch.autograd.functional.hessian(loss, weights.flatten())
        torch.testing.assert_close(softmax[group], expected)
        block = torch.autograd.functional.hessian(error, weights.flatten()).view(4, 4, 4, 4)
        for output in range(4):
            torch.testing.assert_close(squared[group], block[output, :, output])
    assert (softmax[1] == 0).all() and (squared[1] == 0).all()


def test_a_softmax_over_two_classes_is_the_logistic_hessian_in_the_difference():
    features, w = with_ones(draw(20, 2)), draw(2, 3, seed=1)
    logits = features @ w.T
    mu = torch.sigmoid(logits[:, 1] - logits[:, 0])
    logistic = features.T @ ((mu * (1 - mu))[:, None] * features) / 20
    found = softmax_hessian(features, logits, torch.zeros(20, dtype=torch.long), 1)[0]
    torch.testing.assert_close(found[3:, 3:], logistic)
    torch.testing.assert_close(found[:3, 3:], -logistic)


# Aggregation -------------------------------------------------------------------------------------------------


def solved(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = with_ones(draw(rows, 3, seed=seed))
    return x, x @ draw(4, 1, seed=99) + 0.3 * draw(rows, 1, seed=seed + 50)


def test_exact_local_solutions_give_the_pooled_least_squares():
    data = [solved(rows, seed) for seed, rows in enumerate((7, 12, 30))]
    local = torch.stack([torch.linalg.lstsq(x, y).solution for x, y in data])
    hessians = torch.stack([2 * x.T @ x / len(x) for x, _ in data])
    counts = torch.tensor([7.0, 12.0, 30.0])
    pooled = torch.linalg.lstsq(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])).solution
    torch.testing.assert_close(second_order_mean(draw(4, 1, seed=7), local, hessians, counts), pooled)


def test_one_local_newton_step_gives_the_pooled_newton_step():
    """Logistic regression as a softmax over two classes, Hessians at the received head."""
    x = [with_ones(draw(n, 2, seed=n)) for n in (9, 21)]
    y = [torch.arange(len(part)) % 2 for part in x]
    old = 0.3 * draw(2, 3, seed=5)

    def newton(features, labels, counts):
        leaf = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(features @ leaf.T, labels), leaf)
        hessian = softmax_hessian(features, features @ old.T, torch.zeros(len(labels), dtype=torch.long), 1)[0]
        return hessian, old.flatten() - torch.linalg.pinv(hessian, hermitian=True) @ gradient.flatten()

    steps = [newton(a, b, None) for a, b in zip(x, y, strict=True)]
    _, pooled = newton(torch.cat(x), torch.cat(y), None)
    found = second_order_mean(
        old.view(6, 1),
        torch.stack([w.view(6, 1) for _, w in steps]),
        torch.stack([h for h, _ in steps]),
        torch.tensor([9.0, 21.0]),
    )
    torch.testing.assert_close(found.flatten(), pooled)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_direction_that_no_client_saw_keeps_its_old_value(damping):
    x = draw(2, 6, 3) * torch.tensor([1.0, 1.0, 0.0], dtype=F64)
    hessians = x.transpose(1, 2) @ x / 6
    old = draw(3, 2, seed=3)
    new = second_order_mean(old, draw(2, 3, 2, seed=4), hessians, torch.tensor([1.0, 2.0]), damping=damping)
    torch.testing.assert_close(new[2], old[2])
    assert not torch.allclose(new[:2], old[:2])


@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
def test_equal_heads_stay_as_they_are(damping):
    root, old = draw(4, 5, 5), draw(5, 1)
    hessians = root.transpose(1, 2) @ root
    new = second_order_mean(old, old.expand(4, 5, 1), hessians, torch.arange(4.0), damping=damping)
    torch.testing.assert_close(new, old)


def test_with_equal_hessians_it_is_the_weighted_mean_and_without_samples_the_old_head():
    root = draw(5, 5)
    hessians = (root.T @ root).expand(3, 5, 5)
    local, counts = draw(3, 5, 1), torch.tensor([1.0, 0.0, 3.0])
    expected = (local[0] + 3 * local[2]) / 4
    torch.testing.assert_close(second_order_mean(draw(5, 1, seed=8), local, hessians, counts), expected)
    old = draw(5, 1)
    assert second_order_mean(old, local, hessians, torch.zeros(3)) is old


def test_domains_weigh_the_same_in_all():
    counts = torch.tensor([[3.0, 0.0, 1.0], [5.0, 0.0, 1.0]])
    u = domain_weights(counts)
    torch.testing.assert_close(u, torch.tensor([10 / (8 * 2), 0.0, 10 / (2 * 2)]))
    assert float((u * counts.sum(0)).sum()) == 10


# Parameters per domain ---------------------------------------------------------------------------------------

PER_DOMAIN = {"placement": {"head": "per-domain"}}


def with_domains() -> Cohort:
    """Three clients whose head has values of their own for both domains."""
    group = cohort(quick(Local, **PER_DOMAIN), blobs((9, 6, 4)))
    for name in ("head.weight", "head.bias"):
        group.model[name] = draw(3, 2, *group.chain.get_parameter(name).shape, seed=len(name))
    return group


def test_every_sample_passes_the_head_of_its_domain():
    group = with_domains()
    features, outputs = group.features("body"), group.features("head")
    start = 0
    for row, client in enumerate(group.clients):
        for i, domain in enumerate(client.train.domain.tolist()):
            w, b = group.model["head.weight"][row, domain], group.model["head.bias"][row, domain]
            torch.testing.assert_close(outputs[start + i], w @ features[start + i] + b)
        start += len(client.train)


def test_a_head_learns_from_the_samples_of_its_domain_alone():
    """Changing the other domain's samples changes nothing for a head behind a frozen body."""
    both, changed = with_domains(), with_domains()
    clients = []
    for client in changed.clients:
        train = client.train
        other = train.domain == 1
        x = torch.where(other[:, None], -train.x, train.x)
        clients.append(replace(client, train=Split(x, torch.where(other, (train.y + 1) % 3, train.y), train.domain)))
    changed.clients = clients
    for group in (both, changed):
        group.fit("head", epochs=2)
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(both.model[name][:, 0], changed.model[name][:, 0])
        assert not torch.allclose(both.model[name][:, 1], changed.model[name][:, 1])


def test_the_server_keeps_a_head_for_each_domain_and_all_start_equal():
    server = serve(quick(FedAvg, **PER_DOMAIN), blobs())
    weight = server.state.shared["head.weight"]
    assert weight.shape == (2, 3, 5) and torch.equal(weight[0], weight[1])
    train(server, 1)
    weight = server.state.shared["head.weight"]
    assert not torch.equal(weight[0], weight[1])


def test_domains_must_be_known_and_whole_stages_placed():
    plain = [replace(c, train=replace(c.train, domain=None), test=None) for c in blobs()]
    with pytest.raises(PerfedError, match="the data do not say every sample's domain"):
        serve(make("feddar-sa"), Federation(tuple(plain), 3))
    with pytest.raises(PerfedError, match="'per-domain' is for whole stages"):
        serve(quick(FedAvg, placement={"head.bias": "per-domain"}), blobs())


# The method --------------------------------------------------------------------------------------------------


def regression(clients: int = 6, seed: int = 0) -> Federation:
    """Targets of two domains with their own linear law."""
    rng = np.random.default_rng(seed)
    laws = rng.normal(size=(2, 3))
    arrays = {}
    for i in range(clients):
        x, domain = rng.normal(size=(8 + 3 * i, 3)), rng.integers(0, 2, 8 + 3 * i)
        domain[:2] = (0, 1)
        y = (x * laws[domain]).sum(1) + 0.1 * rng.normal(size=len(x))
        arrays[f"c{i}"] = {"x_train": x, "y_train": y, "domain_train": domain}
    return Federation.from_arrays(arrays)


def test_second_order_aggregation_of_well_trained_heads_is_pooled_least_squares_in_each_domain():
    federation = regression()
    settings = {"optimizer": "sgd", "lr": 0.2, "head_epochs": 400, "batch_size": 100, "damping": 0.0}
    server = serve(make("feddar-sa", **settings), federation, model=Model(head=linear(1)))
    server.prepare()
    server.round(1)
    for domain in range(2):
        parts = [c.train.take(torch.nonzero(c.train.domain == domain).flatten()) for c in federation]
        x, y = with_ones(torch.cat([p.x for p in parts])).double(), torch.cat([p.y for p in parts]).double()
        expected = torch.linalg.lstsq(x, y[:, None]).solution.flatten()
        shared = server.state.shared
        found = torch.cat([shared["head.weight"][domain, 0], shared["head.bias"][domain]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weighted_aggregation_is_not():
    federation = regression()
    settings = {"optimizer": "sgd", "lr": 0.2, "head_epochs": 400, "batch_size": 100}
    runs = [
        train(serve(make(name, **settings), federation, model=Model(head=linear(1))), 1)
        for name in ("feddar-wa", "feddar-sa")
    ]
    assert difference(*runs) > 1e-2


def test_permuting_the_domains_permutes_the_heads():
    federation = blobs((9, 8, 7))

    def swapped(split):
        return None if split is None else replace(split, domain=1 - split.domain)

    other = replace(
        federation, clients=tuple(replace(c, train=swapped(c.train), test=swapped(c.test)) for c in federation)
    )
    runs = [train(serve(make("feddar-sa"), data), 2) for data in (federation, other)]
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(runs[0].state.shared[name], runs[1].state.shared[name].flip(0))


def test_a_domain_that_nobody_holds_keeps_its_head_and_one_client_or_sample_is_enough():
    federation = blobs((9, 8))
    clients = []
    for row, client in enumerate(federation):
        domain = torch.zeros_like(client.train.domain)
        if row == 0:
            domain[0] = 2  # one sample of domain 2 at one client; domain 1 only in test data
        test = replace(client.test, domain=torch.ones_like(client.test.domain))
        clients.append(replace(client, train=replace(client.train, domain=domain), test=test))
    server = serve(make("feddar-sa"), replace(federation, clients=tuple(clients)))
    start = server.state.shared["head.weight"].clone()
    train(server, 2)
    end = server.state.shared["head.weight"]
    assert torch.equal(start[1], end[1]) and not torch.equal(start[0], end[0]) and not torch.equal(start[2], end[2])
    assert all(torch.isfinite(t.double()).all() for t in every_tensor(server).values())
    assert len(server.evaluate("test")) == 2


def test_two_exchanges_a_round_and_hessians_are_counted():
    server = serve(make("feddar-sa"), blobs(), model=Model(body=mlp((), 4), head=linear(3)))
    server.prepare()
    record = server.round(1)
    body, heads, hessians = 4 * 4 + 4, 2 * (4 * 3 + 3), 2 * 15 * 15
    assert record.bytes_up == 3 * 8 * ((heads + 2 + hessians) + (body + 1))
    assert record.bytes_down == 3 * 8 * 2 * (body + heads + 2)


@pytest.mark.parametrize(
    "change",
    [
        {"reweight": False},
        {"alternate": False},
        {"hessian_at": "received"},
        {"damping": 1.0},
        {"aggregation": "weighted"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_switch_matters(change):
    default = train(serve(make("feddar-sa"), blobs((9, 8, 7))), 2)
    other = train(serve(make("feddar-sa", **change), blobs((9, 8, 7))), 2)
    assert difference(other, default) > 1e-6


def test_personal_embeddings_with_heads_per_domain():
    """FLIC's embeddings under FedDAR's heads: inputs of different lengths, aligned to anchors."""
    settings = {"placement": {"embedding": "personal"}, "terms": (quick(Anchors),)}
    runs = [
        train(
            serve(
                quick(type(make("feddar-sa")), **settings), blobs((9, 8, 7), dims=(4, 3, 6)), model=network(), engine=e
            ),
            2,
        )
        for e in ("stacked", "sequential")
    ]
    assert difference(*runs) < 1e-8
