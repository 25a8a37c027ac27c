"""FedEM: expectation-maximisation over components that all clients share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from engines import blobs, cohort, make, quick, serve, train

from perfed.data.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedavg_ft import FedAvgFT
from perfed.methods.fedem import FedEM, FedEMFT
from perfed.model.chain import Model
from perfed.model.presets import linear

LINEAR = Model(head=linear(2))


def populations(flipped=(0.0, 1.0, 0.0, 1.0, 0.5), samples=60) -> Federation:
    """Two linear rules with opposite labels; ``flipped[i]`` of client i's samples follow the second."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i, share in enumerate(flipped):
        x = torch.randn(2 * samples, 2, generator=generator, dtype=torch.float64)
        second = torch.arange(2 * samples) % samples < share * samples
        y = ((x[:, 0] > 0) ^ second).long()
        halves = {"train": slice(0, samples), "test": slice(samples, None)}
        arrays[f"c{i}"] = {f"{k}_{split}": v[part] for split, part in halves.items() for k, v in (("x", x), ("y", y))}
    return Federation.from_arrays(arrays, num_classes=2)


def full_batch(**settings):
    return quick(FedEM, **{"optimizer": "sgd", "batch_size": 1000, "lr": 0.3, "local_epochs": 1, **settings})


def component_losses(server, client, m) -> torch.Tensor:
    """Loss of every training sample under component m, by PyTorch alone."""
    chain = server.initialiser.chain(client.input_shape)
    values = {name: bank[m] for name, bank in server.state.components.items()}
    outputs = torch.func.functional_call(chain, values, (client.train.x.double(),))
    return F.cross_entropy(outputs, client.train.y, reduction="none")


def mixture(server, client) -> torch.Tensor:
    return server.engine.states[client]["mixture"]["weights"]


def log_likelihood(server) -> float:
    """``sum_i sum_s log sum_m pi_im exp(-loss_m(s))`` of the state as it is."""
    total = 0.0
    for client in server.engine.federation:
        pi = mixture(server, client.id)
        losses = torch.stack([component_losses(server, client, m) for m in range(len(pi))])
        total += float(torch.logsumexp(pi.log()[:, None] - losses, 0).sum())
    return total


def test_responsibilities_are_the_posterior_and_the_mixture_weights_their_mean():
    server = train(serve(quick(FedEM), blobs((9, 6, 1))), 2)
    method, federation = server.initialiser.method, server.engine.federation
    before = {client: mixture(server, client).clone() for client in federation.ids}
    assert len({tuple(p.tolist()) for p in before.values()}) == 3
    (group,) = server.engine.cohorts(federation.ids, method.download(server.state))
    group.state["mixture"] = {"weights": torch.stack([before[client] for client in group.ids])}
    components = {n: t.unsqueeze(0).expand(group.n, *t.shape) for n, t in server.state.components.items()}
    parts = method.expect(group, components).split([len(client.train) for client in group.clients])
    for row, client in enumerate(group.clients):
        losses = torch.stack([component_losses(server, client, m) for m in range(3)], 1)
        joint = before[client.id] * torch.exp(-losses)
        expected = joint / joint.sum(1, keepdim=True)
        torch.testing.assert_close(parts[row], expected)
        torch.testing.assert_close(parts[row].sum(1), torch.ones(len(client.train), dtype=torch.float64))
        torch.testing.assert_close(group.state["mixture"]["weights"][row], expected.mean(0))


@pytest.mark.long
def test_the_likelihood_does_not_fall_in_full_batch_em_on_a_convex_problem():
    server = serve(full_batch(components=2), populations(), model=LINEAR)
    found = []
    for number in range(1, 41):
        server.round(number)
        found.append(log_likelihood(server))
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found))
    assert found[-1] > found[0] + 50


def test_a_component_descends_on_the_loss_weighted_by_its_responsibilities():
    method = full_batch(components=2)
    group = cohort(method, populations((0.0, 1.0), samples=8), model=LINEAR)
    generator = torch.Generator().manual_seed(3)
    shapes = {name: tensor.shape for name, tensor in group.chain.tensors().items()}
    bank = {name: torch.randn(2, 2, *shape, generator=generator).double() for name, shape in shapes.items()}
    q = torch.rand(16, 2, generator=generator, dtype=torch.float64)
    trained = method.maximise(group, bank, q, 1)
    samples = group.samples()
    for client in range(2):
        part = slice(8 * client, 8 * client + 8)
        for m in range(2):
            values = {name: t[client, m].clone().requires_grad_(True) for name, t in bank.items()}
            outputs = torch.func.functional_call(group.chain, values, (samples.x[part],))
            loss = (q[part, m] * F.cross_entropy(outputs, samples.y[part], reduction="none")).mean()
            grads = torch.autograd.grad(loss, list(values.values()))
            for (name, start), grad in zip(values.items(), grads, strict=True):
                torch.testing.assert_close(trained[name][client, m], start.detach() - 0.3 * grad)


@pytest.mark.long
def test_the_mixture_recovers_two_populations_and_their_shares():
    method = quick(FedEM, components=2, optimizer="sgd", lr=0.3, batch_size=20, local_epochs=2)
    server = train(serve(method, populations(), model=LINEAR, seed=1), 30)
    pi = {client: mixture(server, client) for client in server.engine.states}
    first = int(pi["c0"].argmax())
    assert pi["c0"][first] > 0.9 and pi["c2"][first] > 0.9
    assert pi["c1"][1 - first] > 0.9 and pi["c3"][1 - first] > 0.9
    assert 0.35 < pi["c4"][first] < 0.65
    metrics = server.evaluate("test")
    assert min(metrics[client]["accuracy"] for client in ("c0", "c1", "c2", "c3")) > 0.9
    single = train(serve(method.model_copy(update={"components": 1}), populations(), model=LINEAR, seed=1), 30)
    assert max(single.evaluate("test")[client]["accuracy"] for client in ("c0", "c1")) < 0.8


