"""FLIC's anchors for values, on a line between two points, and for groups of classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import ENGINES, blobs, cohort, difference, make, network, quick, serve, train
from scipy.stats import spearmanr

from perfed import rng
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.methods.build import build_method
from perfed.methods.flic import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp

LATENT = 3


def values(clients=6, samples=40, seed=0) -> Federation:
    """Clients whose two to five features are different nonlinear views of one hidden response."""
    draw = np.random.default_rng(seed)
    arrays = {}
    for i in range(clients):
        y = draw.normal(size=2 * samples)
        noise = draw.normal(size=(2 * samples, 1 + i % 4))
        seen = np.arctan(y) * (1 + i) + 0.1 * draw.normal(size=2 * samples)
        x = np.column_stack([seen, noise])[:, draw.permutation(2 + i % 4)]
        parts = {"train": slice(0, samples), "test": slice(samples, None)}
        arrays[f"c{i}"] = {f"{name}_{k}": v[at] for k, at in parts.items() for name, v in (("x", x), ("y", 5 * y + 2))}
    return Federation.from_arrays(arrays)


def flic(name="flic-hl", **settings):
    own = {key: settings.pop(key) for key in list(settings) if key in Anchors.model_fields}
    method = make(name, **settings)
    return method.model_copy(update={"extensions": (quick(Anchors, **own),)})


def payload_for(group, seed=0):
    means = torch.randn(group.n, 2, LATENT, generator=torch.Generator().manual_seed(seed)).double()
    return {"mean": means, "range": torch.tensor([-20.0, 30.0]).double().expand(group.n, 2)}


def loaded(method, federation):
    group = cohort(method, federation, model=network(1))
    server = serve(method, federation, model=network(1))
    group.load({name: t.expand(group.n, *t.shape).clone() for name, t in server.state.shared.items()})
    return group


def along_the_line(server) -> tuple[float, float]:
    """Of all clients' test samples: rank correlation of response and place along the line, and R^2 of the place."""
    start, stop = server.state.anchors["mean"]
    low, high = server.state.anchors["range"]
    places, shares = [], []
    for group in server.engine.cohorts(server.engine.federation.ids, server.method.download(server.state)):
        z = group.features("embedding", "test")
        places.append((z - start) @ (stop - start) / (stop - start).square().sum())
        shares.append((group.samples("test").y - low) / (high - low))
    found, wanted = torch.cat(places), torch.cat(shares)
    error = (found - wanted).square().mean() / wanted.var(correction=0)
    return float(spearmanr(found, wanted).statistic), 1 - float(error)


@pytest.mark.long
def test_the_embedding_orders_by_response_and_does_not_without_the_term():
    settings = {"local_epochs": 5, "batch_size": 8, "lr": 1e-2, "pretrain_epochs": 60}
    with_term = flic("flic-class", lambda1=0.1, **settings)
    rank, explained = along_the_line(train(serve(with_term, values(), model=network(1)), 5))
    assert rank > 0.97 and explained > 0.7
    without = flic("flic-class", lambda1=0.0, lambda2=0.0, **{**settings, "pretrain_epochs": 0})
    rank, explained = along_the_line(train(serve(without, values(), model=network(1)), 5))
    assert rank < 0.95 and explained < 0.5


def test_the_range_is_that_of_all_clients_and_anchors_start_apart():
    federation = values()
    server = serve(flic(pretrain_epochs=0, anchor_std=10.0), federation, model=network(1))
    server.prepare()
    y = torch.cat([client.train.y for client in federation])
    torch.testing.assert_close(server.state.anchors["range"], torch.stack([y.min(), y.max()]).double())
    assert float((server.state.anchors["mean"][0] - server.state.anchors["mean"][1]).norm()) > 5


def test_the_alignment_is_the_mean_squared_distance_to_the_place_of_the_response():
    method, federation = flic(), blobs((9, 6, 1), regression=True)
    group = loaded(method, federation)
    sent = payload_for(group)
    penalty, found = method.extensions[0].alignment(group, sent), {}

    def loss(step):
        value = penalty(step)
        found.update(zip([group.ids[r] for r in step.rows], value.tolist(), strict=True))
        return value

    embedded = group.features("embedding").split([9, 6, 1])
    group.fit("embedding", steps=1, loss=loss, samples=group.samples().in_batches("all"))
    for row, client in enumerate(group.clients):
        b, a = sent["mean"][row]
        gaps = [
            z - (s * a + (1 - s) * b)
            for z, y in zip(embedded[row], client.train.y, strict=True)
            for s in [(y + 20) / 50]
        ]
        assert found[client.id] == pytest.approx(float(torch.stack(gaps).square().sum(1).mean()), rel=1e-9)


