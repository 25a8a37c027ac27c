from __future__ import annotations

import numpy as np
import pytest
import quadprog
from quadratic import reference

from perfed.errors import PerfedError
from perfed.maths.simplex import simplex_qp


def objective(p, q, a):
    return a @ p @ a + q @ a


def random_problem(seed):
    """Of full or lower rank, with and without a linear part, some with repeated variables."""
    rng = np.random.default_rng(seed)
    m = int(rng.integers(2, 25))
    root = rng.normal(size=(int(rng.integers(1, m + 3)), m)) + rng.normal()
    if seed % 4 == 0:
        root = root[:, rng.integers(0, m, m)]
    p = root.T @ root
    p /= np.abs(p).max()
    return p, rng.uniform(-1, 1, m) * (seed % 2)


@pytest.mark.parametrize("seed", range(60))
def test_simplex_qp_is_as_good_as_cvxpy_at_any_scale(seed):
    p, q = random_problem(seed)
    expected = objective(p, q, reference(p, q))
    scale = 10.0 ** np.random.default_rng(1000 + seed).integers(-12, 13)
    a = simplex_qp(p * scale, q * scale)
    assert (a >= 0).all() and abs(a.sum() - 1) < 1e-12
    assert abs(objective(p, q, a) - expected) <= 1e-8


def test_where_quadprog_has_to_help_the_result_is_cvxpys_too(monkeypatch):
    """Dropping variables can drop one too many; then the gradient says so and quadprog takes over."""
    calls, real = [], quadprog.solve_qp
    monkeypatch.setattr(quadprog, "solve_qp", lambda *given: calls.append(1) or real(*given))
    helped = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(12, 12))
        p = root.T @ root / 20
        before = len(calls)
        a = simplex_qp(p)
        if len(calls) > before and helped < 10:
            helped += 1
            np.testing.assert_allclose(a, reference(p, np.zeros(12)), atol=1e-5)
    assert helped == 10


def test_a_diagonal_matrix_gives_inverse_weights_and_zero_gives_equal_ones():
    np.testing.assert_allclose(simplex_qp(np.diag([1.0, 2.0, 4.0])), np.array([4, 2, 1]) / 7, rtol=1e-12)
    for scale in (1e-300, 1e300):
        np.testing.assert_allclose(simplex_qp(np.diag([1.0, 3.0]) * scale), [0.75, 0.25], rtol=1e-12)
    np.testing.assert_allclose(simplex_qp(np.zeros((4, 4))), np.full(4, 0.25), rtol=1e-12)
    np.testing.assert_allclose(simplex_qp(np.zeros((3, 3)), [5.0, -2.0, 1.0]), [0, 1, 0], atol=1e-8)
    assert simplex_qp([[0.0]]).tolist() == [1.0] and simplex_qp([[-0.0]], [-3.0]).tolist() == [1.0]


@pytest.mark.parametrize("seed", range(10))
def test_the_ridge_of_a_singular_matrix_leaves_no_trace(seed):
    root = np.random.default_rng(seed).normal(size=(5, 20))
    p = root.T @ root / 20
    a = simplex_qp(p)
    assert 2 * (a @ p @ a - (p @ a).min()) <= 1e-12


def test_a_constant_added_to_the_linear_part_changes_nothing():
    p, q = random_problem(7)
    np.testing.assert_allclose(simplex_qp(p + np.eye(len(p)), q), simplex_qp(p + np.eye(len(p)), q + 3), atol=1e-12)


@pytest.mark.parametrize(
    ("matrix", "linear", "message"),
    [
        ([[np.nan, 0], [0, 1]], None, "finite"),
        ([[1, 0], [0, 1]], [0, np.inf], "finite"),
        ([[1, 0], [0, -1]], None, "not positive semi-definite"),
        ([[1, 2], [0, 1]], None, "symmetric"),
        ([[1, 2]], None, "square"),
        (np.zeros((0, 0)), None, "square"),
        ([[1, 0], [0, 1]], [0], r"shape \(2,\)"),
    ],
)
def test_what_cannot_be_solved_is_refused(matrix, linear, message):
    with pytest.raises(PerfedError, match=message):
        simplex_qp(np.asarray(matrix, float), linear)


# ---- combination_weights
