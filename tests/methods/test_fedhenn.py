"""FedHeNN: common inputs, kernels of what the head gets, and their alignment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import blobs, cohort, make, network, serve, train

from perfed import rng
from perfed.errors import PerfedError
from perfed.maths.divergence import compute_cka
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def test_cka_of_linear_kernels_is_the_one_of_their_features():
    """|Y^T X|^2 / (|X^T X| |Y^T Y|) with centred columns (Kornblith et al. 2019, eq. 4)."""
    x, y = torch.randn(3, 9, 4, dtype=torch.float64), torch.randn(3, 9, 6, dtype=torch.float64)
    found = compute_cka(x @ x.mT, y @ y.mT)
    for row in range(3):
        a, b = x[row] - x[row].mean(0), y[row] - y[row].mean(0)
        expected = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
        torch.testing.assert_close(found[row], expected)
    turned = x[0] @ torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0] * 3 + 5
    torch.testing.assert_close(compute_cka(x[0] @ x[0].T, turned @ turned.T), torch.tensor(1.0, dtype=torch.float64))
    for constant in (torch.zeros(4, 3), torch.tensor([[0.3, 0.7, 0.11]]).repeat(4, 1)):
        features = constant.double().requires_grad_()
        value = compute_cka(features @ features.T, x[0, :4] @ x[0, :4].T)
        value.backward()
        assert value.item() == pytest.approx(0, abs=1e-12) and torch.isfinite(features.grad).all()


def test_common_inputs_are_the_same_for_all_and_cut_to_each_clients_shape():
    method = make("fedhenn", points=3)
    group = cohort(method, blobs((6, 5, 4), dims=(5, 2, 3)))
    x = method.inputs(group, rng.key(7).expand(3))
    assert x.shape == (3, 3, 5)
    for row, client in enumerate(group.clients):
        width = client.input_shape[0]
        torch.testing.assert_close(x[row, :, :width], x[group.ids.index("c0"), :, :width], rtol=1e-12, atol=0)
        assert (x[row, :, width:] == 0).all()
    assert len(x[group.ids.index("c0")].unique()) == 15
    assert not torch.equal(x, method.inputs(group, rng.key(8).expand(3)))


@pytest.mark.long
def test_rounds_bring_the_clients_kernels_together():
    federation = blobs((12, 12, 12), dims=(4, 3, 5))
    ends = []
    for eta in (0.0, 20.0):
        server = train(serve(make("fedhenn", eta=eta, lr=0.02, local_epochs=5), federation), 8)
        method = server.initialiser.method
        (group,) = server.engine.cohorts(federation.ids, method.download(server.state))
        kernels = method.kernels(group, rng.key(99).expand(3))["kernel"]
        ends.append(float(compute_cka(kernels, kernels.mean(0)).mean()))
    assert ends[1] > ends[0] + 0.1


@pytest.mark.long
def test_without_its_weight_fedhenn_is_local_training_and_with_it_it_is_not():
    for eta, same in ((0.0, True), (5.0, False)):
        method = make("fedhenn", eta=eta)
        local = make("local")
        group, other = cohort(method, blobs()), cohort(local, blobs())
        keys = rng.key(1).expand(3)
        kernel = method.kernels(group, keys)["kernel"].mean(0).expand(3, -1, -1)
        method.train_aligned(group, keys, kernel)
        local.train(other)
        assert torch.allclose(group.model["head.weight"], other.model["head.weight"], rtol=1e-10, atol=1e-12) == same


def test_images_of_different_sizes_meet_in_their_corner():
    federation = blobs((8, 6), dims=(36, 16))
    sides = {36: 6, 16: 4}
    clients = []
    for client in federation:
        shape = (-1, 1, sides[client.train.x.shape[1]], sides[client.train.x.shape[1]])
        train_, test = (replace(s, x=s.x.view(shape)) for s in (client.train, client.test))
        clients.append(replace(client, train=train_, test=test))
    federation = replace(federation, clients=tuple(clients))
    method, model = make("fedhenn", points=2), Model(body=mlp((6,), 4), head=linear(3))
    large, small = (cohort(method, federation, ids=[client.id], model=model) for client in federation)
    key = rng.key(5).expand(1)
    torch.testing.assert_close(method.inputs(large, key)[..., :4, :4], method.inputs(small, key), rtol=1e-12, atol=0)
    assert set(train(serve(method, federation, model=model), 1).evaluate("test")) == {"c0", "c1"}


def test_two_exchanges_travel_with_kernels_only():
    server = serve(make("fedhenn", points=5), blobs())
    server.prepare()
    record = server.round(1)
    assert record.exchanges == 2
    assert record.bytes_up == 3 * 25 * 8
    assert record.bytes_down == 3 * (8 + 8 + 25 * 8)


def test_common_inputs_have_no_domain():
    with pytest.raises(PerfedError, match="only the head can be per-domain"):
        serve(make("fedhenn", placement={"body": "per-domain"}), blobs(), model=network()).prepare()
