"""``module:NAME`` in an experiment: modules of the user's own are run, and the program says so."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from command_line import another_process, perfed

TRANSFORMERS = """
import sys
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import MinMaxScaler

good = ColumnTransformer([("r", MinMaxScaler(), ["age"])])

def ends():
    sys.exit()

def number():
    return 3

class EndsLater(MinMaxScaler):
    def fit(self, x, y=None):
        sys.exit(0)
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        with Path(f"{site}.csv").open("w", newline="") as file:
            rows = [[value, ["no", "yes"][i % 2]] for i, value in enumerate(rng.normal(size=30).round(3).tolist())]
            csv.writer(file).writerows([["age", "sick"], *rows])
    assert perfed("init", "north.csv", "south.csv", "--target", "sick").code == 0
    Path("my_transformers.py").write_text(TRANSFORMERS)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os:abort", "'os' is a module of Python's own"),
        ("sys:exit", "'sys' is a module of Python's own"),
        ("os.path:join", "'os.path' is a module of Python's own"),
        ("builtins:exit", "'builtins' is a module of Python's own"),
        ("my_transformers:ends", "my_transformers.py, line 9, in ends: SystemExit"),
        ("my_transformers:number", "gives a int; a scikit-learn transformer is needed"),
        ("my_transformers:EndsLater", "my_transformers.py, line 16, in fit: SystemExit"),
    ],
)
def test_what_is_no_transformer_is_one_line(here, name, says):
    # in a process of its own, which os.abort would end
    found = another_process("check", "study.toml", f'data.preprocess="{name}"', "columns=own")
    assert found.code == 2 and says in found.err and found.err.count("\n") == 1, found


@pytest.mark.long
def test_check_names_the_modules_that_it_has_run(here):
    found = perfed("check", "study.toml", 'data.preprocess="my_transformers:good"', "columns=own")
    assert found.code == 0 and "check has run code of these modules: my_transformers" in found.said, found.err
    assert "code of these modules" not in perfed("check", "study.toml").out


@pytest.mark.long
@pytest.mark.parametrize("setting", ['method="os:abort"', 'data={name="os:abort"}', 'model.head={kind="os:abort"}'])
def test_methods_data_and_stages_are_not_python_s_own_either(here, setting):
    found = another_process("check", "study.toml", setting)
    assert found.code == 2 and "'os' is a module of Python's own" in found.err and found.err.count("\n") == 1, found
