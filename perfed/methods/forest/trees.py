"""Decision trees as arrays, grown with scikit-learn, checked on arrival, and evaluated with torch."""

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
from perfed.methods.forest.hazards import compute_rates, relative_risk

Arrays = Mapping[str, Tensor]
"""``feature``, ``left``, ``right`` int32 ``(..., trees, nodes)``, ``threshold`` of the same shape, ``value`` ``(...,
trees, nodes, C)``. Node 0 is the root; a row goes left where ``x[feature] <= threshold``; a leaf leads to itself."""

_VOTE_BYTES = 64 << 20  # memory for the votes of the rows that are processed at a time


@dataclass(frozen=True)
class Recipe:
    """The settings with which trees are grown.

    Attributes:
        trees: number of trees.
        leaves, depth: largest number of leaves, and largest depth, of a tree.
        smallest: fewest distinct rows of the tree's sample in a leaf.
        bins: number of bins of each column; a threshold then lies between the means of two neighbouring bins of at
            least ``smallest`` rows each. ``None``: thresholds lie between two values.
        outputs: C classes; ``None`` for regression and survival.
        survival: whether the values of leaves are relative risks.
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
        """The largest number of nodes of a tree."""
        return 2 * self.leaves - 1


def make_empty_trees(recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arrays of trees with a single leaf of a neutral value."""
    node_numbers, width = torch.arange(recipe.nodes, dtype=torch.int32).repeat(recipe.trees, 1), recipe.outputs or 1
    zeros = torch.zeros(recipe.trees, recipe.nodes, dtype=dtype)
    default = 0.0 if recipe.outputs is None and not recipe.survival else 1.0 / width
    value = zeros[..., None].repeat(1, 1, width) + default
    return {
        "feature": torch.zeros_like(node_numbers),
        "left": node_numbers,
        "right": node_numbers.clone(),
        "threshold": zeros,
        "value": value,
    }


# Growing -------------------------------------------------------------------------------------------------------


def draw_bootstrap(key: Tensor, trees: int, rows: int) -> NDArray[np.int64]:
    """Return how often each row is in each tree's bootstrap sample, ``(trees, rows)``."""
    keys = rng.key(key, "sample", torch.arange(trees))
    rows_drawn = (rng.uniform(keys, rows, torch.float64) * rows).long().clamp_(max=rows - 1)
    counts = torch.zeros(trees, rows, dtype=torch.int64)
    return counts.scatter_add_(1, rows_drawn, torch.ones_like(rows_drawn)).numpy()


