from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import ENGINES, blobs, cohort, difference, every_tensor, make, network, quick, serve, train
from wasserstein import plain_w2

from perfed import rng
from perfed.engine.clients import RoundClients
from perfed.errors import PerfedError
from perfed.maths.divergence import sample_w2
from perfed.method.registry import entry
from perfed.methods.flic.anchors import Anchors, choose_pretraining_epochs
from perfed.methods.flic.classes import ClassAnchors
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.model.chain import stage_of
from perfed.run.callbacks.snapshots import embed_samples
from perfed.run.settings import Snapshots
from perfed.training.early_stopping import choose_epochs, hold_out
from perfed.training.step import assign_domains_in_turn
from perfed.training.steprules import GradientTransform

CLASSES, LATENT = 3, 3


def flic(**settings):
    """FLIC-HL with these settings of the anchors (or, if the method has them, of the method)."""
    extensions = {name: value for name, value in settings.items() if name in Anchors.model_fields}
    rest = {name: value for name, value in settings.items() if name not in extensions}
    return quick(entry("flic-hl").method, extensions=(quick(Anchors, **extensions),), **rest)


def embedded(server, client: str):
    """A client's embedding of its own training samples, and their labels; a plain module does the work."""
    data = server.engine.clients[client]
    chain = copy.deepcopy(server.initialiser.chain(data.input_shape))
    own = server.engine.states[client]["model"]
    for name, tensor in chain.named_parameters():
        if name in own:
            tensor.data = own[name].clone()
    with torch.no_grad():
        return chain.embedding.eval()(data.train.x), data.train.y


def alignment(server, client: str, means=None) -> float:
    """``sum_c W2^2`` of the closed form, from the explicit moments of all of the client's samples."""
    z, y = embedded(server, client)
    means = server.state.anchors["mean"] if means is None else means
    total = 0.0
    for label in y.unique():
        mine = z[y == label]
        spread = torch.cov(mine.T) if len(mine) > 1 else torch.zeros(LATENT, LATENT).double()
        roots = torch.linalg.eigvalsh(spread).clamp_min(0).sqrt()
        total += float((mine.mean(0) - means[label]).square().sum() + (1 - roots).square().sum())
    return total


# Without its extensions FLIC is its base method --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_flic_without_weights_and_pretraining_is_hetfedrep_bit_for_bit(engine):
    federation = blobs((9, 6, 4, 1), dims=(4, 6))
    off = train(serve(flic(lambda1=0.0, lambda2=0.0, pretrain_epochs=0), federation, rate=0.5, **ENGINES[engine]), 3)
    base = train(serve(make("hetfedrep"), federation, rate=0.5, **ENGINES[engine]), 3)
    one, other = every_tensor(off), every_tensor(base)
    assert set(one) - set(other) == {("server", "anchors", "mean")}
    assert all(torch.equal(one[path], tensor) for path, tensor in other.items())
    on = every_tensor(train(serve(flic(lambda1=0.1), federation, rate=0.5, **ENGINES[engine]), 3))
    assert not torch.equal(on["c0", "model", "head.weight"], one["c0", "model", "head.weight"])


def test_flic_class_has_no_body_and_shares_only_anchors():
    server = train(serve(make("flic-class"), blobs()), 1)
    assert server.state.shared == {}
    assert {stage_of(n) for s in server.engine.states.values() for n in s["model"]} == {"embedding", "head"}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_embedding_stays_as_the_pretraining_left_it(frozen):
    server = train(serve(flic(freeze_embedding=frozen), blobs()), 0)
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    server.round(1)
    after = every_tensor(server)
    for client in server.engine.states:
        changed = {path[-1] for path in after if path[0] == client and not torch.equal(after[path], before[path])}
        assert "head.weight" in changed
        assert any(name.startswith("embedding") for name in changed) != frozen


