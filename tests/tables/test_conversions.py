"""Cells that are read in another way: separated thousands, swapped dates, texts that a study replaces."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed

from perfed import Federation, PerfedError
from perfed.data.column import Column
from perfed.tables.agreement import agree_on_schema
from perfed.tables.files import read_table
from perfed.tables.joining import new_client_from_frame
from perfed.tables.kinds import ParsedTable, guess, read
from perfed.tables.options import TableOptions
from perfed.tables.site import TablePreprocessor
from perfed.tables.site_data import read_site_data

PLATELETS = np.random.default_rng(2).integers(300, 1900, 60)


def ward(seed: int = 0, rows: int = 60, **more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        "age": rng.integers(20, 90, rows),
        "sex": rng.choice(["F", "M"], rows),
        "ill": rng.choice(["no", "yes"], rows),
    }
    return pd.DataFrame({**columns, **more})


# Thousands and decimals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [",", " ", "'", "\u00a0"])
@pytest.mark.parametrize("delimiter", ["\t", ";", ","])
def test_separated_thousands_are_read_as_such_from_any_file(tmp_path, sign, delimiter):
    texts = [f"{number:,}".replace(",", sign) for number in PLATELETS.tolist()]
    rows = [delimiter.join(("age", "platelets")), *(f'{n}{delimiter}"{text}"' for n, text in enumerate(texts))]
    (tmp_path / "a.tsv").write_text("\n".join(rows) + "\n")
    frame, notes = read_table(tmp_path / "a.tsv")
    column = guess(frame["platelets"], "platelets")
    values, problems = read(frame["platelets"], column)
    assert (column.kind, problems, notes) == ("number", [], [])
    np.testing.assert_array_equal(values, PLATELETS)


def test_the_reading_of_commas_is_said_and_can_be_changed():
    texts = [f"{number:,}" for number in PLATELETS.tolist()]
    frames = {"north": ward(platelets=texts), "south": ward(1, platelets=PLATELETS)}
    made = Federation.from_frames(frames, target="ill", columns="named")
    (line,) = [line for line in made.notes["doubts"] if "separators of thousands" in line]
    assert line.startswith("column 'platelets' at north: commas are read as separators of thousands")
    plain = Federation.from_frames({**frames, "north": ward(platelets=PLATELETS)}, target="ill", columns="named")
    assert torch.equal(made.clients[0].train.x, plain.clients[0].train.x)
    new = ward(5, rows=2, platelets=["1,250", "985"])
    expected = plain.clients[0].table.transform(new.assign(platelets=[1250, 985]))[0]
    np.testing.assert_array_equal(made.clients[0].table.transform(new)[0], expected)
    decimals = Federation.from_frames({"north": frames["north"]}, target="ill", decimals=["platelets"])
    small = Federation.from_frames({"north": ward(platelets=[float(t.replace(",", ".")) for t in texts])}, target="ill")
    assert torch.equal(decimals.clients[0].train.x, small.clients[0].train.x)
    assert not [line for line in decimals.notes["doubts"] if "platelets" in line]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["12,5", "0,985", "3,250"], [12.5, 0.985, 3.25]),  # of these, one can only have a decimal comma
        (["1,250", "1,147", "3,250"], [1.25, 1.147, 3.25]),
        (["1,25", "985", "7"], [1.25, 985, 7]),
    ],
)
def test_decimal_commas_stay_decimal_commas(tmp_path, cells, expected):
    (tmp_path / "a.csv").write_text("weight;age\n" + "".join(f"{cell};5\n" for cell in cells))
    frame, (note,) = read_table(tmp_path / "a.csv")
    assert read(frame["weight"], guess(frame["weight"], "weight"))[0].tolist() == expected
    assert note.startswith("numbers are read with a decimal comma")
    assert ("thousands" in note) == (cells[0] == "1,250")


def test_points_that_may_separate_thousands_are_asked_about():
    points = [f"{number:,}".replace(",", ".") for number in PLATELETS.tolist()]
    (line,) = Federation.from_frames({"north": ward(platelets=points)}, target="ill").notes["doubts"]
    assert line.startswith("column 'platelets' at north: points are read as decimal points")
    made = Federation.from_frames({"north": ward(platelets=points)}, target="ill", thousands="platelets")
    plain = Federation.from_frames({"north": ward(platelets=PLATELETS)}, target="ill")
    assert torch.equal(made.clients[0].train.x, plain.clients[0].train.x) and not made.notes["doubts"]
    measured = [f"{number:.3f}".rstrip("0") for number in np.random.default_rng(0).normal(5, 2, 60)]
    assert not Federation.from_frames({"north": ward(platelets=measured)}, target="ill").notes["doubts"]


# Dates whose day and month are swapped ---------------------------------------------------------------------------


def damaged(dates: pd.DatetimeIndex, form: str, *, texts: bool) -> list[Any]:
    """What a spreadsheet that expects the other order makes of dates written in ``form``."""
    cells: list[Any] = []
    for date in dates:
        if date.day > 12:
            cells.append(date.strftime(form))
        else:
            cells.append(datetime(date.year, date.day, date.month))
            cells[-1] = str(cells[-1]) if texts else cells[-1]
    return cells


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y"])
@pytest.mark.parametrize("late", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("texts", [True, False])
def test_swapped_days_and_months_are_recognised_and_swapped_back(form, late, texts):
    rng = np.random.default_rng(3)
    days = np.where(rng.uniform(size=60) < late, rng.integers(13, 29, 60), rng.integers(1, 13, 60))
    dates = pd.DatetimeIndex(
        [pd.Timestamp(2023, month, day) for month, day in zip(rng.integers(1, 13, 60), days, strict=True)]
    )
    frame = ward(visit=damaged(dates, form, texts=texts))
    (line,) = Federation.from_frames({"north": frame}, target="ill").notes["doubts"]
    assert line.startswith("column 'visit' at north: all dates that a spreadsheet recognised have a day up to 12")
    made = Federation.from_frames({"north": frame}, target="ill", swapped="visit")
    plain = Federation.from_frames({"north": ward(visit=dates)}, target="ill")
    assert torch.equal(made.clients[0].train.x, plain.clients[0].train.x) and not made.notes["doubts"]
    new = frame.assign(visit="2023-05-20")
    with pytest.raises(PerfedError, match=r"column 'visit': day and month of real dates are swapped back at this site"):
        made.clients[0].table.transform(new)


@pytest.mark.long
def test_dates_that_are_in_order_stay_so():
    dates = pd.date_range("2023-01-01", periods=60, freq="5D")
    for cells in (
        dates.strftime("%d/%m/%Y"),
        dates.strftime("%Y-%m-%d"),
        [*dates.strftime("%d/%m/%Y")[:40], *dates[40:]],
    ):
        frame = ward(visit=list(cells))
        made = Federation.from_frames({"north": frame}, target="ill", swapped="visit")
        plain = Federation.from_frames({"north": frame}, target="ill")
        assert torch.equal(made.clients[0].train.x, plain.clients[0].train.x)
        assert not plain.notes["doubts"]


# Texts that a study replaces ---------------------------------------------------------------------------------------

VALUES = {"sex": {"female": "F", "male": "M"}, "ill": {"krank": "yes", "gesund": "no"}, "race": {"x": "a"}}


def german(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with other codes, by pandas' own hands."""
    inverse = {name: {new: old for old, new in texts.items()} for name, texts in VALUES.items()}
    return frame.assign(**{name: frame[name].replace(inverse[name]) for name in inverse})


