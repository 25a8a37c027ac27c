"""FedCP: policy and heads by the formula, the context, the discrepancy as a double sum, what is sent."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, make, serve, train
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

from perfed.errors import PerfedError
from perfed.model.chain import STAGES, Model
from perfed.model.presets import hidden_layer, linear, mlp

FEDERATION = blobs((12, 7, 5), labels=[[0, 1], [1, 2], [2]])


def received(method):
    return {n: torch.stack([t] * 3) for n, t in serve(method, FEDERATION).state.shared.items()}


def test_prediction_is_both_heads_of_the_features_that_the_policy_parts():
    server = train(serve(make("fedcp", lr=0.05), FEDERATION), 3)
    shared = server.state.shared
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
    x = torch.stack([c.test.x for c in group.clients])
    features = group.forward(x, stages=("embedding", "body"))
    parted = 0.0
    for row, client in enumerate(group.ids):
        own = server.engine.states[client]["model"]
        v = own["head.personal.weight"].sum(0)
        for f, found in zip(features[row], server.initialiser.method.predict(group, x)[row], strict=True):
            a = shared["head.policy.0.weight"] @ (f * v / v.norm()) + shared["head.policy.0.bias"]
            a = layer_norm(a, a.shape) * shared["head.policy.1.weight"] + shared["head.policy.1.bias"]
            r, s = torch.relu(a).view(2, -1).softmax(0)
            expected = own["head.personal.weight"] @ (r * f) + own["head.personal.bias"]
            expected = expected + shared["head.general.weight"] @ (s * f) + shared["head.general.bias"]
            torch.testing.assert_close(found, expected)
            parted = max(parted, float((r - s).abs().max()))
    assert parted > 0.1


def test_the_loss_of_a_step_with_the_discrepancy_as_a_double_sum():
    method = make("fedcp", lam=3.0, batch_size=6)
    group, shared = cohort(method, FEDERATION), received(method)
    method.personalise(group, shared=shared)
    before = group.representation()
    for name in group.shared_parameters:  # no longer as received, but for the general head
        group.model[name] *= 1.0 if name.startswith("head.general.") else 1.5
    seen = []

    def kernel(a, b):
        return sum(torch.exp(-((a - b) ** 2).sum() / (2 * variance)) for variance in (10, 15, 20, 50))

    def check(step):
        value = method.loss(shared, step)
        for row, at in enumerate(step.rows):
            index = step.block.index[step.at, row, step.weight[row] > 0]
            f, f_g, logits = step.representation()[row], before[index], step.output()[row]
            size = len(index)  # padding weighs nothing
            pairs = [(i, j) for i in range(size) for j in range(size)]
            mmd = sum(kernel(f[i], f[j]) + kernel(f_g[i], f_g[j]) - 2 * kernel(f[i], f_g[j]) for i, j in pairs)
            expected = cross_entropy(logits[:size], step.y[row, :size]) + 3.0 * mmd / size**2
            torch.testing.assert_close(value[row], expected)
            seen.append((int(at), size, float(mmd.detach())))
        return 0 * value

    group.fit(STAGES, epochs=1, loss=check)
    assert sorted(s[:2] for s in seen) == [(0, 6), (0, 6), (1, 1), (1, 6), (2, 5)]
    assert all(s[2] > 0.01 for s in seen)


def test_the_general_head_rests_and_the_mean_of_both_heads_is_sent():
    method = make("fedcp")
    group = cohort(method, FEDERATION)
    shared = received(method)
    reply = method.train(group, shared=shared)
    for name in ("weight", "bias"):
        general, personal = group.model[f"head.general.{name}"], group.model[f"head.personal.{name}"]
        assert torch.equal(general, shared[f"head.general.{name}"]) and not torch.equal(personal, general)
        torch.testing.assert_close(reply["shared"][f"head.general.{name}"], (general + personal) / 2)
    assert set(reply["shared"]) == set(shared)
    assert not torch.equal(reply["shared"]["head.policy.0.weight"], shared["head.policy.0.weight"])


@pytest.mark.long
def test_the_discrepancy_holds_the_features_near_those_of_the_received_body():
    def moved(lam):
        method = make("fedcp", lam=lam, lr=0.02, local_epochs=10)
        group = cohort(method, FEDERATION)
        shared = received(method)
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
    assert group.trainable_names(STAGES)

    def convolution(shape):
        return nn.Sequential(nn.Unflatten(1, (1, shape[0])), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3))

    for head in (convolution, lambda shape: nn.Flatten()):
        with pytest.raises(PerfedError, match="matrices of a head of linear layers; this head has other layers"):
            serve(method, FEDERATION, model=Model(body=linear(3), head=head))
    with pytest.raises(PerfedError, match="fedcp gives every client two heads, and this model has no stage 'head'"):
        serve(method, FEDERATION, model=Model(body=linear(3)))
