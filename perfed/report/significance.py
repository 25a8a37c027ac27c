"""How likely differences as large would be by chance alone: paired tests, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]


def paired_p(differences: NDArray[np.float64]) -> float | None:
    """Two-sided p-value of Wilcoxon's signed-rank test over clients; None where fewer than two have a difference.

    Each client's differences ``(seeds, clients)`` are averaged over the seeds, so that a client counts once.
    """
    there = np.isfinite(differences)
    means = np.where(there, differences, 0.0).sum(0)[there.any(0)] / there.sum(0)[there.any(0)]
    if len(means) < 2:
        return None
    if not means.any():
        return 1.0
    return float(stats.wilcoxon(means, zero_method="pratt", method="approx").pvalue)


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
