"""FedFomo: clients combine the models of those who help them on their own validation data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engines import blobs, cohort, quick, serve, train

from perfed import rng
from perfed.data.federation import Federation
from perfed.methods.fedfomo import FedFomo, scaled_gains
from perfed.methods.local import Local
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def random_models(group, count, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in group.chain.tensors().items()}
    return {n: torch.randn(group.n, count, *s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def loss_of(group, split, values) -> float:
    outputs = torch.func.functional_call(group.chain, values, (split.x,))
    return float(F.cross_entropy(outputs, split.y))


def with_one_client_without_validation() -> Federation:
    federation = blobs((9, 6, 5), validation=7)
    clients = [replace(c, validation=None) if c.id == "c1" else c for c in federation]
    return replace(federation, clients=tuple(clients))


def test_the_combined_model_is_the_formula_on_validation_data():
    method = quick(FedFomo)
    group = cohort(method, with_one_client_without_validation())
    old, own = ({n: t[:, 0].contiguous() for n, t in random_models(group, 1, seed).items()} for seed in (1, 2))
    models = random_models(group, 4, 3)
    group.state["old"], group.state["own"] = old, own
    method.combine(group, models)
    helpful = 0
    for row, client in enumerate(group.clients):
        data = client.split("validation") or client.train
        start = {n: t[row] for n, t in old.items()}
        candidates = [
            {n: t[row] for n, t in own.items()},
            *({n: t[row, j] for n, t in models.items()} for j in range(4)),
        ]
        gains = []
        for candidate in candidates:
            distance = torch.cat([(candidate[n] - start[n]).flatten() for n in start]).norm()
            gains.append((loss_of(group, data, start) - loss_of(group, data, candidate)) / float(distance))
        weights = [max(0.0, gain) / sum(max(0.0, g) for g in gains) for gain in gains]
        assert 0 in weights or row != 0
        helpful += sum(weight > 0 for weight in weights[1:])
        for name, tensor in start.items():
            expected = tensor + sum(w * (c[name] - tensor) for w, c in zip(weights, candidates, strict=True))
            torch.testing.assert_close(group.model[name][row], expected)
    assert helpful >= 3


@pytest.mark.long
def test_harmful_and_equal_models_weigh_nothing():
    server = train(serve(quick(Local, local_epochs=30, lr=0.02), blobs((20, 20), validation=10)), 2)
    method = quick(FedFomo)
    group = cohort(method, blobs((20, 20), validation=10))
    good = {n: torch.stack([server.engine.states[c]["model"][n] for c in group.ids]) for n in group.chain.tensors()}
    bad = {n: t[:, 0] for n, t in random_models(group, 1).items()}
    candidates = {n: torch.stack([good[n], bad[n]], 1) for n in good}
    gains = scaled_gains(group, good, candidates)
    assert (gains[:, 0] == 0).all() and (gains[:, 1] < 0).all()
    group.state["old"], group.state["own"] = good, bad
    method.combine(group, {n: t.unsqueeze(1) for n, t in bad.items()})
    for name, tensor in good.items():
        assert torch.equal(group.model[name], tensor)  # nothing helps: back to the old model
    group.state["old"], group.state["own"] = bad, bad
    method.combine(group, {n: t.unsqueeze(1) for n, t in good.items()})
    for name, tensor in good.items():
        torch.testing.assert_close(group.model[name], tensor)


def opposite_labels(clients=6, samples=60) -> Federation:
    """Even and odd clients have opposite labels and few training samples."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i in range(clients):
        x = torch.randn(samples, 6, generator=generator)
        y = ((x.sum(1) > 0) ^ bool(i % 2)).long()
        parts = {"train": slice(0, 10), "validation": slice(10, 30), "test": slice(30, None)}
        arrays[f"c{i}"] = {f"{k}_{split}": v[part] for split, part in parts.items() for k, v in (("x", x), ("y", y))}
    return Federation.from_arrays(arrays, num_classes=2)


def mean_accuracy(server) -> float:
    metrics = server.evaluate("test")
    return sum(values["accuracy"] for values in metrics.values()) / len(metrics)


@pytest.mark.long
def test_similar_clients_get_the_weight_and_help_each_other():
    model = Model(body=mlp((8,), 4), head=linear(2))
    settings = {"local_epochs": 3, "lr": 0.05, "optimizer": "sgd"}
    server = train(serve(quick(FedFomo, **settings), opposite_labels(), model=model), 15)
    for client, row in server.state.preferences.items():
        weights = dict(zip(server.state.preferences, row["weights"].tolist(), strict=True))
        same = [weights[c] for c in weights if c != client and (int(c[1]) - int(client[1])) % 2 == 0]
        other = [weights[c] for c in weights if (int(c[1]) - int(client[1])) % 2]
        assert weights[client] == 0 and min(same) > max(other)
    local = train(serve(quick(Local, **settings), opposite_labels(), model=model), 15)
    assert mean_accuracy(server) > mean_accuracy(local) + 0.03


