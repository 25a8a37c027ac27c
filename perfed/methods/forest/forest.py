"""Forests across sites: every site predicts with its own trees and with trees that other sites have grown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from perfed import rng
from perfed.data.columns import Columns, in_order
from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.forest.hazards import cox_loss, hazard_slope, hazard_weights
from perfed.methods.forest.mixing import (
    FloatArray,
    calibrated_logits,
    calibrated_values,
    mean_weights,
    mixture_weights,
)
from perfed.methods.forest.trees import (
    Recipe,
    check_trees,
    compute_forest_votes,
    compute_votes,
    draw_bootstrap,
    grow_forest,
    make_empty_trees,
)
from perfed.model.chain import STAGES, Model
from perfed.model.placement import FROZEN, Placement
from perfed.settings import LISTED
from perfed.training.cohort import Cohort

FLOOR = 0.01
"""The part of every probability that is distributed equally over the classes, so that no probability is 0 or 1."""

ENOUGH = 4
"""A site tries a smallest leaf only if it has this many times as many rows; otherwise trees have hardly any splits."""


@register(
    "forest",
    title="Forest",
    differs="features",
    needs="columns with names where sites have different ones",
    example="digits-label-skew rounds=1",
)
class Forest(Method):
    """Forests of the site on all columns and of other sites on the common columns, weighted by each site.

    A site grows two random forests on its rows: a local one on all its columns, and one for the other sites on the
    common columns, which is sent once, as arrays. Before it predicts, a site weights its own forest and each received
    forest by the likelihood of its rows (with out-of-bag votes of its own forest); the prior weight of all received
    forests together is ``others``. The weighted mean is then calibrated by a line of the site, ``a + b log p`` or ``a +
    b v``.

    For survival data a tree splits by the likelihood of proportional hazards (LeBlanc and Crowley 1992). The value of a
    leaf is a relative risk ``(1 + O) / (1 + E)``, from its observed events and those expected by the sender's rows, so
    that sites need no common times and send none. The output h of a forest is the logarithm of its trees' mean; weights
    and the slope b of ``b h`` maximise the Cox partial likelihood of the site's rows.

    The thresholds and leaf values of forests that are sent are visible to the receivers. A leaf that is sent contains
    at least ``smallest_leaf`` rows, and a threshold lies between the means of two groups of at least as many rows.

    The experiment's network and the settings of its training are not used. One round is enough.
    """

    needs_mean: ClassVar[str] = "forests collect the clients' trees and average nothing"
    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, FROZEN)
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = "grow_own"

    trees: int = Field(100, ge=1, le=10_000, description="trees of each of a site's two forests")
    leaves: int = Field(128, ge=2, le=4096, description="most leaves of a tree")
    depth: int = Field(16, ge=1, le=64, description="most splits from the root to a leaf")
    smallest_leaf: int = Field(5, ge=1, description="fewest rows in a leaf of a tree that is sent")
    bins: int = Field(32, ge=2, description="groups of a column's values between which trees that are sent may split")
    own_leaf: Annotated[tuple[PositiveInt, ...], LISTED, Field(min_length=1)] = Field(
        (1, 5),
        description="fewest rows in a leaf of the local forest; of several values the best out of bag, or the first "
        "if the site has fewer than four times as many rows",
    )
    others: float = Field(0.5, ge=0, le=1, description="prior weight of all received forests together")
    prior_rows: float = Field(50.0, ge=0, description="number of rows that the prior `others` is worth")
    calibration: float = Field(5.0, gt=0, description="strength of the line's prior, a = 0 and b = 1")

    def sets(self) -> dict[str, ParameterSet]:
        """Return the server's tables and the client's forest.

        The tables are ``columns``, which columns of a client are common, and ``forests``; ``own`` is on the client.
        """

        def init_trees(recipe: Recipe, info: FederationInfo) -> dict[str, Tensor]:
            return {**make_empty_trees(recipe, info.dtype), "grown": torch.tensor(False)}

        return {
            "columns": ParameterSet(
                "table", init=lambda info, _: {"common": torch.tensor(info.columns.common[info.client])}
            ),
            "forests": ParameterSet(
                "table",
                init=lambda info, _: init_trees(self.sent_recipe(info), info) | {"columns": torch.tensor(0)},
            ),
            "own": ParameterSet(
                "client",
                init=lambda info, _: (
                    init_trees(self.own_recipe(info, 1), info) | {"loss": torch.tensor(0.0, dtype=info.dtype)}
                ),
            ),
        }

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse what trees do not have: placed parameters, extensions and class weights."""
        if server.shared or info.personal:
            name = next(iter([*server.shared, *sorted(info.personal)]))
            raise PerfedError(f"forest has no network to place; take '{name.partition('.')[0]}' out of placement")
        if self.extensions:
            name = self.extensions[0].name
            raise PerfedError(f"extension '{name}' is of training by steps, and trees have none; remove it")
        if self.class_weights != "none":
            raise PerfedError("forest weighs all classes alike; remove class_weights")

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Return a note if no column is common, so that no site can use the forests of others."""
        columns = Columns.of_clients(federation)
        common_columns = sum(next(iter(columns.common.values())))
        return [] if common_columns else ["no column is common to all clients: each predicts with its own trees alone"]

    def epochs_in(self, round_: int) -> int:
        """Return 0, because trees take no gradient steps."""
        return 0

    def sent_recipe(self, source: FederationInfo | Cohort) -> Recipe:
        """Return the settings with which trees for other sites are grown."""
        return Recipe(
            self.trees,
            self.leaves,
            self.depth,
            self.smallest_leaf,
            self.bins,
            source.num_classes,
            source.task == "survival",
        )

    def own_recipe(self, source: FederationInfo | Cohort, leaf: int) -> Recipe:
        """Return the settings with which the local forest is grown, with at least ``leaf`` rows in a leaf."""
        return Recipe(self.trees, self.leaves, self.depth, leaf, None, source.num_classes, source.task == "survival")

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """Collect the forests of clients that have not sent one yet, in one exchange."""
        if all(server.forests[client]["grown"] for client in clients.ids):
            clients.train(self.report_loss)
            return
        sent = each({client: server.columns[client]["common"] for client in clients.ids})
        reply = clients.train(self.grow, columns=sent)
        columns = [int(server.columns[client]["common"].sum()) for client in reply.ids]
        check_trees(reply.forest, columns[0], self.sent_recipe(clients.info), lambda row: f"client '{reply.ids[row]}'")
        forests = dict(server.forests)
        for row, client in enumerate(reply.ids):
            trees = {name: tensor[row].clone() for name, tensor in reply.forest.items()}
            forests[client] = {**trees, "grown": torch.tensor(True), "columns": torch.tensor(columns[row])}
        server.forests = forests

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return all forests, each client's common columns, and the position of its own forest among them."""
        senders = [client for client, forest in server.forests.items() if forest["grown"]]
        (first, *_) = server.forests.values()
        stacked = {
            name: torch.stack([server.forests[client][name] for client in senders])
            if senders
            else like.new_zeros(0, *like.shape)
            for name, like in first.items()
            if name != "grown"
        }
        position = {
            client: torch.tensor(senders.index(client) if client in senders else -1) for client in server.forests
        }
        common = {client: row["common"] for client, row in server.columns.items()}
        return {"forests": stacked, "place": each(position), "columns": each(common)}

    # Clients -----------------------------------------------------------------------------------------------

    def grow(self, cohort: Cohort, columns: Tensor) -> Reply:
        """Grow the local forest on all columns, and return another one on the common columns."""
        self.grow_own(cohort)
        recipe, forests = self.sent_recipe(cohort), []
        for row, (x, y) in enumerate(iterate_rows(cohort)):
            common = _locate_columns(cohort, columns, row)
            trees = (
                grow_forest(x[:, common], y, recipe, make_client_key(cohort, row, "sent"))
                if common
                else make_empty_trees(recipe, cohort.dtype)
            )
            forests.append(trees)
        return Reply(forest=stack_forests(forests, cohort))

    def grow_own(self, cohort: Cohort) -> Reply:
        """Grow the local forest of clients that have none yet."""
        state, forests, losses = cohort.state["own"], [], []
        for row, (x, y) in enumerate(iterate_rows(cohort)):
            if state["grown"][row]:
                forests.append({name: tensor[row] for name, tensor in state.items() if name not in ("grown", "loss")})
                losses.append(float(state["loss"][row]))
            else:
                trees, loss = self._choose_own(x, y, make_client_key(cohort, row, "own"), cohort)
                forests.append(trees)
                losses.append(loss)
        new_state = {
            **stack_forests(forests, cohort),
            "loss": torch.tensor(losses, dtype=cohort.dtype, device=cohort.device),
        }
        cohort.state["own"] = {**new_state, "grown": torch.ones_like(state["grown"])}
        return self.report_loss(cohort)

    def report_loss(self, cohort: Cohort) -> Reply:
        """Report the out-of-bag loss of the local forest as the loss of the round."""
        cohort.count(cohort.state["own"]["loss"])
        return Reply()

    def _choose_own(
        self, x: NDArray[Any], y: NDArray[Any], key: Tensor, cohort: Cohort
    ) -> tuple[dict[str, Tensor], float]:
        """Return the forest with the best out-of-bag error over the smallest leaves tried, and its loss."""
        best: tuple[float, dict[str, Tensor], FloatArray] | None = None
        classes = cohort.num_classes
        target = np.eye(classes)[y] if classes is not None else y if cohort.task == "survival" else y[:, None]
        for leaf in (self.own_leaf[0], *(leaf for leaf in self.own_leaf[1:] if len(x) >= ENOUGH * leaf)):
            trees = grow_forest(x, y, self.own_recipe(cohort, leaf), key)
            out_of_bag_votes = self.out_of_bag(trees, x, key)
            error = _compute_error(out_of_bag_votes, target, cohort.task)
            if best is None or error < best[0]:
                best = error, trees, out_of_bag_votes
        assert best is not None
        has_vote = np.isfinite(best[2]).all(1)
        if not has_vote.any():  # every tree was grown with every row
            return best[1], 0.0 if classes is None else float(np.log(classes))
        if classes is None:
            return best[1], best[0]
        return best[1], float(
            -np.log(smooth_probabilities(best[2][has_vote])[np.arange(has_vote.sum()), y[has_vote]]).mean()
        )

    def out_of_bag(self, trees: dict[str, Tensor], x: NDArray[Any], key: Tensor) -> FloatArray:
        """Return the mean vote ``(rows, C)`` of the trees that were grown without a row; NaN if there are none.

        Args:
            trees: the trees of one client.
            x: its training rows.
            key: the key with which the trees were grown.
        """
        one_client = {name: tensor[None] for name, tensor in trees.items()}
        tree_votes = compute_votes(one_client, torch.from_numpy(x)[None], self.depth)[0].double()
        unseen = (draw_bootstrap(key, len(tree_votes), len(x)) == 0).astype(np.float64)
        with np.errstate(invalid="ignore"):
            mean_votes: FloatArray = np.einsum("trc,tr->rc", tree_votes.numpy(), unseen) / unseen.sum(0)[:, None]
        return mean_votes

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Compute the weights of the forests and the line that calibrates their mean."""
        forests, columns = payload["forests"], payload["columns"]
        forests_received, places, weightings = forests["left"].shape[1], [], []
        trees = {name: tensor.flatten(1, 2) for name, tensor in forests.items() if name != "columns"}
        for row, (x, y) in enumerate(iterate_rows(cohort)):
            common = _locate_columns(cohort, columns, row)
            self._check_received(cohort, row, {name: t[row] for name, t in forests.items()}, len(common))
            places.append(common or [0])
            useful = (forests["left"][row, :, :, 0] > 0).any(1).tolist() if common else [False] * forests_received
            prior_weights = self._make_prior(
                useful, int(payload["place"][row]), bool(cohort.state["own"]["grown"][row])
            )
            forest_outputs = self._collect_outputs(
                cohort, row, x, {name: t[row : row + 1] for name, t in trees.items()}, places[-1]
            )
            weightings.append(self._fit_weights(forest_outputs, y, prior_weights, cohort))
        parts = (np.array(part) for part in zip(*weightings, strict=True))
        weight, shift, slope = (torch.from_numpy(part).to(cohort.device, cohort.dtype) for part in parts)
        cohort.scratch |= {"own": _select_trees(cohort.state["own"]), "weight": weight, "shift": shift, "slope": slope}
        if forests_received:
            cohort.scratch |= {"others": trees, "columns": torch.tensor(places, device=cohort.device)}

    def _check_received(self, cohort: Cohort, row: int, forests: dict[str, Tensor], columns: int) -> None:
        """Check that the received forests are trees on the columns that the client has in common with the others."""
        if bool((forests["columns"] != columns).any()):
            expected = int(forests["columns"][0])
            raise PerfedError(
                f"client '{cohort.ids[row]}' has {columns} of the columns on which others' trees split, not {expected}"
            )
        if row == 0:  # all clients of a cohort receive the same forests
            check_trees(forests, columns, self.sent_recipe(cohort), lambda number: f"the server's forest {number + 1}")

    def _make_prior(self, has_splits: list[bool], own_position: int, has_own: bool) -> FloatArray:
        """Return the prior weights of the own forest and of the received ones; 0 for forests without a split."""
        weights = np.array([float(splits and number != own_position) for number, splits in enumerate(has_splits)])
        if not weights.any() or self.others == 0:
            return np.append(1.0, np.zeros(len(has_splits)))
        share = self.others if has_own else 1.0
        return np.append(1 - share, share * weights / weights.sum())

    def _collect_outputs(
        self, cohort: Cohort, row: int, x: NDArray[Any], trees: dict[str, Tensor], places: list[int]
    ) -> FloatArray:
        """Return the output of each forest for a client's training rows, ``(1 + forests, rows, C)``.

        The first is the client's own, out of bag.
        """
        own_trees = {name: tensor[row] for name, tensor in _select_trees(cohort.state["own"]).items()}
        own_votes = self.out_of_bag(own_trees, x, make_client_key(cohort, row, "own"))[None]
        if not trees["left"].shape[1]:
            return own_votes
        columns = torch.tensor([places], device=cohort.device)
        inputs = torch.from_numpy(x)[None].to(cohort.device)
        other_votes = compute_forest_votes(trees, inputs, self.depth, columns, size=self.trees)[0]
        return np.concatenate([own_votes, other_votes.cpu().double().numpy()])

    def _fit_weights(
        self, forest_outputs: FloatArray, y: NDArray[Any], prior_weights: FloatArray, cohort: Cohort
    ) -> tuple[FloatArray, FloatArray, float]:
        """Return weights, shift and slope, fitted on the rows that have an out-of-bag vote."""
        has_vote = np.isfinite(forest_outputs[0]).all(1) if prior_weights[0] else np.ones(len(y), dtype=bool)
        shift, width = np.zeros(forest_outputs.shape[2]), int(has_vote.sum())
        if width < 2:
            return prior_weights, shift, 1.0
        # A forest without weight may have no votes.
        forest_outputs, y = np.nan_to_num(forest_outputs[:, has_vote], nan=1.0), y[has_vote]
        if cohort.task == "survival":
            risk = np.log(forest_outputs[:, :, 0])
            weight = hazard_weights(risk, y, prior_weights, self.prior_rows)
            return weight, shift, hazard_slope(weight @ risk, y, self.calibration)
        if cohort.num_classes is None:
            weight = mean_weights(forest_outputs[:, :, 0], y, prior_weights, self.prior_rows)
            intercept, slope = calibrated_values(weight @ forest_outputs[:, :, 0], y, self.calibration)
            return weight, shift + intercept, slope
        weight = mixture_weights(
            smooth_probabilities(forest_outputs)[:, np.arange(width), y], prior_weights, self.prior_rows
        )
        mean = np.einsum("src,s->rc", forest_outputs, weight)
        shift, slope = calibrated_logits(np.log(smooth_probabilities(mean)), y, self.calibration)
        return weight, shift, slope

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return ``a + b log p`` of the weighted mean vote; for regression ``a + b v``, for survival ``b h``."""
        scratch, x = cohort.scratch, x.flatten(2)
        if "own" not in scratch:  # right after growing
            own_trees = _select_trees(cohort.state["own"])
            forest_outputs = compute_forest_votes(own_trees, x, self.depth, size=own_trees["left"].shape[1])[:, 0]
            return _take_logs(forest_outputs, cohort)
        forest_outputs = compute_forest_votes(scratch["own"], x, self.depth, size=scratch["own"]["left"].shape[1])
        if "others" in scratch:
            other_votes = compute_forest_votes(scratch["others"], x, self.depth, scratch["columns"], size=self.trees)
            forest_outputs = torch.cat([forest_outputs, other_votes], 1)
        if cohort.task == "survival":
            mean = torch.einsum("nsrc,ns->nrc", forest_outputs.log(), scratch["weight"])
        else:
            mean = _take_logs(torch.einsum("nsrc,ns->nrc", forest_outputs, scratch["weight"]), cohort)
        outputs: Tensor = scratch["shift"][:, None] + scratch["slope"][:, None, None] * mean
        return outputs


