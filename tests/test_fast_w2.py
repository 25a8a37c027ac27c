"""The form for training equals the plain one, set by set, in value and gradient."""

import numpy as np
import pytest
import torch

from perfed.divergence import gaussian_w2
from perfed.fast_w2 import Sets, gaussian_w2_sets


def both(z, counts, mean, std):
    """(values, gradients) of the fast form and of the plain one, the sets being consecutive rows of ``z``."""
    counts = np.array(counts)
    begin = np.cumsum(counts) - counts
    rows = np.where(np.arange(counts.max()) < counts[:, None], begin[:, None] + np.arange(counts.max()), 0)
    used = np.arange(len(z)) < counts.sum()
    found = []
    for fast in (True, False):
        x = z.clone().requires_grad_(True)
        if fast:
            value = gaussian_w2_sets(x, Sets.of(rows, counts, used, z), mean, std)
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
