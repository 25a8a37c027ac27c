"""FedALA: the first round, switched off, one step of W against autograd, convergence the first time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import blobs, cohort, make, mean_accuracy, network, opposite_labels, serve, train
from torch.func import functional_call

from perfed.errors import PerfedError
from perfed.model.chain import STAGES, Model
from perfed.model.presets import hidden_layer, linear
from perfed.training.early_stopping import train_until_converged

FEDERATION = blobs((12, 7, 5))


def same(one, other):
    return all(torch.equal(tensor, other.state.shared[name]) for name, tensor in one.state.shared.items())


@pytest.mark.long
def test_the_first_round_is_that_of_fedavg_and_later_ones_are_not():
    one, other = (train(serve(make(name), FEDERATION), 1) for name in ("fedala", "fedavg"))
    assert same(one, other)
    one.round(2)
    other.round(2)
    assert not same(one, other)
    still, averaged = (
        train(serve(make(name, **s), FEDERATION), 3) for name, s in (("fedala", {"eta": 0.0}), ("fedavg", {}))
    )
    for name, tensor in averaged.state.shared.items():  # weights stay at 1: the global model, but for rounding
        torch.testing.assert_close(still.state.shared[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layers", [1, 2])
def test_one_epoch_of_weights_is_clipped_descent_on_the_loss_of_the_aggregated_model(layers):
    method = make("fedala", layers=layers, batch_size=100, share=1.0, eta=5.0)
    server = serve(method, FEDERATION)
    group = cohort(method, FEDERATION)
    draw = torch.Generator().manual_seed(0)
    shared = {
        n: torch.stack([t] * 3) + 0.3 * torch.randn((3, *t.shape), generator=draw)
        for n, t in server.state.shared.items()
    }
    adapted = [n for n in shared if n.startswith(("head",) if layers == 1 else ("head", "body"))]
    assert sorted(group.state["aggregation"]["weights"]) == sorted(adapted)
    before = {n: torch.rand(shared[n].shape, generator=draw, dtype=torch.float64) for n in adapted}
    group.state["aggregation"] = {"weights": before, "learnt": torch.tensor([True] * 3)}
    old = group.state["local"]
    method.personalise(group, shared=shared)
    clipped = 0
    for row, client in enumerate(group.clients):
        w = {n: t[row].clone().requires_grad_(True) for n, t in before.items()}
        model = {n: t[row] for n, t in shared.items()}
        model |= {n: old[n][row] + (shared[n][row] - old[n][row]) * w[n] for n in w}
        loss = torch.nn.functional.cross_entropy(functional_call(group.chain, model, (client.train.x,)), client.train.y)
        for (name, value), gradient in zip(w.items(), torch.autograd.grad(loss, w.values()), strict=True):
            expected = (value - 5.0 * gradient).clamp(0, 1).detach()
            clipped += int(((expected == 0) | (expected == 1)).sum())
            torch.testing.assert_close(group.state["aggregation"]["weights"][name][row], expected)
            mixed = old[name][row] + (shared[name][row] - old[name][row]) * expected
            torch.testing.assert_close(group.model[name][row], mixed)
        for name in set(shared) - set(w):  # layers below are the global ones
            assert torch.equal(group.model[name][row], shared[name][row])
    assert clipped > 0 and group.steps_done.sum() == 0  # the losses of these steps are not those of training


def test_terms_are_of_local_training_and_see_the_received_model():
    """FedProx's pull is to the global model, wherever W puts the client's own; W is learnt on the plain loss."""
    method = make("fedala")
    server, seen = serve(method, FEDERATION), []

    class Extensions:
        def penalties(self, cohort):
            seen.append({name: tensor.clone() for name, tensor in cohort.shared().items()})
            return [lambda step: 1e3 * step.params["head.weight"].flatten(1).sum(1)]

        def transforms(self, cohort):
            return [lambda step, grads: {name: 2 * g for name, g in grads.items()}]

    def learnt(extensions):
        group = cohort(method, FEDERATION)
        shared = {name: torch.stack([tensor] * 3) + 0.1 for name, tensor in server.state.shared.items()}
        half = {n: torch.full_like(t, 0.5) for n, t in group.state["aggregation"]["weights"].items()}
        group.state["aggregation"] = {"weights": half, "learnt": torch.tensor([True] * 3)}
        group.extensions = extensions
        method.personalise(group, shared=shared)
        return shared, group.model["head.weight"]

    (shared, with_terms), (_, without) = learnt(Extensions()), learnt(None)
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in shared.items())
    torch.testing.assert_close(with_terms, without)


def test_only_a_share_of_the_samples_teaches_the_weights():
    samples = cohort(make("fedala"), FEDERATION).samples()
    keys = torch.arange(3)
    part = samples.select_share(0.5, keys)
    assert part.counts.tolist() == [6, 4, 3]
    for start, count, first, size in zip(samples.starts, samples.counts, part.starts, part.counts, strict=True):
        own = {tuple(x) for x in samples.x[start : start + count].tolist()}
        drawn = [tuple(x) for x in part.x[first : first + size].tolist()]
        assert set(drawn) <= own and len(set(drawn)) == size
    assert not torch.equal(samples.select_share(0.5, keys + 7).x, part.x)


@pytest.mark.long
def test_clients_with_opposite_labels_keep_their_own_heads():
    settings = {"lr": 0.02, "local_epochs": 5}
    model = Model(body=hidden_layer(8), head=linear(2))
    ala, averaged = (
        train(serve(make(name, **settings), opposite_labels(), model=model), 6) for name in ("fedala", "fedavg")
    )
    assert mean_accuracy(ala) > mean_accuracy(averaged) + 0.2
    learnt = [state["aggregation"]["weights"]["head.weight"] for state in ala.engine.states.values()]
    assert all(0 <= float(w.min()) < float(w.max()) <= 1 for w in learnt)


def test_training_until_convergence_stops_each_client_by_its_own_losses():
    method = make("fedavg", lr=0.03, batch_size=100)
    shared = serve(method, FEDERATION).state.shared

    def epochs_of(ids):
        group = cohort(method, FEDERATION, ids=ids)
        group.load({name: torch.stack([tensor] * group.n) for name, tensor in shared.items()})
        history = []

        def fit(epochs):
            assert set(epochs.tolist()) <= {0, 5}
            done = group.steps_done * torch.nan_to_num(group.train_loss)
            group.fit(STAGES, epochs=epochs)
            history.append(((group.steps_done * group.train_loss - done) / 5).numpy())

        train_until_converged(group, fit, np.array([i != "c1" for i in group.ids]))
        return group.steps_done.tolist(), np.stack(history)

    together, history = epochs_of(["c0", "c1", "c2"])
    assert together[1] == 0 and together == [epochs_of([i])[0][0] for i in ("c0",)] + [0.0] + epochs_of(["c2"])[0]
    for row in (0, 2):
        looks = int(together[row]) // 5
        gains = history[: looks - 1, row] - history[1:looks, row]
        assert looks > 1 and (gains[:-1] > 0.01).all() and (looks == 20 or gains[-1] <= 0.01)


def test_it_needs_something_to_aggregate():
    everything = dict.fromkeys(("embedding", "body", "head"), "personal")
    with pytest.raises(PerfedError, match="fedala aggregates the shared parameters, but the placement leaves none"):
        train(serve(make("fedala", placement=everything), FEDERATION, model=network()), 1)
