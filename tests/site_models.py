"""Executed runs and models of clients that several test modules use."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from engines import blobs, make, network_for

from perfed.client_model.site_model import SiteModel
from perfed.data.domain_input import with_domain_input
from perfed.data.federation import Federation
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.run.run import Run
from perfed.training.plan import Plan


def done(name: str, federation: Federation, model: Model | None = None, **options: Any) -> Run:
    method = make(name)
    parts = {"rounds": 1, "plan": Plan("stacked", threads=1), **options}
    run = Run(federation, method, model or network_for(method), name=name, **parts)
    run.execute()
    return run


def the_data() -> Federation:
    return blobs((12, 9, 7), test=30)


@cache
def finished(name: str) -> tuple[Run, SiteModel]:
    run = done(name, the_data())
    return run, run.site("c0")


def frames() -> dict[str, pd.DataFrame]:
    """Two hospitals: numbers with gaps, booleans, categories, dates, a domain; the second has columns of its own."""
    found = {}
    for seed, site in enumerate(("north", "south")):
        rng = np.random.default_rng(seed)
        frame = pd.DataFrame(
            {
                "blood pressure": rng.normal(120, 15, 40),
                "smokes": rng.choice(["yes", "no"], 40),
                "pain": rng.choice(["mild", "severe", None], 40),
                "visit": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90, 40), "D"),
                "race": rng.choice(["a", "b"], 40),
            }
        )
        frame["sick"] = np.where(frame["blood pressure"] > 120, "yes", "no")
        frame.loc[3, "blood pressure"] = np.nan
        found[site] = frame
    south = found["south"].assign(sugar=np.arange(40.0) ** 2, ward=["b", "c"] * 20)
    return {**found, "south": south}


@cache
def table_site(method: str, columns: str, domain_input: bool = False) -> SiteModel:
    made = Federation.from_frames(frames(), target="sick", domain="race", columns=columns)
    made = with_domain_input(made) if domain_input else made
    return done(method, made, Model(embedding=mlp((), 3), head=linear(2)), rounds=3).site("north")
