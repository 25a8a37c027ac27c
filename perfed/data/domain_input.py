"""The domain of a sample as an input of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from perfed.data.client import SPLITS, Client, Split
from perfed.data.federation import Federation
from perfed.data.held_out import fold_as_test, with_validation
from perfed.errors import PerfedError


def with_domain_input(federation: Federation) -> Federation:
    """The federation with the one-hot domain of every sample behind its inputs, along their first axis.

    Vectors get M more features, called ``domain NAME`` where features have names; images get M more channels of zeros
    or ones, which random crops move (and fill) like the others.

    Raises:
        PerfedError: the samples have no domains.

    Source: an ablation of Zhong et al. 2023 (FedDAR).
    """
    names = federation.domain_names or tuple(str(m) for m in range(federation.num_domains))
    if federation.num_domains == 0:
        raise PerfedError(
            f"data.domain_input = true needs domains, but the samples of '{federation.name}' have none "
            f"(client '{federation.ids[0]}': train samples without domain ids)"
        )

    return replace(federation, clients=tuple(with_domain(client, names) for client in federation))


def with_domain(client: Client, names: Sequence[str]) -> Client:
    """``client`` with the one-hot domain, of those called ``names``, of every sample behind its inputs."""
    extend = _Extended(len(names))

    def extended(split: Split | None) -> Split | None:
        if split is None or not split.has_domains:
            return split
        inputs, *rest = split.input_shape
        return split.then(extend, lambda facts: replace(facts, input_shape=(inputs + len(names), *rest)))

    features = client.feature_names and (*client.feature_names, *(f"domain {name}" for name in names))
    splits = {name: extended(getattr(client, name)) for name in SPLITS}
    table = client.table and client.table.with_domain_input()
    return replace(client, feature_names=features, table=table, **splits)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Extended:
    domains: int

    def __call__(self, split: Split) -> Split:
        assert split.domain is not None
        hot = F.one_hot(split.domain, self.domains).to(split.x.dtype)
        planes = hot.view(*hot.shape, *([1] * (split.x.ndim - 2))).expand(*hot.shape, *split.x.shape[2:])
        return replace(split, x=torch.cat([split.x, planes], 1))


OPTIONS = ("validation_fraction", "domain_input", "inner_fold")
"""Options that every data set has, for :func:`completed`."""


def completed(
    federation: Federation,
    fraction: float,
    domain_input: bool,
    seed: int,
    inner_fold: Sequence[int] = (),
    *,
    by_class: bool = True,
) -> Federation:
    """The federation with what every data set may have besides: a fold of the training data in the place of the test
    data, validation data, and the domain among the inputs.

    Args:
        federation: of all clients, or of those at one place.
        fraction: of the training samples, see :func:`perfed.data.held_out.with_validation`; 0: none.
        domain_input: whether to do as :func:`with_domain_input`.
        seed: of the choice of validation data, and of folds.
        inner_fold: i and k, see :func:`perfed.data.held_out.fold_as_test`; empty: none.
        by_class: whether each class (of survival, each event) is spread evenly, from which one could tell their sizes.
    """
    stratify = by_class and federation.task != "regression"
    if inner_fold:
        clients = tuple(fold_as_test(client, inner_fold, stratify, seed) for client in federation)
        federation = replace(federation, clients=clients)
    if fraction > 0:
        clients = tuple(with_validation(client, fraction, stratify, seed) for client in federation)
        federation = replace(federation, clients=clients)
    return with_domain_input(federation) if domain_input else federation


def completed_by(federation: Federation, options: Mapping[str, Any], seed: int) -> Federation:
    """:func:`completed` as the checked ``options`` of the data set say: not by class where they say what is public."""
    return completed(
        federation,
        options["validation_fraction"],
        options["domain_input"],
        seed,
        options["inner_fold"],
        by_class=not options.get("public"),
    )
