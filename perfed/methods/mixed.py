"""A mixed model by columns: slopes that sites share, and the departure of each site from them."""

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

_INITIAL_PULLS = {"of_all": 3.0, "of_site": 10.0}  # until sites have replied
_MAX_STEP = 5.0  # largest step of a slope in a round: a quadratic summary is only valid nearby


@register("mixed", title="Mixed")
class Mixed(Local):
    """Partial pooling of a generalised linear model: ``eta = b_i + sum_c x_c (w_c + d_ic)`` at site i.

    All sites with a column share its slope w; d is the site's departure from it, and b the site's intercept. ``w ~ N(0,
    1/shared_pull)``, ``d ~ N(0, 1/site_pull)``; the slope of a column that only one site has is the sum of both.
    Classification is logistic or multinomial, values are linear, survival is Cox.

    A round is one Newton step. Every site fits b and d around the received w, and sends the Hessian of its loss with
    respect to the slopes of shared columns, and the minimiser. From these the server computes w and both pulls in
    closed form ("empirical": they maximise the marginal likelihood); about five rounds are enough. With a large
    ``site_pull`` all sites have one model except for intercepts; with a large ``shared_pull`` each site fits its own
    model.

    ``site_pull = "columns"``, ``"sites"`` or ``"both"``: ``d_ic ~ N(0, 1/(site_pull u_i v_c))``, for columns whose
    slopes differ more between sites than those of other columns, and for sites that differ more from the others. The
    server estimates these factors from the same Hessians; the prior of their logarithms is standard normal. A site that
    joins later has u = 1.

    ``solver = "gradient"`` is for tables with thousands of columns and needs no Hessians: sites send their slopes, and
    w is their shrunk mean. Pulls are not estimated (``"empirical"`` means 3 and 10), and more rounds are needed.

    Models do not depend on the units of inputs. Columns of tables are on one scale already. Those of arrays are centred
    at each site and divided by a scale that the server computes from the same Hessians, about the deviation within
    sites (:func:`~perfed.maths.column_scale.shared_scale`). Empirical pulls refer to scaled columns. A pull that is a
    number refers to the units of the inputs, and columns are then not scaled.

    Only the last stage of the experiment's model is used; it must be a linear layer. Optimiser, learning rate and
    epochs have no effect.
    Sources: Breslow and Clayton 1993 (penalised quasi-likelihood); MacKay 1992 (evidence); Gelman and Hill 2007.
    """

    needs_mean: ClassVar[str] = "a mixed model combines Hessians and minimisers of the clients, not models"
    fits_unused: ClassVar[str] = ""

    shared_pull: Literal["empirical"] | Number = Field(
        "empirical",
        description='pull of the slopes that sites share to 0, in the units of the inputs, or "empirical": estimated '
        "from all sites",
    )
    site_pull: Literal["empirical", "columns", "sites", "both"] | Number = Field(
        "empirical",
        description='pull of a site\'s slopes to the shared ones, or "empirical": estimated from all sites; "columns", '
        '"sites" or "both": also a factor of it for each shared column, each site, or both',
    )

    solver: Literal["newton", "gradient"] = Field(
        "newton", description="newton: sites send a Hessian; gradient: only slopes, for many columns"
    )

    def sets(self) -> dict[str, ParameterSet]:
        """Return the server's sets.

        ``pooled`` has w ``(S, k)`` and both pulls; also columns' factors ``(S,)`` if they are estimated; and, if inputs
        are not on one scale, the scale of each shared column ``(S,)``, which is 0 until sites have replied. The table
        ``said`` has the last reply of each site, empty before its first; the table ``factor`` has the sites' factors if
        they are estimated.
        """
        sets = {
            "pooled": ParameterSet("server", init=self._init_pooled),
            "said": ParameterSet("table", init=_init_reply),
        }
        return sets | ({"factor": ParameterSet("table", init=_init_factor)} if self._by_site else {})

    @property
    def _by_column(self) -> bool:
        return self.site_pull in ("columns", "both")

    @property
    def _by_site(self) -> bool:
        return self.site_pull in ("sites", "both")

    @property
    def _is_empirical(self) -> bool:
        """Whether both pulls are estimated, so that neither refers to the units of the inputs."""
        return isinstance(self.shared_pull, str) and isinstance(self.site_pull, str)

    def _init_pooled(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        settings = {"of_all": self.shared_pull, "of_site": self.site_pull}
        pulls = {name: _INITIAL_PULLS[name] if isinstance(pull, str) else pull for name, pull in settings.items()}
        weight = torch.zeros(info.shared_inputs, 1, dtype=torch.float64)
        column_factors = {"columns": torch.ones(info.shared_inputs, dtype=torch.float64)} if self._by_column else {}
        pull_tensors = {name: torch.tensor(pull, dtype=torch.float64) for name, pull in pulls.items()}
        scale = torch.full((info.shared_inputs,), float(not self._is_empirical), dtype=torch.float64)
        return {"weight": weight, **pull_tensors, **column_factors, **({} if info.scaled_inputs else {"scale": scale})}

    def adapt(self, model: Model) -> Model:
        """Return a model with only the last stage, which must be a linear layer."""
        last = model.factories[next(stage for stage in reversed(STAGES) if stage in model.factories)]
        return Model(head=lambda shape: _check_linear(last(shape), shape))

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse shared parameters, class weights, and extensions, because there are no mini-batches."""
        super().check(server, info)
        if self.extensions:
            name = self.extensions[0].name
            raise PerfedError(f"mixed takes no mini-batch steps, but extension '{name}' changes such steps; remove it")
        if self.class_weights != "none":
            raise PerfedError("mixed maximises a likelihood, which has no class_weights; use 'none'")
        if self.solver == "gradient" and (self._by_column or self._by_site):
            raise PerfedError(
                f"mixed: site_pull = '{self.site_pull}' is estimated from Hessians, which solver=gradient does not "
                "compute; use 'empirical' or a number"
            )

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute slopes and pulls from the last replies of all sites."""
        reply = clients.run(self.train_site, **self.download(server))
        entries = {name: reply.content[name] for name in (_REPLY_ENTRIES if self.solver == "newton" else ("slopes",))}
        new_replies = {
            i: {name: value[row].clone() for name, value in entries.items()} for row, i in enumerate(reply.ids)
        }
        server.said = {i: {**row, **new_replies.get(i, {})} for i, row in server.said.items()}
        weight = server.pooled["weight"].expand(-1, int(reply.outputs[0]))
        if not weight.numel():
            return
        if self.solver == "gradient":
            server.pooled = {**server.pooled, "weight": self._shrunk_mean(server)}
            return
        replies = {i: row for i, row in sorted(server.said.items()) if row["hessian"].numel()}
        estimate = self._estimate_slopes(server, replies, clients.info.task, weight.shape[1])
        step = estimate.weight.view_as(weight) - weight
        if clients.info.task != "regression":  # whose summaries are exact at any distance
            length = (
                (step * _fill_unknown_scales(server.pooled.get("scale", step.new_ones(len(step))))[:, None]).abs().max()
            )
            step = step * (_MAX_STEP / length.clamp_min(_MAX_STEP))
        pulls = {"of_all": estimate.shared_pull, "of_site": estimate.site_pull}
        server.pooled = {
            **server.pooled,
            "weight": weight + step,
            **{name: torch.full_like(server.pooled[name], pull) for name, pull in pulls.items()},
            **({"columns": estimate.columns} if isinstance(estimate, Varied) and self._by_column else {}),
        }
        if isinstance(estimate, Varied) and self._by_site:
            factors = {i: {"of_site": factor.clone()} for i, factor in zip(replies, estimate.sites, strict=True)}
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
        """Return the shrunk mean of the sites' last slopes; a site without a column returns the received slope."""
        slopes = torch.stack([row["slopes"] for _, row in sorted(server.said.items()) if row["slopes"].numel()])
        of_site, of_all = server.pooled["of_site"], server.pooled["of_all"]
        mean: Tensor = of_site * slopes.sum(0) / (len(slopes) * of_site + of_all)
        return mean

    def train_site(self, cohort: Cohort, **payload: Any) -> Reply:
        """Fit the site's part around the shared slopes, and return a summary of the site's loss in these."""
        fits = self._fit_sites(cohort, **payload)
        cohort.count(torch.stack([fit.loss / len(site.y) for site, fit, _ in fits]).to(cohort.dtype))
        outputs = torch.tensor([site.outputs for site, _, _ in fits])
        if self.solver == "gradient":
            slopes = [fit.slopes / scale.deviation[: site.shared, None] for site, fit, scale in fits]
            return Reply(slopes=torch.stack(slopes), outputs=outputs)
        summaries = [
            scale.restore_summary(site.summary(fit, *_select_pulls(row, **payload)), site.outputs)
            for row, (site, fit, scale) in enumerate(fits)
        ]
        freedom = [float((len(site.y) - 1) * site.outputs) for site, _, _ in fits]
        return Reply(
            **{
                name: torch.stack([getattr(summary, name) for summary in summaries])
                for name in _REPLY_ENTRIES
                if name != "freedom"
            },
            freedom=torch.tensor(freedom, dtype=torch.float64),
            outputs=outputs,
        )

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return shared slopes and pulls, with which any site fits its model, and the site's factor if there is one."""
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
            fit = site.fit(weight, *_select_pulls(row, **payload), newton=self.solver == "newton")
            _load_fit(cohort, row, scale.restore_fit(fit, intercept=cohort.task != "survival"))
            fits.append((site, fit, scale))
        cohort.drop_features()
        return fits

    def _column_scale(self, client: Client, x: Tensor, row: int, pooled: dict[str, Tensor], **_: Any) -> ColumnScale:
        """Return the scale of a site's columns: the server's for shared columns, from its rows for the others.

        Columns of tables keep their units, since the preprocessing has scaled them.
        """
        if "scale" not in pooled or (client.table is not None and not pooled["scale"].shape[1]):
            return ColumnScale.keep_units(x)
        shared = pooled["scale"][row].double()
        return ColumnScale.from_rows(x, shared if self._is_empirical else x.new_ones(x.shape[1]))

    def _check_size(self, client: str, site: Site) -> None:
        size = (1 + site.x.shape[1]) * site.outputs
        if self.solver == "newton" and size > _MAX_COEFFICIENTS:
            raise PerfedError(
                f"mixed: client '{client}' has {size} coefficients, too many for a Hessian "
                f"(allowed: {_MAX_COEFFICIENTS}); add solver=gradient"
            )


_REPLY_ENTRIES = ("hessian", "target", "constant", "freedom")
_MAX_COEFFICIENTS = 4000  # coefficients of a site, whose Hessian then has 128 MB


def _init_reply(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    sizes = {"hessian": (0, 0), "target": (0,), "constant": (), "freedom": (), "slopes": (0, 0)}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}


def _init_factor(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"of_site": torch.ones((), dtype=torch.float64)}


def _fill_unknown_scales(scale: Tensor) -> Tensor:
    """Return the scale of columns with 1 in place of unknown scales."""
    return torch.where(scale > 0, scale, 1)


def _select_pulls(
    row: int, pooled: dict[str, Tensor], factor: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a row's pulls of departures and of w, and the columns' factors of the first, if there are any."""
    of_site, of_all = (pooled[name][row].double() for name in ("of_site", "of_all"))
    if factor is not None:
        of_site = of_site * factor["of_site"][row].double()
    return of_site, of_all, pooled["columns"][row].double() if "columns" in pooled else None


def _load_fit(cohort: Cohort, row: int, fit: SiteFit) -> None:
    """Load the site's fit into its row of the working model; each of two classes gets half of the logit."""
    slopes = {"weight": fit.slopes.T, "own": fit.local.T}
    if not any(name.endswith(".own") for name in cohort.model):
        slopes = {"weight": torch.cat([*slopes.values()], 1)}
    for name, working in cohort.model.items():
        value = {**slopes, "bias": fit.bias}[name.rpartition(".")[2]]
        if len(value) < working.shape[1]:
            value = torch.cat([-value, value]) / 2
        padded = torch.zeros_like(working[row])
        padded[tuple(map(slice, value.shape))] = value.to(padded)  # other sites of the cohort may have more columns
        cohort.model[name] = torch.cat([working[:row], padded[None], working[row + 1 :]])


def _check_linear(layer: nn.Module, shape: Shape) -> nn.Module:
    """Return the layer after checking that it is linear.

    Raises:
        PerfedError: it is not linear.
    """
    inner = [module for module in layer.modules() if not list(module.children())]
    if not (
        inner and isinstance(inner[-1], nn.Linear | ColumnLinear) and all(isinstance(m, nn.Flatten) for m in inner[:-1])
    ):
        raise PerfedError(f"mixed is a linear model, but the last stage is a {type(layer).__name__}; use head=linear")
    return layer