@pytest.mark.parametrize("w2", ["closed-form", "two-sample"])
def test_a_longer_pretraining_begins_as_a_shorter_one_does(w2, monkeypatch):
    """So that runs with 10, 50 and 100 epochs show an embedding while it is pre-trained."""
    federation, pictures, passed = blobs((12, 10, 9)), {}, []  # three mini-batches of each client
    alignment_of = ClassAnchors.alignment

    def watched(anchors):
        align = alignment_of(anchors)

        def loss(step):
            passed.append({name: tensor.detach().clone() for name, tensor in step.params.items()})
            return align(step)

        return loss

    monkeypatch.setattr(ClassAnchors, "alignment", watched)
    for epochs in (0, 2, 5):
        passed.clear()
        server = train(serve(flic(pretrain_epochs=epochs, w2=w2), federation), 0)
        pictures[epochs] = embed_samples(server, Snapshots(), 0)["z"]
        assert len(passed) == 3 * epochs
    chain, then = copy.deepcopy(server.initialiser.chain((4,))), []  # after two of the five epochs
    for row, client in enumerate(federation):
        chain.load_state_dict({name: tensor[row] for name, tensor in passed[6].items()}, strict=False)
        with torch.no_grad():
            then.append(chain.embedding.eval()(client.train.x))
    np.testing.assert_allclose(torch.cat(then), pictures[2], rtol=1e-9, atol=1e-12)
    assert np.abs(pictures[0] - pictures[2]).max() > 1e-3 < np.abs(pictures[5] - pictures[2]).max()


def test_pictures_may_show_test_samples():
    federation = blobs((9, 6, 4), test=(5, 0, 3))
    server = train(serve(flic(), federation), 0)
    found = embed_samples(server, Snapshots(split="test"), 0)
    assert found["client"].tolist() == ["c0"] * 5 + ["c2"] * 3
    assert found["y"].tolist() == [*federation.clients[0].test.y.tolist(), *federation.clients[2].test.y.tolist()]
    chain = copy.deepcopy(server.initialiser.chain((4,)))
    chain.load_state_dict(server.engine.states["c2"]["model"], strict=False)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(found["z"][5:]), chain.embedding.eval()(federation.clients[2].test.x)
        )
    assert len(embed_samples(server, Snapshots(), 0)["y"]) == 19


# Anchors ------------------------------------------------------------------------------------------------------


def test_anchors_start_far_apart_and_depend_on_the_seed():
    draws = [
        serve(flic(anchor_std=s), blobs(), seed=seed).state.anchors["mean"] for s, seed in ((10, 0), (5, 0), (10, 1))
    ]
    assert draws[0].shape == (CLASSES, LATENT)
    torch.testing.assert_close(draws[0], 2 * draws[1])
    assert not torch.equal(draws[0], draws[2])
    many = serve(flic(), blobs((40,), num_classes=40), model=network(40)).state.anchors["mean"]
    assert 8 < float(many.std()) < 12


@pytest.mark.long
@pytest.mark.parametrize("w2", ["closed-form", "two-sample"])
@pytest.mark.parametrize("engine", ENGINES)
def test_pretraining_pulls_every_client_towards_the_anchors(engine, w2):
    federation = blobs((24, 18, 12), dims=(4, 6), labels=[[0, 1, 2], [0, 2], [1]])
    method = flic(pretrain_epochs=20, anchor_std=2.0, lr=0.02, w2=w2)
    server = serve(method, federation, **ENGINES[engine])
    server.engine.states = {
        c.id: server.initialiser.client_state(c, server.engine.info) for c in server.engine.federation
    }
    before = {i: alignment(server, i) for i in federation.ids}
    heads = {i: server.engine.states[i]["model"]["head.weight"].clone() for i in federation.ids}
    means = server.state.anchors["mean"].clone()
    far = {}
    for i in federation.ids:
        z, y = embedded(server, i)
        far[i] = sum(float((z[y == c].mean(0) - means[c]).norm()) for c in y.unique())
    server.prepare()
    for i in federation.ids:
        z, y = embedded(server, i)
        near = sum(float((z[y == c].mean(0) - means[c]).norm()) for c in y.unique())
        assert near < 0.7 * far[i]
        assert alignment(server, i) < 0.6 * before[i]
        assert torch.equal(server.engine.states[i]["model"]["head.weight"], heads[i])  # only the embedding
    assert torch.equal(server.state.anchors["mean"], means)  # anchors stay


