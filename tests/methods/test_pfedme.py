"""pFedMe on quadratics, where proximal points have a closed form."""

from __future__ import annotations

import pytest
import torch
from engines import assert_same_metrics, blobs, cohort, make, serve, train
from planes import LINEAR, flat, planes, quadratic
from torch import nn
from torch.func import functional_call

from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.methods.flic.anchors import Anchors
from perfed.methods.pfedme import PFedMe
from perfed.model.chain import Model
from perfed.model.presets import hidden_layer, linear
from perfed.run.run import Run

FULL = {"optimizer": "sgd", "batch_size": 100}


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.3, "decay": "all"}], ids=["plain", "decay"])
def test_the_inner_problem_reaches_its_proximal_point(settings):
    lam, lr, federation = 10.0, 0.02, planes()
    method = make("pfedme", lam=lam, inner_steps=400, local_epochs=1, lr=lr, **FULL, **settings)
    server = serve(method, federation, model=LINEAR)
    w = flat(server.state.shared)
    train(server, 1)
    moved = []
    for client in federation:
        h, b = quadratic(client)
        eye = torch.eye(len(b), dtype=torch.float64)
        theta = torch.linalg.solve(h + (lam + settings.get("weight_decay", 0.0)) * eye, b + lam * w)
        torch.testing.assert_close(flat(server.engine.states[client.id]["theta"]), theta, rtol=1e-8, atol=1e-8)
        moved.append(w - lr * lam * (w - theta))
    torch.testing.assert_close(flat(server.state.shared), torch.stack(moved).mean(0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_is_the_papers_algorithm_step_by_step(momentum):
    """A plain loop: K steps of torch's SGD on f + lam / 2 |theta - w|^2 from w, w's own step, the server's."""
    lam, lr, eta, beta, inner, epochs, rounds = 10.0, 0.05, 0.08, 0.7, 5, 3, 2
    settings = {"lam": lam, "lr": lr, "eta": eta, "beta": beta, "inner_steps": inner, "local_epochs": epochs}
    model, federation = Model(body=hidden_layer(5), head=linear(3)), blobs((12, 7, 5))
    server = serve(make("pfedme", momentum=momentum, **settings, **FULL), federation, model=model)
    chain, theta = server.initialiser.chain((4,)), {}
    w = {name: t.clone() for name, t in server.state.shared.items()}
    train(server, rounds)
    for _ in range(rounds):
        locals_ = []
        for client in federation.to(dtype=torch.float64):
            own = {name: t.clone() for name, t in w.items()}
            for _ in range(epochs):  # all samples are one mini-batch
                mine = {name: t.clone().requires_grad_() for name, t in own.items()}
                optimizer = torch.optim.SGD(list(mine.values()), lr, momentum=momentum)
                for _ in range(inner):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(functional_call(chain, mine, (client.train.x,)), client.train.y)
                    for name, t in mine.items():
                        loss = loss + lam / 2 * (t - own[name]).square().sum()
                    loss.backward()
                    optimizer.step()
                theta[client.id] = {name: t.detach() for name, t in mine.items()}
                own = {name: t - eta * lam * (t - theta[client.id][name]) for name, t in own.items()}
            locals_.append(own)
        w = {name: (1 - beta) * t + beta * torch.stack([own[name] for own in locals_]).mean(0) for name, t in w.items()}
    for name, tensor in w.items():
        torch.testing.assert_close(server.state.shared[name], tensor, rtol=1e-11, atol=1e-12)
        for client, mine in theta.items():
            found = server.engine.states[client]["theta"][name]
            torch.testing.assert_close(found, mine[name], rtol=1e-11, atol=1e-12)


def test_a_strong_pull_and_a_large_learning_rate_do_not_diverge():
    """lr * lambda = 500 in the inner steps: they are implicit, which the run says; theta stays at w."""
    method = make("pfedme", lam=5e3, lr=0.1, eta=1e-4, **FULL)
    run = Run(planes(), method, LINEAR, rounds=3, dtype=torch.float64)
    notes = [note for note in run.execute()["notes"] if "implicit" in note]
    assert notes == [
        "head: SGD's steps on the quadratic term are implicit; explicit ones diverge, as lr * 5000 = 500 is not below "
        "2 (1 + momentum) = 2"
    ]
    server = run.server
    for state in server.engine.states.values():
        gap = flat(state["theta"]) - flat(server.state.shared)
        assert float(gap.abs().max()) < 0.05


@pytest.mark.parametrize("settings", [{"lr": 0.1}, {"lr": 0.1, "proximal": "implicit"}, {"optimizer": "adam"}])
def test_steps_that_are_those_of_the_settings_need_no_note(settings):
    assert not make("pfedme", **{**FULL, **settings}).notes(planes(), LINEAR)


@pytest.mark.parametrize("name", ["pfedme", "ditto", "fedamp"])
def test_adam_takes_no_implicit_step(name):
    with pytest.raises(PerfedError, match=f"{name}.proximal: 'implicit' needs optimizer = 'sgd'"):
        build_method(name, {"proximal": "implicit", "optimizer": "adam"})


@pytest.mark.long
def test_the_global_model_descends_to_the_minimiser_of_the_mean_moreau_envelope():
    """Sum of lambda (w - prox(w)) over clients is zero there; FedAvg's fixed point is another one."""
    lam, federation = 2.0, planes()
    method = make("pfedme", lam=lam, inner_steps=60, lr=0.05, eta=0.5, local_epochs=1, **FULL)
    server = train(serve(method, federation, model=LINEAR), 60)
    total, weights = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for client in federation:
        h, b = quadratic(client)
        inverse = torch.linalg.inv(h + lam * torch.eye(4, dtype=torch.float64))
        weights += torch.eye(4, dtype=torch.float64) - lam * inverse
        total += inverse @ b
    target = torch.linalg.solve(weights, total)
    torch.testing.assert_close(flat(server.state.shared), target, rtol=1e-3, atol=1e-3)
    averaged = train(serve(make("fedavg", lr=0.05, local_epochs=1, **FULL), federation, model=LINEAR), 60)
    assert float((flat(averaged.state.shared) - target).abs().max()) > 0.1


def test_beta_moves_the_server_part_of_the_way():
    runs = {beta: serve(make("pfedme", beta=beta), blobs((6, 5)), seed=3) for beta in (0.5, 1.0)}
    start = {name: t.clone() for name, t in runs[1.0].state.shared.items()}
    for server in runs.values():
        train(server, 1)
    for name, tensor in runs[1.0].state.shared.items():
        torch.testing.assert_close(runs[0.5].state.shared[name], (start[name] + tensor) / 2)


def test_what_is_evaluated_is_the_personal_model():
    server = train(serve(make("pfedme"), blobs((6, 5))), 1)
    record = server.round(2, measure="test")
    assert_same_metrics(record.after, server.evaluate("test"))
    (group,) = server.engine.cohorts(["c0"], {})
    for name, tensor in server.engine.states["c0"]["theta"].items():
        assert torch.equal(group.model[name][0], tensor)
        assert not torch.equal(server.state.shared[name], tensor)


@pytest.mark.parametrize(("proximal", "shrunk"), [("explicit", 1.0), ("implicit", 1.5)])
def test_one_step_per_mini_batch_from_w(proximal, shrunk):
    """K = 1: theta = w - lr g, as the term has no gradient at w; implicit, theta - w shrinks by 1 + lr lam."""
    lam, lr = 10.0, 0.05
    method = make("pfedme", lam=lam, lr=lr, inner_steps=1, local_epochs=1, proximal=proximal, **FULL)
    group = cohort(method, planes(), model=LINEAR)
    w = {name: t.expand(3, *t.shape) for name, t in serve(method, planes(), model=LINEAR).state.shared.items()}
    method.train(group, w)
    for row, client in enumerate(group.clients):
        h, b = quadratic(client)
        start = flat({name: t[row] for name, t in w.items()})
        expected = start - lr * (h @ start - b) / shrunk
        torch.testing.assert_close(flat({n: t[row] for n, t in group.state["theta"].items()}), expected)


@pytest.mark.parametrize("settings", [{"lr": 0.2}, {"lr": {"head": 0.3}}, {"lr": 0.01, "eta": 0.2}])
def test_an_overshooting_step_of_w_is_an_error(settings):
    with pytest.raises(PerfedError, match=r"pfedme.eta: eta \* lam = [23] would carry w beyond theta"):
        build_method("pfedme", settings)
    assert PFedMe(lr=0.2, lam=5.0).lam == 5.0 and PFedMe(lr=0.5, eta=0.1).eta == 0.1


def test_with_personal_embeddings_and_anchors():
    anchors = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
    method = make("pfedme", placement={"embedding": "personal"}, more_extensions=(anchors,))
    server = serve(method, blobs((8, 6, 1), dims=(3, 5)))
    server.prepare()
    before = server.engine.states["c0"]["model"]["embedding.0.weight"].clone()
    server.round(1)
    assert not torch.equal(server.engine.states["c0"]["model"]["embedding.0.weight"], before)
    assert len(server.evaluate("test")) == 3
