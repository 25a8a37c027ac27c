"""pFedHN: a hypernetwork on the server generates every client's model."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, make, mean_accuracy, opposite_labels, quick, serve, train

from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.methods.pfedhn import PFedHN
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def generated(server, ids) -> dict[str, torch.Tensor]:
    state = server.state
    vectors = torch.stack([state.embeddings[client]["vector"] for client in ids])
    return server.initialiser.method.generate(state.shared, state.hypernetwork, vectors)


def plain_generator(method, biases, network, vector) -> dict[str, torch.Tensor]:
    """One client's model, written out."""
    z = vector
    for layer in range(method.hidden_layers):
        z = torch.nn.functional.linear(z, network[f"hidden{layer}.weight"], network[f"hidden{layer}.bias"]).relu()
    flat = {n: torch.nn.functional.linear(z, network[f"output.{n}"], b.flatten()) for n, b in biases.items()}
    return {name: value.view(biases[name].shape) for name, value in flat.items()}


def test_the_server_step_follows_the_gradient_of_theta_times_the_clients_change():
    method = quick(PFedHN, hyper_lr=0.07, hidden_size=6)
    server = serve(method, blobs((5, 4, 3)))
    state = server.state
    ids = ["c0", "c2"]
    generator = torch.Generator().manual_seed(0)
    change = {n: torch.randn(2, *t.shape, generator=generator, dtype=torch.float64) for n, t in state.shared.items()}
    leaves = [
        {n: t.clone().requires_grad_(True) for n, t in tree.items()} for tree in (state.shared, state.hypernetwork)
    ]
    vectors = {client: state.embeddings[client]["vector"].clone().requires_grad_(True) for client in ids}
    surrogates = []
    for row, client in enumerate(ids):
        theta = plain_generator(method, *leaves, vectors[client])
        surrogates.append(sum((theta[n] * change[n][row]).sum() for n in theta))
    torch.stack(surrogates).mean().backward()
    untouched = state.embeddings["c1"]["vector"]
    method.step(state, ids, change)
    for tree, new in zip(leaves, (state.shared, state.hypernetwork), strict=True):
        assert tree.keys() == new.keys()
        for name, tensor in tree.items():
            torch.testing.assert_close(new[name], tensor.detach() - 0.07 * tensor.grad)
            assert not new[name].requires_grad
    for client, vector in vectors.items():
        own = vector.grad * 2  # the mean over two clients halves what is client's own
        torch.testing.assert_close(state.embeddings[client]["vector"], vector.detach() - 0.07 * own)
    assert state.embeddings["c1"]["vector"] is untouched


def test_clients_train_the_generated_model_and_send_their_change():
    settings = {"local_epochs": 1, "optimizer": "sgd", "lr": 0.1, "batch_size": 100}
    server = serve(quick(PFedHN, **settings), blobs((5, 4)))
    before = generated(server, ["c0", "c1"])
    seen = {}
    step = PFedHN.step

    class Watched(PFedHN):
        def step(self, server, ids, change):
            seen.update(change)
            step(self, server, ids, change)

    train(serve(quick(Watched, **settings), blobs((5, 4))), 1)
    for row, client in enumerate(server.engine.federation):
        values = {n: t[row].clone().requires_grad_(True) for n, t in before.items()}
        outputs = torch.func.functional_call(server.initialiser.chain((4,)), values, (client.train.x,))
        loss = torch.nn.functional.cross_entropy(outputs, client.train.y)
        for (name, _), grad in zip(values.items(), torch.autograd.grad(loss, list(values.values())), strict=True):
            torch.testing.assert_close(seen[name][row], 0.1 * grad)