@pytest.mark.parametrize("w2", ["closed-form", "two-sample"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pretrain_epochs", [1, 0])
def test_an_eigenproblem_that_diverges_names_the_client(engine, w2, pretrain_epochs):
    """In a stack with others, neither first nor with most steps; its inputs are finite, their Gram matrix is not.

    Decompositions of such a matrix fail, or give NaN: that depends on its size.
    """
    federation = blobs((60, 35, 45, 40))
    clients = [replace(c, train=replace(c.train, x=1e25 * c.train.x)) if c.id == "c3" else c for c in federation]
    federation = replace(federation, clients=tuple(clients))
    method = flic(w2=w2, pretrain_epochs=pretrain_epochs, pretrain_batch_size=64, batch_size=64)
    server = serve(method, federation, dtype=torch.float32, **ENGINES[engine])
    where = "preparation before round 1" if pretrain_epochs else "round 1"
    with pytest.raises(PerfedError, match=f"^{where}: (training|the training loss) of client 'c3' (diverged|became)"):
        train(server, 1)


def test_the_alignment_of_a_full_batch_is_the_closed_form_summed_over_classes():
    federation = blobs((9, 5, 1), dims=(4, 6), labels=[[0, 1, 2], [0, 2], [1]])
    server = serve(flic(anchor_scale=1.0, batch_size=99), federation)
    server.engine.states = {
        c.id: server.initialiser.client_state(c, server.engine.info) for c in server.engine.federation
    }
    group = cohort(server.initialiser.method, federation)
    extension, means = server.initialiser.method.extensions[0], server.state.anchors["mean"]
    align = extension.alignment(group, {"mean": means.expand(3, -1, -1)})
    found = {}

    def loss(step):
        value = align(step)
        found.update(zip([group.ids[r] for r in step.rows], value.tolist(), strict=True))
        return value

    group.fit("embedding", steps=1, loss=loss)
    for client in federation.ids:
        assert found[client] == pytest.approx(alignment(server, client), rel=1e-6)


@pytest.mark.parametrize("anchor_lr", [0.5, 0.01])
def test_after_one_round_anchors_moved_by_at_most_the_learning_rate(anchor_lr):
    server = serve(
        flic(anchor_lr=anchor_lr), blobs((9, 6, 4), labels=[[0, 1], [1], [0]], num_classes=4), model=network(4)
    )
    before = server.state.anchors["mean"].clone()
    train(server, 1)
    moved = server.state.anchors["mean"] - before
    assert float(moved.abs().max()) <= anchor_lr * (1 + 1e-9)
    assert not moved[[2, 3]].any()  # classes that nobody holds keep their place
    assert bool((moved[:2].abs() > 0.3 * anchor_lr).all())  # Adam's first step has about the size of the rate


def test_anchors_move_towards_the_centres_of_their_class():
    """Without the calibration, the first Adam step is the rate times the sign of (centre - anchor), averaged."""
    federation = blobs((9, 6, 4), labels=[[0, 1], [1], [0, 2]])
    server = serve(flic(anchor_lr=0.1, lambda2=0.0), federation)
    before = server.state.anchors["mean"].clone()
    train(server, 1)
    for label, holders in {0: ["c0", "c2"], 1: ["c0", "c1"], 2: ["c2"]}.items():
        steps = []
        for client in holders:
            z, y = embedded(server, client)
            steps.append(0.1 * (z[y == label].mean(0) - before[label]).sign())
        expected = torch.stack(steps).mean(0)
        torch.testing.assert_close(server.state.anchors["mean"][label] - before[label], expected, rtol=1e-4, atol=1e-6)


def test_clients_weigh_the_same_or_by_their_samples(monkeypatch):
    federation = blobs((9, 3), labels=[[0, 1], [1]])
    method = flic(anchor_average="samples")
    plain = loaded(method, federation)
    reply = method.extensions[0].client_update(plain, {"mean": torch.ones(2, CLASSES, LATENT).double()})
    assert reply["weight"].tolist() == [[9, 9, 0], [0, 3, 0]]
    bodies = []
    mean = RoundClients.mean

    def record(clients, stacked, weights=None, *, current):
        bodies.append(stacked)
        return mean(clients, stacked, weights, current=current)

    monkeypatch.setattr(RoundClients, "mean", record)
    for settings, shares in (({}, (0.5, 0.5)), ({"average": "samples"}, (0.75, 0.25))):
        server = train(serve(make("hetfedrep", **settings), federation), 1)
        own = bodies[-1]["body.0.weight"]
        assert not torch.allclose(own[0], own[1])
        torch.testing.assert_close(server.state.shared["body.0.weight"], shares[0] * own[0] + shares[1] * own[1])


def test_send_all_changes_presence_only():
    federation = blobs((9, 6), labels=[[0, 1], [1]])
    replies = {}
    for send_all in (False, True):
        method = flic(send_all=send_all)
        group = loaded(method, federation)
        replies[send_all] = method.extensions[0].client_update(group, {"mean": torch.ones(2, CLASSES, LATENT).double()})
    assert torch.equal(replies[False]["mean"], replies[True]["mean"])
    assert replies[False]["weight"].tolist() == [[1, 1, 0], [0, 1, 0]]
    assert bool((replies[True]["weight"] == 1).all())
    assert bool((replies[True]["mean"][:, 2] == 1).all())  # what a client does not hold goes back as it came


def loaded(method, federation, seed=0):
    """A cohort that has received shared parameters."""
    group = cohort(method, federation)
    generator = torch.Generator().manual_seed(seed)
    shared = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).expand(group.n, *tensor.shape)
        for name, tensor in group.chain.tensors().items()
        if group.places[name] == "shared"
    }
    group.load(shared)
    return group


