"""GPFL: the valve, its conditions and the three losses, each by the formula; what is shared and what is not."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, make, serve, train
from torch.nn.functional import cosine_similarity, cross_entropy, layer_norm

from perfed.errors import PerfedError
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear

FEDERATION = blobs((8, 5, 6), labels=[[0, 0, 1], [2], [0, 1, 2]])
SHARES = torch.tensor([[6 / 8, 2 / 8, 0], [0, 0, 1], [2 / 6, 2 / 6, 2 / 6]], dtype=torch.float64)


def valve(params, f, condition):
    def net(name):
        hidden = torch.relu(params[f"head.0.{name}.0.weight"] @ condition + params[f"head.0.{name}.0.bias"])
        return layer_norm(hidden, hidden.shape) * params[f"head.0.{name}.2.weight"] + params[f"head.0.{name}.2.bias"]

    return torch.relu((net("gamma") + 1) * f + net("beta"))


def received(method, clients=3):
    shared = serve(method, FEDERATION).state.shared
    return {name: torch.stack([tensor] * clients) for name, tensor in shared.items()}


def test_the_condition_is_the_clients_mixture_of_the_received_embeddings_and_predicts():
    server = train(serve(make("gpfl"), FEDERATION), 2)
    shared = server.state.shared
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
    x = torch.stack([c.test.x for c in group.clients])
    features = group.forward(x, stages=("embedding", "body"))
    for row, client in enumerate(group.ids):
        head = server.engine.states[client]["model"]
        f = valve(shared, features[row], SHARES[int(client[1])] @ shared["head.0.embeddings"])
        expected = f @ head["head.1.weight"].T + head["head.1.bias"]
        torch.testing.assert_close(server.initialiser.method.predict(group, x)[row], expected)


def test_losses_and_gradients_of_a_step():
    method = make("gpfl", lam=0.7, mu=0.3, batch_size=100)
    group, shared = cohort(method, FEDERATION), received(method)
    start = shared["head.0.embeddings"]
    method.personalise(group, shared=shared)
    shift = 0.1 * torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group.model["head.0.embeddings"] = start + shift  # no longer as received: the two roles of E can be told apart
    seen = 0

    def check(step):
        nonlocal seen
        value = method.loss(start, step)
        names = [n for n in step.params if step.params[n].requires_grad]
        found = dict(
            zip(
                names, torch.autograd.grad(value.sum(), [step.params[n] for n in names], retain_graph=True), strict=True
            )
        )
        for row, at in enumerate(step.rows):
            leaf = {n: t[row].detach().clone().requires_grad_(n in names) for n, t in step.params.items()}
            data = group.clients[int(at)].train
            parts = [{n.split(".", 1)[1]: t for n, t in leaf.items() if n.startswith(s)} for s in ("embedding", "body")]
            f = data.x
            for stage, own in zip(("embedding", "body"), parts, strict=True):
                f = torch.func.functional_call(group.chain.get_submodule(stage), own, (f,))
            f_p = valve(leaf, f, SHARES[int(at)] @ start[0])
            f_g = valve(leaf, f, start[0].mean(0))
            logits = f_p @ leaf["head.1.weight"].T + leaf["head.1.bias"]
            angle = torch.stack([cosine_similarity(f_g, e[None]) for e in leaf["head.0.embeddings"]], 1)
            magnitude = (f_g - start[0][data.y]).square().sum(1).sqrt().mean()
            sizes = sum(t.square().sum() for n, t in leaf.items() if n in names and n.startswith("head.0."))
            expected = cross_entropy(logits, data.y) + cross_entropy(angle, data.y) + 0.7 * magnitude + 0.15 * sizes
            torch.testing.assert_close(value[row], expected)
            for name, gradient in zip(names, torch.autograd.grad(expected, [leaf[n] for n in names]), strict=True):
                torch.testing.assert_close(found[name][row], gradient)
        seen += 1
        return value

    group.fit(STAGES, epochs=1, loss=check)
    assert seen == 1 and {"head.0.embeddings", "head.0.gamma.0.weight", "head.0.beta.2.bias"} <= set(
        group.trainable_names(STAGES)
    )


def test_heads_and_conditions_stay_at_home_and_all_else_is_averaged():
    server = train(serve(make("gpfl"), FEDERATION), 1)
    assert {n for n in server.state.shared if n.startswith("head")} == {
        "head.0.embeddings",
        *(
            f"head.0.{net}.{layer}.{kind}"
            for net in ("gamma", "beta")
            for layer in (0, 2)
            for kind in ("weight", "bias")
        ),
    }
    own = {client: state["model"] for client, state in server.engine.states.items()}
    assert {"head.1.weight", "head.1.bias", "head.0.condition"} == set(own["c0"])
    assert not torch.equal(own["c0"]["head.1.weight"], own["c1"]["head.1.weight"])


@pytest.mark.long
@pytest.mark.parametrize("off", ["lam", "mu"])
def test_each_guidance_changes_what_is_learnt(off):
    def embeddings(**settings):
        return train(serve(make("gpfl", **settings), FEDERATION), 2).state.shared["head.0.embeddings"]

    assert not torch.allclose(embeddings(lam=0.5), embeddings(**{"lam": 0.5, off: 0.0}), rtol=1e-3)


def test_it_needs_a_head():
    with pytest.raises(PerfedError, match="gpfl puts a valve before the head, and this model has no stage 'head'"):
        serve(make("gpfl"), FEDERATION, model=Model(body=linear(3)))
