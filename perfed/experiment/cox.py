"""The Cox model of a single site, with scikit-learn's interface."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from perfed.data.files import optional_package


class Cox(BaseEstimator):  # type: ignore[misc]
    """A Cox model, which maximises the partial log-likelihood (ties: Efron) minus ``n penalizer |b|^2 / 2``.

    ``n`` is the number of samples, and ``b`` are the coefficients of the columns in units of their standard deviation.
    Constant columns have the coefficient 0. If there is no event or all columns are constant, all hazards are equal.

    Args:
        penalizer: the strength of the L2 penalty on the coefficients. With 0, the default of lifelines, there is no
            maximum if a column determines the order of the events.

    Attributes:
        events_: the number of events among the training samples.

    Raises:
        PerfedError: lifelines is not installed; the message names the extra.

    Source: Cox 1972; Efron 1977; lifelines' ``CoxPHFitter``.
    """

    def __init__(self, penalizer: float = 0.1) -> None:
        self.penalizer = penalizer
        optional_package("lifelines", "a Cox model", extra="tables")

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> Self:
        """Fit the model to inputs ``(samples, columns)`` and to times and events ``(samples, 2)``.

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
        """Return the log hazards ``(samples, 1)``, up to a constant."""
        return np.asarray(x.astype(np.float64) @ self.coefficients[:, None])

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """The coefficients of the unscaled columns, ``(columns,)``."""
        coefficients = np.zeros(len(self._varies))
        if self._fitted is not None:
            coefficients[self._varies] = self._fitted.params_.to_numpy()
        return coefficients
