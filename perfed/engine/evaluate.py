"""Evaluation of each client's personalised model, and summaries over clients and domains."""

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
"""The prefix of the name of a group of clients, which replaces a client's id where only a mean over them is known."""
ENOUGH = 10
"""The number of samples from which on a domain enters the mean and extremes over domains."""


def group_of(clients: Iterable[str]) -> str:
    """Return the name of a group of clients of which only the mean is known.

    Example:
        >>> group_of(["south", "north"]), summed_clients("sum of north,south"), summed_clients("north")
        ('sum of north,south', ['north', 'south'], [])
    """
    return SUM_OF + ",".join(sorted(clients))


def summed_clients(name: str) -> list[str]:
    """Return the clients of a group, given its name; an empty list if ``name`` is a client's id."""
    return name.removeprefix(SUM_OF).split(",") if name.startswith(SUM_OF) else []


@torch.no_grad()
def predict(method: Method, cohort: Cohort, x: Tensor, trained: Sequence[int]) -> Tensor:
    """Return the outputs of each client's personalised model for ``x``, also in domains without training samples.

    The parameters of such a domain still have their initial values. The outputs for its samples are therefore averaged
    over the parameters of all trained domains; for linear heads these are the outputs of the mean head.

    Args:
        method: the method, whose ``predict`` is called.
        cohort: the clients with their personalised models; ``cohort.domain`` contains the domains of ``x``.
        x: the inputs, ``(n, batch, ...)``.
        trained: the domains of which some client has training samples.

    Returns:
        Logits ``(n, batch, C)``, or values.
    """
    domain = cohort.domain
    if domain is None or not cohort.per_domain or len(trained) == cohort.num_domains:
        return method.predict(cohort, x)
    if _is_trained(domain, trained).all():
        return method.predict(cohort, x)
    return predict_all_domains(method, cohort, x, trained)


def predict_all_domains(method: Method, cohort: Cohort, x: Tensor, trained: Sequence[int]) -> Tensor:
    """Return the outputs of :func:`predict` without branching on the domains of ``x``, so that it can be traced."""
    domain, outputs = cohort.domain, method.predict(cohort, x)
    if domain is None or not cohort.per_domain or len(trained) == cohort.num_domains:
        return outputs
    is_trained = _is_trained(domain, trained)
    total = torch.zeros_like(outputs)
    for m in trained:
        cohort.domain = torch.full_like(domain, m)
        total += method.predict(cohort, x)
    cohort.domain = domain
    mask = is_trained.view(*is_trained.shape, *([1] * (outputs.ndim - 2)))
    return torch.where(mask, outputs, total / len(trained))


def _is_trained(domain: Tensor, trained: Sequence[int]) -> Tensor:
    """Return for each sample's domain whether it is among the trained domains."""
    return torch.isin(domain, torch.tensor(trained, device=domain.device))


def untrained_domains(federation: Federation, split: str) -> list[str]:
    """Return the names of the domains of which ``split`` has samples but no client has training samples."""
    trained = federation.domains_in("train")
    return [federation.domain_name(m) for m in federation.domains_in(split) if m not in trained]


def predict_split(method: Method, cohort: Cohort, split: str, trained: Sequence[int]) -> Tensor | None:
    """Return the outputs of each client's personalised model for every sample of ``split``, by :func:`predict`.

    The rows are in the order of ``cohort.samples(split)``; ``None`` if no client has data in the split.
    """
    samples = cohort.samples(split)
    outputs: Tensor | None = None
    for x, index, valid in cohort.iterate_windows(samples):
        predicted = predict(method, cohort, x, trained)
        outputs = predicted.new_empty((len(samples.y), *predicted.shape[2:])) if outputs is None else outputs
        outputs[index[valid]] = predicted[valid]
    return outputs


def mask_absent_classes(cohort: Cohort, split: str, predicted: Tensor | None) -> Tensor | None:
    """Return ``predicted`` (:func:`predict_split`) with logits ``-inf`` for classes without training samples.

    Whether a class has training samples is decided for each client separately.
    """
    if predicted is None:
        return None
    lacks = torch.ones(cohort.n, predicted.shape[1], dtype=torch.bool, device=predicted.device)
    lacks[:, : cohort.class_counts.shape[1]] = cohort.class_counts == 0
    return predicted.masked_fill(lacks[cohort.client_of(cohort.samples(split))], -torch.inf)


