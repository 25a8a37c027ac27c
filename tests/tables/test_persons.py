"""What a real site does not tell: values of few rows, and columns that look like names or codes of persons."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation
from perfed.tables.agreement import agree_on_schema
from perfed.tables.checks import describe_personal_values
from perfed.tables.marks import FEWEST
from perfed.tables.options import TableOptions
from perfed.tables.site_data import describe_problems, read_site_data


def site(rows: int = 50, **more: object) -> pd.DataFrame:
    generator = np.random.default_rng(len(more))
    ages = generator.normal(60, 10, rows).round(1)
    return pd.DataFrame({"age": ages, "ill": ["no", "yes"] * (rows // 2), **more})


def pains(**counts: int) -> list[str]:
    return [name for name, count in counts.items() for _ in range(count)]


def made(folder, options, **frames):
    """The sites' data, what they tell, and what is agreed of it."""
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    sites = {name: read_site_data(name, folder / f"{name}.csv", options) for name in frames}
    tolds = {name: own.create_metadata(FEWEST) for name, own in sites.items()}
    return sites, tolds, agree_on_schema(tolds, options)


@pytest.mark.parametrize("columns", ["common", "union"])
def test_a_value_in_fewer_than_five_training_rows_stays_and_is_known_where_another_site_tells_it(tmp_path, columns):
    frames = {
        "north": site(pain=pains(mild=41, burning=5, stabbing=4)),
        "south": site(pain=pains(mild=36, burning=3, dull=11)),
    }
    options = TableOptions("ill", columns=columns, test_fraction=0)
    sites, tolds, agreement = made(tmp_path, options, **frames)
    assert "stabbing" not in json.dumps([told.plain() for told in tolds.values()])
    assert {name: told.columns[1].levels for name, told in tolds.items()} == {
        "north": ("burning", "mild"), "south": ("dull", "mild")
    }  # fmt: skip
    (pain,) = [column for column in agreement.columns if column.name == "pain"]
    assert pain.levels == ("burning", "dull", "mild")
    north, south = (sites[name].client(agreement) for name in ("north", "south"))
    rows = {name: made.train.x[:, 1:].sum(0).tolist() for name, made in (("north", north), ("south", south))}
    assert rows == {"north": [5, 0, 41], "south": [3, 11, 36]}  # stabbing is as an unknown one


@pytest.mark.long
def test_where_everybody_has_five_rows_real_sites_have_what_a_simulation_has(tmp_path):
    frames = {
        "north": site(pain=pains(mild=25, burning=25)),
        "south": site(pain=pains(burning=25, dull=25)),
    }
    sites, _, agreement = made(tmp_path, TableOptions("ill", columns="union"), **frames)
    for client in Federation.from_frames(frames, target="ill", columns="union"):
        assert torch.equal(sites[client.id].client(agreement).train.x, client.train.x)


def test_a_value_of_many_rows_of_one_patient_stays(tmp_path):
    """With a group (a patient) so many of these must hold it."""
    patient = [f"P{row // 10}" for row in range(100)]
    told = pains(home=60, clinic=40)
    town = [f"town {row // 50}" if row < 60 else "city" for row in range(100)]
    frame = site(100, patient=patient, town=town, place=told)
    options = TableOptions("ill", columns="common", group="patient", test_fraction=0)
    _, tolds, _ = made(tmp_path, options, north=frame)
    levels = {column.name: column.levels for column in tolds["north"].columns}
    assert levels["town"] == ("town 0",) and levels["place"] == ("home",)


def test_a_category_that_nobody_may_tell_does_not_enter(tmp_path):
    frame = site(20, town=[f"town {row // 3}" for row in range(20)])
    options = TableOptions("ill", columns="common")
    sites, tolds, agreement = made(tmp_path, options, north=frame)
    assert tolds["north"].columns[1].levels == () and [c.name for c in agreement.columns] == ["age"]
    assert sites["north"].client(agreement).input_shape == (1,)


def test_columns_of_names_are_refused_unless_they_are_said(tmp_path):
    names = [f"patient {row % 25}" for row in range(110)]
    site(110, Name=names).to_csv(tmp_path / "north.csv", index=False)
    (line,) = describe_problems("north", tmp_path / "north.csv", TableOptions("ill"))
    assert line.removeprefix(f"{tmp_path / 'north.csv'}: ") == (
        "column 'Name' looks like names or codes of persons: 25 different texts in 110 rows, 15 of them "
        "in fewer than 5; leave it out of the file, or name it in the study's drop, or in its categories if they are "
        "none"
    )
    for said in ({"drop": ["Name"]}, {"categories": ["Name"]}):
        assert describe_problems("north", tmp_path / "north.csv", TableOptions("ill", **said)) == []


@pytest.mark.parametrize(
    ("counts", "groups", "looks"),
    [
        ([40, 30, 20, 6, 2, 1, 1], False, False),  # ten different texts at most
        ([6] * 11, False, False),
        ([500, *[1] * 12], False, True),  # most are rare
        ([4] * 6 + [5] * 6, False, True),  # few rows to a text
        ([100] * 11, True, True),  # each text is of one patient
    ],
)
def test_what_looks_like_names(counts, groups, looks):
    texts = pd.Series([f"text {at}" for at, count in enumerate(counts) for _ in range(count)])
    assert bool(describe_personal_values("c", texts, texts.rename("patient") if groups else None)) == looks


def test_names_of_inputs_leave_as_one_hash():
    """The same for the same names in the same order, and no other."""
    facts = [
        next(iter(Federation.from_frames({"a": frame}, target="ill"))).facts()
        for frame in (site(), site(), site().rename(columns={"age": "years"}))
    ]
    sent = [own.nameless for own in facts]
    assert facts[0].feature_names == ("number__age",) and "age" not in json.dumps(sent[0].plain())
    assert sent[0].feature_names == sent[1].feature_names != sent[2].feature_names
    assert len(sent[0].feature_names) == 1
