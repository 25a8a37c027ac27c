"""The form for training equals the plain one, set by set, in value and gradient."""

import numpy as np
import ot
import pytest
import torch
from wasserstein import plain_w2

from perfed.methods.flic.fast_w2 import Sets, gaussian_w2_sets


def sets_of(counts, z):
    """Consecutive rows of ``z`` as sets; the last rows belong to none."""
    counts = np.array(counts)
    begin = np.cumsum(counts) - counts
    rows = np.where(np.arange(counts.max()) < counts[:, None], begin[:, None] + np.arange(counts.max()), 0)
    return Sets.of(np.zeros_like(counts), rows, counts, np.array([len(z)]), z)[0]


def both(z, counts, mean, std):
    """(values, gradients) of the fast form and of the plain one, the sets being consecutive rows of ``z``."""
    found = []
    for fast in (True, False):
        x = z.clone().requires_grad_(True)
        if fast:
            value = gaussian_w2_sets(x, sets_of(counts, z), mean, std)
        else:
            sets = x[: sum(counts)].split(counts)
            value = torch.stack([plain_w2(own, m, std) for own, m in zip(sets, mean, strict=True)])
        (value * torch.arange(1, len(counts) + 1)).sum().backward()
        found.append((value.detach(), x.grad))
    return found


@pytest.mark.parametrize("std", [1.0, 1.6])
@pytest.mark.parametrize(
    "counts",
    [[1], [2], [3], [4], [3, 3, 2, 2, 1, 1], [9, 8, 7, 5, 4, 3, 2, 1], [33, 31, 30, 12, 5, 5, 3], [12] * 5],
    ids=str,
)
def test_equals_the_plain_form(counts, std):
    torch.manual_seed(0)
    z = torch.randn(sum(counts) + 3, 7, dtype=torch.float64)  # the last rows belong to no set
    mean = 3 * torch.randn(len(counts), 7, dtype=torch.float64)
    (fast, fast_grad), (plain, plain_grad) = both(z, counts, mean, std)
    assert torch.allclose(fast, plain, rtol=1e-10, atol=1e-10)
    assert torch.allclose(fast_grad, plain_grad, rtol=1e-8, atol=1e-10)
    assert fast_grad[-3:].abs().sum() == 0


@pytest.mark.parametrize(("n", "k"), [(9, 3), (40, 5), (3, 8), (3, 1)])
def test_equals_the_distance_of_pot(n, k):
    torch.manual_seed(0)
    z, mean = torch.randn(n, k, dtype=torch.float64), torch.randn(1, k, dtype=torch.float64)
    found = gaussian_w2_sets(z, sets_of([n], z), mean, 1.7)
    # POT takes the root of a matrix, which needs one that is not singular.
    spread = torch.cov(z.T).view(k, k) + 1e-9 * torch.eye(k)
    root = ot.gaussian.bures_wasserstein_distance(mean[0], z.mean(0), 1.7**2 * torch.eye(k).double(), spread)
    assert float(found) == pytest.approx(float(root) ** 2, rel=1e-3)


@pytest.mark.parametrize("counts", [(4, 3, 2, 1), (7, 6, 2), (8,), (5, 5)])
def test_gradients_are_those_of_finite_differences(counts):
    torch.manual_seed(0)
    z = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    mean = torch.randn(len(counts), 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: gaussian_w2_sets(x, sets_of(counts, x), mean, 1.3), z, atol=1e-5)


def test_sets_of_equal_rows_have_no_spread_and_a_finite_gradient():
    z = torch.ones(7, 5, dtype=torch.float32)
    value, grad = both(z, [4, 3], torch.zeros(2, 5), 1.0)[0]
    assert value.tolist() == pytest.approx([10.0, 10.0])  # |m|^2 + tr I
    assert torch.isfinite(grad).all()
    assert torch.allclose(grad[:4], torch.full((4, 5), 2 / 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 33, 100, 500])
def test_rounding_of_the_centre_of_many_equal_rows_is_no_spread(count, dtype):
    torch.manual_seed(0)
    z = (10 * torch.randn(64, dtype=dtype)).repeat(count, 1).requires_grad_(True)
    mean = torch.zeros(1, 64, dtype=dtype)
    (grad,) = torch.autograd.grad(gaussian_w2_sets(z, sets_of([count], z), mean).sum(), z)
    assert torch.allclose(grad, 2 / count * z.detach(), rtol=1e-4)


