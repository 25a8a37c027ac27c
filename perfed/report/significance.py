"""How likely differences as large would be by chance alone: paired tests, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

EXACT = 50
"""Up to so many clients with a difference the p-value is exact; beyond, the normal approximation is."""


def paired_p(differences: NDArray[np.float64]) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test over clients; None where fewer than two have one.

    Each client's differences ``(seeds, clients)`` are averaged over the seeds, so that a client counts once. Clients
    without a difference have a rank and no sign (Pratt 1959). Up to :data:`EXACT` clients all signs are counted, ties
    and zeros included: five clients that all gain have 2 / 2^5 = .0625, so that fewer than six are never significant.
    """
    there = np.isfinite(differences)
    means = np.where(there, differences, 0.0).sum(0)[there.any(0)] / there.sum(0)[there.any(0)]
    if len(means) < 2:
        return None
    means = means.round(12)  # differences that only rounding tells apart are ties
    if not means.any():
        return 1.0
    if len(means) > EXACT:
        return float(stats.wilcoxon(means, zero_method="pratt", method="approx").pvalue)
    return _exact_p(means)


def _exact_p(means: NDArray[np.float64]) -> float:
    """Share of all sign patterns whose rank sum lies as far from the middle as that of ``means``."""
    twice = np.rint(2 * stats.rankdata(abs(means))).astype(int)[means != 0]  # whole numbers, also of ties
    likely = np.ones(1)  # of each twice the sum of the positive ranks
    for rank in twice:
        likely = (np.pad(likely, (0, rank)) + np.pad(likely, (rank, 0))) / 2
    middle = twice.sum() / 2
    far = abs(np.arange(len(likely)) - middle) >= abs(twice[means[means != 0] > 0].sum() - middle)
    return min(1.0, float(likely[far].sum()))


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The p-values made larger so that all of them can be read at once (Holm 1979); None stays None.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
        {'a': 0.03, 'b': 0.06, 'c': 0.06, 'd': None}
    """
    known = sorted((p, name) for name, p in p_values.items() if p is not None)
    found: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for place, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        found[name] = largest
    return found
