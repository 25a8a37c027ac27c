"""How good each client's own model is, and what that says over clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.federation import Federation
from perfed.engine.metrics import ALWAYS, Scoring, metrics_of
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.training.cohort import Cohort
from perfed.training.cox import client_cox_losses
from perfed.training.step import sample_losses

Metrics = dict[str, dict[str, float]]

SUM_OF = "sum of "
"""What the name of a group of clients begins with, in the place of a client's id, where one mean of all is known."""
ENOUGH = 10
"""Samples of a domain from which on it enters the mean and extremes over domains."""


def group_of(clients: Iterable[str]) -> str:
    """The name of a group of clients of which the mean alone is known.

    Example:
        >>> group_of(["south", "north"]), summed_clients("sum of north,south"), summed_clients("north")
        ('sum of north,south', ['north', 'south'], [])
    """
    return SUM_OF + ",".join(sorted(clients))


def summed_clients(name: str) -> list[str]:
    """The clients of a group of that name; none where it is a client's own id."""
    return name.removeprefix(SUM_OF).split(",") if name.startswith(SUM_OF) else []


@torch.no_grad()
def predict(method: Method, cohort: Cohort, x: Tensor, trained: Sequence[int]) -> Tensor:
    """What each client's own model says of ``x``, also where nobody trains on a sample's domain.

    Parameters of such a domain are what they were at the start. For its samples the outputs are the means of those with
    the parameters of each trained domain: of linear heads the outputs of the mean head.

    Args:
        method: that predicts.
        cohort: the clients with their own models; ``cohort.domain`` has the domains of ``x``.
        x: ``(n, batch, ...)``.
        trained: domains that some client has training samples of.

    Returns:
        Logits ``(n, batch, C)``, or values.
    """
    domain = cohort.domain
    if domain is None or not cohort.per_domain or len(trained) == cohort.num_domains or _among(domain, trained).all():
        return method.predict(cohort, x)
    return everywhere(method, cohort, x, trained)


def everywhere(method: Method, cohort: Cohort, x: Tensor, trained: Sequence[int]) -> Tensor:
    """:func:`predict` as one program, whatever the domains of ``x`` are: it can be traced."""
    domain, found = cohort.domain, method.predict(cohort, x)
    if domain is None or not cohort.per_domain or len(trained) == cohort.num_domains:
        return found
    known = _among(domain, trained)
    total = torch.zeros_like(found)
    for m in trained:
        cohort.domain = torch.full_like(domain, m)
        total += method.predict(cohort, x)
    cohort.domain = domain
    return torch.where(known.view(*known.shape, *([1] * (found.ndim - 2))), found, total / len(trained))


def _among(domain: Tensor, trained: Sequence[int]) -> Tensor:
    return torch.isin(domain, torch.tensor(trained, device=domain.device))


def untrained_domains(federation: Federation, split: str) -> list[str]:
    """Names of the domains that ``split`` has samples of and no client's training data."""
    trained = federation.domains_in("train")
    return [federation.domain_name(m) for m in federation.domains_in(split) if m not in trained]


def predictions(method: Method, cohort: Cohort, split: str, trained: Sequence[int]) -> Tensor | None:
    """What each client's own model says of every sample of ``split``, by :func:`predict`.

    Rows are in the order of ``cohort.samples(split)``; ``None`` where no client has data in the split.
    """
    samples = cohort.samples(split)
    found: Tensor | None = None
    for x, index, valid in cohort.iterate_windows(samples):
        predicted = predict(method, cohort, x, trained)
        found = predicted.new_empty((len(samples.y), *predicted.shape[2:])) if found is None else found
        found[index[valid]] = predicted[valid]
    return found


def among_held(cohort: Cohort, split: str, predicted: Tensor | None) -> Tensor | None:
    """``predicted`` (:func:`predictions`) with logits ``-inf`` of classes that a client has no training samples of."""
    if predicted is None:
        return None
    lacks = torch.ones(cohort.n, predicted.shape[1], dtype=torch.bool, device=predicted.device)
    lacks[:, : cohort.class_counts.shape[1]] = cohort.class_counts == 0
    return predicted.masked_fill(lacks[cohort.client_of(cohort.samples(split))], -torch.inf)