def test_the_step_on_the_anchors_uses_the_received_shared_parameters():
    federation, method = blobs((9, 6)), flic(lambda1=0.0, lambda2=1.0, anchor_lr=0.1)
    extension, payload = method.extensions[0], {"mean": torch.randn(2, CLASSES, LATENT).double()}
    group = loaded(method, federation)
    untouched = extension.client_update(group, payload)["mean"]
    for name in group.received:  # local training of the body changes nothing
        group.model[name] = -3 * group.model[name]
    assert torch.equal(extension.client_update(group, payload)["mean"], untouched)
    group.model["head.weight"] = -group.model["head.weight"]  # the personal head does
    assert not torch.equal(extension.client_update(group, payload)["mean"], untouched)
    group.model["head.weight"] = -group.model["head.weight"]
    group.received = {name: -3 * tensor for name, tensor in group.received.items()}
    assert not torch.equal(extension.client_update(group, payload)["mean"], untouched)


def test_the_anchors_gradient_is_that_of_the_objective():
    """Finite check: autograd of lambda1 W2^2 + lambda2 mean loss on samples, written down plainly."""
    federation = blobs((9, 6), labels=[[0, 1, 2], [1]])
    method = flic(lambda1=0.3, lambda2=0.7, anchor_samples=5, anchor_scale=2.0)
    extension, group = method.extensions[0], loaded(method, federation)
    means = torch.randn(2, CLASSES, LATENT, generator=torch.Generator().manual_seed(1)).double()
    held, centres = group.class_counts > 0, group.class_means("embedding")
    found = extension.anchor_gradient(group, {"mean": means})({"mean": means}, 1)["mean"]
    noise = rng.normal(group.key("anchor step", 1), CLASSES * 5 * LATENT, torch.float64).view(2, CLASSES, 5, LATENT)
    for row in range(2):
        v = means[row].clone().requires_grad_(True)
        own = {n: (group.received.get(n, group.model[n]))[row] for n in group.chain.tensors() if "embedding" not in n}
        total = torch.zeros(()).double()
        for label in range(CLASSES):
            if not held[row, label]:
                continue
            z = v[label] + 2.0**0.5 * noise[row, label]
            hidden = F.leaky_relu(z @ own["body.0.weight"].T + own["body.0.bias"])
            logits = hidden @ own["head.weight"].T + own["head.bias"]
            total = total + 0.7 * F.cross_entropy(logits, torch.full((5,), label))
            total = total + 0.3 * (v[label] - centres[row, label]).square().sum()
        (expected,) = torch.autograd.grad(total, v)
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-12)


