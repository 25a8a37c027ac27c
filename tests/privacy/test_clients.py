"""Clients in private: what one client changes of the mean, the noise on it, and that personal parts stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import ENGINES, blobs, difference, leaves, make, quick, serve, train
from scipy import stats

from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.privacy.client import ClientPrivacy
from perfed.testing.runs import RecordingEngine

METHODS = ("fedavg", "fedrep", "ditto", "fedavg-ft", "flic-hl", "apfl")
ENTRIES = ("shared", "num_samples", "mean", "weight")


def private(noise: float, clip: float = 0.05) -> ClientPrivacy:
    return ClientPrivacy(noise=noise, clip=clip, entries=ENTRIES)


def first_of(name: str, extension: ClientPrivacy):
    settings = {"more_extensions": (extension,), "lr": 0.1}
    method = make(name, **settings)
    own = method.extensions
    return method.model_copy(update={"extensions": (own[-1], *own[:-1])})  # as a run has it


def means(server) -> torch.Tensor:
    """What the server has of all clients, as one vector."""
    sets = server.state.tree()
    tensors = [*sets["shared"].values(), *([sets["anchors"]["mean"]] if "anchors" in sets else [])]
    return torch.cat([t.flatten() for t in tensors])


@pytest.mark.parametrize("name", METHODS)
def test_one_client_changes_the_mean_by_at_most_clip_over_m(name):
    def after(federation):
        server = serve(first_of(name, private(0.0)), federation)
        server.prepare()
        server.round(1)
        return means(server)

    federation, whole = blobs((12, 7, 5)), None
    whole = after(federation)
    for i, client in enumerate(federation):
        y = 2 - client.train.y
        other = replace(client, train=replace(client.train, x=-9 * client.train.x, y=y))
        clients = tuple(other if j == i else c for j, c in enumerate(federation))
        change = (after(replace(federation, clients=clients)) - whole).norm()
        assert 0 < change <= 2 * 0.05 / 3 + 1e-9  # one leaves and another comes


@pytest.mark.parametrize("name", METHODS)
def test_what_leaves_is_cut_and_personal_parts_stay(name):
    server = serve(first_of(name, private(1.0)), blobs((12, 7, 5)), runner=RecordingEngine)
    server.prepare()
    record = server.engine.record
    del record[:]
    server.round(1)
    for work, done in record:
        changes = []
        for path, tensor in leaves({"shared": done.content["shared"]}):
            changes.append(tensor - work.shared["shared"][path.removeprefix("shared/")])
        if anchors := done.content.get("extensions", {}).get("anchors"):
            changes.append(anchors["mean"] - work.shared["extensions"]["anchors"]["mean"])
            assert (anchors["weight"] == 1).all()  # which classes are held does not leave
        assert (torch.cat([c.flatten(1) for c in changes], 1).norm(dim=1) <= 0.05 + 1e-9).all()
        assert (done.content.get("num_samples", torch.ones(1)) == 1).all()
        personal = {n for n, place in server.initialiser.places((4,)).items() if place == "personal"}
        assert not personal & set(done.content["shared"])


def test_the_server_cuts_what_a_client_has_not():
    class Loud(ClientPrivacy):
        name = "client-privacy"

        def outgoing(self, cohort, reply):
            shared = {n: 1e3 + t for n, t in reply["shared"].items()}
            return super().outgoing(cohort, reply) | {"shared": shared}

    loud = Loud(noise=0.0, clip=0.05, entries=ENTRIES)
    server = serve(quick(FedAvg, extensions=(loud,)), blobs())
    before = means(server)
    server.round(1)
    assert 0.0499 < (means(server) - before).norm() <= 0.05 + 1e-9


def test_noise_of_the_mean_has_the_scale_of_theory_and_is_new_in_every_round():
    server, draws = serve(quick(FedAvg, extensions=(private(4.0),), lr=0.0, optimizer="sgd"), blobs()), []
    for number in range(1, 9):
        before = means(server)
        server.round(number)
        draws.append((means(server) - before) / (4.0 * 0.05 / 3))
    together = torch.cat(draws)
    assert stats.kstest(together.numpy(), "norm").pvalue > 1e-3
    assert abs(float(together.std()) - 1) < 0.1
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_engines_give_the_same(name):
    runs = [train(serve(first_of(name, private(1.0)), blobs(), **engine), 2) for engine in ENGINES.values()]
    assert max(difference(runs[0], other) for other in runs[1:]) < 1e-8


def test_an_entry_that_was_not_declared_is_refused_by_name():
    with pytest.raises(PerfedError, match="entry 'shared' of a reply has no mechanism"):
        serve(quick(FedAvg, extensions=(ClientPrivacy(entries=("means",)),)), blobs()).round(1)
