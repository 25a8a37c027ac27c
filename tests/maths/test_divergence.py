from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from perfed.maths.divergence import centred_nuclear_norm, gaussian_w2, sample_w2

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


def draw(counts, k, *, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(len(counts), max(counts), k, generator=generator, dtype=torch.float64)
    mean = torch.randn(len(counts), k, generator=generator, dtype=torch.float64)
    factor = torch.randn(len(counts), k, k, generator=generator, dtype=torch.float64)
    return x.to(dtype), mean.to(dtype), factor.to(dtype)


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
@pytest.mark.parametrize("kind", ["number", "one matrix", "a matrix each"])
def test_distance_equals_pot(counts, k, kind):
    x, mean, factors = draw(counts, k)
    factor = {"number": 1.7, "one matrix": factors[0], "a matrix each": factors}[kind]
    found = gaussian_w2(x, counts, mean, factor)
    for i, n in enumerate(counts):
        root = {"number": 1.7 * torch.eye(k).double(), "one matrix": factors[0], "a matrix each": factors[i]}[kind]
        sigma = (root @ root.T).numpy()
        expected = distance(x[i, :n], mean[i], sigma)
        assert float(found[i]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_identity_anchor_counts_the_directions_that_the_samples_miss():
    x = torch.tensor(
        [[[3.0, 0, 0, 0], [-3.0, 0, 0, 0]]], dtype=torch.float64
    )  # standard deviation sqrt(18) along one axis
    found = gaussian_w2(x, [2], torch.zeros(1, 4, dtype=torch.float64))
    assert float(found) == pytest.approx((1 - 18**0.5) ** 2 + 3)


@pytest.mark.parametrize(("counts", "k"), SHAPES)
def test_nuclear_norm_and_its_gradient_equal_those_of_the_singular_values(counts, k):
    x, _, _ = draw(counts, k)
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


@pytest.mark.parametrize(("counts", "k"), [((4, 3, 2, 1), 6), ((7, 6, 2), 3), ((8,), 2), ((5, 5), 4)])
@pytest.mark.parametrize("general", [False, True])
def test_gradients_are_those_of_finite_differences(counts, k, general):
    x, mean, factors = draw(counts, k, seed=1)
    factor = factors if general else 1.3
    x, mean = x.requires_grad_(True), mean.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda a, b: gaussian_w2(a, counts, b, factor), (x, mean), atol=1e-5)
    if general:
        factors = factors.clone().requires_grad_(True)
        assert torch.autograd.gradcheck(lambda f: gaussian_w2(x.detach(), counts, mean.detach(), f), factors, atol=1e-5)


def test_padding_and_neighbours_change_nothing():
    counts, k = (11, 6, 5, 2, 1), 7
    x, mean, factors = draw(counts, k)
    x.requires_grad_(True)
    together = gaussian_w2(x, counts, mean, factors)
    (gradient,) = torch.autograd.grad(together.sum(), x)
    for i, n in enumerate(counts):
        alone = x[i : i + 1, :n].detach().requires_grad_(True)
        value = gaussian_w2(alone, [n], mean[i : i + 1], factors[i : i + 1])
        (own,) = torch.autograd.grad(value.sum(), alone)
        torch.testing.assert_close(value[0], together[i].detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(own[0], gradient[i, :n], rtol=1e-9, atol=1e-9)
        assert not gradient[i, n:].any()
    garbage = x.detach().clone()
    for i, n in enumerate(counts):
        garbage[i, n:] = 1e6
    torch.testing.assert_close(gaussian_w2(garbage, counts, mean, factors), together.detach())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["identical", "two values", "nearly identical", "spread"])
@pytest.mark.parametrize(("counts", "k"), [((26, 3, 2, 1), 64), ((100, 26, 26), 8)])
def test_float32_is_robust(scale, kind, counts, k):
    x, mean, _ = draw(counts, k)
    if kind == "identical":
        x = x[:, :1].expand_as(x).clone()
    elif kind == "two values":
        x = torch.where(torch.arange(max(counts))[None, :, None] % 2 == 0, x[:, :1], x[:, 1:2])
    elif kind == "nearly identical":
        x = x[:, :1] + 1e-6 * x
    x, mean = scale * x, scale * mean
    exact = gaussian_w2(x, counts, mean, scale)
    single = x.float().requires_grad_(True)
    found = gaussian_w2(single, counts, mean.float(), scale)
    found.sum().backward()
    assert bool(torch.isfinite(found).all()) and bool(torch.isfinite(single.grad).all())
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3 * scale**2)
    assert float(single.grad.abs().max()) < 1e2 * scale


@pytest.mark.parametrize(("counts", "k"), [((5, 4, 3, 2, 1), 8), ((9, 7, 3), 3), ((6, 6), 6), ((2,), 2)])
def test_sample_distance_is_that_of_the_two_fitted_gaussians(counts, k):
    x, y = draw(counts, k)[0], draw(counts, k, seed=5)[0]
    found = sample_w2(x, y, counts)
    for i, n in enumerate(counts):
        expected = distance(x[i, :n], y[i, :n].mean(0), covariance(y[i, :n]))
        assert float(found[i]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_sample_distance_does_not_depend_on_how_the_samples_are_paired():
    counts, k = (6, 6), 4
    x, y = draw(counts, k)[0], draw(counts, k, seed=5)[0]
    permuted = y[:, torch.tensor([3, 1, 5, 0, 2, 4])]
    torch.testing.assert_close(sample_w2(x, permuted, counts), sample_w2(x, y, counts), rtol=1e-3, atol=1e-3)


def test_sample_distance_to_itself_is_zero_and_gradients_are_finite_differences():
    counts, k = (5, 4), 3
    x, y = draw(counts, k)[0], draw(counts, k, seed=5)[0]
    assert float(sample_w2(x, x, counts).abs().max()) < 1e-3
    x = x.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda a: sample_w2(a, y, counts), x, atol=1e-4)


def plain_w2(x, mean):
    """The distance to N(mean, I) as autograd differentiates it, through torch's singular values."""
    centred = x - x.mean(0)
    norm = torch.linalg.svdvals(centred)[: min(len(x) - 1, x.shape[1])].sum()
    spread = centred.square().sum() / (len(x) - 1) + x.shape[1] - 2 * norm / (len(x) - 1) ** 0.5
    return (x.mean(0) - mean).square().sum() + spread


@pytest.mark.parametrize("n", [5, 30])
@pytest.mark.parametrize("scale", [1e-4, 1e-6])
def test_a_small_feature_has_its_gradient_in_float64(n, scale):
    """More samples than features, and fewer; the gradient of autograd through the singular values."""
    x, mean, _ = draw((n,), 8)
    x[:, :, 2] *= scale
    if n == 5:
        x[:, :, 4:] *= scale  # three large directions and a small one are left
    x.requires_grad_(True)
    (found,) = torch.autograd.grad(gaussian_w2(x, [n], mean).sum(), x)
    (expected,) = torch.autograd.grad(plain_w2(x[0], mean[0]), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=10 * torch.finfo(x.dtype).eps / scale**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 11])
def test_identical_samples_have_no_direction(n, dtype):
    """What is left after subtracting the mean is rounding: its direction must not become a gradient."""
    x = draw((1,) * 20, 4, dtype=dtype)[0].expand(20, n, 4).clone().requires_grad_(True)
    mean = torch.zeros(20, 4, dtype=dtype)
    gaussian_w2(x, [n] * 20, mean).sum().backward()
    expected = 2 * x.detach() / n  # of the distance between the means alone
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)
