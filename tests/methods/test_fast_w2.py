"""The form for training equals the plain one, set by set, in value and gradient."""

import numpy as np
import pytest
import torch

from perfed.maths.divergence import gaussian_w2
from perfed.methods.flic.fast_w2 import Sets, gaussian_w2_sets


def sets_of(counts, z):
    """Consecutive rows of ``z`` as sets; the last rows belong to none."""
    counts = np.array(counts)
    begin = np.cumsum(counts) - counts
    rows = np.where(np.arange(counts.max()) < counts[:, None], begin[:, None] + np.arange(counts.max()), 0)
    return Sets.of(np.zeros_like(counts), rows, counts, np.array([len(z)]), z)[0]


def both(z, counts, mean, std):
    """(values, gradients) of the fast form and of the plain one, the sets being consecutive rows of ``z``."""
    counts = np.array(counts)
    begin = np.cumsum(counts) - counts
    found = []
    for fast in (True, False):
        x = z.clone().requires_grad_(True)
        if fast:
            value = gaussian_w2_sets(x, sets_of(counts, z), mean, std)
        else:
            value = torch.cat(
                [
                    gaussian_w2(x[b : b + n].unsqueeze(0), [int(n)], mean[i : i + 1], std)
                    for i, (b, n) in enumerate(zip(begin, counts, strict=True))
                ]
            )
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
        centred = z - z.mean(0)
        cross = torch.linalg.svdvals(centred)[:rank].sum() / (samples - 1) ** 0.5
        return z.mean(0).square().sum() + centred.square().sum() / (samples - 1) + 8 - 2 * cross

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
