"""HypCluster: every client trains the one of k shared models that fits its data best."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, assert_same_metrics, blobs, make, mean_accuracy, opposite_labels, quick, serve, train

from perfed.data.federation import Federation
from perfed.engine.executor import Exchange
from perfed.engine.steps.step import ExchangeTask
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.methods.hypcluster import HypCluster
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def choices(server) -> dict[str, int]:
    """Which model each client would train now."""
    method, found = server.initialiser.method, {}
    for group in server.engine.cohorts(server.engine.federation.ids, method.download(server.state)):
        models = {n: t.unsqueeze(0).expand(group.n, *t.shape) for n, t in server.state.models.items()}
        found |= dict(zip(group.ids, method.choose(group, models).tolist(), strict=True))
    return found


@pytest.mark.long
@pytest.mark.parametrize("clusters", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_groups_with_opposite_labels_get_different_models(engine, clusters):
    model = Model(body=mlp((8,), 4), head=linear(2))
    method = quick(HypCluster, clusters=clusters, local_epochs=3, lr=0.03)
    server = train(serve(method, opposite_labels(), model=model, seed=1, **ENGINES[engine]), 8)
    found = choices(server)
    assert not {found[f"c{i}"] for i in (0, 2, 4)} & {found[f"c{i}"] for i in (1, 3, 5)}
    assert mean_accuracy(server) > 0.9


@pytest.mark.long
def test_one_cluster_is_fedavg():
    runs = [
        train(serve(quick(kind, extensions=(Proximal(mu=0.1),), **more), blobs((9, 6, 4, 1, 3)), rate=0.7), 3)
        for kind, more in ((FedAvg, {}), (HypCluster, {"clusters": 1}))
    ]
    for name, tensor in runs[0].state.shared.items():
        torch.testing.assert_close(runs[1].state.models[name][0], tensor, rtol=1e-10, atol=1e-12)
    assert_same_metrics(runs[0].evaluate("test"), runs[1].evaluate("test"))


def test_each_model_becomes_the_mean_of_its_own_clients_weighted_by_samples():
    federation = blobs((12, 7, 5, 3), labels=[[0, 1], [1, 2]])
    server = serve(quick(HypCluster, clusters=3), federation)
    before = {name: tensor.clone() for name, tensor in server.state.models.items()}
    expected_choice = {}
    for client in federation:
        chain = server.initialiser.chain(client.input_shape)
        x = client.train.x.double()
        losses = [
            torch.nn.functional.cross_entropy(
                torch.func.functional_call(chain, {n: t[j] for n, t in before.items()}, (x,)), client.train.y
            )
            for j in range(3)
        ]
        expected_choice[client.id] = int(torch.stack(losses).argmin())
    task = ExchangeTask(Exchange("train", 1, 0), {"models": before}, federation.ids)
    reply = server.engine.run(task, steps=[])
    server.engine.discard()
    assert dict(zip(reply.ids, reply.choice.tolist(), strict=True)) == expected_choice
    assert len(set(expected_choice.values())) == 2  # so that one model is chosen by nobody
    server.round(1)
    for j in range(3):
        rows = [row for row, client in enumerate(reply.ids) if expected_choice[client] == j]
        for name, tensor in server.state.models.items():
            if not rows:
                assert torch.equal(tensor[j], before[name][j])
                continue
            weights = reply.num_samples[rows] / reply.num_samples[rows].sum()
            torch.testing.assert_close(tensor[j], torch.einsum("n,n...->...", weights, reply.model[name][rows]))


def test_the_models_start_differently_and_personal_embeddings_stay_at_home():
    method = make("hypcluster", placement={"embedding": "personal"})
    server = train(serve(method, blobs((6, 5, 4), dims=(3, 8, 1)), rate=0.7), 2)
    assert {name.split(".")[0] for name in server.state.models} == {"body", "head"}
    assert {name.split(".")[0] for name in server.engine.states["c0"]["model"]} == {"embedding"}
    weight = server.state.models["head.weight"]
    assert not torch.equal(weight[0], weight[1]) and not torch.equal(weight[1], weight[2])
    assert len(server.evaluate("test")) == 3


def test_with_every_stage_personal_it_is_local_training():
    personal = dict.fromkeys(("embedding", "body", "head"), "personal")
    runs = [train(serve(make(name, placement=personal), blobs((6, 5))), 2) for name in ("hypcluster", "local")]
    for client in ("c0", "c1"):
        for name, tensor in runs[1].engine.states[client]["model"].items():
            torch.testing.assert_close(runs[0].engine.states[client]["model"][name], tensor, rtol=1e-10, atol=1e-12)


def test_regression_groups_with_opposite_slopes():
    generator = torch.Generator().manual_seed(1)
    arrays = {}
    for i in range(4):
        x = torch.randn(20, 1, generator=generator)
        arrays[f"c{i}"] = {"x_train": x, "y_train": (2.0 if i % 2 else -2.0) * x[:, 0]}
    method = quick(HypCluster, clusters=2, local_epochs=5, lr=0.05, optimizer="sgd")
    server = train(serve(method, Federation.from_arrays(arrays), model=Model(head=linear(1))), 10)
    assert max(values["mse"] for values in server.evaluate("train").values()) < 0.05
