"""A table is the same whatever it is read from: CSV, TSV, Excel, Parquet or a data frame."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation, PerfedError
from perfed.data.problems import DataProblems
from perfed.datasets import load
from perfed.tables.files import read_sites, read_table
from perfed.tables.joining import new_client_from_frame
from perfed.tables.kinds import guess, read
from perfed.tables.site import TablePreprocessor

SOURCES = ["csv", "tsv", "xlsx", "parquet", "frame"]
RNG = np.random.default_rng(0)
ROWS = 60


def source(folder: Path, frame: pd.DataFrame, ending: str) -> pd.DataFrame:
    """The table as a file of this kind gives it, or as it is."""
    file = folder / f"north.{ending}"
    if ending == "frame":
        return frame
    if ending == "parquet":
        frame.to_parquet(file, index=False)
    elif ending == "xlsx":
        frame.to_excel(file, index=False)
    else:
        frame.to_csv(file, index=False, sep="\t" if ending == "tsv" else ",")
    return read_table(file)[0]


def ward(seed: int = 0, **more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"age": rng.integers(20, 90, ROWS), "ill": rng.choice(["no", "yes"], ROWS), **more})


@pytest.mark.parametrize("ending", SOURCES)
def test_texts_that_mean_missing_are_missing(tmp_path, ending):
    texts = RNG.choice(["NA", "?", " N/A ", "None", "null", "<NA>", "low", " high"], ROWS)
    numbers = np.where(np.arange(ROWS) % 7 == 0, "NA", RNG.normal(size=ROWS).round(2).astype(str))
    plain = ward(
        grade=[{"low": "low", " high": "high"}.get(text) for text in texts],
        lab=[None if text == "NA" else float(text) for text in numbers],
    )
    expected = Federation.from_frames({"north": plain}, target="ill").clients[0].train.x
    made = Federation.from_frames({"north": source(tmp_path, ward(grade=texts, lab=numbers), ending)}, target="ill")
    assert torch.equal(made.clients[0].train.x, expected)


@pytest.mark.parametrize("ending", ["parquet", "frame"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_duration_is_a_number_of_days(tmp_path, ending, unit):
    days = pd.Series(np.array([0, 36, 240, "NaT"], "m8[h]").astype(f"m8[{unit}]"))
    stay = source(tmp_path, pd.DataFrame({"stay": days}), ending)["stay"]
    column = guess(stay, "stay")
    assert column.kind == "number"
    np.testing.assert_array_equal(read(stay, column)[0], [0, 1.5, 10, np.nan])


def test_a_duration_is_a_number_of_days_in_excel_and_may_be_long(tmp_path):
    frame = source(tmp_path, pd.DataFrame({"stay": pd.to_timedelta([6, 36, 240], unit="h")}), "xlsx")
    np.testing.assert_allclose(read(frame["stay"], guess(frame["stay"], "stay"))[0], [0.25, 1.5, 10])
    long = pd.Series(np.array([400_000, 800_000], "m8[D]").astype("m8[s]"))  # beyond what nanoseconds hold
    assert read(long, guess(long, "stay"))[0].tolist() == [400_000, 800_000]


FAR = {
    "csv": ["9999-12-31", "2021-09-25"],
    "german": ["31.12.9999", "25.09.2021"],
    "early": ["1599-12-31 10:00", "2021-09-25"],
    "parquet": np.array(["9999-12-31", "2021-09-25"], "M8[us]"),
    "seconds": np.array(["1500-12-31", "2021-09-25"], "M8[s]"),
    "objects": np.array(["9999-12-31", "2021-09-25"], "M8[us]").astype(object),
    "zone": pd.Series(np.array(["9999-12-31", "2021-09-25"], "M8[us]")).dt.tz_localize("UTC"),
}


@pytest.mark.parametrize("form", FAR)
def test_dates_out_of_range_are_named_by_row(form):
    dates = pd.Series(FAR[form])
    column = guess(dates, "ended")
    days, problems = read(dates, column)
    assert column.kind == "date" and days[1] == (pd.Timestamp("2021-09-25") - pd.Timestamp(0)).days
    assert problems == [
        "column 'ended' holds dates outside 1677-09-22 to 2262-04-11 in row 0; put what means a missing value into "
        "missing"
    ]


@pytest.mark.parametrize("ending", [*SOURCES, "xlsx-dates"])
def test_a_date_out_of_range_may_mean_missing(tmp_path, ending):
    days = np.datetime64("2021-01-01", "D") + RNG.integers(0, 300, ROWS)
    far = pd.Series(np.where(np.arange(ROWS) % 9 == 0, np.datetime64("9999-12-31", "D"), days).astype("M8[us]"))
    ended = far if ending in ("parquet", "frame") else far.astype(str).str[:10]
    ended = far.astype(object) if ending == "xlsx-dates" else ended
    frame = source(tmp_path, ward(ended=ended), ending.partition("-")[0])
    with pytest.raises(PerfedError, match="outside 1677-09-22 to 2262-04-11"):
        Federation.from_frames({"north": frame}, target="ill")
    made = Federation.from_frames({"north": frame}, target="ill", missing=["ended=9999-12-31"])
    plain = ward(ended=pd.Series(days.astype("M8[ns]")).where(np.arange(ROWS) % 9 != 0))
    assert torch.equal(
        made.clients[0].train.x, Federation.from_frames({"north": plain}, target="ill").clients[0].train.x
    )


def test_a_date_that_means_missing_is_so_beside_times_of_day():
    seen = pd.Series(pd.to_datetime(["1900-01-01"] * 10 + ["2024-03-01 12:30"] * 50, format="ISO8601"))
    made = Federation.from_frames({"north": ward(seen=seen)}, target="ill", missing=["1900-01-01"])
    assert made.clients[0].table.columns[1].missing > 0


def test_names_of_several_levels_are_joined_and_an_index_with_names_is_columns(tmp_path):
    frame = ward(patient=np.arange(ROWS) // 3, visit=np.arange(ROWS) % 3).set_index(["patient", "visit"])
    frame.columns = pd.MultiIndex.from_tuples([("lab", "age"), ("ill", "")])
    frame.to_parquet(tmp_path / "north.parquet")
    read_back, _ = read_table(tmp_path / "north.parquet")
    assert sorted(read_back.columns) == ["ill", "lab age", "patient", "visit"]
    assert read_back.index.tolist() == list(range(1, ROWS + 1))
    assert read_back["patient"].tolist() == (np.arange(ROWS) // 3).tolist()
    made = Federation.from_frames({"north": frame}, target="ill")
    assert made.clients[0].table.feature_names_in_ == ("lab age",)
    assert len(made.clients[0].table.transform(frame)[0]) == ROWS


def test_an_index_of_the_name_of_a_column_is_refused(tmp_path):
    frame = ward()
    frame.index = pd.Index(range(ROWS), name="age")
    frame.to_parquet(tmp_path / "north.parquet")
    with pytest.raises(PerfedError, match="several columns are called 'age'"):
        read_table(tmp_path / "north.parquet")


# Texts that mean missing, switched off ---------------------------------------------------------------------------


def graded(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "dose": rng.normal(size=ROWS).round(2),
            "smokes": rng.choice(["NA", "now", "before"], ROWS),
            "grade": rng.choice(["None", "Mild", "Severe"], ROWS),
        }
    )


@pytest.mark.parametrize("missing", [[], [""], ["", "-9"]])
@pytest.mark.parametrize("ending", SOURCES)
def test_none_and_na_are_values_where_missing_is_empty(tmp_path, missing, ending):
    made = Federation.from_frames({"north": source(tmp_path, graded(0), ending)}, target="grade", missing=missing)
    assert made.classes == ("Mild", "None", "Severe")
    assert made.clients[0].table.columns[1].levels == ("NA", "before", "now")
    table = made.clients[0].table
    table.save(tmp_path / "table.zip")
    for each in (table, TablePreprocessor.load(tmp_path / "table.zip")):
        x, _ = each.transform(graded(1).drop(columns="grade"))
        np.testing.assert_array_equal(
            x[:, each.feature_names_out_.index("category__smokes_NA")], graded(1).smokes == "NA"
        )
    joined = new_client_from_frame(made, "west", graded(2), "west.csv")
    assert joined.table.columns[1].levels == ("NA", "before", "now")


def test_they_are_switched_off_in_one_column():
    frames = {"north": graded(0)}
    with pytest.raises(DataProblems) as error:
        Federation.from_frames(frames, target="grade")
    rows = (np.flatnonzero(graded(0).grade == "None")[:5]).tolist()
    assert str(error.value).startswith(
        f"site 'north': column 'grade', the target, is missing in rows {str(rows)[1:-1]}"
    )
    assert str(error.value).endswith("leave these rows out, or put 'grade=' into missing if None is a value")
    made = Federation.from_frames(frames, target="grade", missing="grade=")
    assert made.classes == ("Mild", "None", "Severe")
    assert made.clients[0].table.columns[1].levels == ("before", "missing", "now")
    assert made.notes["remarks"] == (
        "column 'smokes': NA is read as missing; if it is a category, put 'smokes=' into missing",
    )
    made = Federation.from_frames(frames, target="grade", missing=[])
    assert made.notes["remarks"] == (
        "column 'smokes': NA is read as a category, and as missing without '' or [] in missing",
    )
    with pytest.raises(PerfedError, match=r"missing: no site has a column 'grad' \(did you mean 'grade'\?\)"):
        Federation.from_frames(frames, target="grade", missing=["grade=", "grad="])


def test_a_study_switches_them_off_for_rows_and_names_of_sites(tmp_path):
    frame = pd.concat([graded(0).assign(country="NA"), graded(1).assign(country="DE")])
    frame.to_csv(tmp_path / "all.csv", index=False)
    options = {"files": [str(tmp_path / "all.csv")], "target": "grade", "site_column": "country"}
    made = load("tables", {**options, "missing": []}, seed=0)
    assert made.ids == ["DE", "NA"] and made.classes == ("Mild", "None", "Severe")
    with pytest.raises(PerfedError, match="column 'country' names no site in rows 2, 3"):
        load("tables", options, seed=0)


# Accents ---------------------------------------------------------------------------------------------------------

NFC, NFD = (
    ("größe", "Köln", "möglich", "é"),
    tuple(unicodedata.normalize("NFD", t) for t in ("größe", "Köln", "möglich", "é")),
)


def accented(seed: int, names: tuple[str, ...]) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    size, town, label, group = names
    return pd.DataFrame(
        {
            size: rng.normal(size=ROWS),
            "town": rng.choice([town, "Bonn"], ROWS),
            "who": [f"{group} {at}" for at in np.arange(ROWS) // 2],
            "ill": rng.choice(["nein", label], ROWS),
        }
    )


def test_accents_of_both_forms_are_the_same():
    options = {"target": "ill", "columns": "named", "group": "who", "folds": 3}
    mixed = Federation.from_frames({"a": accented(0, NFC), "b": accented(1, NFD)}, **options)
    plain = Federation.from_frames({"a": accented(0, NFC), "b": accented(1, NFC)}, **options)
    assert mixed.classes == plain.classes and mixed.schema == plain.schema
    for one, other in zip(mixed, plain, strict=True):
        assert torch.equal(one.train.x, other.train.x) and torch.equal(one.test.x, other.test.x)
    for client, new in ((client, new) for client in mixed for new in (accented(5, NFC), accented(5, NFD))):
        expected = plain.clients[0].table.transform(accented(5, NFC))[0].shape
        assert client.table.transform(new)[0].shape == expected and client.table.unseen(new) == {}
    named = Federation.from_frames(
        {"b": accented(1, NFD)}, target="ill", drop=["who"], categories=["town"], missing=["town=Köln"]
    )
    assert named.clients[0].table.columns[1].levels == ("Bonn", "missing")


def test_rows_of_a_group_stay_together_whatever_the_form():
    frame = accented(0, NFC)
    frame["who"] = [text if at % 2 else unicodedata.normalize("NFD", text) for at, text in enumerate(frame["who"])]
    made = Federation.from_frames({"a": frame}, target="ill", group="who", test=0.4)
    plain = Federation.from_frames({"a": accented(0, NFC)}, target="ill", group="who", test=0.4)
    assert torch.equal(made.clients[0].test.x, plain.clients[0].test.x)


def test_names_are_as_the_site_writes_them(tmp_path):
    made = Federation.from_frames({"a": accented(0, NFD)}, target="ill", drop=["who"])
    made.clients[0].table.save(tmp_path / "table.zip")
    for table in (made.clients[0].table, TablePreprocessor.load(tmp_path / "table.zip")):
        assert table.feature_names_in_ == (NFD[0], "town") and table.original_name(NFC[2]) == NFD[2]
        frame = accented(3, NFD)[list(table.feature_names_in_)]
        assert table.transform(frame)[0].shape == (ROWS, 3)


def test_sites_are_the_same_whatever_the_form(tmp_path):
    with pytest.raises(PerfedError, match="two sites are called"):
        Federation.from_frames({NFC[1]: accented(0, NFC), NFD[1]: accented(1, NFC)}, target="ill", group="who")
    made = Federation.from_frames(
        {NFD[1]: accented(0, NFC)}, target="ill", drop=["who"], test={NFC[1]: accented(1, NFC)}
    )
    assert made.ids == [NFD[1]] and len(made.clients[0].test) == ROWS
    with pytest.raises(PerfedError, match="is in the run already"):
        new_client_from_frame(made, NFC[1], accented(2, NFC), "x.csv")
    frame = pd.concat([accented(0, NFC).assign(site=NFD[1]), accented(1, NFC).assign(site=NFC[1])])
    frame.to_csv(tmp_path / "all.csv", index=False)
    read_back = read_sites([tmp_path / "all.csv"], "site")
    assert list(read_back.frames) == [NFD[1]] and len(read_back.frames[NFD[1]]) == 2 * ROWS
    for folder, name in (("x", NFC[1]), ("y", NFD[1])):
        (tmp_path / folder).mkdir()
        accented(0, NFC).to_csv(tmp_path / folder / f"{name}.csv", index=False)
    with pytest.raises(PerfedError, match="names must differ"):
        read_sites([tmp_path / "x", tmp_path / "y"])
    made = load(
        "tables",
        {"files": [str(tmp_path / "x")], "test_files": [str(tmp_path / "y")], "target": "ill", "drop": ["who"]},
        seed=0,
    )
    assert made.ids == [NFC[1]] and len(made.clients[0].test) == ROWS


def test_columns_that_differ_in_form_alone_are_one_name_twice(tmp_path):
    frame = accented(0, NFC).assign(**{NFD[0]: 1.0})
    frame.to_csv(tmp_path / "north.csv", index=False)
    with pytest.raises(PerfedError, match="several columns are called"):
        read_table(tmp_path / "north.csv")
    with pytest.raises(PerfedError, match="several columns are called"):
        Federation.from_frames({"north": frame}, target="ill", group="who")


# Long texts ------------------------------------------------------------------------------------------------------

LONG = "w" * 1001


@pytest.mark.parametrize("ending", SOURCES)
@pytest.mark.parametrize("columns", ["own", "named"])
@pytest.mark.parametrize("where", ["class", "category", "domain", "header"])
def test_long_texts_are_refused_in_one_line(tmp_path, ending, columns, where):
    frame = ward(site=RNG.choice(["x", "y"], ROWS), town=RNG.choice(["x", "y"], ROWS))
    column = {"class": "ill", "category": "town", "domain": "site", "header": "age"}[where]
    if where == "header":
        frame = frame.rename(columns={"age": LONG})
        says = r"the name of column 1 has 1,001 characters; allowed: 1,000$"
    else:
        frame.loc[[3, 4, 7], column] = LONG
        says = (
            rf"column '{column}' holds texts of more than 1,000 characters in rows \d+, \d+, \d+; shorten them, or drop"
        )
    with pytest.raises(PerfedError, match=says):
        read_back = source(tmp_path, frame, ending)
        Federation.from_frames({"north": read_back, "south": read_back}, target="ill", domain="site", columns=columns)
    if where == "category":
        Federation.from_frames({"north": frame}, target="ill", domain="site", drop=["town"])
