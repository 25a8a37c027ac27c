"""A mixed model by columns: slopes that sites share, and each site's departure from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from perfed.data.client import Client
from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.maths.column_scale import ColumnScale, scale_summary, shared_scale
from perfed.maths.departures import Varied, pool_with_factors
from perfed.maths.glm import Site, SiteFit, Summary
from perfed.maths.pooling import Pooled, pool_summaries
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.method.registry import register
from perfed.methods.local import Local
from perfed.model.chain import STAGES, Model, Shape
from perfed.model.columns import ColumnLinear
from perfed.training.cohort import Cohort

Number = Annotated[float, Field(gt=0, lt=float("inf"))]

_FIRST = {"of_all": 3.0, "of_site": 10.0}  # until sites have said something
_FARTHEST = 5.0  # that a slope moves in a round: a summary is a parabola, and says little far away


@register("mixed", title="Mixed")
class Mixed(Local):
    """Partial pooling of a generalised linear model: ``eta = b_i + sum_c x_c (w_c + d_ic)`` at site i.

    Columns that several sites have share their slope w, whoever else has them; d is the site's departure from it, and
    b its own intercept. ``w ~ N(0, 1/shared_pull)``, ``d ~ N(0, 1/site_pull)``; a column of one site has both
    variances. Classification is logistic or multinomial, values are linear, survival is Cox.

    A round is one step of Newton. Every site fits b and d around the w it gets, and sends the Hessian of its loss in
    the slopes of shared columns, and where its minimum is. The server has w and both pulls from these in closed form
    ("empirical": they maximise the marginal likelihood); about five rounds do. With a large ``site_pull`` there is one
    model for all but for intercepts, with a large ``shared_pull`` each site fits alone.

    ``site_pull = "columns"``, ``"sites"`` or ``"both"``: ``d_ic ~ N(0, 1/(site_pull u_i v_c))``, for columns whose
    slopes differ more between sites than others' do, and sites that are unlike the rest. The server finds these factors
    from the same Hessians; logs of factors are standard normal before. A site that joins later has u = 1.

    With ``solver = "gradient"`` no Hessians are made, for tables of thousands of columns: sites send their slopes, and
    w is the mean of these, shrunk; pulls are as said (``"empirical"``: 3 and 10), and more rounds are needed.

    Models do not depend on the units of inputs. Columns of tables are on one scale already. Those of arrays are centred
    at each site and divided by a scale that the server computes from the same Hessians, about the deviation within
    sites (:func:`~perfed.maths.column_scale.shared_scale`). Empirical pulls refer to scaled columns. A pull that is
    given as a number is in the units of the inputs, and columns are then not scaled.

    Of the experiment's model the last stage counts, a linear layer. Optimiser, rate and epochs do not matter.
    Sources: Breslow and Clayton 1993 (penalised quasi-likelihood); MacKay 1992 (evidence); Gelman and Hill 2007.
    """

    needs_mean: ClassVar[str] = "a mixed model combines Hessians and minima of the clients, not models"
    fits_unused: ClassVar[str] = ""

    shared_pull: Literal["empirical"] | Number = Field(
        "empirical",
        description='pull of the slopes that sites share to 0, in the units of the inputs, or "empirical": found from '
        "all sites",
    )
    site_pull: Literal["empirical", "columns", "sites", "both"] | Number = Field(
        "empirical",
        description='pull of a site\'s slopes to the shared ones, or "empirical": found from all sites; "columns", '
        '"sites" or "both": also a factor of it for each shared column, each site, or both',
    )

    solver: Literal["newton", "gradient"] = Field(
        "newton", description="newton: sites send a Hessian; gradient: slopes alone, for many columns"
    )

    def sets(self) -> dict[str, ParameterSet]:
        """``pooled``: w ``(S, k)`` and both pulls; ``said``: what each site said last, empty where it has not yet.

        Where they are looked for, also columns' factors ``(S,)`` in the first, and ``factor``: the sites'. Where the
        inputs are not on one scale, also that of each shared column ``(S,)`` in the first, 0 until sites have replied.
        """
        found = {"pooled": ParameterSet("server", init=self._start), "said": ParameterSet("table", init=_nothing)}
        return found | ({"factor": ParameterSet("table", init=_one)} if self._by_site else {})

    @property
    def _by_column(self) -> bool:
        return self.site_pull in ("columns", "both")

    @property
    def _by_site(self) -> bool:
        return self.site_pull in ("sites", "both")

    @property
    def _is_empirical(self) -> bool:
        """Whether both pulls are estimated, so that neither is in the units of the inputs."""
        return isinstance(self.shared_pull, str) and isinstance(self.site_pull, str)

    def _start(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        given = {"of_all": self.shared_pull, "of_site": self.site_pull}
        pulls = {name: _FIRST[name] if isinstance(pull, str) else pull for name, pull in given.items()}
        weight = torch.zeros(info.shared_inputs, 1, dtype=torch.float64)
        columns = {"columns": torch.ones(info.shared_inputs, dtype=torch.float64)} if self._by_column else {}
        numbers = {name: torch.tensor(pull, dtype=torch.float64) for name, pull in pulls.items()}
        scale = torch.full((info.shared_inputs,), float(not self._is_empirical), dtype=torch.float64)
        return {"weight": weight, **numbers, **columns, **({} if info.scaled_inputs else {"scale": scale})}

    def adapt(self, model: Model) -> Model:
        """The last stage alone, which must be a linear layer."""
        last = model.factories[next(stage for stage in reversed(STAGES) if stage in model.factories)]
        return Model(head=lambda shape: _linear(last(shape), shape))

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse shared parameters, weights of classes, and extensions, for there are no mini-batches."""
        super().check(server, info)
        if self.extensions:
            name = self.extensions[0].name
            raise PerfedError(f"mixed takes no mini-batch steps, and extension '{name}' goes inside these")
        if self.class_weights != "none":
            raise PerfedError("mixed maximises a likelihood, and class_weights is no part of one; use 'none'")
        if self.solver == "gradient" and (self._by_column or self._by_site):
            raise PerfedError(
                f"mixed: site_pull = '{self.site_pull}' is found from Hessians, which solver=gradient does not make; "
                "use 'empirical' or a number"
            )

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange; then slopes and pulls from what all sites said last."""
        reply = clients.run(self.train_site, **self.download(server))
        said = {name: reply.content[name] for name in (_SAID if self.solver == "newton" else ("slopes",))}
        new = {i: {name: value[row].clone() for name, value in said.items()} for row, i in enumerate(reply.ids)}
        server.said = {i: {**row, **new.get(i, {})} for i, row in server.said.items()}
        weight = server.pooled["weight"].expand(-1, int(reply.outputs[0]))
        if not weight.numel():
            return
        if self.solver == "gradient":
            server.pooled = {**server.pooled, "weight": self._shrunk_mean(server)}
            return
        replies = {i: row for i, row in sorted(server.said.items()) if row["hessian"].numel()}
        found = self._estimate_slopes(server, replies, clients.info.task, weight.shape[1])
        step = found.weight.view_as(weight) - weight
        if clients.info.task != "regression":  # whose summaries hold however far away
            length = (
                (step * _fill_unknown_scales(server.pooled.get("scale", step.new_ones(len(step))))[:, None]).abs().max()
            )
            step = step * (_FARTHEST / length.clamp_min(_FARTHEST))
        pulls = {"of_all": found.shared_pull, "of_site": found.site_pull}
        server.pooled = {
            **server.pooled,
            "weight": weight + step,
            **{name: torch.full_like(server.pooled[name], pull) for name, pull in pulls.items()},
            **({"columns": found.columns} if isinstance(found, Varied) and self._by_column else {}),
        }
        if isinstance(found, Varied) and self._by_site:
            factors = {i: {"of_site": factor.clone()} for i, factor in zip(replies, found.sites, strict=True)}
            server.factor = {**server.factor, **factors}

    def _estimate_slopes(
        self, server: ServerState, replies: Mapping[str, Mapping[str, Tensor]], task: Task, outputs: int
    ) -> Pooled | Varied:
        """Return shared slopes and pulls from the last reply of each site, and set the scales of the columns.

        If inputs are not on one scale, empirical pulls refer to columns divided by their scales. If one pull is given
        as a number in the units of the inputs, all columns are divided by the same scale, and the other pull is
        converted to these units.
        """
        summaries = [Summary(row["hessian"], row["target"], row["constant"]) for row in replies.values()]
        freedom = [float(row["freedom"]) for row in replies.values()]
        of_all, of_site = (None if isinstance(pull, str) else pull for pull in (self.shared_pull, self.site_pull))
        scale, unit = None, 1.0
        if "scale" in server.pooled and (of_all is None or of_site is None):
            scale = shared_scale(task, summaries, freedom, outputs)
            if self._is_empirical:
                earlier_scale = server.pooled["scale"]
                scale = torch.where(earlier_scale > 0, earlier_scale, scale)
                server.pooled = {**server.pooled, "scale": scale}
            else:
                unit = float(scale.square().mean()) or 1.0
                scale = torch.full_like(scale, unit**0.5)
                of_all, of_site = (None if pull is None else pull / unit for pull in (of_all, of_site))
            scale = _fill_unknown_scales(scale).repeat_interleave(outputs)
            summaries = [scale_summary(summary, scale) for summary in summaries]
        total = sum(freedom) if task == "regression" else None
        estimate: Pooled | Varied
        if self._by_column or self._by_site:
            factors = {"by_column": self._by_column, "by_site": self._by_site}
            estimate = pool_with_factors(summaries, of_all, total, **factors, outputs=outputs)
        else:
            estimate = pool_summaries(summaries, of_all, of_site, total)
        if scale is None:
            return estimate
        return replace(
            estimate,
            weight=estimate.weight / scale,
            shared_pull=estimate.shared_pull * unit,
            site_pull=estimate.site_pull * unit,
        )

    def _shrunk_mean(self, server: ServerState) -> Tensor:
        """The best shared slopes for those that sites sent last; of a column that one lacks it sent what it got."""
        slopes = torch.stack([row["slopes"] for _, row in sorted(server.said.items()) if row["slopes"].numel()])
        of_site, of_all = server.pooled["of_site"], server.pooled["of_all"]
        mean: Tensor = of_site * slopes.sum(0) / (len(slopes) * of_site + of_all)
        return mean

    def train_site(self, cohort: Cohort, **payload: Any) -> Reply:
        """Fit the site's part around the shared slopes, and say what its samples say of these."""
        fits = self._fit_sites(cohort, **payload)
        cohort.count(torch.stack([fit.loss / len(site.y) for site, fit, _ in fits]).to(cohort.dtype))
        outputs = torch.tensor([site.outputs for site, _, _ in fits])
        if self.solver == "gradient":
            slopes = [fit.slopes / scale.deviation[: site.shared, None] for site, fit, scale in fits]
            return Reply(slopes=torch.stack(slopes), outputs=outputs)
        said = [
            scale.restore_summary(site.summary(fit, *_pulls(row, **payload)), site.outputs)
            for row, (site, fit, scale) in enumerate(fits)
        ]
        freedom = [float((len(site.y) - 1) * site.outputs) for site, _, _ in fits]
        return Reply(
            **{name: torch.stack([getattr(one, name) for one in said]) for name in _SAID if name != "freedom"},
            freedom=torch.tensor(freedom, dtype=torch.float64),
            outputs=outputs,
        )

    def download(self, server: ServerState) -> dict[str, Any]:
        """Shared slopes and pulls, with which any site fits its own model; where sites differ in it, its factor."""
        return {"pooled": server.pooled, **({"factor": each(server.factor)} if self._by_site else {})}

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Fit the site's part around the shared slopes."""
        self._fit_sites(cohort, **payload)

    def _fit_sites(self, cohort: Cohort, **payload: Any) -> list[tuple[Site, SiteFit, ColumnScale]]:
        """Fit each site's model, set it as the working model, and return the scaled site, its fit and its scale."""
        fits, weights = [], payload["pooled"]["weight"]
        for row, client in enumerate(cohort.clients):
            split = client.train.loaded()
            layer = {name: cohort.model[name] for name in cohort.model}
            outputs = next(t.shape[1] for name, t in layer.items() if name.endswith("weight"))
            x = split.x.flatten(1).double()
            scale = self._column_scale(client, x, row, **payload)
            site = Site(
                cohort.task,
                scale.transform(x),
                split.y.double() if split.has_values else split.y,
                shared=weights.shape[1],
                outputs=1 if cohort.task == "classification" and outputs == 2 else outputs,
            )
            weight = weights[row].expand(-1, site.outputs).double() * scale.deviation[: site.shared, None]
            self._check_size(client.id, site)
            fit = site.fit(weight, *_pulls(row, **payload), newton=self.solver == "newton")
            _write(cohort, row, scale.restore_fit(fit, intercept=cohort.task != "survival"))
            fits.append((site, fit, scale))
        cohort.drop_features()
        return fits

    def _column_scale(self, client: Client, x: Tensor, row: int, pooled: dict[str, Tensor], **_: Any) -> ColumnScale:
        """Return the scale of a site's columns: from the server for shared ones, from its rows for its own ones.

        Columns of tables keep their units, since the preprocessing has scaled them.
        """
        if "scale" not in pooled or (client.table is not None and not pooled["scale"].shape[1]):
            return ColumnScale.keep_units(x)
        shared = pooled["scale"][row].double()
        return ColumnScale.from_rows(x, shared if self._is_empirical else x.new_ones(x.shape[1]))

    def _check_size(self, client: str, site: Site) -> None:
        size = (1 + site.x.shape[1]) * site.outputs
        if self.solver == "newton" and size > _LARGEST:
            raise PerfedError(
                f"mixed: client '{client}' has {size} coefficients, too many for a Hessian of these by these "
                f"(allowed: {_LARGEST}); add solver=gradient"
            )


