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


def by_quadprog(p, q):
    """The method of Goldfarb and Idnani, for positive definite P."""
    constraints = np.concatenate([np.ones((len(p), 1)), np.eye(len(p))], axis=1)
    return quadprog.solve_qp(2 * p, -q, constraints, np.eye(len(p) + 1)[0], 1)[0]


def by_trying_all(p, q):
    """Least objective of the minimisers on the planes of all sets of variables that are in the simplex."""
    m, found = len(p), [p.diagonal().min() + 10]
    for bits in range(1, 2**m):
        s = [i for i in range(m) if bits >> i & 1]
        left = np.block([[2 * p[np.ix_(s, s)], np.ones((len(s), 1))], [np.ones((1, len(s))), np.zeros((1, 1))]])
        a = np.zeros(m)
        a[s] = np.linalg.lstsq(left, np.append(-q[s], 1.0), rcond=None)[0][:-1]
        if (a > -1e-13).all() and abs(a.sum() - 1) < 1e-12:
            found.append(objective(p, q, a))
    return min(found)


def duality_gap(p, q, a):
    gradient = 2 * p @ a + q
    return gradient @ a - gradient.min()


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_the_gap_is_below_3e_12_of_singular_problems_too(first):
    for seed in range(first, first + 50):
        p, q = random_problem(seed)
        a = simplex_qp(p, q)
        assert duality_gap(p, q, a) < 3e-12 and a.tobytes() == simplex_qp(p, q).tobytes()


@pytest.mark.parametrize("m", [3, 20, 100])
def test_simplex_qp_is_quadprogs_where_that_can_solve_it(m):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(m, m)) + rng.normal()
        p, q = root.T @ root / m + 0.01 * np.eye(m), rng.normal(size=m) * (seed % 2)
        np.testing.assert_allclose(simplex_qp(p, q), by_quadprog(p, q), atol=1e-10)


@pytest.mark.parametrize("seed", range(30))
def test_no_set_of_variables_is_better(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 7))
    root = rng.normal(size=(int(rng.integers(1, m + 2)), m))
    p, q = root.T @ root, rng.normal(size=m) * (seed % 2)
    assert abs(objective(p, q, simplex_qp(p, q)) - by_trying_all(p, q)) < 1e-11


def by_dropping_alone(p):
    """The minimiser on the plane ``sum a = 1``, without the variables that it makes negative, until none is."""
    chosen, a = np.arange(len(p)), np.zeros(len(p))
    while True:
        found = np.linalg.solve(p[np.ix_(chosen, chosen)], np.ones(len(chosen)))
        found /= found.sum()
        if (found > 0).all():
            a[chosen] = found
            return a
        chosen = chosen[found > 0]


def test_where_one_variable_too_many_was_dropped_the_result_is_cvxpys_too():
    """Then the gradient says so, and the variable comes back."""
    helped = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(12, 12))
        p, q = root.T @ root / 20, np.zeros(12)
        if duality_gap(p, q, by_dropping_alone(p)) > 1e-6 and helped < 10:
            helped += 1
            a = simplex_qp(p)
            np.testing.assert_allclose(a, reference(p, q), atol=1e-5)
            np.testing.assert_allclose(a, by_quadprog(p, q), atol=1e-10)
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