def three() -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """Sites with one coding, and the same sites of which one has another."""
    plain = {
        name: ward(seed, race=np.random.default_rng(seed).choice(["a", "b"], 60))
        for seed, name in enumerate(("north", "south", "west"))
    }
    return plain, {**plain, "south": german(plain["south"])}


@pytest.mark.long
def test_replaced_texts_are_replaced_wherever_a_cell_is_read(tmp_path):
    plain, coded = three()
    options = {"target": "ill", "domain": "race", "columns": "named"}
    made = Federation.from_frames(coded, values=VALUES, **options)
    expected = Federation.from_frames(plain, **options)
    assert made.classes == expected.classes == ("no", "yes") and made.domain_names == ("a", "b")
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one.train.x, other.train.x) and torch.equal(one.train.y, other.train.y)
        assert torch.equal(one.train.domain, other.train.domain)
    new = ward(7, race=["a", "b"] * 30)
    made.clients[0].table.save(tmp_path / "table.zip")
    for table in (made.clients[0].table, TablePreprocessor.load(tmp_path / "table.zip")):
        for x, y in zip(table.transform(german(new)), expected.clients[0].table.transform(new), strict=True):
            np.testing.assert_array_equal(x, y)
        assert table.unseen(german(new)) == {}
    joined = new_client_from_frame(made, "east", german(new), "east.csv")
    assert torch.equal(joined.train.x, new_client_from_frame(expected, "east", new, "east.csv").train.x)


