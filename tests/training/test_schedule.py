"""Numbers that follow a schedule: against torch's schedulers, and the number that a round really used."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch
from engines import CodecEngine, every_tensor, make, serve
from planes import LINEAR, flat, planes, quadratic
from torch.optim import SGD, lr_scheduler

from perfed.errors import PerfedError
from perfed.experiment.config import read, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import resume, start
from perfed.methods.build import build_method
from perfed.training.schedule import Constant, Cosine, Exponential, Step, WarmUp

ROUNDS = 8
FULL = {"optimizer": "sgd", "batch_size": 100, "local_epochs": 1}
COSINE = {"kind": "cosine", "start": 0.3, "end": 0.05, "rounds": 4}
FALLS = (0.3, 0.2375, 0.1125, 0.05, 0.05)  # 0.05 + 0.25 (1 + cos(pi k / 3)) / 2


def by_torch(kind: type[Any], start: float, **settings: Any) -> list[float]:
    """The rates of the first rounds, as a scheduler of torch gives them."""
    optimizer = SGD([torch.zeros(1)], lr=start)
    scheduler, rates = kind(optimizer, **settings), []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(kind="constant", start=0.1), [0.1] * ROUNDS),
        (
            Step(kind="step", start=0.4, rounds=(2, 5), factor=0.5),
            by_torch(lr_scheduler.MultiStepLR, 0.4, milestones=[2, 5], gamma=0.5),
        ),
        (Exponential(kind="exponential", start=0.4, factor=0.9), by_torch(lr_scheduler.ExponentialLR, 0.4, gamma=0.9)),
        (
            Cosine(kind="cosine", start=0.3, end=0.05, rounds=ROUNDS),
            by_torch(lr_scheduler.CosineAnnealingLR, 0.3, T_max=ROUNDS - 1, eta_min=0.05),
        ),
        (
            WarmUp(kind="warm-up", start=0.1, end=0.4, rounds=4),
            by_torch(lr_scheduler.LinearLR, 0.4, start_factor=0.25, total_iters=3),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_each_kind_is_that_of_torch(schedule, expected):
    assert [schedule.value_in_round(number) for number in range(1, ROUNDS + 1)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("engine", ["stacked", "sequential", "codec"])
def test_the_rate_of_a_round_is_that_of_its_schedule(engine):
    """One step of SGD on a quadratic moves each client by rate times gradient; a round done again, by the same."""
    federation = planes((12, 6), first=0.5, more=0.5)
    runner = {"runner": CodecEngine} if engine == "codec" else {"engine": engine}
    server = serve(make("fedavg", lr=COSINE, **FULL), federation, model=LINEAR, **runner)
    server.prepare()
    for number, rate in enumerate(FALLS, 1):
        before, w = server.snapshot(), flat(server.state.shared)
        server.round(number)
        mean = sum(len(c.train) * (quadratic(c)[0] @ w - quadratic(c)[1]) for c in federation) / 18
        torch.testing.assert_close(w - flat(server.state.shared), rate * mean, rtol=1e-11, atol=1e-13)
        whole = every_tensor(server)
        server.restore(before)
        server.round(number)
        assert all(torch.equal(t, whole[name]) for name, t in every_tensor(server).items())


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_a_methods_own_number_too(engine):
    """Ditto's v takes one step on f(v) + lambda / 2 |v - w|^2, with the lambda of the round."""
    federation, lr = planes((12, 6), first=0.5, more=0.5), 0.1
    lam = {"kind": "warm-up", "start": 0.5, "end": 2.0, "rounds": 4}
    server = serve(make("ditto", lam=lam, lr=lr, **FULL), federation, model=LINEAR, engine=engine)
    server.prepare()
    for number, value in enumerate((0.5, 1.0, 1.5, 2.0, 2.0), 1):
        w = flat(server.state.shared)
        old = {i: flat(state["local"]) for i, state in server.engine.states.items()} or dict.fromkeys(federation.ids, w)
        server.round(number)
        for client in federation:
            a, b = quadratic(client)
            v = old[client.id]
            expected = v - lr * (a @ v - b + value * (v - w))
            found = flat(server.engine.states[client.id]["local"])
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_and_a_terms():
    """FedProx: the second of two steps feels the pull."""
    (client,) = federation = planes((12,), first=0.5)
    method = build_method("fedprox", {"mu": COSINE, "lr": 0.1, **FULL, "local_epochs": 2})
    server, (a, b) = serve(method, federation, model=LINEAR), quadratic(client)
    server.prepare()
    for number, mu in enumerate(FALLS, 1):
        w = flat(server.state.shared)
        one = w - 0.1 * (a @ w - b)
        server.round(number)
        expected = one - 0.1 * (a @ one - b + mu * (one - w))
        torch.testing.assert_close(flat(server.state.shared), expected, rtol=1e-11, atol=1e-13)


