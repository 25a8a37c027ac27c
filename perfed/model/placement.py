"""The placement of parameters: personal to a client, shared by all (also one set per domain), or frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal, get_args

import torch

from perfed.errors import PerfedError
from perfed.model.chain import STAGES, Chain, stage_of

Placement = Literal["personal", "shared", "per-domain", "frozen"]
PERSONAL: Placement = "personal"
SHARED: Placement = "shared"
PER_DOMAIN: Placement = "per-domain"
FROZEN: Placement = "frozen"
SENT = (SHARED, PER_DOMAIN)


@dataclass(frozen=True)
class Layout:
    """An architecture: its modules, and the placement of each of their tensors.

    Attributes:
        chain: the modules; the values of their parameters are not used.
        places: the placement of every parameter and buffer, by full name.
        label: distinguishes the architectures of a run in the names of kinds of work; empty for the first.
        unstackable: the reason why clients of this architecture run one at a time; ``None`` if they can be stacked.
    """

    chain: Chain
    places: Mapping[str, Placement]
    label: str = ""
    unstackable: str | None = None

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every parameter and buffer."""
        return {name: tensor.shape for name, tensor in self.chain.tensors().items()}

    @cached_property
    def size(self) -> int:
        """Return the number of bytes of all parameters and buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.chain.tensors().values())


def place_parameters(
    chain: Chain, defaults: Mapping[str, Placement], rules: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Return the placement of every parameter and buffer: by stage, then by module type, then by a pattern on names.

    Args:
        chain: the model.
        defaults: the placement of each stage.
        rules: placements that override the defaults. A key that is a stage's name applies to the stage; one that is the
            name of a module class (``"BatchNorm2d"``, or a prefix such as ``"BatchNorm"``) to the tensors of such
            modules; anything else is a pattern with wildcards on parameter names. The longest matching pattern applies.

    Parameters that do not require gradients, such as those of a pre-trained layer, are always frozen. Weights of local
    columns (:mod:`perfed.model.columns`) are personal where they would otherwise be shared.

    Raises:
        PerfedError: if a stage has no placement, a placement does not exist, or a rule matches nothing.

    Example:
        >>> from perfed import Model, linear, mlp
        >>> chain = Model(body=mlp((), 4), head=linear(2)).build((3,))
        >>> place_parameters(chain, {"body": SHARED, "head": PERSONAL}, {"*.bias": FROZEN})
        {'body.0.weight': 'shared', 'body.0.bias': 'frozen', 'head.weight': 'personal', 'head.bias': 'frozen'}
    """
    for stage in chain.stages:
        if stage not in defaults:
            raise PerfedError(f"default_placement lacks the stage '{stage}'; allowed: {', '.join(get_args(Placement))}")
    for rule, placement in {**defaults, **rules}.items():
        if placement not in get_args(Placement):
            allowed = ", ".join(get_args(Placement))
            raise PerfedError(f"placement.{rule} = '{placement}' is not allowed; allowed: {allowed}")
    result = {name: defaults[stage_of(name)] for name in chain.tensors()}
    owners = {name: type(chain.get_submodule(name.rpartition(".")[0])).__name__ for name in result}
    ordered = sorted(rules, key=lambda rule: (_rank_rule(rule, owners), len(rule), rule))
    for rule in ordered:
        level = _rank_rule(rule, owners)
        if level == 0:
            matches = [name for name in result if stage_of(name) == rule]
        elif level == 1:
            matches = [name for name in result if owners[name].startswith(rule)]
        else:
            matches = [name for name in result if fnmatchcase(name, rule)]
        if not matches and rule not in STAGES:
            raise PerfedError(f"placement.{rule} matches no parameter; parameters are: {', '.join(result)}")
        for name in matches:
            result[name] = rules[rule]
    for name, parameter in chain.named_parameters():
        if not parameter.requires_grad:
            if result[name] == PER_DOMAIN:
                raise PerfedError(f"'{name}' does not require gradients, but everything in its stage is per-domain")
            result[name] = FROZEN
    for name, owner in owners.items():
        if owner == "ColumnLinear" and name.endswith(".own") and result[name] in SENT:
            result[name] = PERSONAL
    stage_rules = {**defaults, **rules}
    for name, tensor_place in result.items():
        stage = stage_of(name)
        if (tensor_place == PER_DOMAIN) != (stage_rules[stage] == PER_DOMAIN):
            raise PerfedError(
                f"placement: '{PER_DOMAIN}' is for whole stages, by the stage's name; '{stage}' is "
                f"{stage_rules[stage]}, but '{name}' is {tensor_place}"
            )
    return result


def suggest_personal_embedding(has_embedding: bool) -> str:
    """Return the settings that give each client a personal embedding, as a text of assignments.

    Args:
        has_embedding: whether the model has an embedding.

    Example:
        >>> suggest_personal_embedding(has_embedding=True)
        'placement.embedding=personal'
    """
    personal = "placement.embedding=personal"
    images = "for images model.embedding=cnn model.body=hidden-layer"
    return personal if has_embedding else f"model.embedding=mlp {personal} ({images})"


def _rank_rule(rule: str, owners: Mapping[str, str]) -> int:
    """Return 0 for a rule on a stage, 1 for a rule on a module type, 2 for a pattern on names."""
    if rule in STAGES:
        return 0
    return 1 if any(owner.startswith(rule) for owner in owners.values()) else 2
