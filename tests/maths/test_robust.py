from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from perfed.maths.robust import bound_updates, map_coordinates, trimmed_mean, weighted_median


def draw(clients: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(clients, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 7, 10])
def test_with_equal_weights_the_median_is_numpys(clients):
    x = draw(clients, 5, 3)
    for weight in (1.0, 0.1, 7.0):
        median = weighted_median(x, torch.full((clients,), weight))
        np.testing.assert_array_equal(median, np.median(x.numpy(), axis=0))


@pytest.mark.parametrize("seed", range(5))
def test_integer_weights_repeat_a_client_so_many_times(seed):
    generator = np.random.default_rng(seed)
    x, weights = draw(6, 8, seed=seed), torch.from_numpy(generator.integers(1, 6, 6))
    repeated = np.repeat(x.numpy(), weights.numpy(), axis=0)
    np.testing.assert_allclose(weighted_median(x, weights), np.median(repeated, axis=0), rtol=1e-15)
    total = len(repeated)
    for cut in range((total - 1) // 2 + 1):
        expected = stats.trim_mean(repeated, (cut + 0.5) / total, axis=0)  # scipy cuts int(n * share)
        np.testing.assert_allclose(trimmed_mean(x, weights, cut / total), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_median_minimises_the_weighted_sum_of_distances(seed):
    generator = torch.Generator().manual_seed(seed)
    x, weights = draw(7, 20, seed=seed), torch.rand(7, generator=generator, dtype=torch.float64) + 0.01

    def total(value: torch.Tensor) -> torch.Tensor:
        return (weights[:, None] * (x - value).abs()).sum(0)

    best = torch.stack([total(row) for row in x]).amin(0)  # the minimum is at one of the values
    torch.testing.assert_close(total(weighted_median(x, weights)), best, rtol=1e-12, atol=0)


@pytest.mark.parametrize("trim", [0.0, 0.05, 0.13, 0.3, 0.49, 0.4999999999])
def test_the_trimmed_mean_cuts_weight_client_by_client(trim):
    x, weights = draw(6, 9, seed=3), torch.tensor([3.0, 0.5, 1.0, 8.0, 2.5, 1.0], dtype=torch.float64)
    expected = []
    for column in x.T.tolist():
        order = sorted(range(6), key=column.__getitem__)
        rest = {i: float(weights[i]) for i in order}
        for side in (order, order[::-1]):
            cut = trim * float(weights.sum())
            for i in side:
                step = min(cut, rest[i])
                rest[i] -= step
                cut -= step
        expected.append(sum(rest[i] * column[i] for i in order) / sum(rest.values()))
    np.testing.assert_allclose(trimmed_mean(x, weights, trim), expected, rtol=1e-5)


def test_without_trimming_it_is_the_mean():
    x, weights = draw(5, 4), torch.tensor([1, 2, 3, 4, 5])
    np.testing.assert_allclose(
        trimmed_mean(x, weights, 0.0), np.average(x.numpy(), axis=0, weights=weights.numpy()), rtol=1e-12
    )


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, 1e300, -1e300])
@pytest.mark.parametrize("estimate", [weighted_median, lambda x, w: trimmed_mean(x, w, 0.3)], ids=["median", "trimmed"])
def test_a_minority_cannot_leave_the_range_of_the_honest(estimate, lie):
    x = draw(10, 6, seed=5)
    x[[2, 7, 9]] = lie
    honest = x[[0, 1, 3, 4, 5, 6, 8]]
    value = estimate(x, torch.ones(10))
    assert bool(((value >= honest.amin(0)) & (value <= honest.amax(0))).all())


@pytest.mark.parametrize(("clients", "shape"), [(3, (700, 401)), (2000, (150,)), (5, (0,)), (4, ())])
def test_blocks_of_columns_change_nothing(clients, shape):
    x = draw(clients, *shape, seed=6).float()
    weights = torch.ones(clients)
    np.testing.assert_array_equal(
        weighted_median(x, weights).float(), np.median(x.numpy(), axis=0).astype(np.float32).reshape(shape)
    )
    assert trimmed_mean(x, weights, 0.1).shape == shape


def test_types_stay_and_integers_are_rounded():
    stacked = {"a": torch.tensor([1.0, 2.0, 4.0]), "inner": {"n": torch.tensor([1, 2, 9])}}
    median = map_coordinates(stacked, lambda x: weighted_median(x, torch.tensor([1, 1, 2])))
    assert float(median["a"]) == 3.0 and median["a"].dtype == torch.float32
    assert int(median["inner"]["n"]) == 6 and median["inner"]["n"].dtype == torch.int64


def test_an_update_is_one_vector_over_all_tensors():
    current = {"w": torch.tensor([1.0, 1.0]), "inner": {"b": torch.tensor(2.0)}, "n": torch.tensor(5)}
    stacked = {
        "w": torch.tensor([[3.0, 4.0], [1.1, 1.0], [1.0, math.nan]]),
        "inner": {"b": torch.tensor([8.0, 2.0, 7.0])},
        "n": torch.tensor([6, 6, 9]),
    }
    # The updates are (2, 3, 6) of norm 7, (0.1, 0, 0), and one that is not finite.
    bounded = bound_updates(stacked, current, 3.5)
    torch.testing.assert_close(bounded["w"], torch.tensor([[2.0, 2.5], [1.1, 1.0], [1.0, 1.0]]))
    torch.testing.assert_close(bounded["inner"]["b"], torch.tensor([5.0, 2.0, 2.0]))
    assert bounded["n"].tolist() == [6, 6, 9]
    assert torch.equal(bounded["w"][1], stacked["w"][1])  # a short update keeps its bits


def test_a_tree_without_floating_point_tensors_stays_as_it_is():
    assert bound_updates({"n": torch.tensor([1, 2])}, {"n": torch.tensor(0)}, 1.0)["n"].tolist() == [1, 2]
