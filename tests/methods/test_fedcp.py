"""FedCP: policy and heads by the formula, the context, the discrepancy as a double sum, what is sent."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, make, serve, train
from torch import nn
from torch.nn.functional import layer_norm

from perfed.errors import PerfedError
from perfed.methods.fedcp import squared_mmd
from perfed.model.chain import STAGES, Model
from perfed.model.presets import hidden_layer, linear, mlp

FEDERATION = blobs((12, 7, 5), labels=[[0, 1], [1, 2], [2]])


def test_prediction_is_both_heads_of_the_features_that_the_policy_parts():
    server = train(serve(make("fedcp", lr=0.05), FEDERATION), 3)
    shared = server.state.shared
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.setup.method.download(server.state))
    x = torch.stack([c.test.x for c in group.clients])
    features = group.forward(x, stages=("embedding", "body"))
    parted = 0.0
    for row, client in enumerate(group.ids):
        own = server.engine.states[client]["model"]
        v = own["head.personal.weight"].sum(0)
        for f, found in zip(features[row], server.setup.method.predict(group, x)[row], strict=True):
            a = shared["head.policy.0.weight"] @ (f * v / v.norm()) + shared["head.policy.0.bias"]
            a = layer_norm(a, a.shape) * shared["head.policy.1.weight"] + shared["head.policy.1.bias"]
            r, s = torch.relu(a).view(2, -1).softmax(0)
            expected = own["head.personal.weight"] @ (r * f) + own["head.personal.bias"]
            expected = expected + shared["head.general.weight"] @ (s * f) + shared["head.general.bias"]
            torch.testing.assert_close(found, expected)
            parted = max(parted, float((r - s).abs().max()))
    assert parted > 0.1


def test_the_discrepancy_is_a_double_sum_over_samples():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 4, 3, generator=draw, dtype=torch.float64) * size for size in (2, 5))
    weight = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0]], dtype=torch.float64)

    def kernel(a, b):
        return sum(torch.exp(-((a - b) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))

    for row, size in ((0, 4), (1, 3)):  # padding weighs nothing
        one, other = x[row, :size], y[row, :size]
        pairs = [(i, j) for i in range(size) for j in range(size)]
        terms = [kernel(one[i], one[j]) + kernel(other[i], other[j]) - 2 * kernel(one[i], other[j]) for i, j in pairs]
        torch.testing.assert_close(squared_mmd(x, y, weight)[row], sum(terms) / size**2)
    assert squared_mmd(x, x, weight).abs().max() < 1e-12


def test_the_general_head_rests_and_the_mean_of_both_heads_is_sent():
    method = make("fedcp")
    group = cohort(method, FEDERATION)
    shared = {n: torch.stack([t] * 3) for n, t in serve(method, FEDERATION).state.shared.items()}
    reply = method.train(group, shared=shared)
    for name in ("weight", "bias"):
        general, personal = group.model[f"head.general.{name}"], group.model[f"head.personal.{name}"]
        assert torch.equal(general, shared[f"head.general.{name}"]) and not torch.equal(personal, general)
        torch.testing.assert_close(reply["shared"][f"head.general.{name}"], (general + personal) / 2)
    assert set(reply["shared"]) == set(shared)
    assert not torch.equal(reply["shared"]["head.policy.0.weight"], shared["head.policy.0.weight"])


def test_the_discrepancy_holds_the_features_near_those_of_the_received_body():
    def moved(lam):
        method = make("fedcp", lam=lam, lr=0.02, local_epochs=10)
        group = cohort(method, FEDERATION)
        shared = {n: torch.stack([t] * 3) for n, t in serve(method, FEDERATION).state.shared.items()}
        group.load(shared)
        before = group.representation()
        method.train(group, shared=shared)
        return float((group.representation() - before).norm())

    assert moved(1000.0) < 0.5 * moved(0.0)


def test_the_context_of_a_head_of_two_layers_and_heads_that_have_none():
    method = make("fedcp")
    model = Model(body=hidden_layer(5), head=mlp((4,), 3))
    server = train(serve(method, FEDERATION, model=model), 1)
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], method.download(server.state))
    for row in range(3):
        first, second = (group.model[f"head.personal.{layer}.weight"][row] for layer in (0, 2))
        torch.testing.assert_close(group.model["head.context"][row], (second @ first).sum(0))
    assert group.trainable(STAGES)

    def convolution(shape):
        return nn.Sequential(nn.Unflatten(1, (1, shape[0])), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3))

    for head in (convolution, lambda shape: nn.Flatten()):
        with pytest.raises(PerfedError, match="matrices of a head of linear layers; this head has others"):
            serve(method, FEDERATION, model=Model(body=linear(3), head=head))
    with pytest.raises(PerfedError, match="fedcp gives every client two heads, and this model has no stage 'head'"):
        serve(method, FEDERATION, model=Model(body=linear(3)))
