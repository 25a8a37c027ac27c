"""Quadratic programmes on the simplex by another library."""

from __future__ import annotations

import cvxpy
import numpy as np


def reference(p, q):
    """cvxpy's solution; p and q are near 1."""
    a = cvxpy.Variable(len(p))
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.quad_form(a, cvxpy.psd_wrap(p)) + q @ a), [a >= 0, cvxpy.sum(a) == 1])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    found = np.clip(a.value, 0, None)
    return found / found.sum()