def score(cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Metrics:
    """Metrics of each client of ``cohort`` on its own ``split``: client id -> metric -> value.

    The metrics of :func:`metrics_of`, and of classification and survival the ``loss``. Clients without data in the
    split are left out, and of each client the metrics that are not defined for it.

    Args:
        cohort: the clients.
        split: on which they are evaluated.
        predicted: of :func:`predictions`.
        scoring: what is measured.
    """
    if scoring.held:
        among_all = score(cohort, split, predicted, replace(scoring, held=False))
        held = score(cohort, split, among_held(cohort, split, predicted), replace(scoring, held=False))
        # A sample of a class that the client does not hold has no probability: its loss is not defined.
        defined = {client: {n: v for n, v in values.items() if not np.isinf(v)} for client, values in held.items()}
        return {c: defined[c] | {f"{name}_all": value for name, value in among_all[c].items()} for c in defined}
    if predicted is None:
        return {}
    samples, found = cohort.samples(split), {}
    if cohort.task == "survival":
        losses = client_cox_losses(predicted, samples).cpu().double()
    else:
        losses = sample_losses(predicted[None], samples.y[None], cohort.task)[0].cpu().double()
    y, outputs = scoring.in_units(samples.y).cpu().numpy(), scoring.in_units(predicted).cpu().double().numpy()
    for client, start, count in zip(cohort.ids, samples.starts.tolist(), samples.counts.tolist(), strict=True):
        if count == 0:
            continue
        own = slice(start, start + count)
        values = metrics_of(y[own], outputs[own], cohort.task, cohort.num_classes, scoring.metrics)
        if cohort.task != "regression":
            first = {name: values.pop(name) for name in ALWAYS[cohort.task] if name in values}
            values = {**first, "loss": float(losses[own].mean()), **values}
        found[client] = values
    return found


@dataclass(frozen=True)
class Outputs:
    """What the clients' own models say of every sample of a split; all arrays have one row per sample.

    Attributes:
        client: client ids.
        domain: domain ids; ``None`` where they are unknown.
        y: targets.
        outputs: logits ``(samples, C)``, or values.
    """

    client: NDArray[np.str_]
    domain: NDArray[np.int64] | None
    y: NDArray[Any]
    outputs: NDArray[np.float64]


def outputs_of(cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Outputs:
    """``predicted`` (:func:`predictions`) with the clients, domains and targets of the samples of ``split``.

    Where a client predicts among the classes that it holds, logits of the others are ``-inf``.
    """
    samples = cohort.samples(split)
    if scoring.held:
        predicted = among_held(cohort, split, predicted)
    rows = samples.y.new_zeros(0) if predicted is None else predicted
    owners = np.repeat(np.array(cohort.ids), samples.counts)
    domain = None if samples.domain is None else samples.domain.cpu().numpy()
    y, found = scoring.in_units(samples.y).cpu().numpy(), scoring.in_units(rows).double().cpu().numpy()
    return Outputs(owners, domain, y, found)


def joined(parts: Sequence[Outputs]) -> Outputs:
    """The samples of all ``parts`` as one; without domains unless all have them."""
    client, y, outputs = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("client", "y", "outputs")
    )
    domains = [part.domain for part in parts if part.domain is not None]
    return Outputs(client, np.concatenate(domains) if len(domains) == len(parts) else None, y, outputs)


def by_domain(
    parts: Sequence[Outputs], federation: Federation, more: Sequence[str] = ()
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Metrics of each domain over the samples of all clients, and of each client in each domain that it holds.

    See :func:`with_extremes` for the mean, least and largest over domains.

    Args:
        parts: outputs of different clients.
        federation: the clients.
        more: metrics beside those that the task always has.

    Returns:
        metric -> domain's name -> value; and client id -> ``METRIC_DOMAIN`` -> value.

    Raises:
        PerfedError: the data do not say the domains.
    """
    if unknown := [part for part in parts if part.domain is None]:
        raise PerfedError(
            f"metrics per domain need domains; client '{unknown[0].client[0]}': samples without domain ids"
        )
    kind = (federation.task, federation.num_classes, more)
    outputs = joined(parts)
    assert outputs.domain is not None
    domains: dict[str, dict[str, float]] = {}
    clients: dict[str, dict[str, float]] = {}
    for m in np.unique(outputs.domain).tolist():
        rows, name = outputs.domain == m, federation.domain_name(m)
        for metric, value in metrics_of(outputs.y[rows], outputs.outputs[rows], *kind).items():
            domains.setdefault(metric, {})[name] = value
        for client in np.unique(outputs.client[rows]).tolist():
            own = rows & (outputs.client == client)
            found = metrics_of(outputs.y[own], outputs.outputs[own], *kind)
            clients.setdefault(client, {}).update({f"{metric}_{name}": value for metric, value in found.items()})
    return domains, clients


def few_samples(counts: Mapping[str, int]) -> list[str]:
    """The domains that have fewer than ten samples; ``counts`` by the domain's name."""
    return [name for name, count in counts.items() if count < ENOUGH]


def with_extremes(domains: Mapping[str, Mapping[str, float]], few: Collection[str] = ()) -> Metrics:
    """Metric -> domain -> value, with ``mean``, ``min`` and ``max`` over the domains added.

    They are over the domains that are not in ``few`` (:func:`few_samples`), or over all where there are no others.
    """
    found: Metrics = {}
    for metric, each in domains.items():
        values = np.array([value for name, value in each.items() if name not in few] or [*each.values()])
        extremes = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
        found[metric] = {**each, **extremes}
    return found


def client_table(
    federation: Federation,
    split: str,
    before: Metrics,
    after: Metrics,
    rounds: Mapping[str, int],
    seconds: Mapping[str, float],
    domains: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of ``clients.csv``; ``None`` where a client was not measured.

    Args:
        federation: the clients.
        split: on which they were evaluated.
        before, after: metrics before and after local training.
        rounds: how often each client took part.
        seconds: mean virtual time of each client's replies; empty without a clock.
        domains: per-domain metrics of each client, as from :func:`by_domain`.
    """
    names = sorted({name for table in (before, after) for values in table.values() for name in values})
    of_domains = sorted({name for values in domains.values() for name in values})
    columns = ["id", "n_train", "n_test", *(f"{n}_{w}" for n in names for w in ("before", "after")), "rounds"]
    columns += ["seconds"] if seconds else []
    rows = []
    for client in federation:
        data = client.split(split)
        values = [table.get(client.id, {}).get(n) for n in names for table in (before, after)]
        own = [domains.get(client.id, {}).get(name) for name in of_domains]
        sizes = [len(client.train), 0 if data is None else len(data)]
        time = [seconds.get(client.id)] if seconds else []
        rows.append([client.id, *sizes, *values, rounds.get(client.id, 0), *time, *own])
    return [*columns, *of_domains], rows


def spread(values: Iterable[float], weights: Iterable[float] | None = None) -> dict[str, float]:
    """``mean`` (weighted if ``weights`` are given), ``std`` (of the population), ``min``, percentiles, ``max``.

    The percentiles are the 10th, ``p10``, and the 90th, ``p90``: the tenth of the clients with the highest losses.
    """
    array = np.array(list(values), dtype=np.float64)
    weight = None if weights is None else np.array(list(weights), dtype=np.float64)
    return {
        "mean": float(np.average(array, weights=weight)),
        "std": float(array.std()),
        "min": float(array.min()),
        "p10": float(np.percentile(array, 10)),
        "p90": float(np.percentile(array, 90)),
        "max": float(array.max()),
    }


def sample_counts(federation: Federation, split: str) -> dict[str, float]:
    """Number of samples of every client that has any in ``split``: weights for :func:`summarise`."""
    found = {client.id: client.split(split) for client in federation}
    return {client: float(len(samples)) for client, samples in found.items() if samples is not None}


def summarise(metrics: Mapping[str, Mapping[str, float]], weights: Mapping[str, float] | None = None) -> dict[str, Any]:
    """:func:`spread` of every metric over the clients that have it; ``weights`` by client id.

    Where some clients do not have it, ``n`` is the number of those that do. Of groups of which the mean alone is known
    (:func:`group_of`), all else is NaN.
    """
    found: dict[str, Any] = {}
    if any(summed_clients(client) for client in metrics):
        unknown = dict.fromkeys(("std", "min", "p10", "p90", "max"), float("nan"))
        names = dict.fromkeys(name for values in metrics.values() for name in values)
        each = {name: [values[name] for values in metrics.values() if name in values] for name in names}
        return {name: {"mean": float(np.mean(values)), **unknown} for name, values in each.items()}
    for name in dict.fromkeys(name for client in sorted(metrics) for name in metrics[client]):
        clients = [client for client in sorted(metrics) if name in metrics[client]]
        share = None if weights is None else [weights[c] for c in clients]
        missing = len(clients) < len(metrics)
        found[name] = spread([metrics[c][name] for c in clients], share) | ({"n": len(clients)} if missing else {})
    return found