def test_real_sites_replace_them_too(tmp_path):
    _, coded = three()
    options = TableOptions("ill", domain="race", columns="named", values=VALUES, task="classification")
    sites = {}
    for name, frame in coded.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        sites[name] = read_site_data(name, tmp_path / f"{name}.csv", options)
    schema = agree_on_schema({name: site.create_metadata(5) for name, site in sites.items()}, options)
    assert schema.classes == ("no", "yes") and schema.domain_names == ("a", "b")
    assert [column.levels for column in schema.columns if column.name == "sex"] == [("F", "M")]
    assert [len(site.client(schema).train) for site in sites.values()] == [48, 48, 48]


@pytest.mark.parametrize("values", [{"sex": "F"}, {"sex": {"female": ""}}, {"sex": {"female": True}}, {"sex": 3}])
def test_a_table_of_values_that_is_none_is_refused(values):
    with pytest.raises(PerfedError, match=r"values.sex = .* is not allowed; allowed: texts of the column"):
        TableOptions("ill", values=values)
    with pytest.raises(PerfedError, match=r"values: no site has a column 'sexx' \(did you mean 'sex'"):
        Federation.from_frames({"north": ward()}, target="ill", values={"sexx": {"female": "F"}})


@pytest.mark.long
def test_from_init_to_an_onnx_file(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    _, coded = three()
    for name, frame in coded.items():
        frame.drop(columns="race").to_csv(f"wards/{name}.csv", index=False)
    replaced = [f"{name}:{old}={new}" for name in ("sex", "ill") for old, new in VALUES[name].items()]
    options = [word for text in replaced for word in ("--values", text)]
    assert "seem to mean the same" in " ".join(
        perfed("init", "wards", "--target", "ill", "--out", "a.toml").out.split()
    )
    made = perfed("init", "wards", "--target", "ill", *options)
    assert made.code == 0 and "seem to mean" not in made.out, made.err
    text = Path("study.toml").read_text()
    assert 'values = { sex = { female = "F", male = "M" }, ill = { krank = "yes", gesund = "no" } }' in text
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run")
    assert perfed("run", "study.toml", "--method", "fedrep", *quick).code == 0
    done = perfed("export", "run", "--site", "north", "--format", "onnx", "--out", "north.onnx")
    assert done.code == 0, done.err
    assert "female as F" in Path("north.md").read_text()
    session = onnxruntime.InferenceSession("north.onnx")
    ages = np.array([[40.0], [40.0]], np.float32)
    answers = [
        session.run(None, {"age": ages, "sex": np.array([[f], [m]], object)})[0]
        for f, m in (("F", "M"), ("female", "male"))
    ]
    np.testing.assert_array_equal(*answers)
    assert not np.array_equal(answers[0][0], answers[0][1])
    assert perfed("init", "wards", "--target", "ill", "--values", "sex", "--out", "b.toml").code == 2


def test_real_dates_that_are_converted_categories_are_read_alike_in_training_and_prediction():
    frame = pd.DataFrame({"d": pd.to_datetime(["2024-01-01", "2024-02-03", None]), "y": ["a", "b", "a"]})
    options = TableOptions(target="y", values={"d": {"2024-01-01": "first"}}, categories=["d"])
    table = ParsedTable(frame).clean(options.codes).converted(options.conversions)
    column = Column(name="d", kind="category")
    in_training, in_prediction = table.read(column)[0].tolist(), read(table.frame["d"], column)[0].tolist()
    assert in_training == in_prediction == ["2024-01-01", "2024-02-03", None]