def score(cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Metrics:
    """Return the metrics of each client of ``cohort`` on its samples in ``split``: client id -> metric -> value.

    They are the metrics of :func:`metrics_of`, and for classification and survival the ``loss``. Clients without data
    in the split and metrics that are not defined for a client are left out.

    Args:
        cohort: the clients.
        split: the split.
        predicted: the outputs from :func:`predict_split`.
        scoring: the settings of the evaluation.
    """
    if scoring.held:
        among_all = score(cohort, split, predicted, replace(scoring, held=False))
        masked = score(cohort, split, mask_absent_classes(cohort, split, predicted), replace(scoring, held=False))
        # The loss of a sample whose class is masked is infinite; it is not defined.
        defined = {client: {n: v for n, v in values.items() if not np.isinf(v)} for client, values in masked.items()}
        return {c: defined[c] | {f"{name}_all": value for name, value in among_all[c].items()} for c in defined}
    if predicted is None:
        return {}
    samples, metrics = cohort.samples(split), {}
    if cohort.task == "survival":
        losses = client_cox_losses(predicted, samples).cpu().double()
    else:
        losses = sample_losses(predicted[None], samples.y[None], cohort.task)[0].cpu().double()
    y, outputs = scoring.in_units(samples.y).cpu().numpy(), scoring.in_units(predicted).cpu().double().numpy()
    for client, start, count in zip(cohort.ids, samples.starts.tolist(), samples.counts.tolist(), strict=True):
        if count == 0:
            continue
        rows = slice(start, start + count)
        values = metrics_of(y[rows], outputs[rows], cohort.task, cohort.num_classes, scoring.metrics)
        if cohort.task != "regression":
            first = {name: values.pop(name) for name in ALWAYS[cohort.task] if name in values}
            values = {**first, "loss": float(losses[rows].mean()), **values}
        metrics[client] = values
    return metrics


@dataclass(frozen=True)
class Outputs:
    """The outputs of the clients' personalised models for every sample of a split.

    All arrays have one row per sample.

    Attributes:
        client: client ids.
        domain: domain ids; ``None`` if they are unknown.
        y: targets.
        outputs: logits ``(samples, C)``, or values.
    """

    client: NDArray[np.str_]
    domain: NDArray[np.int64] | None
    y: NDArray[Any]
    outputs: NDArray[np.float64]


def outputs_of(cohort: Cohort, split: str, predicted: Tensor | None, scoring: Scoring) -> Outputs:
    """Return ``predicted`` (:func:`predict_split`) with the clients, domains and targets of the samples of ``split``.

    If clients predict only among the classes of their training samples, the logits of other classes are ``-inf``.
    """
    samples = cohort.samples(split)
    if scoring.held:
        predicted = mask_absent_classes(cohort, split, predicted)
    rows = samples.y.new_zeros(0) if predicted is None else predicted
    owners = np.repeat(np.array(cohort.ids), samples.counts)
    domain = None if samples.domain is None else samples.domain.cpu().numpy()
    y, outputs = scoring.in_units(samples.y).cpu().numpy(), scoring.in_units(rows).double().cpu().numpy()
    return Outputs(owners, domain, y, outputs)


def concatenate_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the samples of all ``parts``; the result has domains only if all parts have them."""
    client, y, outputs = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("client", "y", "outputs")
    )
    domains = [part.domain for part in parts if part.domain is not None]
    return Outputs(client, np.concatenate(domains) if len(domains) == len(parts) else None, y, outputs)


def compute_domain_metrics(
    parts: Sequence[Outputs], federation: Federation, extra: Sequence[str] = ()
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return the metrics of each domain over all clients, and of each client in each of its domains.

    :func:`with_extremes` adds the mean, minimum and maximum over domains.

    Args:
        parts: outputs of different clients.
        federation: the clients.
        extra: metrics in addition to those that are always computed for the task.

    Returns:
        Two dictionaries: metric -> domain's name -> value; and client id -> ``METRIC_DOMAIN`` -> value.

    Raises:
        PerfedError: samples have no domain ids.
    """
    if unknown := [part for part in parts if part.domain is None]:
        raise PerfedError(
            f"metrics per domain need domains; client '{unknown[0].client[0]}': samples without domain ids"
        )
    kind = (federation.task, federation.num_classes, extra)
    outputs = concatenate_outputs(parts)
    assert outputs.domain is not None
    domains: dict[str, dict[str, float]] = {}
    clients: dict[str, dict[str, float]] = {}
    for m in np.unique(outputs.domain).tolist():
        rows, name = outputs.domain == m, federation.domain_name(m)
        for metric, value in metrics_of(outputs.y[rows], outputs.outputs[rows], *kind).items():
            domains.setdefault(metric, {})[name] = value
        for client in np.unique(outputs.client[rows]).tolist():
            of_client = rows & (outputs.client == client)
            metrics = metrics_of(outputs.y[of_client], outputs.outputs[of_client], *kind)
            clients.setdefault(client, {}).update({f"{metric}_{name}": value for metric, value in metrics.items()})
    return domains, clients


def few_samples(counts: Mapping[str, int]) -> list[str]:
    """Return the names of the domains with fewer than ten samples; ``counts`` are numbers of samples by name."""
    return [name for name, count in counts.items() if count < ENOUGH]


def with_extremes(domains: Mapping[str, Mapping[str, float]], few: Collection[str] = ()) -> Metrics:
    """Return metrics by domain with the entries ``mean``, ``min`` and ``max`` over the domains added.

    Args:
        domains: metric -> domain -> value.
        few: domains with too few samples (:func:`few_samples`), which are left out of the mean and extremes, unless
            there are no others.
    """
    metrics: Metrics = {}
    for metric, by_domain in domains.items():
        values = np.array([value for name, value in by_domain.items() if name not in few] or [*by_domain.values()])
        extremes = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
        metrics[metric] = {**by_domain, **extremes}
    return metrics


def client_table(
    federation: Federation,
    split: str,
    before: Metrics,
    after: Metrics,
    rounds: Mapping[str, int],
    seconds: Mapping[str, float],
    domains: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of ``clients.csv``; values that were not measured are ``None``.

    Args:
        federation: the clients.
        split: the split on which they were evaluated.
        before, after: metrics before and after local training.
        rounds: the number of rounds in which each client took part.
        seconds: the mean virtual time of each client's replies; empty without a clock.
        domains: per-domain metrics of each client, as from :func:`compute_domain_metrics`.
    """
    names = sorted({name for table in (before, after) for values in table.values() for name in values})
    of_domains = sorted({name for values in domains.values() for name in values})
    columns = ["id", "n_train", "n_test", *(f"{n}_{w}" for n in names for w in ("before", "after")), "rounds"]
    columns += ["seconds"] if seconds else []
    rows = []
    for client in federation:
        data = client.split(split)
        values = [table.get(client.id, {}).get(n) for n in names for table in (before, after)]
        domain_values = [domains.get(client.id, {}).get(name) for name in of_domains]
        sizes = [len(client.train), 0 if data is None else len(data)]
        time = [seconds.get(client.id)] if seconds else []
        rows.append([client.id, *sizes, *values, rounds.get(client.id, 0), *time, *domain_values])
    return [*columns, *of_domains], rows


def spread(values: Iterable[float], weights: Iterable[float] | None = None) -> dict[str, float]:
    """Return the mean and spread of values over clients.

    Returns:
        ``mean`` (weighted if ``weights`` are given), ``std`` (of the population), ``min``, ``max``, and the 10th and
        90th percentiles ``p10`` and ``p90``.
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
    """Return the number of samples in ``split`` of every client that has any: weights for :func:`summarise`."""
    splits = {client.id: client.split(split) for client in federation}
    return {client: float(len(samples)) for client, samples in splits.items() if samples is not None}


def summarise(metrics: Mapping[str, Mapping[str, float]], weights: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the :func:`spread` of every metric over the clients that have it.

    If some clients do not have a metric, the entry ``n`` is the number of clients that do. For groups of which only the
    mean is known (:func:`group_of`), all other entries are NaN.

    Args:
        metrics: client id -> metric -> value.
        weights: the weights of the means, by client id; ``None`` for plain means.
    """
    if any(summed_clients(client) for client in metrics):
        unknown = dict.fromkeys(("std", "min", "p10", "p90", "max"), float("nan"))
        names = dict.fromkeys(name for values in metrics.values() for name in values)
        group_means = {name: [values[name] for values in metrics.values() if name in values] for name in names}
        return {name: {"mean": float(np.mean(values)), **unknown} for name, values in group_means.items()}
    spreads: dict[str, Any] = {}
    for name in dict.fromkeys(name for client in sorted(metrics) for name in metrics[client]):
        clients = [client for client in sorted(metrics) if name in metrics[client]]
        share = None if weights is None else [weights[c] for c in clients]
        missing = len(clients) < len(metrics)
        spreads[name] = spread([metrics[c][name] for c in clients], share) | ({"n": len(clients)} if missing else {})
    return spreads
