"""What ``perfed init`` and ``perfed check`` print of tables with very many columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import perfed

COLUMNS = 300


@pytest.fixture
def wide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    rng = np.random.default_rng(0)
    for site in ("north", "south", "west"):
        table = pd.DataFrame(rng.normal(size=(20, COLUMNS)).round(3), columns=[f"gene{n:04d}" for n in range(COLUMNS)])
        table.assign(ill=["yes", "no"] * 10).to_csv(f"sites/{site}.csv", index=False)


@pytest.mark.long
def test_of_many_columns_the_first_are_printed_and_json_has_all(wide):
    made = perfed("init", "sites", "--target", "ill")
    assert made.code == 0, made.err
    checked = perfed("check", "study.toml")
    for out in (made.out, checked.out):
        words = " ".join(out.split())
        assert "gene0019 and 280 more" in words and "gene0020" not in words
        assert len(out.splitlines()) < 50
    assert "gene0020" not in Path("study.toml").read_text()
    facts = json.loads(perfed("check", "study.toml", "--json").out)
    assert len(facts["columns"]["number"]) == COLUMNS


@pytest.mark.long
def test_of_many_problems_the_first_are_printed(wide):
    for path in Path("sites").iterdir():
        table = pd.read_csv(path)
        table.iloc[3, :COLUMNS] = "about 5"
        table.to_csv(path, index=False)
    made = perfed("init", "sites", "--target", "ill")
    assert made.code == 2 and "gene0099" in made.out + made.err and "gene0100" not in made.out + made.err
    assert f"and {COLUMNS - 100} more" in made.out + made.err and f"{COLUMNS} problems in the tables" in made.err


@pytest.mark.long
def test_init_prepares_the_tables_once(wide, monkeypatch):
    """Which is most of the time that it takes with many columns."""
    from sklearn.compose import ColumnTransformer

    fits = []
    fit = ColumnTransformer.fit
    monkeypatch.setattr(ColumnTransformer, "fit", lambda self, *given: (fits.append(1), fit(self, *given))[1])
    assert perfed("init", "sites", "--target", "ill").code == 0
    assert len(fits) == 3
