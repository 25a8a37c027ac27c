from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from perfed.maths.divergence import centred_nuclear_norm, mean_kernel, sample_w2

# samples per set (decreasing) and dimension: fewer and more samples than dimensions, one sample, padded sizes
SHAPES = [
    ((5, 4, 3, 2, 1), 8),
    ((9, 7, 3, 1), 3),
    ((40, 17, 2), 5),
    ((1, 1), 4),
    ((3,), 1),
    ((6, 6, 6), 6),
    ((30, 13), 20),
]


def draw(counts, k, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(counts), max(counts), k, generator=generator, dtype=torch.float64).to(dtype)


def covariance(x):
    return np.zeros((x.shape[1], x.shape[1])) if len(x) == 1 else np.cov(x.T.numpy()).reshape(x.shape[1], x.shape[1])


def distance(x, mean, sigma):
    """The reference: the closed form on the explicit moments, checked against POT."""
    found = covariance(x)
    gap = float((x.mean(0) - mean).square().sum())
    cross = np.sqrt(np.linalg.eigvals(sigma @ found).real.clip(0)).sum()
    value = gap + np.trace(sigma) + np.trace(found) - 2 * cross
    # POT takes the root of the product without clipping, which needs matrices that are not singular.
    ridge = 1e-7 * np.eye(len(sigma))
    means = np.zeros(len(sigma)), (x.mean(0) - mean).numpy()
    root = ot.gaussian.bures_wasserstein_distance(*means, sigma + ridge, found + ridge)
    assert value == pytest.approx(float(root) ** 2, rel=1e-2, abs=2e-2)
    return value


@pytest.mark.parametrize(("counts", "k"), SHAPES)
def test_nuclear_norm_and_its_gradient_equal_those_of_the_singular_values(counts, k):
    x = draw(counts, k)
    for i, n in enumerate(counts):
        x[i, :n] -= x[i, :n].mean(0)
        x[i, n:] = 0
    x.requires_grad_(True)
    norms = centred_nuclear_norm(x, counts)
    (norms * torch.arange(1, len(counts) + 1)).sum().backward()
    for i, n in enumerate(counts):
        one = x[i, :n].detach()
        assert norms[i].item() == pytest.approx(torch.linalg.matrix_norm(one, "nuc").item(), rel=1e-7, abs=1e-7)
        u, s, vh = torch.linalg.svd(one, full_matrices=False)
        keep = s > 1e-9 * s.max() if n > 1 else torch.zeros_like(s, dtype=torch.bool)
        polar = (i + 1) * (u * keep) @ vh
        torch.testing.assert_close(x.grad[i, :n], polar, rtol=1e-6, atol=1e-7)
        assert not x.grad[i, n:].any()


def test_padding_and_neighbours_change_nothing():
    counts, k = (11, 6, 5, 2, 1), 7
    x, y = draw(counts, k).requires_grad_(True), draw(counts, k, seed=5)
    together = sample_w2(x, y, counts)
    (gradient,) = torch.autograd.grad(together.sum(), x)
    for i, n in enumerate(counts):
        alone = x[i : i + 1, :n].detach().requires_grad_(True)
        value = sample_w2(alone, y[i : i + 1, :n], [n])
        (own,) = torch.autograd.grad(value.sum(), alone)
        torch.testing.assert_close(value[0], together[i].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own[0], gradient[i, :n], rtol=1e-5, atol=1e-6)
        assert not gradient[i, n:].any()
    garbage = [part.detach().clone() for part in (x, y)]
    for i, n in enumerate(counts):
        for part in garbage:
            part[i, n:] = 1e6
    torch.testing.assert_close(sample_w2(*garbage, counts), together.detach())


@pytest.mark.parametrize(("counts", "k"), [((5, 4, 3, 2, 1), 8), ((9, 7, 3), 3), ((6, 6), 6), ((2,), 2)])
def test_sample_distance_is_that_of_the_two_fitted_gaussians(counts, k):
    x, y = draw(counts, k), draw(counts, k, seed=5)
    found = sample_w2(x, y, counts)
    for i, n in enumerate(counts):
        expected = distance(x[i, :n], y[i, :n].mean(0), covariance(y[i, :n]))
        assert float(found[i]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_sample_distance_does_not_depend_on_how_the_samples_are_paired():
    counts, k = (6, 6), 4
    x, y = draw(counts, k), draw(counts, k, seed=5)
    permuted = y[:, torch.tensor([3, 1, 5, 0, 2, 4])]
    torch.testing.assert_close(sample_w2(x, permuted, counts), sample_w2(x, y, counts), rtol=1e-3, atol=1e-3)


def test_sample_distance_to_itself_is_zero_and_gradients_are_finite_differences():
    counts, k = (5, 4), 3
    x, y = draw(counts, k), draw(counts, k, seed=5)
    assert float(sample_w2(x, x, counts).abs().max()) < 1e-3
    x = x.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda a: sample_w2(a, y, counts), x, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 11])
def test_identical_samples_have_no_direction(n, dtype):
    """What is left after subtracting the mean is rounding: its direction must not become a gradient."""
    x = draw((1,) * 20, 4, dtype=dtype).expand(20, n, 4).clone().requires_grad_(True)
    y = draw((n,) * 20, 4, seed=5, dtype=dtype)
    sample_w2(x, y, [n] * 20).sum().backward()
    expected = 2 * (x.detach() - y.mean(1, keepdim=True)) / n  # of the distance between the means alone
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_the_mean_kernel_is_a_double_sum_and_of_two_sets_their_discrepancy():
    gammas = (0.01, 0.2)
    x, weight = draw((5, 3), 4), torch.tensor([[0.1, 0.2, 0.3, 0.3, 0.1], [0.5, 0.5, -1.0, 0.0, 0.0]]).double()
    x = x.requires_grad_(True)
    found = mean_kernel(x, weight, gammas)
    for s in range(2):
        pairs = ((i, j, float(((x[s, i] - x[s, j]) ** 2).sum().detach())) for i in range(5) for j in range(5))
        terms = (weight[s, i] * weight[s, j] * sum(np.exp(-g * square) for g in gammas) for i, j, square in pairs)
        assert float(found[s].detach()) == pytest.approx(float(sum(terms)), abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: mean_kernel(x, weight, gammas), x)
    twice = torch.cat([x, x], 1)  # a set and itself: no discrepancy, and no slope to anywhere
    value = mean_kernel(twice, torch.cat([weight, -weight], 1), gammas)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert value.abs().max() < 1e-12 and slope.abs().max() < 1e-12
