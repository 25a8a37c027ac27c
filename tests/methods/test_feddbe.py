"""FedDBE: switched off, one step against the formula, the consensus, the memory that stays at home."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, make, network, serve, train
from torch.nn.functional import cross_entropy

from perfed.errors import PerfedError
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear

FEDERATION = blobs((12, 7, 5), labels=[[0, 1], [1, 2], [2]])


def stacked(server, clients=3):
    return {name: torch.stack([tensor] * clients) for name, tensor in server.state.shared.items()}


@pytest.mark.long
def test_without_memory_and_regularisation_it_is_fedavg():
    def shared(name, **settings):
        return train(serve(make(name, optimizer="sgd", **settings), FEDERATION), 3).state.shared

    averaged = shared("fedavg")
    off = shared("feddbe", kappa=0.0, placement={"head.0.bias": "frozen"})
    for name, tensor in averaged.items():
        torch.testing.assert_close(off[name.replace("head.", "head.1.")], tensor, rtol=1e-10, atol=1e-12)
    for settings in ({"kappa": 0.0}, {"placement": {"head.0.bias": "frozen"}}):  # memory, then regularisation alone
        assert not torch.allclose(shared("feddbe", **settings)["head.1.weight"], averaged["head.weight"], rtol=1e-4)


def test_losses_and_gradients_of_two_steps():
    """The formula sample by sample; the mean moves by mu, without a gradient into the past."""
    method = make("feddbe", kappa=3.0, mu=0.4, optimizer="sgd", batch_size=6)
    server = serve(method, FEDERATION)
    group = cohort(method, FEDERATION, ids=["c0"])
    shared = stacked(server, 1)
    shared["head.0.consensus"] = torch.tensor([[0.1, -0.2, 0.3, 0.0, 0.5]], dtype=torch.float64)
    group.load(shared)
    group.model["head.0.bias"] += 0.25
    past = torch.zeros(5, dtype=torch.float64)
    seen = 0

    def check(step):
        nonlocal past, seen
        value = method.loss(step)
        below, head = step.params["body.0.weight"], step.params["head.1.weight"]
        found = torch.autograd.grad(value.sum(), [below, head, step.params["head.0.bias"]], retain_graph=True)
        leaf = {n: t[0].detach().clone().requires_grad_(True) for n, t in step.params.items() if t.is_floating_point()}
        hidden = torch.relu(step.x[0] @ leaf["embedding.0.weight"].T + leaf["embedding.0.bias"])
        hidden = hidden @ leaf["embedding.2.weight"].T + leaf["embedding.2.bias"]
        f = torch.nn.functional.leaky_relu(hidden @ leaf["body.0.weight"].T + leaf["body.0.bias"])
        logits = (f + leaf["head.0.bias"]) @ leaf["head.1.weight"].T + leaf["head.1.bias"]
        moved = 0.6 * past + 0.4 * f.mean(0)
        expected = cross_entropy(logits, step.y[0]) + 3.0 * ((moved - shared["head.0.consensus"][0]) ** 2).sum() / 5
        torch.testing.assert_close(value[0], expected)
        own = torch.autograd.grad(expected, [leaf[n] for n in ("body.0.weight", "head.1.weight", "head.0.bias")])
        for one, other in zip(found, own, strict=True):
            torch.testing.assert_close(one[0], other)
        past, seen = moved.detach(), seen + 1
        return value

    group.model["head.0.mean"] = torch.zeros_like(group.model["head.0.mean"])
    group.fit(STAGES, epochs=1, loss=check)
    assert seen == 2
    torch.testing.assert_close(group.model["head.0.mean"][0], past)


def test_the_consensus_is_the_mean_feature_after_local_training_alone():
    method = make("feddbe")
    server = serve(method, FEDERATION)
    start = stacked(server)
    server.prepare()
    assert all(torch.equal(t, start[n][0]) for n, t in server.state.shared.items() if n != "head.0.consensus")
    plain = cohort(make("fedavg"), FEDERATION, round_=0)
    plain.load({n.replace("head.1.", "head."): t for n, t in start.items() if not n.startswith("head.0.")})
    plain.fit(STAGES, epochs=method.local_epochs)
    assert server.state.shared["head.0.consensus"].shape == (5,)
    features = plain.representation()  # of all samples: clients count by their numbers
    close = torch.linalg.vector_norm(server.state.shared["head.0.consensus"] - features.mean(0))
    untrained = cohort(make("fedavg"), FEDERATION)
    untrained.load({n.replace("head.1.", "head."): t for n, t in start.items() if not n.startswith("head.0.")})
    far = torch.linalg.vector_norm(server.state.shared["head.0.consensus"] - untrained.representation().mean(0))
    assert close < 0.2 * far


@pytest.mark.long
def test_regularisation_keeps_the_clients_features_together():
    def spread(kappa):
        settings = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100, "local_epochs": 5}
        server = train(serve(make("feddbe", kappa=kappa, **settings), FEDERATION), 5)
        means = torch.stack([state["model"]["head.0.mean"] for state in server.engine.states.values()])
        return float((means - server.state.shared["head.0.consensus"]).square().mean())

    assert spread(10.0) < 0.1 * spread(0.0)


@pytest.mark.long
def test_the_memory_stays_at_home_and_is_added_in_prediction():
    server = train(serve(make("feddbe"), FEDERATION), 1)
    record = server.round(2)
    size = sum(t.numel() * 8 for t in server.state.shared.values())
    assert record.bytes_down == 3 * size and record.bytes_up == 3 * (size + 8)
    states = {client: state["model"] for client, state in server.engine.states.items()}
    assert not torch.equal(states["c0"]["head.0.bias"], states["c1"]["head.0.bias"])
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
    x = torch.stack([c.test.x for c in group.clients])
    for row, client in enumerate(group.ids):
        f = group.forward(x, stages=("embedding", "body"))[row] + states[client]["head.0.bias"]
        expected = f @ server.state.shared["head.1.weight"].T + server.state.shared["head.1.bias"]
        torch.testing.assert_close(server.initialiser.method.predict(group, x)[row], expected)


@pytest.mark.long
def test_with_a_personal_head_and_without_a_head():
    train(serve(make("feddbe", placement={"head": "personal"}), FEDERATION), 2)
    with pytest.raises(PerfedError, match="feddbe shifts the head's inputs, and this model has no stage 'head'"):
        serve(make("feddbe"), FEDERATION, model=Model(body=linear(3)))
    assert len(train(serve(make("feddbe"), FEDERATION, model=network(dropout=0.3)), 1).evaluate("test")) == 3