def test_sets_with_values_below_the_cut_of_the_gradient():
    torch.manual_seed(0)
    scale = torch.cat([torch.logspace(0, -3, 7, dtype=torch.float64), torch.full((5,), 1e-9, dtype=torch.float64)])
    z = torch.cat([torch.randn(n, 12, dtype=torch.float64) * scale for n in (20, 9, 8, 4)])
    (fast, fast_grad), (plain, plain_grad) = both(z, [20, 9, 8, 4], torch.zeros(4, 12).double(), 1.0)
    assert torch.allclose(fast, plain, rtol=1e-8)
    assert torch.allclose(fast_grad, plain_grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("samples", [6, 40])
def test_descent_in_float64_reaches_what_exact_gradients_reach(samples):
    """Features that are 1e-4 of the others grow to the variance 1, the anchor's, as they do with torch's SVD."""
    torch.manual_seed(0)
    start = torch.randn(samples, 8, dtype=torch.float64)
    start[:, 4:] *= 1e-4
    mean, rank, reached = torch.zeros(1, 8, dtype=torch.float64), min(samples - 1, 8), []

    def fast(z):
        return gaussian_w2_sets(z, sets_of([samples], z), mean)[0]

    def exact(z):
        return plain_w2(z, mean[0])

    for loss in (fast, exact):
        z = start.clone().requires_grad_(True)
        for _ in range(60):
            (grad,) = torch.autograd.grad(loss(z), z)
            z = (z - samples / 20 * grad).detach().requires_grad_(True)
        reached.append(float(exact(z.detach())))
    assert reached[0] == pytest.approx(reached[1], abs=1e-6)
    assert reached[0] < 8 - rank + 0.01  # too few samples leave directions without any variance


def test_the_sets_of_several_steps_are_those_of_each_alone():
    torch.manual_seed(0)
    z = [torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (9, 30, 2)]
    counts = [[4, 2, 1], [12, 12, 3, 1, 1], [1]]
    mean = [torch.randn(len(c), 5, dtype=torch.float64) for c in counts]
    begin = [np.cumsum(c) - c for c in counts]
    rows = np.concatenate([np.minimum(b[:, None] + np.arange(12), len(x) - 1) for b, x in zip(begin, z, strict=True)])
    step = np.repeat(np.arange(3), [len(c) for c in counts])
    together = Sets.of(step, rows, np.concatenate(counts), np.array([len(x) for x in z]), z[0])
    for x, c, m, sets in zip(z, counts, mean, together, strict=True):
        found, alone = (gaussian_w2_sets(x, s, m) for s in (sets, sets_of(c, x)))
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)
        grads = (torch.autograd.grad(v.sum(), x)[0] for v in (found, alone))
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [16, 64])
def test_padded_sets_of_equal_rows_decompose(k):
    """Gram matrices of nothing but rounding do not converge in float32; found with these sizes."""
    torch.manual_seed(0)
    for longest in (40, 54, 101, 198):
        counts = list(range(longest, 0, -5))
        z = (100 * torch.randn(1, k)).repeat(sum(counts), 1).requires_grad_(True)
        value = gaussian_w2_sets(z, sets_of(counts, z), torch.zeros(len(counts), k))
        (grad,) = torch.autograd.grad(value.sum(), z)
        assert torch.isfinite(value).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_very_small_and_very_large_samples_have_finite_gradients(scale):
    torch.manual_seed(0)
    counts = [20, 9, 5, 2, 1]
    z = (scale * torch.randn(sum(counts), 16)).requires_grad_(True)
    value = gaussian_w2_sets(z, sets_of(counts, z), torch.zeros(len(counts), 16))
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert torch.isfinite(value).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["identical", "two values", "nearly identical", "spread"])
@pytest.mark.parametrize(("counts", "k"), [((26, 3, 2, 1), 64), ((100, 26, 26), 8)])
def test_float32_is_robust(scale, kind, counts, k):
    torch.manual_seed(0)
    sets = []
    for n in counts:
        x = torch.randn(n, k, dtype=torch.float64)
        if kind == "identical":
            x = x[:1].expand_as(x)
        elif kind == "two values":
            x = torch.where(torch.arange(n)[:, None] % 2 == 0, x[:1], x[1:2] if n > 1 else x[:1])
        elif kind == "nearly identical":
            x = x[:1] + 1e-6 * x
        sets.append(scale * x)
    z, mean = torch.cat(sets), scale * torch.randn(len(counts), k, dtype=torch.float64)
    exact = torch.stack([plain_w2(x, m, scale) for x, m in zip(sets, mean, strict=True)])
    single = z.float().requires_grad_(True)
    found = gaussian_w2_sets(single, sets_of(counts, single), mean.float(), scale)
    found.sum().backward()
    assert bool(torch.isfinite(found).all()) and bool(torch.isfinite(single.grad).all())
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3 * scale**2)
    assert float(single.grad.abs().max()) < 1e2 * scale


@pytest.mark.parametrize("n", [5, 30])
@pytest.mark.parametrize("scale", [1e-4, 1e-6])
def test_a_small_feature_has_its_gradient_in_float64(n, scale):
    """More samples than features, and fewer; the gradient of autograd through the singular values."""
    torch.manual_seed(0)
    z, mean = torch.randn(n, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    z[:, 2] *= scale
    if n == 5:
        z[:, 4:] *= scale  # three large directions and a small one are left
    (_, found), (_, expected) = both(z, [n], mean, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=10 * torch.finfo(z.dtype).eps / scale**2)
