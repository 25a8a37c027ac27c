"""Decision trees as arrays: grown by scikit-learn, checked where they arrive, applied by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng
from perfed.errors import PerfedError
from perfed.maths.thresholds import distinct_values, place_between, separate_values
from perfed.methods.forest.hazards import rates, relative_risk

Arrays = Mapping[str, Tensor]
"""``feature``, ``left``, ``right`` int32 ``(..., trees, nodes)``, ``threshold`` of the same shape, ``value`` ``(...,
trees, nodes, C)``. Node 0 is the root; a row goes left where ``x[feature] <= threshold``; a leaf leads to itself."""

_HELD_BYTES = 64 << 20  # of what rows at a time may need


@dataclass(frozen=True)
class Recipe:
    """How trees are grown.

    Attributes:
        trees: how many.
        leaves, depth: at most, of a tree.
        smallest: fewest rows in a leaf, different ones of the tree's sample.
        bins: of each column, so that a threshold lies between the means of two neighbouring bins of at least
            ``smallest`` rows each; ``None``: thresholds lie between two values.
        outputs: C classes; ``None`` for values, and for risks.
        survival: whether leaves say relative risks.
    """

    trees: int
    leaves: int
    depth: int
    smallest: int
    bins: int | None
    outputs: int | None
    survival: bool = False

    @property
    def nodes(self) -> int:
        """Most nodes of a tree."""
        return 2 * self.leaves - 1


def no_trees(recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return trees of one leaf that say nothing: the arrays before any is grown."""
    at, width = torch.arange(recipe.nodes, dtype=torch.int32).repeat(recipe.trees, 1), recipe.outputs or 1
    zeros = torch.zeros(recipe.trees, recipe.nodes, dtype=dtype)
    nothing = 0.0 if recipe.outputs is None and not recipe.survival else 1.0 / width
    value = zeros[..., None].repeat(1, 1, width) + nothing
    return {"feature": torch.zeros_like(at), "left": at, "right": at.clone(), "threshold": zeros, "value": value}


# Growing -------------------------------------------------------------------------------------------------------


def drawn(key: Tensor, trees: int, rows: int) -> NDArray[np.int64]:
    """Return how often each of ``rows`` rows is in each tree's bootstrap sample, ``(trees, rows)``."""
    keys = rng.key(key, "sample", torch.arange(trees))
    at = (rng.uniform(keys, rows, torch.float64) * rows).long().clamp_(max=rows - 1)
    counts = torch.zeros(trees, rows, dtype=torch.int64)
    return counts.scatter_add_(1, at, torch.ones_like(at)).numpy()