def test_without_its_input_the_hypernetwork_is_uniform_federated_averaging():
    server = serve(quick(PFedHN, hyper_lr=1.0, hidden_layers=1), blobs((6, 6, 6)))
    network = {name: torch.zeros_like(tensor) for name, tensor in server.state.hypernetwork.items()}
    server.state.hypernetwork = network
    server.round(1)
    average = train(serve(quick(FedAvg), blobs((6, 6, 6))), 1)
    for name, tensor in average.state.shared.items():
        torch.testing.assert_close(server.state.shared[name], tensor)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_clients_with_opposite_labels_get_different_models(engine):
    model = Model(body=mlp((8,), 4), head=linear(2))
    settings = {"local_epochs": 3, "lr": 0.03}
    server = train(serve(quick(PFedHN, **settings), opposite_labels(), model=model, seed=1, **ENGINES[engine]), 30)
    assert mean_accuracy(server) > 0.9
    single = train(serve(quick(FedAvg, **settings), opposite_labels(), model=model, seed=1), 30)
    assert mean_accuracy(single) < 0.7


def test_only_the_embeddings_of_participants_change_but_all_models_do():
    server = serve(quick(PFedHN), blobs((5, 4, 3, 3)), rate=0.5)
    everyone = server.engine.federation.ids
    models, before = generated(server, everyone), dict(server.state.embeddings)
    part = server.round(1).participants
    assert len(part) == 2
    for client in everyone:
        changed = not torch.equal(server.state.embeddings[client]["vector"], before[client]["vector"])
        assert changed == (client in part)
    for name, tensor in generated(server, everyone).items():
        assert all(not torch.equal(new, old) for new, old in zip(tensor, models[name], strict=True))
    assert len(server.evaluate("test")) == 4


def test_generated_models_start_on_the_scale_of_the_models_own_initial_values():
    method = quick(PFedHN)
    model = Model(body=mlp((64, 64), 32), head=linear(10))
    federation = blobs((3,) * 40, dims=(20,), num_classes=10)
    server = serve(method, federation, model=model)
    assert server.state.embeddings["c7"]["vector"].shape == (11,)  # 1 + 40 // 4
    theta = generated(server, federation.ids)
    for name, initial in server.state.shared.items():
        if name.endswith("weight"):
            spread = (theta[name] - initial).std() * initial.shape[1] ** 0.5  # U(+-1/sqrt(fan in)) has 0.58
            assert 0.3 < spread < 2, name
    logits = server.engine.clients["c0"].train.x
    for layer in ("body.0", "body.2", "body.4", "head"):
        logits = logits @ theta[f"{layer}.weight"][0].T + theta[f"{layer}.bias"][0]
        logits = logits.relu() if layer in ("body.0", "body.2") else logits
    assert logits.abs().max() < 50


def test_buffers_are_personal_and_personal_embeddings_are_not_generated():
    def body(shape):
        return torch.nn.Sequential(torch.nn.Linear(shape[0], 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU())

    server = train(serve(quick(PFedHN), blobs((8, 6, 4)), model=Model(body=body, head=linear(3))), 2)
    assert not any("running" in name or "tracked" in name for name in server.state.hypernetwork)
    own = server.engine.states["c0"]["model"]
    assert set(own) == {f"body.1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")}
    assert own["body.1.num_batches_tracked"] > 0 and len(server.evaluate("test")) == 3

    method = make("pfedhn", placement={"embedding": "personal"})
    server = train(serve(method, blobs((6, 5, 4), dims=(3, 8, 1)), rate=0.7), 2)
    assert {name.split(".")[0] for name in server.state.shared} == {"body", "head"}
    assert len(server.evaluate("test")) == 3


def test_something_must_be_left_to_generate():
    personal = dict.fromkeys(("embedding", "body", "head"), "personal")
    with pytest.raises(PerfedError, match="pfedhn generates the shared parameters") as error:
        serve(make("pfedhn", placement=personal), blobs())
    assert "\n" not in str(error.value)


def test_regression():
    server = train(serve(quick(PFedHN), blobs((9, 1, 4), regression=True)), 3)
    assert all(values["mse"] < 1e3 for values in server.evaluate("test").values())
