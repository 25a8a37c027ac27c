"""Hessians of linear heads, and second-order aggregation with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from perfed.errors import PerfedError
from perfed.methods.feddar.heads import softmax_hessian, squared_error_hessian, with_ones
from perfed.methods.feddar.second_order import Quadratics, add_quadratics, minimise_quadratics

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# Hessians ----------------------------------------------------------------------------------------------------


def test_hessians_are_those_of_autograd():
    x, groups = draw(13, 3), torch.tensor([0] * 5 + [2] * 8)
    features = with_ones(x)
    y = torch.arange(13) % 4
    weights = draw(4, 4, seed=1)
    softmax = softmax_hessian(features, features @ weights.T, groups, 3)
    squared = squared_error_hessian(features, groups, 3, outputs=4)
    targets = draw(13, 4, seed=2)
    for group in (0, 2):
        mine = groups == group

        def loss(w, mine=mine):
            return F.cross_entropy(features[mine] @ w.view(4, 4).T, y[mine])

        def error(w, mine=mine):
            return (features[mine] @ w.view(4, 4).T - targets[mine]).square().mean(1).mean()

        expected = torch.autograd.functional.hessian(loss, weights.flatten())
        torch.testing.assert_close(softmax[group], expected)
        block = torch.autograd.functional.hessian(error, weights.flatten()).view(4, 4, 4, 4)
        for output in range(4):
            torch.testing.assert_close(squared[group], block[output, :, output])
    assert (softmax[1] == 0).all() and (squared[1] == 0).all()


def test_a_softmax_over_two_classes_is_the_logistic_hessian_in_the_difference():
    features, w = with_ones(draw(20, 2)), draw(2, 3, seed=1)
    logits = features @ w.T
    mu = torch.sigmoid(logits[:, 1] - logits[:, 0])
    logistic = features.T @ ((mu * (1 - mu))[:, None] * features) / 20
    found = softmax_hessian(features, logits, torch.zeros(20, dtype=torch.long), 1)[0]
    torch.testing.assert_close(found[3:, 3:], logistic)
    torch.testing.assert_close(found[:3, 3:], -logistic)


# Aggregation -------------------------------------------------------------------------------------------------


def second_order_mean(old, local, hessians, counts, *, damping=0.0) -> torch.Tensor:
    """Return the minimiser for one entry, after folding the clients' rows."""
    total: Quadratics | None = None
    for w, hessian, count in zip(local, hessians, counts, strict=True):
        total = add_quadratics(total, (w - old)[None], hessian[None], count[None])
    assert total is not None
    return minimise_quadratics(total, old[None], damping=damping)[0]


def solved(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = with_ones(draw(rows, 3, seed=seed))
    return x, x @ draw(4, 1, seed=99) + 0.3 * draw(rows, 1, seed=seed + 50)


def test_exact_local_solutions_give_the_pooled_least_squares():
    data = [solved(rows, seed) for seed, rows in enumerate((7, 12, 30))]
    local = torch.stack([torch.linalg.lstsq(x, y).solution for x, y in data])
    hessians = torch.stack([2 * x.T @ x / len(x) for x, _ in data])
    counts = torch.tensor([7.0, 12.0, 30.0])
    pooled = torch.linalg.lstsq(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])).solution
    torch.testing.assert_close(second_order_mean(draw(4, 1, seed=7), local, hessians, counts), pooled)


def test_one_local_newton_step_gives_the_pooled_newton_step():
    """Logistic regression as a softmax over two classes, Hessians at the received head."""
    x = [with_ones(draw(n, 2, seed=n)) for n in (9, 21)]
    y = [torch.arange(len(part)) % 2 for part in x]
    old = 0.3 * draw(2, 3, seed=5)

    def newton(features, labels, counts):
        leaf = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(features @ leaf.T, labels), leaf)
        hessian = softmax_hessian(features, features @ old.T, torch.zeros(len(labels), dtype=torch.long), 1)[0]
        return hessian, old.flatten() - torch.linalg.pinv(hessian, hermitian=True) @ gradient.flatten()

    steps = [newton(a, b, None) for a, b in zip(x, y, strict=True)]
    _, pooled = newton(torch.cat(x), torch.cat(y), None)
    found = second_order_mean(
        old.view(6, 1),
        torch.stack([w.view(6, 1) for _, w in steps]),
        torch.stack([h for h, _ in steps]),
        torch.tensor([9.0, 21.0]),
    )
    torch.testing.assert_close(found.flatten(), pooled)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_direction_that_no_client_saw_keeps_its_old_value(damping):
    x = draw(2, 6, 3) * torch.tensor([1.0, 1.0, 0.0], dtype=F64)
    hessians = x.transpose(1, 2) @ x / 6
    old = draw(3, 2, seed=3)
    new = second_order_mean(old, draw(2, 3, 2, seed=4), hessians, torch.tensor([1.0, 2.0]), damping=damping)
    torch.testing.assert_close(new[2], old[2])
    assert not torch.allclose(new[:2], old[:2])


