"""Presets: a method and a participation policy under one name, with an experiment's settings for both."""

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


def split_method_name(name: str) -> tuple[str, str]:
    """Return the method that ``name`` runs, without its module, and the policy in the name; "" if it has none.

    Only the name and the shipped presets are used, so that results can be read without the user's module.

    Example:
        >>> split_method_name("fedrep-srpfl"), split_method_name("mine:avg+deadline"), split_method_name("ditto")
        (('fedrep', 'srpfl'), ('avg', 'deadline'), ('ditto', ''))
    """
    method, plus, policy = name.rpartition("+")
    if plus and (policy in POLICIES or ":" in policy):
        return bare_name(method), policy
    bare = bare_name(name)
    if bare in preset_names():
        return entry(bare).base, entry(bare).policy
    return bare, ""
