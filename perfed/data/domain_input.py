"""The domain of a sample as an input of the model, and the options that every data set has."""

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
    """Return the federation with the one-hot domain of every sample appended to its inputs, along their first axis.

    Vectors get M more features, called ``domain NAME`` if features have names; images get M more channels of zeros or
    ones, which random crops move and fill like the other channels.

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
    """Return the client with the one-hot domain of every sample appended to its inputs; ``names`` are the domains."""
    append_domain = _AppendDomain(len(names))

    def extend(split: Split | None) -> Split | None:
        if split is None or not split.has_domains:
            return split
        inputs, *shape = split.input_shape
        return split.then(append_domain, lambda facts: replace(facts, input_shape=(inputs + len(names), *shape)))

    features = client.feature_names and (*client.feature_names, *(f"domain {name}" for name in names))
    splits = {name: extend(getattr(client, name)) for name in SPLITS}
    table = client.table and client.table.with_domain_input()
    return replace(client, feature_names=features, table=table, **splits)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _AppendDomain:
    """A function that appends the one-hot domain to the inputs of a split."""

    domains: int

    def __call__(self, split: Split) -> Split:
        assert split.domain is not None
        hot = F.one_hot(split.domain, self.domains).to(split.x.dtype)
        planes = hot.view(*hot.shape, *([1] * (split.x.ndim - 2))).expand(*hot.shape, *split.x.shape[2:])
        return replace(split, x=torch.cat([split.x, planes], 1))


OPTIONS = ("validation_fraction", "domain_input", "inner_fold")
"""The options that every data set has, which :func:`apply_common_options` applies."""


def apply_common_options(
    federation: Federation,
    fraction: float,
    domain_input: bool,
    seed: int,
    inner_fold: Sequence[int] = (),
    *,
    by_class: bool = True,
) -> Federation:
    """Return the federation after applying the options that every data set has.

    Args:
        federation: the federation of all or some clients.
        fraction: the fraction of the training samples that become validation data
            (:func:`perfed.data.held_out.with_validation`); 0 for none.
        domain_input: whether domains are appended to the inputs (:func:`with_domain_input`).
        seed: the seed of the choice of validation data and of folds.
        inner_fold: the fold i of k that replaces the test data (:func:`perfed.data.held_out.fold_as_test`); empty for
            none.
        by_class: whether classes (for survival, samples with and without an event) are divided evenly, which could
            disclose their sizes.
    """
    stratify = by_class and federation.task != "regression"
    if inner_fold:
        clients = tuple(fold_as_test(client, inner_fold, stratify, seed) for client in federation)
        federation = replace(federation, clients=clients)
    if fraction > 0:
        clients = tuple(with_validation(client, fraction, stratify, seed) for client in federation)
        federation = replace(federation, clients=clients)
    return with_domain_input(federation) if domain_input else federation


def apply_options(federation: Federation, options: Mapping[str, Any], seed: int) -> Federation:
    """Apply the validated ``options`` of a data set with :func:`apply_common_options`.

    Classes are not divided evenly if the options name public metadata.
    """
    return apply_common_options(
        federation,
        options["validation_fraction"],
        options["domain_input"],
        seed,
        options["inner_fold"],
        by_class=not options.get("public"),
    )