def test_per_batch_steps_take_as_many_steps_as_mini_batches():
    federation = blobs((8, 4), labels=[[0], [1]])
    moved = {}
    for steps in ("once", "per-batch"):
        method = flic(anchor_steps=steps, anchor_lr=0.1, lambda2=0.0, pretrain_epochs=0, local_epochs=3)
        server = serve(method, federation)
        before = server.state.anchors["mean"].clone()
        server.round(1)
        moved[steps] = (server.state.anchors["mean"] - before)[:2].abs().max(1).values
    # 3 epochs of the head and 1 of the body in mini-batches of 4: 8 and 4 steps of about 0.1 each.
    torch.testing.assert_close(moved["once"], torch.full((2,), 0.1).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved["per-batch"], torch.tensor([0.8, 0.4]).double(), rtol=0.1, atol=0)


# The local objective ------------------------------------------------------------------------------------------


def gradients(method, trained, federation):
    """Gradients of the anchors' penalty alone with respect to the trained stages."""
    group = loaded(method, federation)
    payload = {"mean": torch.randn(group.n, CLASSES, LATENT, generator=torch.Generator().manual_seed(2)).double()}
    found = {}

    def keep(step, grads):
        found.update({name: float(g.abs().max()) for name, g in grads.items()})
        return grads

    penalty = method.extensions[0].loss(group, payload)
    # A zero that touches every parameter, so that all of them have a gradient.
    touch = lambda step: sum(0.0 * step.params[n].flatten(1).sum(1) for n in group.trainable_names(trained))  # noqa: E731
    group.penalties = [penalty]
    group.fit(trained, steps=1, loss=touch, update=GradientTransform(keep))
    return found


ALL = ("embedding", "body", "head")


def test_the_calibration_reaches_body_and_head_only_and_the_alignment_the_embedding_only():
    federation = blobs((9, 6))
    second = gradients(flic(lambda1=0.0, lambda2=1.0), ALL, federation)
    assert {stage_of(n) for n, size in second.items() if size > 1e-9} == {"body", "head"}
    assert all(size == 0 for n, size in second.items() if n.startswith("embedding"))
    first = gradients(flic(lambda1=1.0, lambda2=0.0), ALL, federation)
    assert {stage_of(n) for n, size in first.items() if size > 1e-9} == {"embedding"}
    body = gradients(flic(lambda1=1.0, lambda2=1.0), ("body",), federation)
    assert set(body) == {"body.0.weight", "body.0.bias"} and body["body.0.weight"] > 1e-9


def test_the_calibration_is_the_mean_loss_on_samples_of_the_anchors():
    """With tiny anchors (no spread), every sample is the anchor itself and the loss is known."""
    federation = blobs((9, 6, 1), labels=[[0, 1, 2], [1, 2], [1]])
    method = flic(lambda1=0.0, lambda2=2.0, anchor_scale=1e-20, batch_size=99)
    group = loaded(method, federation)
    means = torch.randn(CLASSES, LATENT, generator=torch.Generator().manual_seed(3)).double()
    penalty = method.extensions[0].loss(group, {"mean": means.expand(3, -1, -1)})
    found = {}

    def loss(step):
        value = penalty(step)
        found.update(zip([group.ids[r] for r in step.rows], value.tolist(), strict=True))
        return value + 0.0 * step.output().flatten(1).sum(1)

    with torch.no_grad():
        logits = group.apply_after("embedding", means.expand(3, -1, -1))
    group.fit(("body", "head"), steps=1, loss=loss)
    for row, client in enumerate(group.clients):
        held = client.train.y.unique()
        expected = 2.0 * F.cross_entropy(logits[row, held], held, reduction="sum")
        assert found[client.id] == pytest.approx(float(expected), rel=1e-6)


