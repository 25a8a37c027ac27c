"""The Gaussian mechanism in closed form: what accounting is compared with."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm


def closed_form(squares: float, delta: float) -> float:
    """Epsilon of Gaussian mechanisms whose 1 / noise^2 sum to ``squares``, by theorem 8 of Balle and Wang (2018)."""
    mu = squares**0.5
    excess = lambda e: norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta  # noqa: E731
    return float(brentq(excess, 0.0, 200.0))
