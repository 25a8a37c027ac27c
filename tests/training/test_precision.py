"""``precision = "bf16"``: layers with numbers of 16 bits where asked for, and where they are faster."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from engines import awkward_domains, blobs, make, serve, train
from torch import nn

from perfed import Federation, Model, linear, mlp
from perfed.errors import PerfedError
from perfed.privacy.sample import SamplePrivacy
from perfed.training.plan import Path, Plan
from perfed.training.trials import Trial, is_faster

SETTINGS = {"optimizer": "sgd", "lr": 0.1, "batch_size": 20, "local_epochs": 3, "precision": "bf16"}


def network():
    return Model(body=mlp((7,), 5, final_activation=True), head=linear(3))


def shared(server):
    return {name: t.clone() for name, t in server.sets["shared"].items()}


def one_client():
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    return Federation.from_arrays({"a": {"x_train": x, "y_train": y, "x_test": x, "y_test": y}}), x, y


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_it_is_training_under_autocast_by_hand(precision):
    """One mini-batch an epoch, so that the order of rows does not count but for rounding."""
    federation, x, y = one_client()
    server = serve(
        make("fedavg", **{**SETTINGS, "precision": precision}), federation, model=network(), dtype=torch.float32
    )
    chain = nn.Sequential(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU()), nn.Linear(5, 3))
    for mine, theirs in zip(chain.parameters(), shared(server).values(), strict=True):
        mine.data.copy_(theirs)
    sgd = torch.optim.SGD(chain.parameters(), 0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = chain(x)
        sgd.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        sgd.step()
    train(server, 1)
    for mine, theirs in zip(chain.parameters(), shared(server).values(), strict=True):
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(theirs, mine.data, rtol=0, atol=2e-3 if precision == "bf16" else 1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto"])
def test_stacks_train_in_it_too_near_full_precision_and_not_equal_to_it(name):
    runs = []
    for precision in ("full", "bf16"):
        method = make(name, **{**SETTINGS, "precision": precision})
        runs.append(shared(train(serve(method, blobs((23, 11, 9)), model=network(), dtype=torch.float32), 2)))
    gaps = [float((runs[0][key] - runs[1][key]).abs().max()) for key in runs[0]]
    assert 1e-5 < max(gaps) < 0.05


@pytest.mark.parametrize(
    ("dtype", "more"), [(torch.float64, ()), (torch.float32, (SamplePrivacy(entries=("shared", "num_samples")),))]
)
def test_what_it_does_not_combine_with_is_one_line(dtype, more):
    with pytest.raises(PerfedError, match=r"precision = 'bf16' needs dtype = 'float32', and does not combine with"):
        serve(make("fedavg", **SETTINGS, more_extensions=more), blobs((9, 8)), model=network(), dtype=dtype)


@pytest.mark.parametrize("faster", [True, False])
def test_a_trial_decides_under_auto_and_its_choice_is_recorded(monkeypatch, faster):
    tried = []
    monkeypatch.setattr("perfed.training.cohort.is_faster", lambda *_: tried.append(1) or faster)

    def done(plan, precision="bf16"):
        method = make("fedavg", **{**SETTINGS, "precision": precision})
        return shared(train(serve(method, blobs((23, 11, 9)), model=network(), dtype=torch.float32, plan=plan), 2))

    first = Plan("auto", threads=1, remember=False)
    found = done(first)
    kind = "fit body+head in bf16" if faster else "fit body+head"
    assert kind in first.paths and len(tried) == 1
    again = Plan("auto", threads=1, paths=dict(first.paths))
    monkeypatch.setattr("perfed.training.cohort.is_faster", lambda *_: not faster)
    assert all(torch.equal(found[key], value) for key, value in done(again).items())
    full = done(Plan("auto", threads=1, paths={"fit body+head": first.paths[kind]}), "full")
    assert all(torch.equal(found[key], value) for key, value in full.items()) != faster


def test_without_trials_it_is_as_asked():
    never = iter(())
    assert Plan("stacked").prefers("fit in bf16", "fit", never.__next__)
    assert Plan("auto", paths={"fit in bf16": Path(1, 1)}).prefers("fit in bf16", "fit", never.__next__)
    assert not Plan("auto", paths={"fit": Path(1, 1)}).prefers("fit in bf16", "fit", never.__next__)


def test_quicker_is_clearly_quicker():
    def waits(seconds):
        def steps(clients):
            while True:
                time.sleep(seconds)
                yield clients

        return Trial(steps, 100)

    assert is_faster(waits(0.001), waits(0.003)) and not is_faster(waits(0.003), waits(0.001))


def test_banks_of_domains_compute_in_it_too():
    runs = []
    for precision in ("full", "bf16"):
        method = make("feddar-wa", **{**SETTINGS, "precision": precision})
        model = Model(body=lambda shape: nn.Identity(), head=linear(3))
        runs.append(shared(train(serve(method, awkward_domains(), model=model, dtype=torch.float32), 1)))
    gaps = [float((runs[0][key] - runs[1][key]).abs().max()) for key in runs[0]]
    assert 1e-6 < max(gaps) < 0.05
