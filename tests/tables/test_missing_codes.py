"""Values that stand for a missing one: as if the cell were empty, and asked about where nobody named them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed

from perfed import Federation, PerfedError
from perfed.tables.joining import new_client_from_frame
from perfed.tables.site import TablePreprocessor

CODES = ["-9", "age=999", "ward=unknown", "seen=1900-01-01"]


def ward(seed: int, rows: int = 80) -> pd.DataFrame:
    """A site whose gaps are written as codes."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 95, rows),
            "lactate": rng.gamma(2, 1, rows).round(2) + 0.1,
            "pulse": rng.integers(50, 999, rows),
            "smokes": rng.choice(["0", "1"], rows),
            "ward": rng.choice(["A", "B"], rows),
            "seen": pd.to_datetime("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, rows), unit="D"),
            "ill": rng.choice(["no", "yes"], rows),
        }
    )
    for at, (name, code) in enumerate({"age": 999, "lactate": -9.0, "smokes": "-9", "ward": "unknown"}.items()):
        frame.loc[at :: 8 + at, name] = code
    frame.loc[::7, "seen"] = pd.Timestamp("1900-01-01")
    frame.loc[5, "pulse"] = 999  # is no code there
    return frame


def emptied(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with pandas' own hands."""
    return frame.assign(
        age=frame["age"].where(frame["age"] != 999),
        lactate=frame["lactate"].where(frame["lactate"] >= 0),
        smokes=frame["smokes"].where(frame["smokes"] != "-9"),
        ward=frame["ward"].where(frame["ward"] != "unknown"),
        seen=frame["seen"].where(frame["seen"].dt.year > 1900),
    )


@pytest.mark.long
def test_they_are_as_if_the_cell_were_empty(tmp_path):
    frames = {name: ward(seed) for seed, name in enumerate(("north", "south"))}
    said = Federation.from_frames(frames, target="ill", columns="named", missing=CODES)
    plain = Federation.from_frames({n: emptied(f) for n, f in frames.items()}, target="ill", columns="named")
    for one, other in zip(said, plain, strict=True):
        assert torch.equal(one.train.x, other.train.x) and torch.equal(one.test.x, other.test.x)
        assert one.feature_names == other.feature_names
    new = ward(9)
    (table, *_), (expected, *_) = ([client.table for client in federation] for federation in (said, plain))
    table.save(tmp_path / "table.zip")
    for each in (table, TablePreprocessor.load(tmp_path / "table.zip")):
        np.testing.assert_array_equal(each.transform(new)[0], expected.transform(emptied(new))[0])
    joined = new_client_from_frame(said, "west", new, "west.csv")
    assert torch.equal(joined.train.x, new_client_from_frame(plain, "west", emptied(new), "west.csv").train.x)
    unsaid = Federation.from_frames(frames, target="ill", columns="named")
    assert all(one.train.x.shape != other.train.x.shape for one, other in zip(unsaid, said, strict=True))


@pytest.mark.long
def test_in_files_from_init_to_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    for seed, name in enumerate(("north", "south")):
        ward(seed).to_csv(f"wards/{name}.csv", index=False)
    options = [word for code in CODES for word in ("--missing", code)]
    assert perfed("init", "wards", "--target", "ill").code == 0
    assert "column 'lactate' holds -9" in " ".join(perfed("check", "study.toml").out.split())
    made = perfed("init", "wards", "--target", "ill", *options, "--out", "coded.toml")
    assert made.code == 0 and "holds -9" not in made.out, made.err
    assert 'missing = ["-9", "age=999", "ward=unknown", "seen=1900-01-01"]' in Path("coded.toml").read_text()
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run")
    assert perfed("run", "coded.toml", "--method", "local", *quick).code == 0
    for name, frame in {"coded": ward(7), "empty": emptied(ward(7))}.items():
        frame.to_csv(f"{name}.csv", index=False)
        assert perfed("predict", "run", "--site", "north", f"{name}.csv", "--out", f"{name}-p.csv").code == 0
    assert Path("coded-p.csv").read_text() == Path("empty-p.csv").read_text()


def suspicions(values: Any, rows: int = 100, **more: Any) -> list[str]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"value": values, "ill": rng.choice(["no", "yes"], rows)})
    return list(Federation.from_frames({"north": frame}, target="ill", **more).notes["doubts"])


RNG = np.random.default_rng(3)
PLAIN = {
    "years": RNG.integers(18, 99, 100),
    "counts": RNG.poisson(3, 100),
    "small numbers": RNG.integers(-1, 5, 100),
    "changes": RNG.normal(0, 1, 100).round(2),
    "a heavy tail": np.exp(RNG.normal(0, 2, 100)).round(1),
    "half a number": np.where(np.arange(100) < 10, -0.5, RNG.gamma(2, 1, 100) + 0.1),
    "one slip": np.where(np.arange(100) < 1, -9, RNG.integers(18, 99, 100)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_columns_without_codes_are_not_asked_about(name):
    assert suspicions(PLAIN[name]) == []


@pytest.mark.parametrize("code", [-9, -1, 999, 9999])
def test_a_value_far_from_all_others_is_asked_about(code):
    values = np.where(np.arange(100) % 10 == 0, code, PLAIN["years"])
    (line,) = suspicions(values)
    assert line == (
        f"column 'value' holds {code} in 10 % of the rows of north, far from its other values; if that means missing, "
        f"put 'value={code}' into missing"
    )
    assert suspicions(values, missing=[f"value={code}"]) == []
    assert suspicions(values, missing=str(code)) == []


def test_a_column_that_no_site_has_is_refused():
    with pytest.raises(PerfedError, match=r"missing: no site has a column 'valeu' \(did you mean 'value'\?\)"):
        suspicions(PLAIN["years"], missing=["valeu=-9"])


def test_a_target_that_is_missing_is_said_by_row():
    frame = pd.DataFrame({"value": [1.5, 2.5, 3.5, 4.5] * 5, "ill": ["yes", "no", "?", "no"] * 5})
    with pytest.raises(PerfedError, match=r"column 'ill', the target, is missing in rows 2, 6"):
        Federation.from_frames({"north": frame}, target="ill", missing=["ill=?"])


@pytest.mark.long
@pytest.mark.parametrize("how", [["--missing", ""], ["--missing", "ill="]])
def test_a_class_called_none_from_init_to_predictions(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    grades = np.random.default_rng(0)
    for seed, name in enumerate(("north", "south")):
        ward(seed).assign(ill=grades.choice(["None", "Mild", "NA"], 80)).to_csv(f"wards/{name}.csv", index=False)
    refused = perfed("init", "wards", "--target", "ill")
    printed = " ".join((refused.out + refused.err).split())
    assert refused.code == 2 and "put 'ill=' into missing if NA or None is a value" in printed
    assert perfed("init", "wards", "--target", "ill", *how).code == 0
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run")
    assert perfed("run", "study.toml", "--method", "local", *quick).code == 0
    ward(7).drop(columns="ill").to_csv("new.csv", index=False)
    assert perfed("predict", "run", "--site", "north", "new.csv", "--out", "p.csv").code == 0
    header, *rows = Path("p.csv").read_text().splitlines()
    assert header.split(",")[1:] == ["prediction", *(f"probability of {name}" for name in ("Mild", "NA", "None"))]
    assert {row.split(",")[1] for row in rows} <= {"Mild", "NA", "None"}
