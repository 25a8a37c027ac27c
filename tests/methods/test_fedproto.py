"""Alignment to class means: the prototypes extension, and FedProto, which shares nothing else."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, difference, make, network, quick, serve, train

from perfed.errors import PerfedError
from perfed.method.exchange import Replies, ServerState
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.training.step import Step

SPLIT = {"labels": [[0, 1], [1, 2], [0, 2]]}


def penalty_of(group, extension, payload, params=None) -> torch.Tensor:
    """The penalty of one full batch, by a fit that only listens."""
    seen = []
    inner = extension.loss(group, payload)

    def listen(step: Step) -> torch.Tensor:
        value = inner(step)
        seen.append(value.detach().clone())
        return value

    group.penalties = [listen]
    group.fit(("embedding", "body", "head"), steps=1, samples=group.samples().in_batches(100))
    return torch.cat(seen)


def known(means, flags):
    return {"centroids": {"mean": means, "known": flags}}


@pytest.mark.parametrize("unknown", ["skip", "own"])
def test_the_penalty_is_the_mean_squared_distance_to_the_centroid_of_the_class(unknown):
    group = cohort(quick(Local), blobs((9, 6, 1)))
    own, counts = group.class_means(), group.class_counts
    centroids = torch.randn(3, 5, dtype=torch.float64)
    flags = torch.tensor([True, False, True])
    expected = []
    features = group.representation().split([len(c.train) for c in group.clients])
    for row, client in enumerate(group.clients):
        total = 0.0
        for f, y in zip(features[row], client.train.y.tolist(), strict=True):
            target = centroids[y] if flags[y] else own[row, y]
            if flags[y] or unknown == "own":
                total += float((f - target).square().sum()) / 5
        expected.append(0.7 * total / len(client.train))
        assert counts[row].sum() == len(client.train)
    extension = Prototypes(alignment=0.7, unknown_class=unknown)
    payload = known(centroids.expand(3, 3, 5), flags.expand(3, 3))
    found = penalty_of(group, extension, payload)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_nothing_is_penalised_before_there_are_centroids():
    group = cohort(quick(Local), blobs((9, 6)))
    payload = known(torch.randn(2, 3, 5).double(), torch.zeros(2, 3, dtype=torch.bool))
    assert (penalty_of(group, Prototypes(unknown_class="own"), payload) == 0).all()


def test_centroids_are_means_over_all_samples_and_absent_classes_keep_theirs():
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (7, 5)]
    labels = [torch.tensor([0, 0, 1, 1, 1, 0, 1]), torch.tensor([1, 1, 1, 0, 1])]
    means = torch.zeros(2, 3, 4, dtype=torch.float64)
    counts = torch.zeros(2, 3, dtype=torch.float64)
    for i, (f, y) in enumerate(zip(features, labels, strict=True)):
        for c in range(2):
            means[i, c], counts[i, c] = f[y == c].mean(0), (y == c).sum()
    old = torch.full((3, 4), 9.0, dtype=torch.float64)
    server = ServerState({"centroids": {"mean": old, "known": torch.tensor([False, True, False])}})
    content = {"means": means, "counts": counts}
    Prototypes().on_replies(server, Replies(["a", "b"], {}, torch.zeros(2)), content)
    f, y = torch.cat(features), torch.cat(labels)
    expected = torch.stack([f[y == 0].mean(0), f[y == 1].mean(0), old[2]])
    torch.testing.assert_close(server.centroids["mean"], expected)
    assert server.centroids["known"].tolist() == [True, True, False]


def test_without_alignment_and_in_the_first_round_fedproto_is_local_training():
    for rounds, alignment in ((1, 1.0), (3, 0.0)):
        local = train(serve(quick(Local), blobs(**SPLIT)), rounds)
        method = make("fedproto-g")
        method = method.model_copy(update={"extensions": (Prototypes(alignment=alignment),)})
        proto = train(serve(method, blobs(**SPLIT)), rounds)
        for client in ("c0", "c1", "c2"):
            for name, tensor in local.engine.states[client]["model"].items():
                torch.testing.assert_close(proto.engine.states[client]["model"][name], tensor, rtol=1e-10, atol=1e-12)


def test_alignment_brings_the_clients_class_means_together():
    spreads = []
    for alignment in (0.0, 20.0):
        method = make("fedproto").model_copy(update={"extensions": (Prototypes(alignment=alignment),), "lr": 0.02})
        server = train(serve(method, blobs((24, 24, 24))), 15)
        (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
        means = group.class_means()
        spreads.append(float((means - means.mean(0)).square().sum() / means.square().sum()))
    assert spreads[1] < 0.3 * spreads[0]


def test_only_class_means_travel_and_with_own_means_nothing_does():
    size = 3 * 5 * 8
    record = train(serve(make("fedproto"), blobs()), 1).round(2)
    assert record.bytes_up == 3 * (size + 3 * 8) and record.bytes_down == 3 * (size + 3)
    server = train(serve(make("fedproto-l"), blobs()), 2)
    record = server.round(3)
    assert record.bytes_up == record.bytes_down == 0
    assert server.engine.states["c0"]["centroids"]["known"].all()


def test_own_means_are_those_of_the_clients_last_training():
    server = train(serve(make("fedproto-l"), blobs()), 2)
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], server.initialiser.method.download(server.state))
    for row, client in enumerate(group.ids):
        kept = server.engine.states[client]["centroids"]["mean"]
        torch.testing.assert_close(kept, group.class_means()[row])


def test_prediction_is_the_nearest_known_class_mean():
    server = train(serve(make("fedproto"), blobs(**SPLIT)), 3)
    method = server.initialiser.method
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], method.download(server.state))
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    features = group.forward(x, stages=("embedding", "body"))
    means = server.state.centroids["mean"]
    nearest = torch.cdist(features, means.expand(3, 3, 5)).argmin(2)
    assert torch.equal(method.predict(group, x).argmax(2), nearest)
    server.state.centroids = {"mean": means, "known": torch.tensor([True, False, True])}
    (group,) = server.engine.cohorts(["c0", "c1", "c2"], method.download(server.state))
    outputs = method.predict(group, x)
    assert not (outputs.argmax(2) == 1).any()
    assert outputs.abs().max() < 1e3  # a sample of that class has a loss, not a number that drowns all others


@pytest.mark.long
def test_the_term_goes_with_other_methods():
    plain = train(serve(quick(FedAvg), blobs()), 3)
    aligned = train(serve(quick(FedAvg, extensions=(Prototypes(),)), blobs(), model=network()), 3)
    assert aligned.state.centroids["known"].all()
    assert any(not torch.allclose(aligned.state.shared[name], t) for name, t in plain.state.shared.items())
    again = train(serve(quick(FedAvg, extensions=(Prototypes(),)), blobs(), engine="sequential"), 3)
    assert difference(again, aligned) < 1e-8


@pytest.mark.parametrize("name", ["fedproto", "fedpac"])
def test_heads_that_get_inputs_of_different_size_are_refused_in_one_line(name):
    model = Model(head=linear(3))
    with pytest.raises(
        PerfedError, match=r"compares the inputs of clients' heads, .* differs between the clients of this model; add"
    ) as error:
        serve(make(name, placement={"head": "personal"}), blobs((6, 4), dims=(4, 6)), model=model)
    assert "\n" not in str(error.value)
