from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import blobs, cohort, make, serve

from perfed.maths.aggregate import masked_mean, weighted_mean
from perfed.model.chain import STAGES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_mean_is_numpys_average_of_every_tensor(dtype):
    generator = torch.Generator().manual_seed(0)
    stacked = {
        "a": torch.randn(4, 3, 2, generator=generator, dtype=dtype),
        "inner": {"b": torch.randn(4, generator=generator, dtype=dtype)},
    }
    weights = torch.tensor([1.0, 0.0, 5.0, 2.0])
    mean = weighted_mean(stacked, weights)
    for found, x in ((mean["a"], stacked["a"]), (mean["inner"]["b"], stacked["inner"]["b"])):
        expected = np.average(x.double().numpy(), axis=0, weights=weights.numpy())
        assert found.dtype == dtype
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("clients, shape", [(3, (700, 1001)), (2000, (1500,)), (5, (0,)), (1, (1 << 21,))])
def test_a_mean_of_more_than_a_block_is_numpys(clients, shape):
    x = torch.randn(clients, *shape, generator=torch.Generator().manual_seed(3))
    weights = torch.rand(clients, generator=torch.Generator().manual_seed(4))
    found = weighted_mean({"x": x}, weights)["x"]
    np.testing.assert_array_equal(found.shape, shape)
    np.testing.assert_allclose(found, np.average(x.double(), axis=0, weights=weights.double()), rtol=1e-6, atol=1e-9)


def test_only_the_proportions_of_the_weights_matter_and_equal_tensors_stay_as_they_are():
    x = {"x": torch.randn(3, 5, generator=torch.Generator().manual_seed(1))}
    a, b = weighted_mean(x, torch.tensor([1.0, 2.0, 3.0])), weighted_mean(x, torch.tensor([100.0, 200.0, 300.0]))
    torch.testing.assert_close(a["x"], b["x"])
    equal = {"x": x["x"][:1].expand(3, 5)}
    torch.testing.assert_close(weighted_mean(equal, torch.tensor([0.1, 0.7, 0.3]))["x"], x["x"][0])
    assert weighted_mean({}, torch.ones(2)) == {}


def test_the_mean_of_many_float32_values_is_as_good_as_float64():
    x = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(2)) + 1000
    found = weighted_mean({"x": x}, torch.ones(10_000))["x"]
    assert float(found) == float(x.double().mean().float())


def test_integers_are_rounded():
    counters = {"n": torch.tensor([1, 2, 2]), "big": torch.tensor([2**40, 2**40 + 2, 2**40 + 2])}
    mean = weighted_mean(counters, torch.ones(3))
    assert mean["n"].dtype == torch.int64 and int(mean["n"]) == 2
    assert int(mean["big"]) == 2**40 + 1


def test_masked_mean_is_over_the_holders_and_falls_back():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], [[5.0, 6.0], [7.0, 8.0], [9.0, 9.0]]])
    held = torch.tensor([[True, True, False], [True, False, False]])
    fallback = torch.tensor([[-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]])
    found = masked_mean(x, held, fallback)
    assert found.tolist() == [[3.0, 4.0], [3.0, 4.0], [-3.0, -3.0]] and found.dtype == x.dtype


def test_masked_mean_ignores_whatever_non_holders_say():
    x = torch.tensor([[[1.0]], [[float("inf")]], [[3.0]]])
    found = masked_mean(x.nan_to_num(posinf=1e30), torch.tensor([[True], [False], [True]]), torch.zeros(1, 1))
    assert found.tolist() == [[2.0]]


def test_masked_mean_of_weights_below_one_is_a_mean():
    x, weights = torch.tensor([[[1.0]], [[4.0]]]), torch.tensor([[0.2], [0.1]])
    for scale in (1.0, 1e-9, 1e9):
        found = masked_mean(x, scale * weights, torch.zeros(1, 1))
        assert found.item() == pytest.approx((0.2 * 1 + 0.1 * 4) / 0.3)


def test_fedavg_weighs_clients_by_their_samples():
    federation = blobs((12, 3))
    server = serve(make("fedavg"), federation)
    start = {name: tensor.clone() for name, tensor in server.state.shared.items()}
    server.round(1)
    alone = []
    for client in federation.ids:
        group = cohort(server.initialiser.method, federation, ids=[client])
        group.load({name: tensor.unsqueeze(0) for name, tensor in start.items()})
        group.fit(STAGES, epochs=2)
        alone.append(group.shared())
    for name, tensor in server.state.shared.items():
        expected = (12 * alone[0][name][0] + 3 * alone[1][name][0]) / 15
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)
