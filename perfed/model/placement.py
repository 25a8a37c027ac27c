"""Where parameters live: personal to a client, shared by all (also one set per domain), or frozen."""

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
    """One architecture: its modules, and where each of their tensors lives.

    Attributes:
        chain: the modules; their own values are not used.
        places: of every parameter and buffer, by full name.
        label: tells the architectures of a run apart in the names of kinds of work; empty for the first.
        unstackable: why clients of this architecture run one at a time; ``None`` where they can be stacked.
    """

    chain: Chain
    places: Mapping[str, Placement]
    label: str = ""
    unstackable: str | None = None

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer."""
        return {name: tensor.shape for name, tensor in self.chain.tensors().items()}

    @cached_property
    def size(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.chain.tensors().values())


def place(chain: Chain, defaults: Mapping[str, Placement], rules: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placement of every parameter and buffer: a stage, then a module type, then a pattern on names.

    Args:
        chain: the model.
        defaults: stage -> placement.
        rules: overriding rules. A key that is a stage's name applies to the stage; one that is the name of a module
            class (``"BatchNorm2d"``, or a prefix such as ``"BatchNorm"``) to the tensors of such modules; anything
            else is a pattern with wildcards on parameter names, of which the longest wins.

    Parameters that do not require gradients (a pre-trained layer of the user's) are frozen, whatever the rules say, and
    weights of a client's own columns (:mod:`perfed.model.columns`) are personal where they would be shared.

    Raises:
        PerfedError: a stage without a placement, a placement that there is not, or a rule that matches nothing.

    Example:
        >>> from perfed import Model, linear, mlp
        >>> chain = Model(body=mlp((), 4), head=linear(2)).build((3,))
        >>> place(chain, {"body": SHARED, "head": PERSONAL}, {"*.bias": FROZEN})
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
    ordered = sorted(rules, key=lambda rule: (_specificity(rule, owners), len(rule), rule))
    for rule in ordered:
        level = _specificity(rule, owners)
        if level == 0:
            hit = [name for name in result if stage_of(name) == rule]
        elif level == 1:
            hit = [name for name in result if owners[name].startswith(rule)]
        else:
            hit = [name for name in result if fnmatchcase(name, rule)]
        if not hit and rule not in STAGES:
            raise PerfedError(f"placement.{rule} matches no parameter; parameters are: {', '.join(result)}")
        for name in hit:
            result[name] = rules[rule]
    for name, parameter in chain.named_parameters():
        if not parameter.requires_grad:
            if result[name] == PER_DOMAIN:
                raise PerfedError(f"'{name}' does not require gradients, but everything in its stage is per-domain")
            result[name] = FROZEN
    for name, owner in owners.items():
        if owner == "ColumnLinear" and name.endswith(".own") and result[name] in SENT:
            result[name] = PERSONAL
    of_stage = {**defaults, **rules}
    for name, found in result.items():
        stage = stage_of(name)
        if (found == PER_DOMAIN) != (of_stage[stage] == PER_DOMAIN):
            raise PerfedError(
                f"placement: '{PER_DOMAIN}' is for whole stages, by the stage's name; '{stage}' is {of_stage[stage]}, "
                f"but '{name}' is {found}"
            )
    return result


def own_embedding(there: bool) -> str:
    """The settings that give each client an embedding of its own, as assignments; ``there``: the model has one.

    Example:
        >>> own_embedding(there=True)
        'placement.embedding=personal'
    """
    personal = "placement.embedding=personal"
    images = "for images model.embedding=cnn model.body=hidden-layer"
    return personal if there else f"model.embedding=mlp {personal} ({images})"


def _specificity(rule: str, owners: Mapping[str, str]) -> int:
    if rule in STAGES:
        return 0
    return 1 if any(owner.startswith(rule) for owner in owners.values()) else 2
