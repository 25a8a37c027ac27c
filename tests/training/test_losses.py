"""The plain losses: the Cox partial likelihood against lifelines and loops, class weights against scikit-learn."""

from __future__ import annotations

from math import exp, log
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from engines import blobs, cohort, make, serve, train
from lifelines import CoxPHFitter
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight

from perfed import PerfedError, Reply
from perfed.data.federation import Federation
from perfed.method.extension import Extension
from perfed.methods.apfl import APFL
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear
from perfed.training.cox import cox_losses
from perfed.training.step import balance_classes


def draw(n: int, seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs ``(n, 3)``, times and events with hazards that depend on the inputs."""
    g = np.random.default_rng(seed)
    x = g.normal(size=(n, 3))
    time = g.exponential(np.exp(-x @ [1.0, -0.5, 0.0])) + 0.01
    return x, np.ceil(4 * time) if ties else time, (g.random(n) < 0.7).astype(float)


def by_hand(h, time, event, weight) -> list[float]:
    """Breslow's terms, one loop in another; weights in units of their mean."""
    weight = np.array(weight) / np.mean([w for w in weight if w > 0])
    found = []
    for i in range(len(h)):
        risk = sum(weight[j] * exp(h[j]) for j in range(len(h)) if time[j] >= time[i])
        found.append(log(risk) - h[i] if event[i] and weight[i] else 0.0)
    return found


def rows(*values) -> list[torch.Tensor]:
    return [torch.as_tensor(np.array(v), dtype=torch.float64) for v in values]


@pytest.mark.parametrize("ties", [False, True])
def test_cox_losses_are_those_of_a_loop_for_every_client_with_padding_and_weights(ties):
    h, time, event, weight = [], [], [], []
    for seed in range(4):
        g = np.random.default_rng(seed)
        _, t, e = draw(15, seed, ties)
        h.append(g.normal(size=15) * 3)
        time.append(t), event.append(e), weight.append(g.random(15) * (np.arange(15) < 15 - 3 * seed))
    found = cox_losses(*rows(h, time, event, weight))
    expected = [by_hand(*row) for row in zip(h, time, event, weight, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_likelihood_is_that_of_lifelines():
    x, time, event = draw(80, 3)
    weight = np.random.default_rng(0).integers(1, 4, 80).astype(float)
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "t": time, "e": event, "w": weight})
    for weights_col, w in ((None, np.ones(80)), ("w", weight)):
        columns = table if weights_col else table.drop(columns="w")
        model = CoxPHFitter().fit(columns, "t", "e", weights_col=weights_col, robust=bool(weights_col))
        hazard = x[:, :2] @ model.params_.to_numpy()
        each = cox_losses(*rows([hazard], [time], [event], [w]))[0].numpy()
        scale = (w * event).sum() * np.log(w.mean())  # lifelines' weights are not in units of their mean
        assert -(w * each).sum() == pytest.approx(model.log_likelihood_ + scale, rel=1e-9)


def test_cox_losses_have_two_derivatives_and_survive_large_hazards():
    h, time, event, weight = rows(
        np.random.default_rng(1).normal(size=(2, 6)),
        *(np.array([draw(6, s, True)[k] for s in (0, 1)]) for k in (1, 2)),
        np.ones((2, 6)),
    )
    weight[1, 4:] = 0
    h.requires_grad_()
    function = lambda values: cox_losses(values, time, event, weight).sum(1)  # noqa: E731
    assert torch.autograd.gradcheck(function, h) and torch.autograd.gradgradcheck(function, h)
    apart = torch.tensor([[300.0, -300.0, 0.0]], dtype=torch.float32, requires_grad=True)
    losses = cox_losses(apart, torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3), torch.ones(1, 3))
    torch.testing.assert_close(losses, torch.tensor([[0.0, 300.0, 0.0]]))
    (gradient,) = torch.autograd.grad(losses.sum(), apart)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.0, 1.0]]))


def test_cox_losses_keep_risk_sets_whose_hazards_are_further_below_the_largest_than_exp_reaches():
    h, time = torch.tensor([[800.0, 0.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0, 2.0, 3.0]])
    losses = cox_losses(h, time, torch.ones(1, 3), torch.ones(1, 3))
    # 800 stands in the first risk set alone: log(e^800 + 1 + e) - 800, log(1 + e), log(e) - 1.
    torch.testing.assert_close(losses, torch.tensor([[0.0, log(1 + exp(1)), 0.0]], dtype=torch.float64))


def survival(sizes=(40, 30), events=None, **more) -> Federation:
    clients = {}
    for i, n in enumerate(sizes):
        x, time, event = draw(2 * n, i, **more)
        y = np.stack([time, event if events is None else np.full(2 * n, events)], 1)
        domains = {"domain_train": np.arange(n) % 2, "domain_test": np.arange(n) % 2}
        clients[f"c{i}"] = {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:], **domains}
    return Federation.from_arrays(clients, task="survival")


def test_mini_batches_without_events_train_nothing():
    server = serve(make("fedavg"), survival(events=0.0), model=Model(head=linear(1)))
    before = {name: t.clone() for name, t in server.state.shared.items()}
    server.prepare()
    assert server.round(1).train_loss == 0.0
    assert all(torch.equal(t, before[name]) for name, t in server.state.shared.items())