def test_stages_may_have_schedules_of_their_own():
    method = make("fedrep", lr={"head": COSINE, "body": 0.2}, lr_drops=(2,), lr_factor=0.5)
    assert [method.in_round(n).lr_of("head") for n in (1, 2, 3)] == [0.3, pytest.approx(0.2375), pytest.approx(0.05625)]
    assert [method.in_round(n).lr_of("body") for n in (1, 2, 3)] == [0.2, 0.2, 0.1]


def test_a_method_without_schedules_is_the_same_object_in_every_round():
    method = make("fedpac")
    assert method.in_round(7) is method


TABLE = {
    "method": "ditto",
    "rounds": 6,
    "dtype": "float64",
    "checkpoint_seconds": 0.0,
    "data": {"name": "digits", "clients": 3},
    "model": {"head": "linear"},
    "training": {"lr": COSINE, "local_epochs": 1},
    "methods": {"ditto": {"lam": {"kind": "exponential", "start": 2.0, "factor": 0.5}}},
    "plan": {"threads": 1},
}


@pytest.mark.long
def test_files_say_it_and_a_resumed_run_has_the_same_bits(tmp_path):
    experiment = validate(TABLE)
    assert read(experiment.to_toml(), "config.toml") == experiment
    whole = start(experiment, out=tmp_path / "whole")
    summary = whole.execute()

    def interrupt(number: int, rounds: int, accuracy: float | None) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(experiment, out=tmp_path / "cut").execute(interrupt)
    again = resume(tmp_path / "cut")
    again.execute()
    found, expected = every_tensor(again.server), every_tensor(whole.server)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
    config = tomllib.loads((tmp_path / "whole/config.toml").read_text())
    assert config["training"]["lr"] == COSINE and summary["settings"]["lr"] == COSINE
    assert summary["settings"]["lam"] == TABLE["methods"]["ditto"]["lam"]
    constant = start(validate(override(TABLE, ["lr=0.3", "methods.ditto.lam=2.0"], ["ditto"])))
    assert constant.execute()["metrics"] != summary["metrics"]


def test_assignments_reach_into_it():
    table = override(TABLE, ["lr.start=0.2", "lam.factor=0.9"], ["ditto"])
    method = validate(table).built_method
    assert method.lr == 0.2 and method.in_round(2).lam == pytest.approx(1.8)
    table = override(table, ["lr={kind='warm-up', end=0.1, rounds=5}", "lam=1.0"], ["ditto"])
    method = validate(table).built_method
    assert [method.in_round(n).lr for n in (1, 3, 5)] == [0.0, pytest.approx(0.05), 0.1] and method.lam == 1.0


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("lr.kind=cosin", "lr: .*'cosin'.*'constant', 'step', 'exponential', 'cosine', 'warm-up'"),
        ("lr={kind='cosine', start=0.1}", "lr.rounds: field required"),
        ("lr.factor=2", "lr.factor: extra inputs are not permitted"),
        ("lr.end=-0.1", "lr: must be a finite number, at least 0"),
        ("lam.start=-1.0", "lam: .*greater than or equal to 0"),
        ("local_epochs={kind='constant', start=2.0}", "local_epochs: cannot be a schedule; fractions"),
        ("optimizer={kind='constant', start=2.0}", "optimizer: cannot be a schedule; fractions"),
    ],
)
def test_what_is_none_is_one_line(assignment, said):
    with pytest.raises(PerfedError, match=said) as found:
        validate(override(TABLE, [assignment], ["ditto"]))
    assert "\n" not in str(found.value)