@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
def test_equal_heads_stay_as_they_are(damping):
    root, old = draw(4, 5, 5), draw(5, 1)
    hessians = root.transpose(1, 2) @ root
    new = second_order_mean(old, old.expand(4, 5, 1), hessians, torch.arange(4.0), damping=damping)
    torch.testing.assert_close(new, old)


@pytest.mark.parametrize("scale", [1e-3, 40.0])
@pytest.mark.parametrize("damping", [0.0, 1e-2, 0.5])
def test_the_unit_of_the_features_does_not_matter(damping, scale):
    """Features c times as large and heads 1 / c of theirs say the same, and so do their aggregates."""
    x, old = with_ones(draw(20, 3)), draw(4, 1, seed=1)
    local, counts, groups = draw(3, 4, 1, seed=2), torch.tensor([5.0, 8.0, 7.0]), torch.arange(20) % 3
    one = squared_error_hessian(x, groups, 3)
    other = squared_error_hessian(scale * x, groups, 3)
    new = second_order_mean(old, local, one, counts, damping=damping)
    found = second_order_mean(old / scale, local / scale, other, counts, damping=damping)
    torch.testing.assert_close(scale * found, new)
    # and the unit of the loss: sums of squares in place of their mean
    torch.testing.assert_close(second_order_mean(old, local, 20 * one, counts, damping=damping), new)
    logits = x @ draw(4, 2, seed=3)
    one, other = (softmax_hessian(c * x, logits, groups, 3) for c in (1.0, scale))
    old, local = draw(8, 1, seed=4), draw(3, 8, 1, seed=5)
    new = second_order_mean(old, local, one, counts, damping=damping)
    found = second_order_mean(old / scale, local / scale, other, counts, damping=damping)
    torch.testing.assert_close(scale * found, new)


def test_damping_is_in_units_of_the_mean_curvature():
    """By the eigenvalues h of the summed Hessian: a share h / (h + damping mean h) of the way that is left."""
    root, old, moved = draw(6, 6), draw(6, 1, seed=1), draw(6, 1, seed=2)
    hessian = root.T @ root
    values, vectors = torch.linalg.eigh(hessian)
    share = values / (values + 0.3 * values.mean())
    expected = old + vectors @ (share[:, None] * (vectors.T @ moved))
    counts = torch.tensor([2.0, 5.0])
    found = second_order_mean(old, (old + moved).expand(2, 6, 1), hessian.expand(2, 6, 6), counts, damping=0.3)
    torch.testing.assert_close(found, expected)
    flat = second_order_mean(old, (old + moved).expand(2, 6, 1), torch.zeros(2, 6, 6).double(), counts, damping=0.3)
    assert torch.equal(flat, old)  # no curvature anywhere, no reason to move


def test_with_equal_hessians_it_is_the_weighted_mean_and_without_samples_the_old_head():
    root = draw(5, 5)
    hessians = (root.T @ root).expand(3, 5, 5)
    local, counts = draw(3, 5, 1), torch.tensor([1.0, 0.0, 3.0])
    expected = (local[0] + 3 * local[2]) / 4
    torch.testing.assert_close(second_order_mean(draw(5, 1, seed=8), local, hessians, counts), expected)
    old = draw(5, 1)
    assert torch.equal(second_order_mean(old, local, hessians, torch.zeros(3)), old)


def test_a_certain_softmax_keeps_its_curvature():
    """Curvature p (1 - p) far below the rounding of p."""
    features, gaps = with_ones(draw(6, 2)), torch.tensor([30.0, 35, 40, 45, 50, 60], dtype=F64)
    logits = torch.stack([gaps, torch.zeros_like(gaps)], dim=1)
    curvature = torch.exp(-gaps) / (1 + torch.exp(-gaps)) ** 2
    expected = features.T @ (curvature[:, None] * features) / 6
    found = softmax_hessian(features, logits, torch.zeros(6, dtype=torch.long), 1)[0]
    torch.testing.assert_close(found[:3, :3], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[:3, :3], -found[:3, 3:], rtol=1e-12, atol=0)


def test_sums_that_cannot_be_solved_are_errors():
    x = draw(1, 2, 6) * 1e6  # rank 2 of 6
    hessian, moved = x.transpose(1, 2) @ x, draw(1, 6, 1, seed=1)
    total = add_quadratics(None, moved, hessian, torch.ones(1))
    with pytest.raises(
        PerfedError, match=r"damping = 1e-20 \(times .*\) is lost in rounding .* domain 0; .* or 0 \(pseudo-inverse\)"
    ):
        minimise_quadratics(total, draw(1, 6, 1), damping=1e-20)
    total = add_quadratics(None, moved, hessian / 0, torch.ones(1))
    with pytest.raises(PerfedError, match="the Hessians of domain 0 or their heads are not finite"):
        minimise_quadratics(total, draw(1, 6, 1))
