"""How often a site keeps its own model although its blend is as good, by simulation.

``python benchmarks/guard.py`` (four minutes on one core) prints the table of docs/results.md. A site has 40 held-out
rows and 1, 3 or 6 models of its own. The squared errors of its best own model and of the blend are exchangeable; those
of the other own models are as large, or larger. Keeping the best own model is then a mistake, which the guard may make
at 10 % of sites. The last row of each kind of error is the share of sites that keep an own model that errs 30 % less.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from usage import usage

from perfed.maths.blending import Values, guard_weights

Numbers = NDArray[np.float64]
ROWS, DRAWS = 40, 2000
MODELS = (1, 3, 6)
ERRORS: dict[str, Callable[[np.random.Generator, int], Numbers]] = {
    "normal": lambda generator, k: generator.normal(size=(ROWS, k)),
    "t with 3 degrees of freedom": lambda generator, k: generator.standard_t(3, size=(ROWS, k)),
    "normal, correlation 0.8": lambda generator, k: (
        2 * generator.normal(size=(ROWS, 1)) + generator.normal(size=(ROWS, k))
    ),
}
OTHERS = {"as good": (1.0, 1.0), "20 % larger errors": (1.0, 1.2), "twice the errors": (1.0, 2.0)}
BETTER = {"the best errs 30 % less": (0.7, 1.0)}


def keeps_own_model(errors: Numbers) -> bool:
    """Return whether the guard keeps an own model, for errors of the blend (first column) and of the own models."""
    blend, models = errors[:, 0], errors[:, 1:]
    weights = np.full(errors.shape[1], 1 / errors.shape[1])
    last = (blend - models @ weights[1:]) / weights[-1]  # a federated candidate with which the blend errs as drawn
    rows = Values(np.column_stack([models, last]), np.zeros(ROWS), np.arange(ROWS) % 5)
    return guard_weights(rows, weights, range(models.shape[1])) is not weights


def share_of_sites(
    draw: Callable[[np.random.Generator, int], Numbers], models: int, scales: tuple[float, float]
) -> float:
    """Return the share of sites that keep an own model.

    Args:
        draw: errors of the blend and of the own models.
        models: number of own models.
        scales: factors of the errors of the first own model and of the others.
    """
    generator, false_alarms = np.random.default_rng(models), 0
    for _ in range(DRAWS):
        errors = draw(generator, 1 + models)
        errors[:, 1] *= scales[0]
        errors[:, 2:] *= scales[1]
        false_alarms += keeps_own_model(errors)
    return false_alarms / DRAWS


def main() -> None:
    """Print the table."""
    print("| errors | other own models | " + " | ".join(f"{m} own" for m in MODELS) + " |")
    print("| --- | --- |" + " --- |" * len(MODELS))
    for errors, draw in ERRORS.items():
        for other_models, scales in {**OTHERS, **BETTER}.items():
            shares = [f"{100 * share_of_sites(draw, models, scales):.1f} %" for models in MODELS]
            print(f"| {errors} | {other_models} | " + " | ".join(shares) + " |", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
