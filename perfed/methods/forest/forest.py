"""Forests across sites: every site predicts with trees of its own and with those that others have grown."""

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
from perfed.methods.forest.trees import Recipe, check, drawn, forest_votes, grown, no_trees, votes
from perfed.model.chain import STAGES, Model
from perfed.model.placement import FROZEN, Placement
from perfed.settings import LISTED
from perfed.training.cohort import Cohort

FLOOR = 0.01
"""Part of every probability that is shared out equally among the classes: no forest is ever sure."""

ENOUGH = 4
"""Times as many rows as a leaf has at least, from which on a site tries such leaves: else there is hardly a split."""


@register(
    "forest",
    title="Forest",
    differs="features",
    needs="columns with names where sites have different ones",
    example="digits-label-skew rounds=1",
)
class Forest(Method):
    """Own trees on all columns, others' trees on the columns that all sites have; each site weighs them.

    A site grows two random forests on its rows: one for itself, on all its columns, and one for the others, on the
    columns in common. The second is sent, once, as arrays. Before it predicts, a site weighs its own forest and each
    of the others' by how likely they make its rows (those of its own by out-of-bag votes), drawn to ``others`` for the
    others together. What they say is then moved by an own line, ``a + b log p`` or ``a + b v``.

    Of survival a tree splits by the likelihood of proportional hazards (LeBlanc and Crowley 1992). A leaf says events
    over those that the sender's own rows let expect, ``(1 + O) / (1 + E)``: a relative risk. So sites need no times in
    common, and none leaves. A forest says h, the log of its trees' mean; weights and the slope b of ``b h`` are by the
    Cox partial likelihood of the site's rows.

    What others' forests say lies open: thresholds and what leaves say. A leaf that is sent is of at least
    ``smallest_leaf`` rows, and a threshold lies between the means of two groups of at least as many.

    The experiment's network is not used, nor are settings of its training. One round is enough.
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
    bins: int = Field(32, ge=2, description="groups of a column's values, between which trees that are sent may split")
    own_leaf: Annotated[tuple[PositiveInt, ...], LISTED, Field(min_length=1)] = Field(
        (1, 5),
        description="fewest rows in a leaf of a tree that stays; of several what is best out of bag, the first where a "
        "site has under four times as many rows",
    )
    others: float = Field(0.5, ge=0, le=1, description="weight of the others' forests together, before any row")
    prior_rows: float = Field(50.0, ge=0, description="rows that `others` counts as")
    calibration: float = Field(5.0, gt=0, description="how strongly the line is drawn to a = 0, b = 1")

    def sets(self) -> dict[str, ParameterSet]:
        """Tables on the server: which ``columns`` a client has in common, its ``forests``; ``own`` on the client."""

        def before(recipe: Recipe, info: FederationInfo) -> dict[str, Tensor]:
            return {**no_trees(recipe, info.dtype), "grown": torch.tensor(False)}

        return {
            "columns": ParameterSet(
                "table", init=lambda info, _: {"common": torch.tensor(info.columns.common[info.client])}
            ),
            "forests": ParameterSet(
                "table",
                init=lambda info, _: before(self.sent_recipe(info), info) | {"columns": torch.tensor(0)},
            ),
            "own": ParameterSet(
                "client",
                init=lambda info, _: (
                    before(self.own_recipe(info, 1), info) | {"loss": torch.tensor(0.0, dtype=info.dtype)}
                ),
            ),
        }

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse what trees do not have: a network's placement, extensions, weights of classes."""
        if server.shared or info.personal:
            name = next(iter([*server.shared, *sorted(info.personal)]))
            raise PerfedError(f"forest has no network to place; take '{name.partition('.')[0]}' out of placement")
        if self.extensions:
            name = self.extensions[0].name
            raise PerfedError(f"extension '{name}' is of training by steps, and trees have none; remove it")
        if self.class_weights != "none":
            raise PerfedError("forest weighs all classes alike; remove class_weights")

    def notes(self, federation: Federation, model: Model) -> list[str]:
        """Say where no site can use what others have grown."""
        held = Columns.of_clients(federation)
        number = sum(next(iter(held.common.values())))
        return [] if number else ["no column is common to all clients: each predicts with its own trees alone"]

    def epochs_in(self, round_: int) -> int:
        """Return 0: trees take no steps."""
        return 0

    def sent_recipe(self, of: FederationInfo | Cohort) -> Recipe:
        """Return how trees for others are grown."""
        return Recipe(
            self.trees, self.leaves, self.depth, self.smallest_leaf, self.bins, of.num_classes, of.task == "survival"
        )

    def own_recipe(self, of: FederationInfo | Cohort, leaf: int) -> Recipe:
        """Return how trees for oneself are grown."""
        return Recipe(self.trees, self.leaves, self.depth, leaf, None, of.num_classes, of.task == "survival")

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange: forests of those that have sent none yet; nothing is asked of the others again."""
        if all(server.forests[client]["grown"] for client in clients.ids):
            clients.train(self.rest)
            return
        sent = each({client: server.columns[client]["common"] for client in clients.ids})
        reply = clients.train(self.grow, columns=sent)
        columns = [int(server.columns[client]["common"].sum()) for client in reply.ids]
        check(reply.forest, columns[0], self.sent_recipe(clients.info), lambda row: f"client '{reply.ids[row]}'")
        forests = dict(server.forests)
        for row, client in enumerate(reply.ids):
            trees = {name: tensor[row].clone() for name, tensor in reply.forest.items()}
            forests[client] = {**trees, "grown": torch.tensor(True), "columns": torch.tensor(columns[row])}
        server.forests = forests

    def download(self, server: ServerState) -> dict[str, Any]:
        """All forests; of each client its columns in common, and which forest is its own."""
        sent = [client for client, forest in server.forests.items() if forest["grown"]]
        (first, *_) = server.forests.values()
        stacked = {
            name: torch.stack([server.forests[client][name] for client in sent])
            if sent
            else like.new_zeros(0, *like.shape)
            for name, like in first.items()
            if name != "grown"
        }
        place = {client: torch.tensor(sent.index(client) if client in sent else -1) for client in server.forests}
        common = {client: row["common"] for client, row in server.columns.items()}
        return {"forests": stacked, "place": each(place), "columns": each(common)}

    # Clients -----------------------------------------------------------------------------------------------

    def grow(self, cohort: Cohort, columns: Tensor) -> Reply:
        """Grow a forest on all columns, which stays, and one on the columns in common, which is sent."""
        self.grow_own(cohort)
        recipe, sent = self.sent_recipe(cohort), []
        for row, (x, y) in enumerate(rows_of(cohort)):
            held = _held(cohort, columns, row)
            trees = (
                grown(x[:, held], y, recipe, key_of(cohort, row, "sent")) if held else no_trees(recipe, cohort.dtype)
            )
            sent.append(trees)
        return Reply(forest=stacked(sent, cohort))

    def grow_own(self, cohort: Cohort) -> Reply:
        """Grow the forest that stays, where there is none yet."""
        own, found, losses = cohort.state["own"], [], []
        for row, (x, y) in enumerate(rows_of(cohort)):
            if own["grown"][row]:
                found.append({name: tensor[row] for name, tensor in own.items() if name not in ("grown", "loss")})
                losses.append(float(own["loss"][row]))
            else:
                trees, loss = self._best_own(x, y, key_of(cohort, row, "own"), cohort)
                found.append(trees)
                losses.append(loss)
        made = {**stacked(found, cohort), "loss": torch.tensor(losses, dtype=cohort.dtype, device=cohort.device)}
        cohort.state["own"] = {**made, "grown": torch.ones_like(own["grown"])}
        return self.rest(cohort)

    def rest(self, cohort: Cohort) -> Reply:
        """Say how good the own forest is out of bag, as the loss of the round."""
        cohort.count(cohort.state["own"]["loss"])
        return Reply()

    def _best_own(self, x: NDArray[Any], y: NDArray[Any], key: Tensor, of: Cohort) -> tuple[dict[str, Tensor], float]:
        """The forest whose smallest leaf is best out of bag (by distance or likelihood), and its loss."""
        best: tuple[float, dict[str, Tensor], FloatArray] | None = None
        classes = of.num_classes
        target = np.eye(classes)[y] if classes is not None else y if of.task == "survival" else y[:, None]
        for leaf in (self.own_leaf[0], *(leaf for leaf in self.own_leaf[1:] if len(x) >= ENOUGH * leaf)):
            trees = grown(x, y, self.own_recipe(of, leaf), key)
            said = self.out_of_bag(trees, x, key)
            error = _distance(said, target, of.task)
            if best is None or error < best[0]:
                best = error, trees, said
        assert best is not None
        seen = np.isfinite(best[2]).all(1)
        if not seen.any():  # every tree has seen every row
            return best[1], 0.0 if classes is None else float(np.log(classes))
        if classes is None:
            return best[1], best[0]
        return best[1], float(-np.log(sure(best[2][seen])[np.arange(seen.sum()), y[seen]]).mean())

    def out_of_bag(self, trees: dict[str, Tensor], x: NDArray[Any], key: Tensor) -> FloatArray:
        """Mean vote ``(rows, C)`` of the trees that have not seen a row; NaN where all have.

        Args:
            trees: of one client.
            x: its training rows.
            key: that they were grown with.
        """
        said = votes({name: t[None] for name, t in trees.items()}, torch.from_numpy(x)[None], self.depth)[0].double()
        unseen = (drawn(key, len(said), len(x)) == 0).astype(np.float64)
        with np.errstate(invalid="ignore"):
            found: FloatArray = np.einsum("trc,tr->rc", said.numpy(), unseen) / unseen.sum(0)[:, None]
        return found

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Weigh the forests, and find the line by which what they say is moved."""
        forests, columns = payload["forests"], payload["columns"]
        number, places, found = forests["left"].shape[1], [], []
        trees = {name: tensor.flatten(1, 2) for name, tensor in forests.items() if name != "columns"}
        for row, (x, y) in enumerate(rows_of(cohort)):
            held = _held(cohort, columns, row)
            self._check_arrived(cohort, row, {name: t[row] for name, t in forests.items()}, len(held))
            places.append(held or [0])
            useful = (forests["left"][row, :, :, 0] > 0).any(1).tolist() if held else [False] * number
            before = self._before(useful, int(payload["place"][row]), bool(cohort.state["own"]["grown"][row]))
            said = self._said(cohort, row, x, {name: t[row : row + 1] for name, t in trees.items()}, places[-1])
            found.append(self._weighed(said, y, before, cohort))
        made = (np.array(part) for part in zip(*found, strict=True))
        weight, shift, slope = (torch.from_numpy(part).to(cohort.device, cohort.dtype) for part in made)
        cohort.scratch |= {"own": _trees_of(cohort.state["own"]), "weight": weight, "shift": shift, "slope": slope}
        if number:
            cohort.scratch |= {"others": trees, "columns": torch.tensor(places, device=cohort.device)}

    def _check_arrived(self, cohort: Cohort, row: int, forests: dict[str, Tensor], columns: int) -> None:
        """What the server sent are trees on the columns that the client has in common with the others."""
        if bool((forests["columns"] != columns).any()):
            known = int(forests["columns"][0])
            raise PerfedError(
                f"client '{cohort.ids[row]}' has {columns} of the columns on which others' trees split, not {known}"
            )
        if row == 0:  # all clients of a cohort get the same
            check(forests, columns, self.sent_recipe(cohort), lambda at: f"the server's forest {at + 1}")

    def _before(self, useful: list[bool], own: int, grown_own: bool) -> FloatArray:
        """Weights of the own forest and of those that were sent, before any row: 0 where no tree has a split."""
        others = np.array([float(splits and at != own) for at, splits in enumerate(useful)])
        if not others.any() or self.others == 0:
            return np.append(1.0, np.zeros(len(useful)))
        share = self.others if grown_own else 1.0
        return np.append(1 - share, share * others / others.sum())

    def _said(
        self, cohort: Cohort, row: int, x: NDArray[Any], trees: dict[str, Tensor], places: list[int]
    ) -> FloatArray:
        """What each forest says of a client's training rows, ``(1 + forests, rows, C)``; its own out of bag."""
        own = {name: tensor[row] for name, tensor in _trees_of(cohort.state["own"]).items()}
        mine = self.out_of_bag(own, x, key_of(cohort, row, "own"))[None]
        if not trees["left"].shape[1]:
            return mine
        columns = torch.tensor([places], device=cohort.device)
        inputs = torch.from_numpy(x)[None].to(cohort.device)
        theirs = forest_votes(trees, inputs, self.depth, columns, size=self.trees)[0]
        return np.concatenate([mine, theirs.cpu().double().numpy()])

    def _weighed(
        self, said: FloatArray, y: NDArray[Any], before: FloatArray, of: Cohort
    ) -> tuple[FloatArray, FloatArray, float]:
        """Weights, shift and slope, from the rows that some own tree has not seen."""
        seen = np.isfinite(said[0]).all(1) if before[0] else np.ones(len(y), dtype=bool)
        shift, width = np.zeros(said.shape[2]), int(seen.sum())
        if width < 2:
            return before, shift, 1.0
        said, y = np.nan_to_num(said[:, seen], nan=1.0), y[seen]  # of a forest without weight
        if of.task == "survival":
            risk = np.log(said[:, :, 0])
            weight = hazard_weights(risk, y, before, self.prior_rows)
            return weight, shift, hazard_slope(weight @ risk, y, self.calibration)
        if of.num_classes is None:
            weight = mean_weights(said[:, :, 0], y, before, self.prior_rows)
            a, slope = calibrated_values(weight @ said[:, :, 0], y, self.calibration)
            return weight, shift + a, slope
        weight = mixture_weights(sure(said)[:, np.arange(width), y], before, self.prior_rows)
        mean = np.einsum("src,s->rc", said, weight)
        shift, slope = calibrated_logits(np.log(sure(mean)), y, self.calibration)
        return weight, shift, slope

    def predict(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Return ``a + b log p`` of the weighted mean of all votes; of values ``a + b v``, of risks ``b h``."""
        held, x = cohort.scratch, x.flatten(2)
        if "own" not in held:  # the model as growing left it
            own = _trees_of(cohort.state["own"])
            said = forest_votes(own, x, self.depth, size=own["left"].shape[1])[:, 0]
            return _in_logs(said, cohort)
        said = forest_votes(held["own"], x, self.depth, size=held["own"]["left"].shape[1])
        if "others" in held:
            theirs = forest_votes(held["others"], x, self.depth, held["columns"], size=self.trees)
            said = torch.cat([said, theirs], 1)
        if cohort.task == "survival":
            mean = torch.einsum("nsrc,ns->nrc", said.log(), held["weight"])
        else:
            mean = _in_logs(torch.einsum("nsrc,ns->nrc", said, held["weight"]), cohort)
        moved: Tensor = held["shift"][:, None] + held["slope"][:, None, None] * mean
        return moved


def _in_logs(said: Tensor, cohort: Cohort) -> Tensor:
    """Logs of probabilities or risks; values as they are."""
    if cohort.task == "regression":
        return said
    logs: Tensor = (said if cohort.task == "survival" else sure(said)).log()
    return logs


def _distance(said: FloatArray, target: FloatArray, task: Task) -> float:
    """How far forests' votes are from what happened, over the rows that have any: 0 where none has."""
    seen = np.isfinite(said).all(1)
    if not seen.any():
        return 0.0
    if task == "survival":
        return cox_loss(np.log(said[seen, 0]), target[seen]) / int(seen.sum())
    return float(np.nanmean((said - target) ** 2))


def sure(p: Any) -> Any:
    """Return probabilities ``(..., C)`` of which :data:`FLOOR` is shared out equally."""
    return p * (1 - FLOOR) + FLOOR / p.shape[-1]


def rows_of(cohort: Cohort) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield each client's training rows ``(rows, columns)`` and targets ``(rows,)``; times and events ``(rows, 2)``.

    Raises:
        PerfedError: inputs that are no numbers, or targets of several values.
    """
    samples = cohort.samples()
    for client, start, count in zip(cohort.clients, samples.starts.tolist(), samples.counts.tolist(), strict=True):
        x, y = (
            samples.x[start : start + count],
            samples.y[start : start + count].flatten(1 if samples.y.ndim > 1 else 0),
        )
        if not x.is_floating_point():
            raise PerfedError(f"client '{client.id}': trees split on numbers, and the inputs are token ids")
        if cohort.task == "survival":
            y = y.double()
        elif y.numel() > count:
            raise PerfedError(f"client '{client.id}': forest predicts one value, and the targets have {y[0].numel()}")
        else:
            y = y.flatten()
        yield x.flatten(1)[:, : prod(client.input_shape)].cpu().numpy(), y.cpu().numpy()


def key_of(cohort: Cohort, row: int, which: str) -> Tensor:
    """Return a key of a client, whatever the round: so it can be told later which rows a tree has seen."""
    return rng.key(cohort.where.seed, "forest", which, cohort.ids[row])


def _held(cohort: Cohort, columns: Tensor, row: int) -> list[int]:
    """Where the columns in common are at a client, in the order that all have."""
    client = cohort.clients[row]
    return in_order(columns[row, : prod(client.input_shape)].tolist(), client.feature_names)


def _trees_of(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in own.items() if name not in ("grown", "loss")}


def stacked(rows: list[dict[str, Tensor]], cohort: Cohort) -> dict[str, Tensor]:
    """Return one forest per client, side by side."""
    return {name: torch.stack([row[name].to(cohort.device) for row in rows]) for name in rows[0]}