def test_the_two_sample_estimate_is_close_to_the_closed_form_for_many_samples():
    n, k = 150, 3
    x = rng.normal(rng.key(0), n * k, torch.float64).view(1, n, k) * torch.tensor([0.5, 1.0, 2.0]) + 1.0
    mean = torch.tensor([[3.0, 0.0, 1.0]]).double()
    estimates = []
    for draw in range(30):
        y = mean[:, None] + rng.normal(rng.key(1, draw), n * k, torch.float64).view(1, n, k)
        estimates.append(float(sample_w2(x, y, [n])))
    assert float(np.mean(estimates)) == pytest.approx(float(plain_w2(x[0], mean[0])), rel=0.05)


# Epochs by validation -----------------------------------------------------------------------------------------


def looking(tables):
    """Scores of clients by epochs done; the search sees them at its looks."""
    state = {"epochs": 0}

    def train_(epochs):
        state["epochs"] += epochs

    return train_, lambda: torch.tensor([table(state["epochs"]) for table in tables])


def test_each_client_gets_the_epochs_with_its_best_score():
    tables = [
        lambda e: abs(e - 7.0),
        lambda e: abs(e - 20.0),
        lambda e: float(e),
        lambda e: float("nan"),
        lambda e: -float(e),
    ]
    assert choose_epochs(*looking(tables), 50).tolist() == [7, 20, 1, 10, 50]
    assert choose_epochs(*looking(tables), 6).tolist() == [6, 6, 1, 6, 6]


def test_a_clients_epochs_do_not_depend_on_who_else_is_looking():
    # Gets worse three times in a row, and then much better: alone, this client has stopped looking by then.
    unlucky = lambda e: {1: 5.0, 2: 1.0}.get(e, 2.0 if e < 30 else 0.0)  # noqa: E731
    patient = lambda e: -float(e)  # noqa: E731
    alone = choose_epochs(*looking([unlucky]), 100).tolist()
    assert alone == [2]
    assert choose_epochs(*looking([unlucky, patient]), 100).tolist() == [2, 100]


def test_held_out_samples_are_a_quarter_of_each_class_and_never_validation_data():
    federation = blobs((16, 9, 3), labels=[[0, 1], [2], [0, 1, 2]])
    group = cohort(flic(), federation)
    kept, held = hold_out(group)
    assert held.counts.tolist() == [4, 2, 0] and kept.counts.tolist() == [12, 7, 3]
    assert held.y[:4].bincount().tolist() == [2, 2]
    rows = {tuple(r) for r in torch.cat([kept.x, held.x]).tolist()}
    assert rows == {tuple(r) for r in group.samples().x.tolist()} and len(rows) == 28
    with_validation = replace(federation, clients=tuple(replace(c, validation=c.test) for c in federation))
    again = hold_out(cohort(flic(), with_validation))
    assert torch.equal(again[0].x, kept.x) and torch.equal(again[1].x, held.x)


UNEQUAL = blobs((16, 12, 8, 1))