@pytest.mark.long
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_training_ends_at_lifelines_estimate(engine):
    federation = survival((120, 80))
    method = make("local-full", optimizer="sgd", lr=1.0, batch_size=200, local_epochs=400)
    server = train(serve(method, federation, model=Model(head=linear(1)), engine=engine), 1)
    for cohort_ in server.own_models(federation.ids, 1):
        for row, client in enumerate(cohort_.clients):
            x, y = client.train.x.numpy(), client.train.y.numpy()
            table = pd.DataFrame({**dict(zip("abc", x.T, strict=True)), "t": y[:, 0], "e": y[:, 1]})
            expected = CoxPHFitter().fit(table, "t", "e").params_.to_numpy()
            np.testing.assert_allclose(cohort_.model["head.weight"][row, 0], expected, atol=1e-4)


def test_losses_of_a_split_have_risk_sets_of_the_whole_client():
    federation = survival((12, 7), ties=True)
    group = cohort(make("local-full"), federation, model=Model(head=linear(1)))
    outputs = [
        group.model["head.weight"][i, 0] @ c.train.x.T + group.model["head.bias"][i]
        for i, c in enumerate(group.clients)
    ]
    expected = [
        by_hand(h.tolist(), *c.train.y.T.tolist(), [1.0] * len(h)) for h, c in zip(outputs, group.clients, strict=True)
    ]
    np.testing.assert_allclose(group.sample_losses(), np.concatenate(expected), atol=1e-12)
    np.testing.assert_allclose(group.losses(), [np.mean(each) for each in expected], atol=1e-12)


# Class weights -------------------------------------------------------------------------------------------------------


def rare(sizes=(90, 60)) -> Federation:
    """Three classes, 8 : 3 : 1; the second client has none of class 2."""
    clients = {}
    for i, n in enumerate(sizes):
        g = np.random.default_rng(i)
        y = np.repeat([0, 1, 2] if i == 0 else [0, 0, 1], [8 * n // 12, 3 * n // 12, n - 8 * n // 12 - 3 * n // 12])
        clients[f"c{i}"] = {"x_train": g.normal(size=(n, 4)) + y[:, None], "y_train": y}
    return Federation.from_arrays(clients, num_classes=3)


def test_balanced_weights_are_those_of_scikit_learn():
    federation = rare()
    counts = torch.stack([torch.bincount(c.train.y, minlength=3) for c in federation]).double()
    for weights, client in zip(balance_classes(counts), federation, strict=True):
        y = client.train.y.numpy()
        held = np.unique(y)
        np.testing.assert_allclose(weights[held], compute_class_weight("balanced", classes=held, y=y))
        assert float(weights[y].sum()) == pytest.approx(len(y))
        assert not weights[np.setdiff1d(range(3), held)].any()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_training_with_class_weights_ends_at_scikit_learn_s_weighted_fit(engine):
    federation = rare()
    decay = 0.02  # a ridge of decay / 2 on the weights is scikit-learn's C = 1 / (decay n)
    options = {"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": decay, "batch_size": 100}
    ends = {}
    for weights in ("balanced", "none"):
        method = make("local-full", class_weights=weights, local_epochs=400, **options)
        server = train(serve(method, federation, model=Model(head=linear(3)), engine=engine), 1)
        (group,) = [*server.own_models(["c0"], 1)]
        client = group.clients[0]
        asked = {"C": 1 / (decay * len(client.train)), "class_weight": weights if weights == "balanced" else None}
        expected = LogisticRegression(tol=1e-10, max_iter=10000, **asked).fit(client.train.x, client.train.y)
        np.testing.assert_allclose(group.model["head.weight"][0], expected.coef_, atol=2e-4)
        ends[weights] = group.model["head.weight"][0]
    assert not torch.allclose(*ends.values(), atol=0.05)


@pytest.mark.long
@pytest.mark.parametrize("name", ["apfl", "fedrod", "feddar-wa", "separate-fedavg", "fedem"])
def test_losses_of_methods_have_the_weights_too(name):
    federation = rare()
    with_domains = {
        c.id: {"x_train": c.train.x, "y_train": c.train.y, "domain_train": c.train.y % 2} for c in federation
    }
    federation = Federation.from_arrays(with_domains, num_classes=3)
    ends = [
        train(serve(make(name, class_weights=weights, lr=0.1), federation), 1).round(2).train_loss
        for weights in ("none", "balanced")
    ]
    assert ends[0] != ends[1]


SHAPES = {
    "one for all clients": lambda step: step.losses().mean(),
    "one for each sample": lambda step: step.losses(),
    "a column": lambda step: step.losses().mean(1, keepdim=True),
    "too few": lambda step: step.losses().mean(1)[:-1],
    "a number": lambda step: 0.5,
    "nothing": lambda step: None,
    "whole numbers": lambda step: torch.ones(len(step.rows), dtype=torch.int64),
}


class Shaped(FedAvg):
    """Adds ``shape``, as a loss."""

    def train(self, cohort, shared):
        cohort.load(shared)
        cohort.fit(STAGES, epochs=1, loss=SHAPES[self.shape])
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    shape: str


class Penalised(Extension):
    """Adds ``shape``, as a penalty."""

    name: ClassVar[str] = "penalised"
    shape: str

    def loss(self, cohort, payload):
        return SHAPES[self.shape]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["loss", "penalty", "penalty of both models"])
def test_a_loss_or_penalty_of_another_shape_than_one_number_a_client_is_refused_in_one_line(kind, name):
    penalty = (Penalised(shape=name),)
    method = {
        "loss": lambda: Shaped(shape=name),
        "penalty": lambda: FedAvg(extensions=penalty, local_epochs=1),
        "penalty of both models": lambda: APFL(extensions=penalty, local_epochs=1),
    }[kind]()
    word = kind.partition(" ")[0]
    with pytest.raises(PerfedError, match=rf"the {word} .*lambda.* must return one .*shape \(3,\) \(given: ") as error:
        train(serve(method, blobs((5, 4, 3))), 1)
    assert "\n" not in str(error.value)
