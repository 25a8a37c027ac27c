"""Fed-RoD: two heads that do not disturb each other, and the balanced softmax."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, difference, make, network, quick, serve, train
from torch import nn
from torch.nn.functional import cross_entropy

from perfed.errors import PerfedError
from perfed.method.exchange import Reply
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedrod import FedRoD
from perfed.model.chain import STAGES, Model
from perfed.model.presets import hidden_layer, linear


class BalancedFedAvg(FedAvg):
    """Fed-RoD's generic path alone."""

    def train(self, cohort, shared):
        cohort.load(shared)
        log_counts = cohort.class_counts.clamp_min(1.0).log()

        def loss(step):
            return (step.losses(step.output() + step.select_rows(log_counts)[:, None]) * step.weight).sum(1)

        cohort.fit(STAGES, epochs=self.local_epochs, loss=loss)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_generic_path_is_what_it_is_without_the_personal_head(optimizer):
    federation = blobs((12, 7, 1), labels=[[0, 1], [1, 2], [0]])
    one, other = (
        train(serve(quick(kind, optimizer=optimizer), federation, model=network(dropout=0.3)), 3)
        for kind in (FedRoD, BalancedFedAvg)
    )
    for name, tensor in one.state.shared.items():
        torch.testing.assert_close(tensor, other.state.shared[name], rtol=1e-10, atol=1e-12)


def test_on_balanced_labels_the_generic_path_is_fedavg_and_on_others_it_is_not():
    balanced = blobs((12, 9, 6))
    one, other = (train(serve(make(name), balanced), 2).state.shared for name in ("fedrod", "fedavg"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9)
    skewed = blobs((12, 9, 6), labels=[[0, 0, 1, 2], [1, 1, 2]])
    one, other = (train(serve(make(name), skewed), 2).state.shared for name in ("fedrod", "fedavg"))
    assert not torch.allclose(one["head.bias"], other["head.bias"], rtol=1e-3, atol=1e-3)


def test_loss_and_gradients_of_one_step():
    """The formula, with explicit gradients: body and g see the first term only, p the second only."""
    method = make("fedrod", batch_size=100)
    group = cohort(method, blobs((8, 5), labels=[[0, 0, 1], [2]]))
    group.load({n: torch.stack([t, t]) for n, t in serve(method, blobs((8, 5))).state.shared.items()})
    head = group.state["personal_head"]
    personal = {n: t + 0.3 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for n, t in head.items()}
    seen = 0

    def check(step):
        nonlocal seen
        value = method.loss(group)(step)
        names = [n for n in step.params if step.params[n].requires_grad]
        found = torch.autograd.grad(value.sum(), [step.params[n] for n in names], retain_graph=True)
        grads = dict(zip(names, found, strict=True))
        for row in range(2):
            client = group.clients[int(step.rows[row])].train
            counts = torch.bincount(client.y, minlength=3)
            leaf = {n: t[row].detach().clone().requires_grad_(True) for n, t in step.params.items()}
            below = {n: t for n, t in leaf.items() if n.startswith(("embedding", "body"))}
            features = client.x
            for stage in ("embedding", "body"):
                part = {n.removeprefix(f"{stage}."): t for n, t in below.items() if n.startswith(stage)}
                features = torch.func.functional_call(group.chain.get_submodule(stage), part, (features,))
            g = features @ leaf["head.weight"].T + leaf["head.bias"]
            p = features.detach() @ leaf["personal/head.weight"].T + leaf["personal/head.bias"]
            first = cross_entropy(g + counts.clamp_min(1).log(), client.y)
            second = cross_entropy(g.detach() + p, client.y)
            torch.testing.assert_close(value[row], first + second)
            generic = [n for n in names if "/" not in n]
            own = [n for n in names if "/" in n]
            expected = [*torch.autograd.grad(first, [leaf[n] for n in generic])]
            expected += torch.autograd.grad(second, [leaf[n] for n in own])
            for name, gradient in zip([*generic, *own], expected, strict=True):
                torch.testing.assert_close(grads[name][row], gradient)
            assert own and float(grads["personal/head.weight"][row].abs().max()) > 1e-3
            seen += 1
        return value

    group.fit(STAGES, epochs=1, also={"personal": personal}, loss=check)
    assert seen == 2


def test_the_personal_head_is_trained_stays_at_home_and_is_added_in_prediction():
    server = serve(make("fedrod"), blobs())
    server.prepare()
    start = server.initialiser.draw_initial((4,), ("head",))
    record = server.round(1)
    size = sum(t.numel() * 8 for t in server.state.shared.values())
    assert record.bytes_down == 3 * size and record.bytes_up == 3 * (size + 8)
    heads = {client: state["personal_head"] for client, state in server.engine.states.items()}
    assert not torch.equal(heads["c0"]["head.weight"], heads["c1"]["head.weight"])
    assert not torch.equal(heads["c0"]["head.weight"], start["head.weight"])
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
    x = torch.stack([c.test.x for c in group.clients])
    for row, client in enumerate(group.ids):
        features = group.forward(x, stages=("embedding", "body"))[row]
        both = [server.state.shared, heads[client]]
        expected = sum(features @ head["head.weight"].T + head["head.bias"] for head in both)
        torch.testing.assert_close(server.initialiser.method.predict(group, x)[row], expected)


def test_a_client_of_one_class_trains_the_generic_path_too():
    """Without a floor under the counts its balanced loss would be zero."""
    server = serve(make("fedrod"), blobs((6, 4), labels=[[1]], num_classes=3))
    start = server.state.shared
    train(server, 1)
    assert all(not torch.equal(t, start[name]) for name, t in server.state.shared.items())


def test_a_client_that_never_took_part_has_its_initial_personal_head():
    server = train(serve(make("fedrod"), blobs((5, 4, 3, 3)), rate=0.3), 1)
    assert len(server.evaluate("test")) == 4


def normalised_head(shape):
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], 3))


def test_a_head_with_batch_norm_keeps_its_own_statistics():
    model = Model(body=hidden_layer(5), head=normalised_head)
    runs = [train(serve(make("fedrod"), blobs((8, 6)), model=model, engine=e), 2) for e in ("sequential", "stacked")]
    assert difference(*runs) <= 1e-8
    for client in ("c0", "c1"):
        own = runs[0].engine.states[client]["personal_head"]
        assert int(own["head.0.num_batches_tracked"]) > 0
        assert not torch.equal(own["head.0.running_mean"], torch.zeros(5, dtype=torch.float64))


def test_models_without_a_body_but_not_without_a_head():
    assert len(train(serve(make("fedrod"), blobs(), model=Model(head=linear(3))), 2).evaluate("test")) == 3
    with pytest.raises(PerfedError, match="no stage 'head'"):
        serve(make("fedrod"), blobs(), model=Model(body=linear(3)))


def test_it_needs_class_labels():
    with pytest.raises(PerfedError, match="class labels"):
        train(serve(make("fedrod"), blobs((5, 4), regression=True)), 1)
