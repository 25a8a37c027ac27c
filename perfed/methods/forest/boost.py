"""Boosting at each site, starting at the score of the other sites' forests."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from perfed.method.declared import FederationInfo
from perfed.method.exchange import Reply
from perfed.method.registry import register
from perfed.methods.forest.boosting import Steps, boost_trees
from perfed.methods.forest.forest import Forest, iterate_rows, make_client_key, stack_forests
from perfed.methods.forest.trees import Recipe, compute_votes
from perfed.training.cohort import Cohort

_DEPTH = 2  # splits from the root to a leaf of a boosting tree
_LEAF = 5  # fewest rows in such a leaf


@register(
    "boost",
    title="Boost",
    differs="features",
    needs="columns with names where sites have different ones",
    example="digits-label-skew rounds=1",
)
class Boost(Forest):
    """Boosting on all columns of a site, starting at the score of the other sites' forests (Friedman 2001).

    Every site sends a forest on the common columns, as ``forest`` does. The weighted and calibrated output of the other
    sites' forests is the score at which the site's boosting starts. Five-fold cross-validation on the site's rows
    selects the number of stages; with 0 stages the site predicts with the score of the others. There is no local
    forest, so that ``own_leaf`` and ``others`` have no effect. For survival data boosting follows the gradient of the
    Cox partial likelihood (Ridgeway 1999).
    """

    stages: int = Field(60, ge=1, le=1000, description="largest number of boosting stages")
    shrinkage: float = Field(0.1, gt=0, le=1, description="factor of each boosting step")

    def own_recipe(self, source: FederationInfo | Cohort, leaf: int) -> Recipe:
        """Return the settings of an empty forest, because there is no local one."""
        return Recipe(1, 2, 1, leaf, None, source.num_classes, source.task == "survival")

    def grow_own(self, cohort: Cohort) -> Reply:
        """Grow nothing, because a site's own trees start at the score of the others."""
        return self.report_loss(cohort)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Weight the other sites' forests, and boost from their score."""
        super().personalise(cohort, **payload)
        samples, arrays = cohort.samples(), []
        start = samples.x.new_zeros(len(samples.y), cohort.num_classes or 1)
        for x, index, valid in cohort.iterate_windows(samples):
            start[index[valid]] = super().predict(cohort, x)[valid]
        survival = cohort.task == "survival"
        scores = start.cpu().double().split(samples.counts.tolist())
        for row, (inputs, y) in enumerate(iterate_rows(cohort)):
            steps = Steps(self.stages, self.shrinkage, _DEPTH, _LEAF, cohort.num_classes, survival)
            arrays.append(boost_trees(inputs, y, scores[row].numpy(), steps, make_client_key(cohort, row, "folds")))
        cohort.scratch["steps"] = stack_forests(arrays, cohort)

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return the score of the other sites' forests plus all boosting steps."""
        start = super().predict(cohort, x)
        if "steps" not in cohort.scratch:
            return start
        return start + compute_votes(cohort.scratch["steps"], x.flatten(2), _DEPTH).sum(1)