def _take_logs(outputs: Tensor, cohort: Cohort) -> Tensor:
    """Return the logarithms of probabilities or risks; values unchanged."""
    if cohort.task == "regression":
        return outputs
    logs: Tensor = (outputs if cohort.task == "survival" else smooth_probabilities(outputs)).log()
    return logs


def _compute_error(outputs: FloatArray, target: FloatArray, task: Task) -> float:
    """Return the error of forests' votes over the rows that have any; 0 if there are none."""
    has_vote = np.isfinite(outputs).all(1)
    if not has_vote.any():
        return 0.0
    if task == "survival":
        return cox_loss(np.log(outputs[has_vote, 0]), target[has_vote]) / int(has_vote.sum())
    return float(np.nanmean((outputs - target) ** 2))


def smooth_probabilities(p: Any) -> Any:
    """Return probabilities ``(..., C)`` mixed with the uniform distribution, which has the weight :data:`FLOOR`."""
    return p * (1 - FLOOR) + FLOOR / p.shape[-1]


def iterate_rows(cohort: Cohort) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield each client's training rows ``(rows, columns)`` and targets ``(rows,)``, or times and events ``(rows, 2)``.

    Raises:
        PerfedError: the inputs are not numbers, or the targets have several values per row.
    """
    samples = cohort.samples()
    for client, start, count in zip(cohort.clients, samples.starts.tolist(), samples.counts.tolist(), strict=True):
        x, y = (
            samples.x[start : start + count],
            samples.y[start : start + count].flatten(1 if samples.y.ndim > 1 else 0),
        )
        if not x.is_floating_point():
            raise PerfedError(f"client '{client.id}': trees split on numbers, but the inputs are token ids")
        if cohort.task == "survival":
            y = y.double()
        elif y.numel() > count:
            raise PerfedError(f"client '{client.id}': forest predicts one value, but the targets have {y[0].numel()}")
        else:
            y = y.flatten()
        yield x.flatten(1)[:, : prod(client.input_shape)].cpu().numpy(), y.cpu().numpy()


def make_client_key(cohort: Cohort, row: int, purpose: str) -> Tensor:
    """Return a client's key, the same in every round, so that later calls know which rows a tree was grown with."""
    return rng.key(cohort.where.seed, "forest", purpose, cohort.ids[row])


def _locate_columns(cohort: Cohort, columns: Tensor, row: int) -> list[int]:
    """Return the positions of the common columns at a client, in the order that all clients use."""
    client = cohort.clients[row]
    return in_order(columns[row, : prod(client.input_shape)].tolist(), client.feature_names)


def _select_trees(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in ("grown", "loss")}


def stack_forests(rows: list[dict[str, Tensor]], cohort: Cohort) -> dict[str, Tensor]:
    """Return the clients' forests, stacked by name."""
    return {name: torch.stack([row[name].to(cohort.device) for row in rows]) for name in rows[0]}
