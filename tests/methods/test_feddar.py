"""Heads per domain, and FedDAR's two exchanges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import assert_same_metrics, blobs, cohort, difference, every_tensor, make, network, quick, serve, train

from perfed.data.client import Split
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.domains import domain_weights
from perfed.methods.build import build_method
from perfed.methods.fedavg import FedAvg
from perfed.methods.feddar.heads import with_ones
from perfed.methods.flic.anchors import Anchors
from perfed.methods.local import Local
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.training.cohort import Cohort

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


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
    for rules in ({"head.bias": "per-domain"}, {"head.*": "per-domain"}, {"head": "per-domain", "head.*": "shared"}):
        with pytest.raises(PerfedError, match=r"'per-domain' is for whole stages, by the stage's name; 'head' is "):
            serve(quick(FedAvg, placement=rules), blobs())


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


@pytest.mark.long
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


def test_one_round_is_the_algorithm_box():
    """Algorithm 1 with the weighted mean of the heads, on whole gradients, by autograd and loops."""
    federation, lr = blobs((11, 5)), 0.1
    settings = {"optimizer": "sgd", "lr": lr, "batch_size": 100, "head_epochs": 1, "local_epochs": 2}
    server = serve(make("feddar-wa", **settings), federation, model=Model(body=linear(3), head=linear(3)))
    server.prepare()
    start = {name: tensor.clone() for name, tensor in server.state.shared.items()}
    server.round(1)
    data = [client.train for client in federation]
    counts = torch.stack([torch.bincount(d.domain, minlength=2) for d in data]).double()
    u = counts.sum() / (2 * counts.sum(0))

    def losses(d, body, heads):
        features = d.x @ body["body.weight"].T + body["body.bias"]
        logits = torch.einsum("bk,bck->bc", features, heads["head.weight"][d.domain]) + heads["head.bias"][d.domain]
        return F.cross_entropy(logits, d.y, reduction="none")

    body, old = ({n: t for n, t in start.items() if n.startswith(stage)} for stage in ("body", "head"))
    heads = {name: torch.zeros_like(t) for name, t in old.items()}
    for d, own in zip(data, counts, strict=True):  # step 1: each head on its domain's mean
        leaves = {name: t.clone().requires_grad_() for name, t in old.items()}
        sum(losses(d, body, leaves)[d.domain == m].mean() for m in (0, 1) if own[m]).backward()
        for name, t in leaves.items():
            share = (own / counts.sum(0)).view(2, *([1] * (t.ndim - 1)))
            heads[name] += share * (t - lr * t.grad).detach()  # step 2
    expected = {name: torch.zeros_like(t) for name, t in body.items()}
    for d in data:  # steps 3 and 4: the body with the new heads, every sample with the weight of its domain
        own = body
        for _ in range(2):
            leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
            (u[d.domain] * losses(d, leaves, heads)).mean().backward()
            own = {name: (t - lr * t.grad).detach() for name, t in leaves.items()}
        for name, t in own.items():
            expected[name] += len(d) / counts.sum() * t
    assert not torch.allclose(u, torch.ones(2).double()) and len(set(counts.sum(1).tolist())) == 2
    for name, tensor in (heads | expected).items():
        torch.testing.assert_close(server.state.shared[name], tensor, msg=name)


def test_heads_take_the_mean_of_their_domain_in_every_mini_batch():
    """One sample of a domain among many: its head takes ordinary steps, by hand, whatever the size of the batch."""
    x, y = draw(40, 2), draw(40, seed=1)
    domain = torch.zeros(40, dtype=torch.long)
    domain[7] = 1
    federation = Federation.from_arrays({"c": {"x_train": x, "y_train": y, "domain_train": domain}})
    settings = {"optimizer": "sgd", "lr": 0.05, "batch_size": 10, "head_epochs": 6, "local_epochs": 0}
    server = serve(make("feddar-wa", **settings), federation, model=Model(head=linear(1)))
    w, b = (server.state.shared[f"head.{part}"][1].clone() for part in ("weight", "bias"))
    train(server, 1)
    for _ in range(6):  # once an epoch
        error = 2 * (w[0] @ x[7] + b - y[7])
        w, b = w - 0.05 * error * x[7], b - 0.05 * error
    torch.testing.assert_close(server.state.shared["head.weight"][1], w)
    torch.testing.assert_close(server.state.shared["head.bias"][1], b)


@pytest.mark.long
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
    learnt = [server.state.shared for server in (default, other)]
    assert any(float((learnt[0][name] - learnt[1][name]).abs().max()) > 1e-6 for name in learnt[0])


SHARED_HEAD = {"placement": {"head": "shared"}}


@pytest.mark.parametrize("name", ["feddar-sa", "feddar-wa"])
@pytest.mark.parametrize(
    ("switches", "baseline", "settings"),
    [
        ({"alternate": False}, "fedavg-multi-head", {}),
        ({"alternate": False, "reweight": False}, "fedavg-multi-head", {"reweight": False}),
        ({"alternate": False, **SHARED_HEAD}, "fedavg-rw", {}),
        ({"alternate": False, "reweight": False, **SHARED_HEAD}, "fedavg", {}),
    ],
)
def test_what_the_switches_leave_is_the_baseline(name, switches, baseline, settings):
    ours = train(serve(make(name, **switches), blobs((9, 8, 7))), 2)
    plain = train(serve(make(baseline, **settings), blobs((9, 8, 7))), 2)
    assert ours.state.shared.keys() == plain.state.shared.keys()
    for key, tensor in plain.state.shared.items():
        torch.testing.assert_close(ours.state.shared[key], tensor, rtol=1e-12, atol=1e-12)
    assert_same_metrics(ours.evaluate("test"), plain.evaluate("test"))


def test_the_two_methods_differ_in_the_aggregation_alone():
    switched = train(serve(make("feddar-sa", aggregation="weighted"), blobs((9, 8, 7))), 2)
    assert difference(switched, train(serve(make("feddar-wa"), blobs((9, 8, 7))), 2)) == 0
    switched = train(serve(make("feddar-wa", aggregation="second-order"), blobs((9, 8, 7))), 2)
    assert difference(switched, train(serve(make("feddar-sa"), blobs((9, 8, 7))), 2)) == 0


@pytest.mark.parametrize("placement", [{"head": "shared"}, {"head": "personal"}, {"body": "per-domain"}])
def test_only_heads_per_domain_alternate_with_the_rest(placement):
    with pytest.raises(PerfedError, match=r"methods\.feddar-wa\.alternate: true needs .* the head alone per-domain"):
        build_method("feddar-wa", {"placement": placement})
    assert not build_method("feddar-wa", {"placement": placement, "alternate": False}).alternate


@pytest.mark.long
def test_personal_embeddings_with_heads_per_domain():
    """FLIC's embeddings under FedDAR's heads: inputs of different lengths, aligned to anchors."""
    settings = {"placement": {"embedding": "personal"}, "extensions": (quick(Anchors),)}
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


# Exact heads -------------------------------------------------------------------------------------------------


def features_by_domain(server) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Each client's ``(x with ones, y)`` of each domain, under the body that the server has."""
    chain = server.initialiser.chain(server.engine.federation.clients[0].input_shape)
    chain.load_state_dict({n: t[0] if n.startswith("head") else t for n, t in server.state.shared.items()})
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {0: [], 1: []}
    for client in server.engine.federation:
        x = with_ones(chain.body(chain.embedding(client.train.x)).detach())
        for domain, rows in found.items():
            mine = client.train.domain == domain
            rows.append((x[mine], client.train.y[mine]))
    return found


