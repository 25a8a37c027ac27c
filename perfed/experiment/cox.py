"""The Cox model of a site alone, in scikit-learn's manner."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from perfed.data.files import optional_package


class Cox(BaseEstimator):  # type: ignore[misc]
    """The maximum of the Cox partial log-likelihood (ties: Efron) less ``n penalizer |b|^2 / 2``.

    ``n`` is the number of samples, ``b`` the coefficients of the columns in units of their standard deviation. Columns
    that are constant have the coefficient 0; without an event, or without any other column, all hazards are the same.

    Args:
        penalizer: how strongly coefficients are held near 0. Without it (lifelines' default) there is no maximum where
            a column tells who has the event first.

    Attributes:
        events_: events among the samples that it was fitted to.

    Raises:
        PerfedError: lifelines is not installed; names the extra.

    Source: Cox 1972; Efron 1977; lifelines' ``CoxPHFitter``.
    """

    def __init__(self, penalizer: float = 0.1) -> None:
        self.penalizer = penalizer
        optional_package("lifelines", "a Cox model", extra="tables")

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> Self:
        """Fit to inputs ``(samples, columns)`` and times and events ``(samples, 2)``.

        Raises:
            ValueError: lifelines finds no maximum.
        """
        pandas = optional_package("pandas", "a Cox model", extra="tables")
        self.events_ = int(np.count_nonzero(y[:, 1]))
        self._varies = np.ptp(x, axis=0) > 0
        self._fitted = None
        if self.events_ and self._varies.any():
            table = pandas.DataFrame(x[:, self._varies].astype(np.float64))
            table = table.rename(columns=str).assign(time=y[:, 0], event=y[:, 1])
            model = optional_package("lifelines", "a Cox model", extra="tables").CoxPHFitter(penalizer=self.penalizer)
            self._fitted = model.fit(table, "time", "event")
        return self

    def predict(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """Return log hazards ``(samples, 1)``, up to a constant."""
        return np.asarray(x.astype(np.float64) @ self.coefficients[:, None])

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """Of the columns as they are given, ``(columns,)``."""
        found = np.zeros(len(self._varies))
        if self._fitted is not None:
            found[self._varies] = self._fitted.params_.to_numpy()
        return found
