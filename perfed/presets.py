"""Presets: a method and a participation policy under one name, with the settings that an experiment has for both."""

from __future__ import annotations

import perfed.methods  # noqa: F401 - registers the methods
from perfed.registry import entry, preset

preset("fedrep-srpfl", "fedrep", "srpfl", "FedRep under SRPFL's participation (Tziotis et al. 2023, Algorithm 1)")
preset("lg-srpfl", "lg-fedavg", "srpfl", "LG-FedAvg under SRPFL's participation (Tziotis et al. 2023, section 5)")
preset("flanp", "fedavg", "flanp", "FedAvg on the fastest clients, whose number doubles (Reisizadeh et al. 2022)")
preset("flanp-ft", "fedavg-ft", "flanp", "FLANP; each client evaluates a copy fine-tuned on its own data")


def base_of(name: str) -> str:
    """Name of the method that ``name``, a method or a preset, runs."""
    return entry(name).base or name