@pytest.mark.parametrize("kind, plain", [(FedEM, FedAvg), (FedEMFT, FedAvgFT)])
@pytest.mark.parametrize("embedding", ["shared", "personal"])
def test_one_component_is_fedavg(kind, plain, embedding):
    places = {"placement": {"embedding": embedding}}
    runs = [
        train(serve(quick(k, **places, **more), blobs((9, 6, 4, 1)), rate=0.7), 3)
        for k, more in ((plain, {}), (kind, {"components": 1}))
    ]
    for name, tensor in runs[0].state.shared.items():
        torch.testing.assert_close(runs[1].state.components[name][0], tensor, rtol=1e-10, atol=1e-12)
    for client, values in runs[0].evaluate("test").items():
        assert runs[1].evaluate("test")[client] == pytest.approx(values, rel=1e-10)


def test_prediction_is_the_mixture_of_the_components_probabilities():
    server = train(serve(quick(FedEM), blobs((9, 6))), 2)
    method = server.initialiser.method
    (group,) = server.engine.cohorts(["c0", "c1"], method.download(server.state))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    found = method.predict(group, x).exp()
    torch.testing.assert_close(found.sum(2), torch.ones(2, 5, dtype=torch.float64))
    for row in range(2):
        expected = torch.zeros(5, 3, dtype=torch.float64)
        for m, weight in enumerate(group.state["mixture"]["weights"][row]):
            values = {name: bank[m] for name, bank in server.state.components.items()}
            expected += weight * torch.func.functional_call(group.chain, values, (x[row],)).softmax(1)
        torch.testing.assert_close(found[row], expected)
    largest = int(group.state["mixture"]["weights"][0].argmax())
    torch.testing.assert_close(group.model["head.weight"][0], server.state.components["head.weight"][largest])


@pytest.mark.long
def test_a_client_that_never_took_part_finds_its_component_when_it_is_evaluated():
    method = quick(FedEM, components=2, optimizer="sgd", lr=0.3, batch_size=20, local_epochs=2)
    trained = train(serve(method, populations((0.0, 1.0, 0.0, 1.0)), model=LINEAR, seed=1), 30)
    fresh = serve(method, populations((0.0, 1.0, 0.0, 1.0, 0.0, 1.0)), model=LINEAR, seed=1)
    fresh.state.components = trained.state.components
    metrics = fresh.evaluate("test")
    assert min(values["accuracy"] for values in metrics.values()) > 0.9
    assert "c5" not in fresh.engine.states  # evaluation is on copies


@pytest.mark.long
def test_fine_tuning_fits_the_clients_own_data_better_and_keeps_the_components():
    federation = blobs((20, 20, 20), labels=[[0, 1], [1, 2], [0, 2]])
    server = train(serve(quick(FedEMFT, finetune_epochs=10), federation), 2)
    plain = serve(quick(FedEM), federation)
    plain.state, plain.engine.states = server.state, server.engine.states
    before, after = plain.evaluate("train"), server.evaluate("train")
    assert all(after[client]["loss"] < 0.8 * before[client]["loss"] for client in before)
    assert plain.evaluate("train") == before


@pytest.mark.long
def test_personal_parameters_are_averaged_by_mixture_weights():
    method = make("fedem", placement={"embedding": "personal"})
    server = train(serve(method, blobs((6, 5, 4), dims=(3, 8, 1)), rate=0.7), 2)
    assert {name.split(".")[0] for name in server.state.components} == {"body", "head"}
    q = torch.softmax(torch.randn(11, 3, dtype=torch.float64), 1)

    def personal(weights) -> dict[str, torch.Tensor]:
        group = cohort(method, blobs((6, 5)))
        group.state["mixture"] = {"weights": torch.tensor([weights] * 2, dtype=torch.float64)}
        bank = {n: t.unsqueeze(0).expand(2, *t.shape) for n, t in server.state.components.items()}
        method.maximise(group, bank, q, 2)
        return group.personal()

    alone = [personal(weights) for weights in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])]
    for name, tensor in personal([0.2, 0.5, 0.3]).items():
        assert not torch.equal(alone[0][name], alone[1][name])
        torch.testing.assert_close(tensor, 0.2 * alone[0][name] + 0.5 * alone[1][name] + 0.3 * alone[2][name])


@pytest.mark.long
def test_regression_finds_two_slopes_where_one_model_cannot():
    generator = torch.Generator().manual_seed(1)
    arrays = {}
    for i in range(4):
        x = torch.randn(30, 1, generator=generator)
        arrays[f"c{i}"] = {"x_train": x, "y_train": (2.0 if i % 2 else -2.0) * x[:, 0]}
    settings = {"local_epochs": 3, "lr": 0.05, "optimizer": "sgd", "batch_size": 10}
    errors = []
    for method in (quick(FedEM, components=2, **settings), quick(FedAvg, **settings)):
        server = train(serve(method, Federation.from_arrays(arrays), model=Model(head=linear(1))), 20)
        errors.append(max(values["mse"] for values in server.evaluate("train").values()))
    assert errors[0] < 0.1 and errors[1] > 1