def test_what_a_client_holds_out_does_not_depend_on_who_else_is_there():
    mixed = UNEQUAL
    together = cohort(flic(), mixed)
    kept, held = hold_out(together)
    for row, client in enumerate(mixed.ids):
        alone_kept, alone_held = hold_out(cohort(flic(), mixed, ids=[client]))
        for all_, one in ((kept, alone_kept), (held, alone_held)):
            begin = int(all_.starts[row])
            mine = slice(begin, begin + int(all_.counts[row]))
            assert torch.equal(all_.x[mine], one.x) and torch.equal(all_.y[mine], one.y)


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_validated_pretraining_differs_between_clients_and_agrees_across_engines(dropout):
    settings = {"pretrain_epochs": "validated", "pretrain_max_epochs": 40, "anchor_std": 0.5, "lr": 0.1}
    runs = {
        name: train(serve(flic(**settings), UNEQUAL, model=network(dropout=dropout), **options), 1)
        for name, options in {**ENGINES, "pairs": {"engine": "stacked", "chunk": 2}}.items()
    }
    for name, run in runs.items():
        assert difference(run, runs["sequential"]) <= 1e-8, name
    server = serve(flic(**settings), UNEQUAL)
    extension, group = server.initialiser.method.extensions[0], cohort(flic(**settings), UNEQUAL, round_=0)
    means = server.state.anchors["mean"].expand(4, -1, -1)
    before = {name: tensor.clone() for name, tensor in group.model.items()}
    epochs = choose_pretraining_epochs(group, extension.anchors(group, {"mean": means}), batch_size=4, limit=40)
    assert len(set(epochs.tolist())) > 1 and epochs.min() >= 1 and epochs.max() <= 40
    assert all(torch.equal(group.model[name], tensor) for name, tensor in before.items())
    assert group.steps_done.tolist() == [0, 0, 0, 0]


# After each round ---------------------------------------------------------------------------------------------


def test_an_embedding_that_is_shared_in_part_is_refused():
    method = make("fedavg", more_extensions=(quick(Anchors),), placement={"embedding.2.*": "personal"})
    with pytest.raises(PerfedError, match=r"aligns personal embeddings, but 'embedding\.0\.weight' is shared; add"):
        serve(method, blobs((6, 5))).prepare()


def test_in_time_every_sample_of_an_anchor_meets_every_domain():
    """By turns: with as many samples as here, the same ones would else always meet the same domains' heads."""
    params, x = {"head.weight": torch.zeros(1, 5, 2, 3)}, torch.zeros(1, 8, 3)
    met = torch.cat([assign_domains_in_turn(x, params, frozenset({"head"}), step) for step in range(5)])
    assert all(sorted(column) == [0, 1, 2, 3, 4] for column in met.T.tolist())
    assert assign_domains_in_turn(x, params, frozenset(), 0) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_realignment_is_for_all_clients_and_for_embeddings_only(engine):
    federation = blobs((9, 6, 4, 5))
    server = train(serve(flic(realign_epochs=1), federation, rate=0.5, **ENGINES[engine]), 0)
    before = {path: tensor.clone() for path, tensor in every_tensor(server).items()}
    participants = server.round(1).participants
    assert len(participants) == 2
    after = every_tensor(server)
    for path, tensor in before.items():
        if path[0] == "server":
            continue
        changed = not torch.equal(after[path], tensor)
        assert changed == (path[0] in participants or path[-1].startswith("embedding")), path


def test_realignment_brings_embeddings_nearer_to_the_new_anchors():
    federation = blobs((12, 9, 8))
    gaps = []
    for epochs in (0, 10):
        server = train(serve(flic(realign_epochs=epochs, anchor_std=2.0), federation), 1)
        gaps.append(sum(alignment(server, client) for client in federation.ids))
    assert gaps[1] < 0.9 * gaps[0]


def test_hetfedrep_with_realignment_only_is_the_published_baseline():
    extension = quick(Anchors, lambda1=0.0, lambda2=0.0, pretrain_epochs=0, realign_epochs=1)
    server = train(serve(quick(HetFedRep, extensions=(extension,)), blobs((9, 6, 4))), 2)
    plain = train(serve(quick(HetFedRep), blobs((9, 6, 4))), 2)
    one, other = every_tensor(server), every_tensor(plain)
    assert not torch.equal(one["c0", "model", "embedding.0.weight"], other["c0", "model", "embedding.0.weight"])