def test_the_calibration_is_the_squared_error_at_the_places_of_the_responses():
    method = flic(lambda1=0.0, lambda2=2.0, anchor_scale=1e-20, batch_size=99)
    group = loaded(method, blobs((9, 6, 1), regression=True))
    sent = payload_for(group)
    penalty, found = method.extensions[0].loss(group, sent), {}

    def loss(step):
        value = penalty(step)
        found.update(zip([group.ids[r] for r in step.rows], value.tolist(), strict=True))
        return value + 0.0 * step.output().flatten(1).sum(1)

    expected = {}
    with torch.no_grad():
        for row, client in enumerate(group.clients):
            s = ((client.train.y + 20) / 50)[:, None]
            z = s * sent["mean"][row, 1] + (1 - s) * sent["mean"][row, 0]
            own = {name: t[row] for name, t in group.model.items()}
            hidden = F.leaky_relu(z @ own["body.0.weight"].T + own["body.0.bias"])
            outputs = (hidden @ own["head.weight"].T + own["head.bias"])[:, 0]
            expected[client.id] = 2.0 * float((outputs - client.train.y).square().mean())
    group.fit(("body", "head"), steps=1, loss=loss)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_step_on_the_two_points_follows_the_gradient_of_the_objective():
    method = flic(lambda1=0.3, lambda2=0.7, anchor_samples=5, anchor_scale=2.0)
    group = loaded(method, blobs((9, 6), regression=True))
    sent = payload_for(group)
    found = method.extensions[0].anchor_gradient(group, sent)(sent, 1)["mean"]
    noise = rng.normal(group.key("anchor step", 1), 16 * 5 * LATENT, torch.float64).view(2, 16, 5, LATENT)
    embedded = group.features("embedding").split([9, 6])
    for row, client in enumerate(group.clients):
        v = sent["mean"][row].clone().requires_grad_(True)
        own = {n: (group.received.get(n, group.model[n]))[row] for n in group.chain.tensors() if "embedding" not in n}

        def place(y, v=v):
            s = (y + 20) / 50
            return s * v[1] + (1 - s) * v[0]

        total = 0.3 * sum((place(y) - z).square().sum() for y, z in zip(client.train.y, embedded[row], strict=True))
        total = total / len(client.train)
        ranked = client.train.y.sort().values
        for j in range(16):
            y = ranked[int(j * (len(ranked) - 1) / 15)]
            for draw in noise[row, j]:
                hidden = F.leaky_relu((place(y) + 2.0**0.5 * draw) @ own["body.0.weight"].T + own["body.0.bias"])
                total = total + 0.7 / 80 * (hidden @ own["head.weight"].T + own["head.bias"] - y).square().sum()
        (expected,) = torch.autograd.grad(total, v)
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("pretrain", [1, "validated"])
def test_engines_and_chunks_agree_on_values(pretrain):
    method = flic(pretrain_epochs=pretrain, pretrain_max_epochs=5, lambda1=0.1, lambda2=0.1)
    results = [train(serve(method, values(), model=network(1), **how), 2) for how in ENGINES.values()]
    for other in results[1:]:
        assert difference(results[0], other) < 1e-9


def test_values_that_have_no_line_are_refused():
    draw = np.random.default_rng(0)
    two = {"a": {"x_train": draw.normal(size=(9, 3)), "y_train": draw.normal(size=(9, 2))}}
    server = serve(flic(), Federation.from_arrays(two), model=network(2))
    with pytest.raises(PerfedError, match="need one per sample, not shape"):
        server.prepare()
    same = {"a": {"x_train": draw.normal(size=(9, 3)), "y_train": np.ones(9)}}
    with pytest.raises(PerfedError, match="need responses that differ"):
        serve(flic(), Federation.from_arrays(same), model=network(1)).prepare()
    with pytest.raises(PerfedError, match="w2 is for class labels"):
        serve(flic(w2="two-sample"), values(), model=network(1))


# Groups of classes --------------------------------------------------------------------------------------------

GROUPS = ((0, 2), (1, 3))


def four_classes():
    return blobs((16, 12, 9), num_classes=4, labels=[[0, 1, 2, 3], [0, 1], [2, 3]])


