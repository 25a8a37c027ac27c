"""The loss of each local epoch is that of a plain loop, and to look changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import blobs, make, network_for
from torch.nn.functional import cross_entropy

from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.participation.settings import Participation
from perfed.report.snapshots import load_losses
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.settings import Snapshots
from perfed.training.plan import Plan

SIZES = (9, 5, 12)


def kept(path):
    return load_losses(sorted((path / "losses").glob("*.npz")))


def trained(path, name="fedavg", losses=True, engine="stacked", clients=3, rounds=2, **settings) -> Run:
    method, federation = make(name, **settings), blobs(SIZES)
    model = Model(head=linear(3)) if name == "fedavg" else network_for(method)
    more = {"dtype": torch.float64, "plan": Plan(engine, threads=1), "directory": RunDirectory.create(path)}
    more |= {"snapshots": Snapshots(clients=clients, losses=losses)}
    run = Run(federation, method, model, rounds=rounds, participation=Participation(rate=0.7), **more)
    run.execute()
    return run


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_it_is_that_of_gradient_descent_by_hand(tmp_path, engine):
    """One mini-batch an epoch: the loss of an epoch is that of the parameters before it."""
    settings = {"optimizer": "sgd", "lr": 0.1, "batch_size": 20, "local_epochs": 3}
    method, clients = make("fedavg", **settings), {client.id: client for client in blobs(SIZES)}
    start = Run(blobs(SIZES), method, Model(head=linear(3)), rounds=1, dtype=torch.float64).server.sets["shared"]
    run = trained(tmp_path / "run", engine=engine, clients=2, **settings)
    found = kept(tmp_path / "run")
    assert set(found) == {"c0", "c1"}
    shared, expected = {name: tensor.clone() for name, tensor in start.items()}, {"c0": [], "c1": []}
    for record in run.history:
        ended, sizes = [], []
        for client in record["participants"]:
            x, y = clients[client].train.x.double(), clients[client].train.y
            w, b = (shared[f"head.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
            losses = []
            for _ in range(3):
                loss = cross_entropy(x @ w.T + b, y)
                losses.append(loss.item())
                with torch.no_grad():
                    for tensor, grad in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True):
                        tensor -= 0.1 * grad
            ended.append((w.detach(), b.detach()))
            sizes.append(len(y))
            if client in expected:
                expected[client].append((record["round"], pytest.approx(losses, rel=1e-9)))
        parts = [sum(n * one[k] for n, one in zip(sizes, ended, strict=True)) / sum(sizes) for k in (0, 1)]
        shared = {"head.weight": parts[0], "head.bias": parts[1]}
    assert found == {client: rounds for client, rounds in expected.items() if rounds}


def test_to_look_changes_nothing_and_the_mean_is_the_training_loss(tmp_path):
    settings = {"batch_size": 4, "local_epochs": 2, "rounds": 3}
    seen, unseen = trained(tmp_path / "seen", **settings), trained(tmp_path / "unseen", losses=False, **settings)
    assert seen.summary["metrics"] == unseen.summary["metrics"] and not (tmp_path / "unseen" / "losses").exists()
    found = kept(tmp_path / "seen")
    for record in seen.history:
        own = [dict(found[client])[record["round"]] for client in record["participants"]]
        assert all(len(losses) == 2 for losses in own)
        assert np.mean(own) == pytest.approx(record["train_loss"], rel=1e-6)


def test_epochs_of_several_fits_come_one_after_the_other(tmp_path):
    trained(tmp_path / "run", "fedrep", batch_size=4, local_epochs=3, body_epochs=1)
    found = kept(tmp_path / "run")
    assert {len(losses) for rounds in found.values() for _, losses in rounds} == {4}  # the head's, then the body's
