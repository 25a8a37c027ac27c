"""kNN-Per: neighbours as scikit-learn finds and weighs them, mixed with FedAvg's model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import ENGINES, blobs, make, serve, train
from sklearn.neighbors import KNeighborsClassifier

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.methods import knnper
from perfed.methods.knnper import Memory

KERNELS = {
    "exponential": lambda distance, width, scale: np.exp(-distance / scale),
    "gaussian": lambda distance, width, scale: np.exp(-(distance**2) / (width * scale)),
}


def sklearn_vote(x, y, queries, num_classes, k, weights):
    """``predict_proba`` for all classes, also those that do not occur in ``y``."""
    found = KNeighborsClassifier(min(k, len(y)), weights=weights, algorithm="brute").fit(x, y)
    votes = np.zeros((len(queries), num_classes))
    votes[:, found.classes_] = found.predict_proba(queries)
    return votes


def ragged(sizes=(30, 7, 1), width=6, queries=11, num_classes=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(len(sizes), max(sizes), width, generator=generator, dtype=dtype)
    labels = torch.randint(num_classes, features.shape[:2], generator=generator)
    held = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    return Memory(features, labels, held), torch.randn(len(sizes), queries, width, generator=generator, dtype=dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_votes_are_those_of_scikit_learn_with_the_same_weights(kernel, k):
    memory, queries = ragged()
    method = make("knnper", kernel=kernel, scale=0.7)
    votes = memory.vote(queries, 4, k, method.similarity)
    for row, size in enumerate((30, 7, 1)):
        x, y = memory.features[row, :size].numpy(), memory.labels[row, :size].numpy()
        expected = sklearn_vote(x, y, queries[row].numpy(), 4, k, lambda d: KERNELS[kernel](d, 6, 0.7))
        np.testing.assert_allclose(votes[row].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_the_search_in_parts_gives_the_same(monkeypatch):
    memory, queries = ragged()
    similarity = make("knnper").similarity
    whole = memory.vote(queries, 4, 5, similarity)
    monkeypatch.setattr(knnper, "SEARCH_BYTES", 1)
    torch.testing.assert_close(memory.vote(queries, 4, 5, similarity), whole, rtol=1e-12, atol=1e-12)


def test_votes_of_far_neighbours_do_not_vanish_and_a_sample_finds_itself():
    memory, queries = ragged(dtype=torch.float32)
    far = Memory(1e4 * memory.features, memory.labels, memory.held)
    votes = far.vote(1e4 * queries, 4, 10, make("knnper").similarity)
    torch.testing.assert_close(votes.sum(2), torch.ones(3, 11))
    itself = far.vote(far.features[:, :1], 4, 10, make("knnper").similarity)
    assert torch.equal(itself.argmax(2)[:, 0], memory.labels[:, 0])
    assert float(itself.max(2).values.min()) == pytest.approx(1.0, rel=1e-6)


def own(server):
    (group,) = server.engine.cohorts(server.engine.federation.ids, server.initialiser.method.download(server.state))
    return group


def queries(group):
    return torch.stack([client.test.x for client in group.clients])


@pytest.mark.parametrize("interpolation", [0.0, 0.5, 0.8, 1.0])
def test_predictions_mix_softmax_and_neighbours_in_the_features_of_the_global_model(interpolation):
    federation = blobs((25, 14, 6), labels=[[0, 1], [1, 2]], num_classes=3)
    server = train(serve(make("knnper", interpolation=interpolation, neighbours=4), federation), 2)
    group = own(server)
    outputs = server.initialiser.method.predict(group, queries(group))
    assert bool(torch.isfinite(outputs).all())
    features = group.forward(queries(group), stages=("embedding", "body"))
    memory, samples = group.representation(), group.samples()
    for row, (start, count) in enumerate(zip(samples.starts, samples.counts, strict=True)):
        assert all(torch.equal(group.model[name][row], t) for name, t in server.state.shared.items())
        x, y = memory[start : start + count].numpy(), samples.y[start : start + count].numpy()
        votes = sklearn_vote(x, y, features[row].numpy(), 3, 4, lambda d: np.exp(-d))
        softmax = group.forward(queries(group))[row].softmax(1).numpy()
        expected = interpolation * votes + (1 - interpolation) * softmax
        np.testing.assert_allclose(outputs[row].exp().numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_without_neighbours_it_is_fedavg():
    one, other = (
        train(serve(make(name, **settings), blobs()), 2)
        for name, settings in (("knnper", {"interpolation": 0.0}), ("fedavg", {}))
    )
    assert all(torch.equal(t, other.state.shared[name]) for name, t in one.state.shared.items())
    expected = other.evaluate("test")
    for client, values in one.evaluate("test").items():
        assert values == pytest.approx(expected[client], rel=1e-10)
    mixed = train(serve(make("knnper"), blobs()), 2)
    assert all(torch.equal(t, other.state.shared[name]) for name, t in mixed.state.shared.items())
    assert mixed.evaluate("test") != one.evaluate("test")


def test_capacity_is_the_share_of_its_own_training_samples_that_a_client_remembers():
    federation = blobs((20, 7, 1))
    groups = {c: own(serve(make("knnper", capacity=c), federation)) for c in (1.0, 0.3)}
    kept = {c: Memory(**group.scratch["memory"]) for c, group in groups.items()}
    assert kept[1.0].held.sum(1).tolist() == [20, 7, 1]
    assert kept[0.3].held.sum(1).tolist() == [6, 3, 1]
    assert kept[0.3].features.shape == (3, 6, 5)
    group = groups[0.3]
    features, samples = group.representation(), group.samples()
    for row, (start, count) in enumerate(zip(samples.starts, samples.counts, strict=True)):
        held = kept[0.3].held[row]
        same = (kept[0.3].features[row][held][:, None] == features[start : start + count]).all(2)
        assert same.sum(1).tolist() == [1] * int(held.sum()) and int(same.sum(0).max()) == 1
        assert torch.equal(samples.y[start : start + count][same.int().argmax(1)], kept[0.3].labels[row][held])
    first = features[samples.starts[0] : samples.starts[0] + 6]
    assert not torch.equal(kept[0.3].features[0], first)  # a random share


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_remembered_does_not_depend_on_the_engine(engine):
    runs = [serve(make("knnper", capacity=0.5), blobs((9, 6, 4)), **ENGINES[e]) for e in ("stacked", engine)]
    scores = [run.evaluate("test") for run in runs]
    for client, values in scores[0].items():
        assert values == pytest.approx(scores[1][client], rel=1e-9)


@pytest.mark.long
def test_neighbours_help_where_clients_disagree_about_labels():
    """Two clients with the same inputs and opposite labels: the global model cannot serve both."""
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    arrays = {
        f"c{i}": {"x_train": x[:40], "y_train": (y ^ i)[:40], "x_test": x[40:], "y_test": (y ^ i)[40:]} for i in (0, 1)
    }
    federation = Federation.from_arrays(arrays, num_classes=2)
    scores = [train(serve(make(name), federation), 3).evaluate("test") for name in ("fedavg", "knnper")]
    fedavg, own_labels = (sum(values["accuracy"] for values in found.values()) / 2 for found in scores)
    assert fedavg == pytest.approx(0.5) and own_labels > 0.8


def test_it_needs_class_labels():
    with pytest.raises(PerfedError, match="class labels"):
        train(serve(make("knnper"), blobs((5, 4), regression=True)), 1)