def cuts(column: NDArray[Any], smallest: int, bins: int) -> NDArray[Any]:
    """Return the thresholds ``(k,)``, ascending, that a tree may have in a column ``(rows,)``; as :class:`Recipe` says.

    Groups of rows with the same value count as one: a threshold at their mean would be that value.

    Example:
        >>> cuts(np.array([1.0, 2.0, 4.0, 8.0]), 1, 9).round(3).tolist()
        [1.618, 3.236, 6.472]
        >>> cuts(np.array([1.0, 2.0, 4.0, 8.0]), 2, 9).round(3).tolist()
        [4.281]
    """
    groups = max(1, min(bins, len(column) // smallest))
    parts = np.array_split(np.sort(column).astype(np.float64), groups)
    means = np.unique(np.array([part.mean() for part in parts], np.float32)).astype(np.float64)
    return place_between(means[:-1], means[1:]).astype(column.dtype)


def grown(x: NDArray[Any], y: NDArray[Any], recipe: Recipe, key: Tensor) -> dict[str, Tensor]:
    """Grow a random forest, each tree on a bootstrap sample (:func:`drawn`), a few columns tried at every split.

    A split tries the square root of the number of columns, of values a third of them. Of survival a tree's sample
    needs an event, and so does each leaf: a sample without one grows nothing. With bins, columns are tried by
    how many of their :func:`cuts` each value is above.

    Args:
        x: ``(rows, columns)``.
        y: ``(rows,)`` labels or values, or ``(rows, 2)`` times and events.
        recipe: of the trees.
        key: of everything random.

    Returns:
        :data:`Arrays` of ``trees`` trees, floats in the type of ``x``; ``value`` is the share of each class, or the
        mean, or the risk relative to all rows (:func:`~perfed.methods.forest.hazards.relative_risk`).

    Source: Breiman 2001, Machine Learning 45; scikit-learn's ``RandomForestClassifier``; of survival LeBlanc and
    Crowley 1992, Ishwaran et al. 2008.
    """
    places, inputs, values = [], x, distinct_values(x)
    if recipe.bins is not None:
        places = [cuts(column, recipe.smallest, recipe.bins) for column in x.T]
        inputs = np.stack([np.searchsorted(at, column) for at, column in zip(places, x.T, strict=True)], 1)
    seeds = (rng.key(key, "splits", torch.arange(recipe.trees)) & 0x7FFFFFFF).tolist()
    found = no_trees(recipe, torch.from_numpy(x[:0]).dtype)
    samples = drawn(key, recipe.trees, len(x))
    target, weight = rates(y) if recipe.survival else (y, np.ones(len(x)))
    for row, (seed, counts) in enumerate(zip(seeds, samples, strict=True)):
        if recipe.survival and not counts @ y[:, 1]:
            continue
        fitted = _fitted(recipe, seed).fit(inputs, target, sample_weight=counts * weight)
        tree, value = fitted.tree_, fitted.tree_.value[:, 0, :]
        if recipe.survival:
            value = relative_risk(value, tree.weighted_n_node_samples[:, None])
        if recipe.outputs is not None:
            value = (value / value.sum(1, keepdims=True)) @ np.eye(recipe.outputs)[fitted.classes_]
        if not places:
            separate_values(tree, values)
        threshold = _of_ranks(tree, places) if places else tree.threshold
        write({name: array[row] for name, array in found.items()}, tree, threshold, value)
    return found


def _of_ranks(tree: Any, places: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Thresholds ``(nodes,)`` of a tree that was grown on ranks."""
    found = np.zeros(tree.node_count)
    for node in np.flatnonzero(tree.children_left >= 0):
        found[node] = places[tree.feature[node]][int(tree.threshold[node])]
    return found


def _fitted(recipe: Recipe, seed: int) -> Any:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    limits = {"max_leaf_nodes": recipe.leaves, "max_depth": recipe.depth, "min_samples_leaf": recipe.smallest}
    if recipe.survival:
        return DecisionTreeRegressor(criterion="poisson", max_features="sqrt", random_state=seed, **limits)
    if recipe.outputs is None:
        return DecisionTreeRegressor(max_features=1 / 3, random_state=seed, **limits)
    return DecisionTreeClassifier(max_features="sqrt", random_state=seed, **limits)


def write(into: Mapping[str, Tensor], tree: Any, threshold: NDArray[Any], value: NDArray[Any]) -> None:
    """Put a tree of scikit-learn's into one row of :data:`Arrays`.

    Args:
        into: arrays ``(nodes, ...)`` of a single leaf.
        tree: ``tree_`` of what was fitted.
        threshold: ``(nodes,)``; that of a leaf does not matter.
        value: ``(nodes, C)``, what each node says.
    """
    inner = np.flatnonzero(tree.children_left >= 0)
    parts = {"feature": tree.feature, "left": tree.children_left, "right": tree.children_right, "threshold": threshold}
    for name, array in parts.items():
        into[name][inner] = torch.from_numpy(array[inner]).to(into[name].dtype)
    into["value"][: len(value)] = torch.from_numpy(value).to(into["value"].dtype)


# Checking ------------------------------------------------------------------------------------------------------


def check(trees: Arrays, columns: int, recipe: Recipe, whose: Callable[[int], str]) -> None:
    """Refuse arrays ``(forests, trees, nodes)`` that are no trees on ``columns`` columns.

    Args:
        trees: as they arrived.
        columns: how many there are.
        recipe: by which they should be grown.
        whose: what messages call the forest at a position.

    Raises:
        PerfedError: a child that is not behind its parent, an unknown column, a value that is not finite, a risk that
            is not above 0, or shares of classes that are no shares; names the forest.
    """
    nodes, value = trees["left"].shape[-1], trees["value"]
    at = torch.arange(nodes, dtype=trees["left"].dtype, device=trees["left"].device)
    leaf = (trees["left"] == at) & (trees["right"] == at)
    behind = (trees["left"] > at) & (trees["right"] > at) & (trees["left"] < nodes) & (trees["right"] < nodes)
    known = (trees["feature"] >= 0) & (trees["feature"] < max(1, columns))
    says, what_leaves_say = torch.isfinite(value).all(-1), "no finite value"
    if recipe.survival:
        says, what_leaves_say = says & (value > 0).all(-1), "no risk above 0"
    elif recipe.outputs is not None:
        what_leaves_say = "no shares of classes"
        says &= (value >= 0).all(-1) & ((value.sum(-1) - 1).abs() < 1e-3)
    for holds, what in (
        (leaf | behind, "a node whose children are not behind it"),
        (known, f"a split on a column beyond the {columns} that all have"),
        (torch.isfinite(trees["threshold"]), "a threshold that is not finite"),
        (says, f"a leaf that says {what_leaves_say}"),
    ):
        wrong = ~holds.flatten(1).all(1)
        if wrong.any():
            raise PerfedError(f"the trees of {whose(int(wrong.nonzero()[0]))} have {what}")


# Applying ------------------------------------------------------------------------------------------------------


def landed(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
    """Return the leaf of every row in every tree, int64 ``(n, trees, rows)``.

    Args:
        trees: of n clients, ``(n, trees, nodes)``.
        x: ``(n, rows, columns)``.
        depth: at least that of the trees.
        columns: int64 ``(n, common)``, where each client has the trees' columns; ``None``: where the trees say.
    """
    by_column, left, right = x.transpose(1, 2), trees["left"], trees["right"]
    at = torch.zeros(*left.shape[:2], x.shape[1], dtype=torch.int64, device=x.device)
    for _ in range(depth):
        which = trees["feature"].gather(2, at).long()
        which = which if columns is None else columns[:, :, None].expand(-1, -1, which.shape[2]).gather(1, which)
        goes_left = by_column.gather(1, which) <= trees["threshold"].gather(2, at)
        at = torch.where(goes_left, left.gather(2, at), right.gather(2, at)).long()
    return at


def votes(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
    """Return what every tree says of every row, ``(n, trees, rows, C)``; arguments as in :func:`landed`."""
    at = landed(trees, x, depth, columns)[..., None].expand(-1, -1, -1, trees["value"].shape[-1])
    said: Tensor = trees["value"].gather(2, at)
    return said


def forest_votes(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None, *, size: int) -> Tensor:
    """Return the mean vote of every forest of ``size`` trees that lie side by side, ``(n, forests, rows, C)``."""

    def means(rows: Tensor) -> Tensor:
        said: Tensor = votes(trees, rows, depth, columns).unflatten(1, (-1, size))
        return said.mean(2)

    if torch.compiler.is_compiling():  # a graph for any number of rows
        return means(x)
    clients, count = trees["left"].shape[:2]
    width = max(1, _HELD_BYTES // max(1, clients * count * 8 * (4 + trees["value"].shape[-1])))
    return torch.cat([means(part) for part in x.split(width, 1)], 2)
