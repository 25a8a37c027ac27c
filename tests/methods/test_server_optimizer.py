"""FedAdam, FedYogi and FedAdagrad: the server's steps are the optimisers' along the mean change."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from engines import blobs, difference, make, network, serve, train
from planes import LINEAR, flat, planes

from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.methods.extensions.server_optimizer import ServerOptimizer

LOCAL = {"optimizer": "sgd", "lr": 0.1, "batch_size": 100, "local_epochs": 3}
TAU, LR = 1e-3, 0.03


def averaged(federation, shared):
    """What a round of FedAvg makes of ``shared``: without momentum it depends on nothing else."""
    server = serve(make("fedavg", **LOCAL), federation, model=LINEAR)
    server.state.shared = dict(shared)
    server.round(1)
    return server.state.shared


def rounds(name: str, federation, count: int, **settings) -> list[torch.Tensor]:
    server = serve(build_method(name, {**LOCAL, "server_lr": LR, "tau": TAU, **settings}), federation, model=LINEAR)
    found = [flat(server.state.shared)]
    for number in range(1, count + 1):
        server.round(number)
        found.append(flat(server.state.shared))
    return found


def along_changes(federation, optimizer, x):
    """Five steps of an optimiser of torch, whose gradient is minus the mean change."""
    server = serve(make("fedavg", **LOCAL), federation, model=LINEAR)
    shapes = {name: t.shape for name, t in server.state.shared.items()}
    found = [x.detach().clone()]
    for _ in range(5):
        sizes = [shape.numel() for shape in shapes.values()]
        parts = dict(zip(shapes, x.detach().split(sizes), strict=True))
        x.grad = x.detach() - flat(averaged(federation, {n: t.view(shapes[n]) for n, t in parts.items()}))
        optimizer.step()
        found.append(x.detach().clone())
    return found


def start(federation):
    return flat(serve(make("fedavg", **LOCAL), federation, model=LINEAR).state.shared).clone().requires_grad_(True)


def test_fedadagrad_takes_the_steps_of_torchs_adagrad():
    federation = planes(first=0.5, more=0.5, seed=4)
    x = start(federation)
    optimizer = torch.optim.Adagrad([x], lr=LR, initial_accumulator_value=TAU**2, eps=TAU)
    expected = along_changes(federation, optimizer, x)
    torch.testing.assert_close(rounds("fedadagrad", federation, 5), expected)


def test_fedadam_without_momentum_takes_the_steps_of_torchs_rmsprop():
    """Which is Adam without m and without correction of the bias."""
    federation = planes(first=0.5, more=0.5, seed=4)
    x = start(federation)
    optimizer = torch.optim.RMSprop([x], lr=LR, alpha=0.99, eps=TAU)
    optimizer.state[x] = {"step": torch.tensor(0.0), "square_avg": torch.full_like(x, TAU**2)}
    expected = along_changes(federation, optimizer, x)
    torch.testing.assert_close(rounds("fedadam", federation, 5, beta1=0.0), expected)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_every_step_is_the_papers(name):
    beta1, beta2 = 0.8, 0.95
    server = serve(build_method(name, {**LOCAL, "server_lr": LR, "tau": TAU, "beta1": beta1, "beta2": beta2}), blobs())
    m = {n: torch.zeros_like(t) for n, t in server.state.shared.items()}
    v = {n: torch.full_like(t, TAU**2) for n, t in server.state.shared.items()}
    for number in range(1, 6):
        before = dict(server.state.shared)
        plain = serve(make("fedavg", **LOCAL), blobs())
        plain.state.shared = dict(before)
        plain.round(number)
        server.round(number)
        for n, x in before.items():
            delta = plain.state.shared[n] - x
            m[n] = beta1 * m[n] + (1 - beta1) * delta
            if name == "fedadam":
                v[n] = beta2 * v[n] + (1 - beta2) * delta**2
            elif name == "fedadagrad":
                v[n] = v[n] + delta**2
            else:
                v[n] = v[n] - (1 - beta2) * delta**2 * torch.sign(v[n] - delta**2)
            torch.testing.assert_close(server.state.shared[n], x + LR * m[n] / (v[n].sqrt() + TAU))


def test_fedyogi_is_fedadagrad_with_another_rate_while_v_is_below_the_squares():
    """Then v grows by (1 - beta2) Delta^2 a round: why FLamby's published figures of the two are the same."""
    federation, beta2 = planes(first=0.5, more=0.5, seed=4), 0.999
    tiny = {"tau": 1e-30, "beta1": 0.9}
    yogi = rounds("fedyogi", federation, 4, beta2=beta2, server_lr=1e-3, **tiny)
    adagrad = rounds("fedadagrad", federation, 4, server_lr=1e-3 / sqrt(1 - beta2), **tiny)
    torch.testing.assert_close(yogi, adagrad)


@pytest.mark.long
def test_a_large_tau_with_as_large_a_rate_is_the_method_itself():
    off = {"server_optimizer": "adagrad", "beta1": 0.0, "tau": 1e6, "server_lr": 2e6}  # sqrt(v) is tau then
    for name in ("fedavg", "fedrep", "fedpac", "scaffold"):
        settings = {"optimizer": "sgd", "lr": 1e-2}
        plain = train(serve(make(name, **settings), blobs()), 2)
        extension = ServerOptimizer(**off)
        around = train(serve(make(name, more_extensions=(extension,), **settings), blobs()), 2)
        around.state = type(around.state)({n: v for n, v in around.sets.items() if not n.startswith("server_")})
        assert difference(around, plain) < 1e-8, name


def test_batch_norms_statistics_are_the_methods():
    model = network(batch_norm=True)
    runs = [
        train(serve(make("fedavg", more_extensions=extensions), blobs(), model=model), 1)
        for extensions in ((), (ServerOptimizer(),))
    ]
    plain, stepped = (run.state.shared for run in runs)
    statistics = [name for name in plain if "running" in name or "num_batches" in name]
    assert statistics and all(torch.equal(plain[name], stepped[name]) for name in statistics)
    assert not any(torch.equal(plain[name], stepped[name]) for name in plain if name not in statistics)


def test_parameters_of_each_domain_take_steps_of_their_own():
    server = train(serve(make("feddar-wa", more_extensions=(ServerOptimizer(),)), blobs()), 2)
    assert server.state.server_v["head.weight"].shape == server.state.shared["head.weight"].shape


def test_a_method_without_shared_parameters_is_refused():
    with pytest.raises(PerfedError, match=r"extension 'server-optimizer' moves .* but the placement leaves none"):
        serve(make("local", more_extensions=(ServerOptimizer(),)), blobs()).prepare()