_SAID = ("hessian", "target", "constant", "freedom")
_LARGEST = 4000  # coefficients of a site: a Hessian of 128 MB


def _nothing(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    sizes = {"hessian": (0, 0), "target": (0,), "constant": (), "freedom": (), "slopes": (0, 0)}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}


def _one(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"of_site": torch.ones((), dtype=torch.float64)}


def _fill_unknown_scales(scale: Tensor) -> Tensor:
    """Return the scale of columns with 1 in place of unknown scales."""
    return torch.where(scale > 0, scale, 1)


def _pulls(
    row: int, pooled: dict[str, Tensor], factor: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is sent to a row of the cohort: pulls of departures and of w, and the columns' factors of the first."""
    of_site, of_all = (pooled[name][row].double() for name in ("of_site", "of_all"))
    if factor is not None:
        of_site = of_site * factor["of_site"][row].double()
    return of_site, of_all, pooled["columns"][row].double() if "columns" in pooled else None


def _write(cohort: Cohort, row: int, fit: SiteFit) -> None:
    """Make the site's model the working one of its row; of two classes each gets half of the logit."""
    slopes = {"weight": fit.slopes.T, "own": fit.local.T}
    if not any(name.endswith(".own") for name in cohort.model):
        slopes = {"weight": torch.cat([*slopes.values()], 1)}
    for name, working in cohort.model.items():
        value = {**slopes, "bias": fit.bias}[name.rpartition(".")[2]]
        if len(value) < working.shape[1]:
            value = torch.cat([-value, value]) / 2
        whole = torch.zeros_like(working[row])
        whole[tuple(map(slice, value.shape))] = value.to(whole)  # other sites of the cohort may have more columns
        cohort.model[name] = torch.cat([working[:row], whole[None], working[row + 1 :]])


def _linear(layer: nn.Module, shape: Shape) -> nn.Module:
    """The layer, if it is a linear one.

    Raises:
        PerfedError: it is another.
    """
    inner = [module for module in layer.modules() if not list(module.children())]
    if not (
        inner and isinstance(inner[-1], nn.Linear | ColumnLinear) and all(isinstance(m, nn.Flatten) for m in inner[:-1])
    ):
        raise PerfedError(f"mixed is a linear model, and the last stage is a {type(layer).__name__}; use head=linear")
    return layer
