"""Boosting at each site from the score of the others' forests."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from perfed.method.declared import FederationInfo
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.forest.boosting import Steps, boosted
from perfed.methods.forest.forest import Forest, key_of, rows_of, stacked
from perfed.methods.forest.trees import Recipe, votes
from perfed.training.cohort import Cohort

_DEPTH = 2  # splits from the root to a leaf of a tree of boosting
_LEAF = 5  # fewest rows in such a leaf


@register(
    "boost",
    title="Boost",
    differs="features",
    needs="columns with names where sites have different ones",
    example="digits-label-skew rounds=1",
)
class Boost(Forest):
    """Small trees of a site's own on all its columns, which begin where the others' forests end (Friedman 2001).

    Every site sends a forest on the columns in common, as ``forest`` does. What the others' forests say together,
    weighed and moved by the site's own line, is the score at which its boosting starts. Five folds of the site's rows
    say how many stages it has, perhaps none: then it predicts with the others' score. There is no own forest, so that
    ``own_leaf`` and ``others`` do not count. Of survival its steps are against the gradient of the Cox partial
    likelihood (Ridgeway 1999).
    """

    stages: int = Field(60, ge=1, le=1000, description="most stages of boosting")
    shrinkage: float = Field(0.1, gt=0, le=1, description="what each step of boosting is multiplied by")

    def own_recipe(self, of: FederationInfo | Cohort, leaf: int) -> Recipe:
        """Return that there is no own forest."""
        return Recipe(1, 2, 1, leaf, None, of.num_classes, of.task == "survival")

    def grow_own(self, cohort: Cohort) -> Reply:
        """Grow nothing: a site's own trees begin at the others' score."""
        return self.rest(cohort)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Weigh the others' forests, and boost from their score."""
        super().personalise(cohort, **payload)
        samples, found = cohort.samples(), []
        start = samples.x.new_zeros(len(samples.y), cohort.num_classes or 1)
        for x, index, valid in cohort.iterate_windows(samples):
            start[index[valid]] = super().predict(cohort, x)[valid]
        survival = cohort.task == "survival"
        scores = start.cpu().double().split(samples.counts.tolist())
        for row, (inputs, y) in enumerate(rows_of(cohort)):
            steps = Steps(self.stages, self.shrinkage, _DEPTH, _LEAF, cohort.num_classes, survival)
            found.append(boosted(inputs, y, scores[row].numpy(), steps, key_of(cohort, row, "folds")))
        cohort.scratch["steps"] = stacked(found, cohort)

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the others' score and all steps from there."""
        start = super().predict(cohort, x)
        if "steps" not in cohort.scratch:
            return start
        return start + votes(cohort.scratch["steps"], x.flatten(2), _DEPTH).sum(1)
