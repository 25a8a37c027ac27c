"""How often tables are read and their columns parsed: once, whatever is asked of them afterwards."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import perfed

from perfed import Federation
from perfed.datasets import load
from perfed.tables import files


def ward(seed: int, rows: int = 30) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    numbers = {name: rng.normal(size=rows).round(3).astype(str) for name in ("age", "dose", "height")}
    return pd.DataFrame({**numbers, "smokes": ["yes", "no"] * (rows // 2), "sick": ["no", "yes"] * (rows // 2)})


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each column was made numbers."""
    counts: Counter[str] = Counter()
    given = pd.to_numeric

    def counted(values: pd.Series, *more: object, **options: object) -> pd.Series:
        counts[str(values.name)] += 1
        return given(values, *more, **options)

    monkeypatch.setattr(pd, "to_numeric", counted)
    return counts


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read."""
    counts: Counter[str] = Counter()
    given = files.read_table

    def counted(path: Path) -> object:
        counts[path.name] += 1
        return given(path)

    monkeypatch.setattr(files, "read_table", counted)
    return counts


@pytest.mark.parametrize("columns", ["own", "common"])
def test_a_column_is_parsed_once_at_each_site(parsed, columns):
    Federation.from_frames({"x": ward(0), "y": ward(1)}, target="sick", columns=columns, folds=5)
    assert {name: parsed[name] for name in ("age", "dose", "height")} == {"age": 2, "dose": 2, "height": 2}


def test_a_wide_table_needs_few_series_for_each_column(monkeypatch):
    """Creating a pandas Series takes as long as a Python loop over a hundred cells."""
    rng = np.random.default_rng(0)
    frames = {
        site: pd.DataFrame(rng.normal(size=(20, 60)).round(3).astype(str))
        .add_prefix("gene ")
        .assign(ill=["no", "yes"] * 10)
        for site in ("north", "south")
    }
    create, count = pd.Series.__init__, 0

    def count_series(*arguments: object, **options: object) -> None:
        nonlocal count
        count += 1
        create(*arguments, **options)

    monkeypatch.setattr(pd.Series, "__init__", count_series)
    Federation.from_frames(frames, target="ill", columns="named", folds=5)
    assert count < 4 * 2 * 60


@pytest.mark.long
def test_seeds_of_one_process_read_a_file_once_and_anew_where_it_has_changed(tmp_path, opened, parsed):
    for number, name in enumerate(("north", "south")):
        ward(number).to_csv(tmp_path / f"{name}.csv", index=False)
    options = {"files": [str(tmp_path)], "target": "sick", "folds": 5}
    tested = [load("tables", options, seed=seed).clients[0].test.x for seed in range(3)]
    assert dict(opened) == {"north.csv": 1, "south.csv": 1} and parsed["age"] == 2
    assert not tested[0].equal(tested[1])
    ward(7).to_csv(tmp_path / "north.csv", index=False)
    os.utime(tmp_path / "north.csv", ns=(0, 0))  # within the clock's tick it would be of the same time
    expected = Federation.from_frames({"north": ward(7), "south": ward(1)}, target="sick", folds=5, seed=2)
    assert load("tables", options, seed=2).clients[0].test.x.equal(expected.clients[0].test.x)
    ward(3).to_csv(tmp_path / "west.csv", index=False)
    assert load("tables", options, seed=0).ids == ["north", "south", "west"]


@pytest.mark.long
def test_commands_read_a_file_once(tmp_path, monkeypatch, opened):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    for number, name in enumerate(("north", "south")):
        ward(number + 20).to_csv(Path("wards", f"{name}.csv"), index=False)
    assert perfed("init", "wards", "--target", "sick").code == 0
    assert dict(opened) == {"north.csv": 1, "south.csv": 1}
    opened.clear()
    os.utime(Path("wards", "north.csv"), ns=(0, 0))  # as if another process had read it
    os.utime(Path("wards", "south.csv"), ns=(0, 0))
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    done = perfed("compare", "study.toml", "--methods", "local,fedrep", "--seeds", "0..2", *quick, "--out", "out")
    assert done.code == 0 and dict(opened) == {"north.csv": 1, "south.csv": 1}, done.err