def test_a_group_has_one_anchor_and_less_travels():
    down = {}
    for groups in ((), GROUPS):
        server = serve(flic("flic-class", meta_classes=groups), four_classes(), model=network(4))
        server.prepare()
        assert server.state.anchors["mean"].shape == (len(groups) or 4, LATENT)
        down[groups] = server.round(1).bytes_down
    assert down[GROUPS] == down[()] / 2  # only anchors travel


def test_groups_of_one_class_are_the_classes():
    results = []
    for groups in ((), ((0,), (1,), (2,), (3,))):
        method = flic(meta_classes=groups, lambda1=0.1, lambda2=0.1, pretrain_epochs=1)
        results.append(train(serve(method, four_classes(), model=network(4)), 2))
    assert difference(*results) < 1e-12


def test_the_alignment_takes_a_groups_samples_as_one_set():
    """It is that of the classes where labels are those of the groups."""
    grouped = flic(meta_classes=GROUPS)
    group = cohort(grouped, four_classes(), model=network(4))
    means = torch.randn(2, LATENT, generator=torch.Generator().manual_seed(3)).double()
    sent = {"mean": means.expand(3, -1, -1)}
    relabelled = four_classes()
    names = torch.tensor([0, 1, 0, 1])
    merged = Federation.from_arrays(
        {c.id: {"x_train": c.train.x, "y_train": names[c.train.y]} for c in relabelled}, num_classes=4
    )
    plain = cohort(flic(), merged, model=network(4))
    plain.model.update({n: t.clone() for n, t in group.model.items()})
    found = []
    for view, extension, received in (
        (group, grouped.extensions[0], sent),
        (plain, flic().extensions[0], {"mean": torch.cat([means, means + 9]).expand(3, -1, -1)}),
    ):
        losses, align = {}, extension.alignment(view, received)

        def loss(step, align=align, losses=losses):
            value = align(step)
            losses.update(zip(step.rows.tolist(), value.tolist(), strict=True))
            return value

        view.fit("embedding", steps=1, loss=loss, samples=view.samples().in_batches("all"))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert set(found[0]) == {0, 1, 2}


def test_the_calibration_is_the_loss_of_the_groups_classes_together():
    method = flic(meta_classes=GROUPS, lambda1=0.0, lambda2=1.0, anchor_scale=1e-20, batch_size=99)
    group = cohort(method, four_classes(), model=network(4))
    server = serve(method, four_classes(), model=network(4))
    group.load({name: t.expand(3, *t.shape).clone() for name, t in server.state.shared.items()})
    means = torch.randn(2, LATENT, generator=torch.Generator().manual_seed(3)).double().expand(3, -1, -1)
    penalty, found = method.extensions[0].loss(group, {"mean": means}), {}

    def loss(step):
        value = penalty(step)
        found.update(zip(step.rows.tolist(), value.tolist(), strict=True))
        return value

    with torch.no_grad():
        shares = group.apply_after("embedding", means).softmax(-1)
    group.fit(("body", "head"), steps=1, loss=loss)
    for row in range(3):
        assert found[row] == pytest.approx(
            -sum(float(shares[row, entry, list(members)].sum().log()) for entry, members in enumerate(GROUPS)), rel=1e-9
        )


@pytest.mark.parametrize("groups", [((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3, 4),)])
def test_groups_must_hold_every_class_once(groups):
    with pytest.raises(PerfedError, match="each of the classes 0 to 3 must be in one group"):
        serve(flic(meta_classes=groups), four_classes(), model=network(4))


def test_groups_are_lists_in_toml():
    assert build_method("flic-class", {"meta_classes": [[0, 1], [2, 3]]}).extensions[0].meta_classes == ((0, 1), (2, 3))
    with pytest.raises(PerfedError, match="meta_classes"):
        build_method("flic-class", {"meta_classes": [[0, "1"], [2, 3]]})


@pytest.mark.long
def test_flic_on_groups_learns_all_classes():
    federation = blobs((40, 40, 40), num_classes=4, dims=(4,), test=40)
    model = Model(embedding=mlp((16,), 8), head=linear(4))
    settings = {"local_epochs": 10, "lr": 1e-2, "batch_size": 10, "lambda1": 1e-3}
    server = train(serve(flic("flic-class", meta_classes=GROUPS, **settings), federation, model=model), 8)
    scores = server.evaluate("test")
    assert np.mean([found["accuracy"] for found in scores.values()]) > 0.8