def test_without_downloads_it_is_local_training_while_that_helps():
    settings = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100}  # full batches: every step lowers the loss
    model = Model(body=mlp((6,), 5), head=linear(3))
    fomo = train(serve(quick(FedFomo, downloads=0, **settings), blobs(), model=model), 4)
    local = train(serve(quick(Local, **settings), blobs(), model=model), 4)
    for client in ("c0", "c1", "c2"):
        for name, tensor in local.engine.states[client]["model"].items():
            torch.testing.assert_close(fomo.engine.states[client]["own"][name], tensor)
    before = {client: state["own"] for client, state in fomo.engine.states.items()}
    fomo.round(5)
    for client, state in fomo.engine.states.items():  # the model before the latest training is what gains are against
        for name, tensor in before[client].items():
            torch.testing.assert_close(state["old"][name], tensor)
            assert not torch.equal(state["own"][name], tensor)


def test_all_get_the_same_number_of_models_of_others_that_have_taken_part():
    method = quick(FedFomo, downloads=3)
    server = serve(method, blobs((5,) * 6))
    everyone, key = list(server.state.preferences), rng.key(0, "test")
    assert set(map(len, method.choose(server.state, everyone, key, 0.5).values())) == {0}  # nobody has taken part
    liked = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.1, 0.2], dtype=torch.float64)
    for client in everyone[:5]:
        server.state.preferences[client] = {"weights": liked, "uploaded": torch.tensor(True)}
    assert method.choose(server.state, ["c0", "c2"], key, 0.0) == {
        "c0": ["c1", "c4", "c3"],
        "c2": ["c1", "c4", *method.choose(server.state, ["c2"], key, 0.0)["c2"][2:]],
    }
    for number in range(20):
        sent = method.choose(server.state, everyone, rng.key(number), 0.5)
        assert all(len(set(s)) == 3 and client not in s and "c5" not in s for client, s in sent.items())
    wide = method.model_copy(update={"downloads": 50})
    assert set(map(len, wide.choose(server.state, everyone, key, 0.5).values())) == {4}


def test_exploration_is_keyed_and_fades():
    method = quick(FedFomo, downloads=1)
    server = serve(method, blobs((5,) * 6))
    liked = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    for client in server.state.preferences:
        server.state.preferences[client] = {"weights": liked, "uploaded": torch.tensor(True)}
    picks = [method.choose(server.state, ["c0"], rng.key(number), 0.3)["c0"][0] for number in range(300)]
    assert 0.15 < sum(pick != "c1" for pick in picks) / 300 < 0.33  # 0.3 times 4 of 5
    assert picks == [method.choose(server.state, ["c0"], rng.key(number), 0.3)["c0"][0] for number in range(300)]
    seen = []
    choose = FedFomo.choose

    class Watched(FedFomo):
        def choose(self, server, ids, key, epsilon):
            seen.append(epsilon)
            return choose(self, server, ids, key, epsilon)

    train(serve(quick(Watched), blobs()), 8)
    assert seen == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0])


def test_the_server_keeps_the_latest_model_of_each_client():
    server = serve(quick(FedFomo), blobs((5, 4, 4, 3, 3)), rate=0.4)
    for number in (1, 2, 3):
        before = dict(server.state.models)
        part = server.round(number).participants
        for client in before:
            same = all(torch.equal(server.state.models[client][n], t) for n, t in before[client].items())
            assert same == (client not in part)
            if client in part:
                own = server.engine.states[client]["own"]
                assert all(torch.equal(server.state.models[client][n], t) for n, t in own.items())


@pytest.mark.long
def test_a_client_that_never_took_part_gains_from_the_others_when_it_is_evaluated():
    model = Model(body=mlp((8,), 4), head=linear(2))
    settings = {"local_epochs": 3, "lr": 0.05, "optimizer": "sgd"}
    server = train(serve(quick(FedFomo, **settings), opposite_labels(), model=model), 15)
    newcomer = server.engine.initialiser.client_state(server.engine.clients["c0"], server.engine.info)
    server.engine.states["c0"] = newcomer
    assert server.evaluate("test", ["c0"])["c0"]["accuracy"] > 0.8


@pytest.mark.long
def test_regression_and_batch_norm():
    server = train(serve(quick(FedFomo), blobs((9, 1, 4), regression=True, validation=3)), 3)
    assert all(values["mse"] < 1e3 for values in server.evaluate("test").values())

    def body(shape):
        return torch.nn.Sequential(torch.nn.Linear(shape[0], 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU())

    server = train(serve(quick(FedFomo), blobs((8, 6, 4)), model=Model(body=body, head=linear(3))), 3)
    assert server.state.models["c0"]["body.1.num_batches_tracked"].dtype == torch.int64
    assert len(server.evaluate("test")) == 3