def compute_thresholds(column: NDArray[Any], smallest: int, bins: int) -> NDArray[Any]:
    """Return the ascending thresholds ``(k,)`` that binned trees may use in a column ``(rows,)``.

    Bins with equal means are merged, because a threshold at their mean would be a value of the column.

    Example:
        >>> compute_thresholds(np.array([1.0, 2.0, 4.0, 8.0]), 1, 9).round(3).tolist()
        [1.618, 3.236, 6.472]
        >>> compute_thresholds(np.array([1.0, 2.0, 4.0, 8.0]), 2, 9).round(3).tolist()
        [4.281]
    """
    groups = max(1, min(bins, len(column) // smallest))
    parts = np.array_split(np.sort(column).astype(np.float64), groups)
    means = np.unique(np.array([part.mean() for part in parts], np.float32)).astype(np.float64)
    return place_between(means[:-1], means[1:]).astype(column.dtype)


def grow_forest(x: NDArray[Any], y: NDArray[Any], recipe: Recipe, key: Tensor) -> dict[str, Tensor]:
    """Grow a random forest, each tree on a bootstrap sample, and return it as arrays.

    A split tries the square root of the number of columns, in regression a third of the columns. For survival data a
    tree's sample and each leaf need an event; a sample without events gives an empty tree. With bins, a value is
    replaced by the number of :func:`compute_thresholds` below it.

    Args:
        x: ``(rows, columns)``.
        y: ``(rows,)`` labels or values, or ``(rows, 2)`` times and events.
        recipe: settings of the trees.
        key: key of all random numbers.

    Returns:
        :data:`Arrays` of ``trees`` trees, floats in the type of ``x``; ``value`` is the share of each class, or the
        mean, or the risk relative to all rows (:func:`~perfed.methods.forest.hazards.relative_risk`).

    Source: Breiman 2001, Machine Learning 45; scikit-learn's ``RandomForestClassifier``; of survival LeBlanc and
    Crowley 1992, Ishwaran et al. 2008.
    """
    thresholds, inputs, values = [], x, distinct_values(x)
    if recipe.bins is not None:
        thresholds = [compute_thresholds(column, recipe.smallest, recipe.bins) for column in x.T]
        inputs = np.stack(
            [
                np.searchsorted(thresholds_of_column, column)
                for thresholds_of_column, column in zip(thresholds, x.T, strict=True)
            ],
            1,
        )
    seeds = (rng.key(key, "splits", torch.arange(recipe.trees)) & 0x7FFFFFFF).tolist()
    arrays = make_empty_trees(recipe, torch.from_numpy(x[:0]).dtype)
    samples = draw_bootstrap(key, recipe.trees, len(x))
    target, weight = compute_rates(y) if recipe.survival else (y, np.ones(len(x)))
    for row, (seed, counts) in enumerate(zip(seeds, samples, strict=True)):
        if recipe.survival and not counts @ y[:, 1]:
            continue
        fitted = _make_tree(recipe, seed).fit(inputs, target, sample_weight=counts * weight)
        tree, value = fitted.tree_, fitted.tree_.value[:, 0, :]
        if recipe.survival:
            value = relative_risk(value, tree.weighted_n_node_samples[:, None])
        if recipe.outputs is not None:
            value = (value / value.sum(1, keepdims=True)) @ np.eye(recipe.outputs)[fitted.classes_]
        if not thresholds:
            separate_values(tree, values)
        threshold = _convert_ranks(tree, thresholds) if thresholds else tree.threshold
        write_tree({name: array[row] for name, array in arrays.items()}, tree, threshold, value)
    return arrays


def _convert_ranks(tree: Any, thresholds: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return thresholds ``(nodes,)`` of a tree that was grown on ranks."""
    values = np.zeros(tree.node_count)
    for node in np.flatnonzero(tree.children_left >= 0):
        values[node] = thresholds[tree.feature[node]][int(tree.threshold[node])]
    return values


def _make_tree(recipe: Recipe, seed: int) -> Any:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    limits = {"max_leaf_nodes": recipe.leaves, "max_depth": recipe.depth, "min_samples_leaf": recipe.smallest}
    if recipe.survival:
        return DecisionTreeRegressor(criterion="poisson", max_features="sqrt", random_state=seed, **limits)
    if recipe.outputs is None:
        return DecisionTreeRegressor(max_features=1 / 3, random_state=seed, **limits)
    return DecisionTreeClassifier(max_features="sqrt", random_state=seed, **limits)


def write_tree(arrays: Mapping[str, Tensor], tree: Any, threshold: NDArray[Any], value: NDArray[Any]) -> None:
    """Write a tree of scikit-learn into one row of :data:`Arrays`.

    Args:
        arrays: arrays ``(nodes, ...)`` of a single leaf.
        tree: attribute ``tree_`` of the fitted estimator.
        threshold: ``(nodes,)``; those of leaves are ignored.
        value: ``(nodes, C)``, the value of each node.
    """
    inner = np.flatnonzero(tree.children_left >= 0)
    parts = {"feature": tree.feature, "left": tree.children_left, "right": tree.children_right, "threshold": threshold}
    for name, array in parts.items():
        arrays[name][inner] = torch.from_numpy(array[inner]).to(arrays[name].dtype)
    arrays["value"][: len(value)] = torch.from_numpy(value).to(arrays["value"].dtype)


# Checking ------------------------------------------------------------------------------------------------------


def check_trees(trees: Arrays, columns: int, recipe: Recipe, forest_name: Callable[[int], str]) -> None:
    """Check that arrays ``(forests, trees, nodes)`` are trees on ``columns`` columns.

    Args:
        trees: the arrays as received.
        columns: number of columns.
        recipe: the settings with which they should be grown.
        forest_name: function that returns the name of the forest at a position, for messages.

    Raises:
        PerfedError: a child is not after its parent, a column is unknown, a value is not finite, a risk is not above 0,
            or values are no shares of classes; the message names the forest.
    """
    nodes, value = trees["left"].shape[-1], trees["value"]
    node_numbers = torch.arange(nodes, dtype=trees["left"].dtype, device=trees["left"].device)
    leaf = (trees["left"] == node_numbers) & (trees["right"] == node_numbers)
    behind = (
        (trees["left"] > node_numbers)
        & (trees["right"] > node_numbers)
        & (trees["left"] < nodes)
        & (trees["right"] < nodes)
    )
    column_exists = (trees["feature"] >= 0) & (trees["feature"] < max(1, columns))
    value_is_valid, leaf_fault = torch.isfinite(value).all(-1), "no finite value"
    if recipe.survival:
        value_is_valid, leaf_fault = value_is_valid & (value > 0).all(-1), "no risk above 0"
    elif recipe.outputs is not None:
        leaf_fault = "no shares of classes"
        value_is_valid &= (value >= 0).all(-1) & ((value.sum(-1) - 1).abs() < 1e-3)
    for valid, fault in (
        (leaf | behind, "a node whose children are not behind it"),
        (column_exists, f"a split on a column beyond the {columns} common ones"),
        (torch.isfinite(trees["threshold"]), "a threshold that is not finite"),
        (value_is_valid, f"a leaf with {leaf_fault}"),
    ):
        faulty = ~valid.flatten(1).all(1)
        if faulty.any():
            raise PerfedError(f"the trees of {forest_name(int(faulty.nonzero()[0]))} have {fault}")


# Applying ------------------------------------------------------------------------------------------------------


def find_leaves(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
    """Return the leaf of every row in every tree, int64 ``(n, trees, rows)``.

    Args:
        trees: trees of n clients, ``(n, trees, nodes)``.
        x: ``(n, rows, columns)``.
        depth: at least the depth of the trees.
        columns: int64 ``(n, common)``, position of the trees' columns at each client; ``None``: the trees' column
            numbers are positions.
    """
    by_column, left, right = x.transpose(1, 2), trees["left"], trees["right"]
    nodes = torch.zeros(*left.shape[:2], x.shape[1], dtype=torch.int64, device=x.device)
    for _ in range(depth):
        split_columns = trees["feature"].gather(2, nodes).long()
        split_columns = (
            split_columns
            if columns is None
            else columns[:, :, None].expand(-1, -1, split_columns.shape[2]).gather(1, split_columns)
        )
        goes_left = by_column.gather(1, split_columns) <= trees["threshold"].gather(2, nodes)
        nodes = torch.where(goes_left, left.gather(2, nodes), right.gather(2, nodes)).long()
    return nodes


def compute_votes(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None) -> Tensor:
    """Return every tree's value for every row, ``(n, trees, rows, C)``; arguments are those of :func:`find_leaves`."""
    leaves = find_leaves(trees, x, depth, columns)[..., None].expand(-1, -1, -1, trees["value"].shape[-1])
    leaf_values: Tensor = trees["value"].gather(2, leaves)
    return leaf_values


def compute_forest_votes(trees: Arrays, x: Tensor, depth: int, columns: Tensor | None = None, *, size: int) -> Tensor:
    """Return the mean vote of every forest of ``size`` consecutive trees, ``(n, forests, rows, C)``."""

    def means(rows: Tensor) -> Tensor:
        tree_votes: Tensor = compute_votes(trees, rows, depth, columns).unflatten(1, (-1, size))
        return tree_votes.mean(2)

    if torch.compiler.is_compiling():  # The graph must work for any number of rows.
        return means(x)
    clients, number_of_trees = trees["left"].shape[:2]
    width = max(1, _VOTE_BYTES // max(1, clients * number_of_trees * 8 * (4 + trees["value"].shape[-1])))
    return torch.cat([means(part) for part in x.split(width, 1)], 2)
