"""A blend between sites: three stations with other columns each, asked by the server's own program."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
from command_line import perfed
from stations import COLUMNS, TABLE, Stations, answer_all, write_tables

from perfed.deploy.own_model import site_model
from perfed.deploy.study import study_of
from perfed.experiment.blended_models import opened_models
from perfed.experiment.comparison import Comparison
from perfed.experiment.config import validate
from perfed.experiment.study import Study

CANDIDATES = ["flic-hl", "local", "sklearn:logistic", "sklearn:random-forest"]
FOLDS = 3


def table(path, **changes):
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "columns": "own", **changes.pop("data", {})}
    return {
        **TABLE,
        "method": "local",
        "rounds": 2,
        "baseline_tries": 1,
        "evaluation": {"every": 2},
        "data": data,
        "blend": {"folds": FOLDS, "candidates": CANDIDATES},
        **changes,
    }


def study(path, **changes):
    return study_of(validate(table(path, **changes)), list(COLUMNS)).to_toml()