@pytest.mark.parametrize("name", ["feddar-sa", "feddar-wa"])
def test_exact_heads_are_least_squares_and_aggregated(name):
    settings = {"damping": 0.0} if name == "feddar-sa" else {}
    method = make(name, head_epochs="exact", local_epochs=0, **settings)
    server = serve(method, blobs((20, 3, 30), regression=True))

    def heads() -> torch.Tensor:
        weight, bias = (server.state.shared[f"head.{part}"] for part in ("weight", "bias"))
        return torch.cat([weight, bias.unsqueeze(-1)], -1)[:, 0].clone()

    def solve(x, y):
        return torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=1e-10)[0])

    old, new = heads(), (train(server, 1), heads())[1]
    for domain, parts in features_by_domain(server).items():
        if name == "feddar-sa":  # pooled, and as before in directions that no sample has
            x, y = (torch.cat(both) for both in zip(*parts, strict=True))
            expected = old[domain] + solve(x, y - x @ old[domain])
        else:
            expected = sum(len(y) * solve(x, y) for x, y in parts if len(y)) / sum(len(y) for _, y in parts)
        torch.testing.assert_close(new[domain], expected, rtol=1e-6, atol=1e-8)


def test_exact_heads_of_features_that_overflow_name_the_client():
    def steep(shape):
        layer = torch.nn.Linear(shape[0], 5)
        layer.weight.data.mul_(1e10)
        return layer

    federation = blobs((6, 5, 7), regression=True)
    clients = [replace(c, train=replace(c.train, x=1e300 * c.train.x)) if c.id == "c1" else c for c in federation]
    federation, model = replace(federation, clients=tuple(clients)), Model(body=steep, head=linear(1))
    server = serve(make("feddar-wa", head_epochs="exact"), federation, model=model)
    with pytest.raises(PerfedError, match=r"^round 1: training of client 'c1' diverged: torch\.linalg\.pinv failed"):
        train(server, 1)


def test_exact_heads_are_for_plain_regression():
    with pytest.raises(PerfedError, match="head_epochs = 'exact' is for regression without extensions"):
        serve(make("feddar-wa", head_epochs="exact"), blobs((6, 5))).prepare()
    model = Model(body=mlp((6,), 3), head=mlp((4,), 1))
    with pytest.raises(PerfedError, match="'exact' trains no personal parameters, and the placement has some"):
        method = make("feddar-wa", head_epochs="exact", placement={"embedding": "personal"})
        serve(method, blobs((6, 5), regression=True), model=network(1)).prepare()
    with pytest.raises(PerfedError, match="head_epochs = 'exact' needs a linear head with bias"):
        serve(make("feddar-wa", head_epochs="exact"), blobs((6, 5), regression=True), model=model).prepare()
    with pytest.raises(ValueError, match="head_epochs"):
        make("feddar-wa", head_epochs="exactly")


def test_second_order_aggregation_has_no_hessians_of_weighted_losses():
    server = serve(make("feddar-sa", class_weights="balanced"), blobs())
    with pytest.raises(PerfedError, match=r"not implemented for losses with class_weights; add aggregation=weighted"):
        server.prepare()
