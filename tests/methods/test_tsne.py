"""FedRep on t-SNE projections: what a client makes of its own data before the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import blobs, make, network, quick, serve, train
from sklearn.neighbors import KNeighborsClassifier

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.methods.fedrep import FedRep
from perfed.methods.tsne import TSNEFedRep


@pytest.mark.long
def test_clients_whose_inputs_differ_get_one_space():
    federation = blobs((30, 24, 18), dims=(4, 7, 3))
    server = serve(make("fedrep-tsne", dimension=5), federation)
    assert all(client.input_shape == (5,) for client in server.engine.clients.values())
    for client in federation:
        seen = server.engine.clients[client.id]
        assert torch.equal(seen.train.y, client.train.y) and len(seen.test) == len(client.test)
    train(server, 1)
    again, other = (serve(make("fedrep-tsne", dimension=5), federation, seed=seed) for seed in (0, 1))
    assert torch.equal(again.engine.clients["c0"].train.x, server.engine.clients["c0"].train.x)
    assert not torch.equal(other.engine.clients["c0"].train.x, server.engine.clients["c0"].train.x)


def test_the_projection_keeps_neighbours_across_splits():
    """A nearest neighbour among the projected training samples has the class of a projected test sample."""
    (client,) = blobs((60,), test=30)
    client = replace(client, train=replace(client.train, x=10 * client.train.x))
    client = replace(client, test=replace(client.test, x=10 * client.test.x))
    server = serve(make("fedrep-tsne", dimension=3), replace(blobs((60,)), clients=(client,)))
    seen = server.engine.clients[client.id]
    neighbour = KNeighborsClassifier(1).fit(seen.train.x, seen.train.y)
    assert neighbour.score(seen.test.x, seen.test.y) > 0.6  # by chance: a third


@pytest.mark.parametrize("size", [1, 2, 3])
def test_very_few_samples_are_enough(size):
    x, y = torch.randn(size, 4, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    federation = Federation((Client("c0", Split(x, y)),), num_classes=2)
    server = serve(make("fedrep-tsne"), federation)
    assert server.engine.clients["c0"].train.x.shape == (size, 64)
    assert torch.isfinite(server.engine.clients["c0"].train.x).all()


def test_it_is_fedrep_on_those_data():
    federation = blobs((12, 9), dims=(4, 3))
    server = serve(quick(TSNEFedRep, dimension=6), federation, model=network())
    seen = replace(federation, clients=tuple(server.engine.clients.values()))
    plain = serve(quick(FedRep), seen, model=network())
    for run in (server, plain):
        train(run, 2)
    for name, tensor in plain.state.shared.items():
        assert torch.equal(server.state.shared[name], tensor)
