"""Presets: a method and a participation policy under one name, with the settings that an experiment has for both."""

from __future__ import annotations

import perfed.methods  # noqa: F401 - registers the methods
from perfed.method.registry import entry, preset, preset_names
from perfed.participation.policy import POLICIES
from perfed.plugins import bare_name

preset(
    "fedrep-srpfl",
    "fedrep",
    "srpfl",
    "FedRep under SRPFL's participation (Tziotis et al. 2023, Algorithm 1)",
    "FedRep-SRPFL",
)
preset(
    "lg-srpfl",
    "lg-fedavg",
    "srpfl",
    "LG-FedAvg under SRPFL's participation (Tziotis et al. 2023, section 5)",
    "LG-SRPFL",
)
preset(
    "flanp", "fedavg", "flanp", "FedAvg on the fastest clients, whose number doubles (Reisizadeh et al. 2022)", "FLANP"
)
preset(
    "flanp-fedgate",
    "fedgate",
    "flanp",
    "FLANP with FedGATE as its local solver (Reisizadeh et al. 2022)",
    "FLANP-FedGATE",
    "digits-label-skew clock.speeds=fixed methods.fedgate.optimizer=sgd methods.fedgate.lr=0.03",
)
preset("flanp-ft", "fedavg-ft", "flanp", "FLANP; each client evaluates a copy fine-tuned on its own data", "FLANP-FT")
preset(
    "cyclic",
    "fedavg",
    "cyclic",
    "One model that goes from client to client, each training it (Chang et al. 2018)",
    "Cyclic",
)


def method_and_policy(name: str) -> tuple[str, str]:
    """The method that ``name`` runs, without a module, and the policy that the name says; empty where it says none.

    Reads nothing but the name and the shipped presets, so that results can be read where the user's module is not.

    Example:
        >>> method_and_policy("fedrep-srpfl"), method_and_policy("mine:avg+deadline"), method_and_policy("ditto")
        (('fedrep', 'srpfl'), ('avg', 'deadline'), ('ditto', ''))
    """
    method, plus, policy = name.rpartition("+")
    if plus and (policy in POLICIES or ":" in policy):
        return bare_name(method), policy
    bare = bare_name(name)
    if bare in preset_names():
        return entry(bare).base, entry(bare).policy
    return bare, ""
