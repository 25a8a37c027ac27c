"""Columns of 0 and 1: they are numbers, and a 2 that comes later is one too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from perfed import Federation
from perfed.data.new_client import TEST_FRACTION
from perfed.data.problems import DataProblems
from perfed.errors import PerfedError
from perfed.tables.joining import new_client_from_frame
from perfed.tables.options import TableOptions
from perfed.tables.splits import draw_test_rows


def ward(rows: int = 40, seed: int = 0, **more: Any) -> pd.DataFrame:
    """A site: a number, a count that is 0 or 1, and who is sick."""
    rng = np.random.default_rng(seed)
    frame = {"age": rng.normal(60, 10, rows).round(1), "visits": rng.integers(0, 2, rows), "sick": ["no", "yes"] * 20}
    return pd.DataFrame({**frame, **more}).astype(object)


def inputs(federation: Federation, site: str, name: str) -> np.ndarray:
    """Training inputs of a site by their name."""
    client = next(client for client in federation if client.id == site)
    return client.train.x[:, client.feature_names.index(name)].numpy()


@pytest.mark.parametrize("rare", [False, True], ids=["half of them", "one of forty"])
def test_they_enter_as_they_are_and_a_count_standardised(rare):
    """Standardised, a rare 1 would be a large input."""
    visits = (np.arange(40) == 7).astype(int) if rare else ward()["visits"].to_numpy()
    federation = Federation.from_frames({"x": ward(visits=visits, ward=np.arange(40) % 3)}, target="sick", test=0.0)
    np.testing.assert_allclose(inputs(federation, "x", "number__visits"), visits.astype(float))
    count = np.arange(40) % 3
    np.testing.assert_allclose(inputs(federation, "x", "number__ward"), (count - count.mean()) / count.std())


def test_missing_ones_are_the_median_and_the_others_as_they_are():
    visits = [1, None, 1, 0, 1] * 8
    made = Federation.from_frames({"x": ward(visits=visits)}, target="sick", test=0.0)
    np.testing.assert_allclose(inputs(made, "x", "number__visits"), [1.0, 1.0, 1.0, 0.0, 1.0] * 8)


@pytest.mark.parametrize("columns", ["own", "common", "union"])
def test_a_2_among_the_rows_to_be_tested_on_is_a_number(columns):
    frames, later = {"x": ward(), "y": ward(seed=1)}, ward(seed=2)
    later.loc[3, "visits"] = 2
    made = Federation.from_frames(frames, target="sick", columns=columns, test={"x": later})
    assert made.clients[0].test.x[3, made.clients[0].feature_names.index("number__visits")] == 2


def test_a_2_in_new_rows_is_a_number():
    (client,) = Federation.from_frames({"x": ward()}, target="sick")
    low, high = (client.table.transform(ward(visits=value))[0][0] for value in (1, 2))
    assert high[list(client.feature_names).index("number__visits")] > low[1]


@pytest.mark.parametrize("columns", ["own", "common"])
def test_a_newcomer_whose_only_2_is_among_its_test_rows_joins(columns):
    others = {"x": ward(visits=np.arange(40) % 4), "y": ward(seed=1, visits=np.arange(40) % 3)}
    federation = Federation.from_frames(others, target="sick", columns=columns)
    new = ward(seed=2)
    tested = draw_test_rows(pd.factorize(new["sick"])[0], TEST_FRACTION, 0, "test rows of west")
    new.loc[np.flatnonzero(tested)[0], "visits"] = 2
    client = new_client_from_frame(federation, "west", new, "west.csv")
    assert len(client.test) == tested.sum()
    assert {column.name: column.kind for column in client.table.columns}["visits"] == "number"


def test_what_the_sites_agreed_on_wins_over_what_a_newcomer_s_rows_look_like():
    """Whole numbers that count up look like an id, and yes and no like truth; at the others they are numbers."""
    frames = {site: ward(seed=seed, day=np.arange(40) % 7) for seed, site in enumerate("xy")}
    federation = Federation.from_frames(frames, target="sick", columns="common")
    new = ward(seed=2, day=np.arange(1, 41), visits=["no", "yes"] * 20)
    client = new_client_from_frame(federation, "west", new, "west.csv")
    assert client.feature_names == federation.clients[0].feature_names
    train = client.train.x[:, client.feature_names.index("number__visits")]
    assert len(set(train.tolist())) == 2


@pytest.mark.long
def test_a_newcomer_writes_dates_in_its_own_way():
    days = [pd.Timestamp("2024-01-01") + pd.Timedelta(hours=7 * number) for number in range(40)]
    frames = {site: ward(seed=seed, visit=[f"{day:%Y-%m-%d %H:%M}" for day in days]) for seed, site in enumerate("xy")}
    federation = Federation.from_frames(frames, target="sick", columns="common")
    new = {form: ward(seed=2, visit=[f"{day:{form}}" for day in days]) for form in ("%d.%m.%Y %H:%M", "%Y-%m-%dT%H:%M")}
    one, two = (new_client_from_frame(federation, "west", frame, "west.csv") for frame in new.values())
    assert one.train.x.equal(two.train.x) and one.test.x.equal(two.test.x)


def test_words_here_and_0_and_1_there_are_truth_values_and_a_count_is_none():
    words = ward(seed=1, visits=["yes", "no"] * 20)
    made = Federation.from_frames({"x": ward(), "y": words}, target="sick", columns="common", test=0.0)
    np.testing.assert_array_equal(inputs(made, "x", "boolean__visits"), ward()["visits"].astype(float))
    np.testing.assert_array_equal(inputs(made, "y", "boolean__visits"), [1.0, 0.0] * 20)
    with pytest.raises(DataProblems, match="site 'y': column 'visits' holds numbers, and something else in rows"):
        Federation.from_frames(
            {"x": ward(visits=np.arange(40) % 3), "y": words}, target="sick", columns="common", test=0.0
        )


def test_numbers_says_that_columns_are_numbers():
    frames = {
        "x": ward(visits=np.arange(40) % 3, day_id=np.arange(40)),
        "y": ward(seed=1, visits=["yes", "no"] * 20, day_id=np.arange(40) % 9),
    }
    names = ["visits", "day_id"]
    made = Federation.from_frames(frames, target="sick", columns="common", numbers=names, test=0.0)
    found = (np.arange(40) % 3 - np.mean(np.arange(40) % 3)) / np.std(np.arange(40) % 3)
    np.testing.assert_allclose(inputs(made, "x", "number__visits"), found)
    np.testing.assert_allclose(inputs(made, "y", "number__visits"), [1.0, 0.0] * 20)
    np.testing.assert_allclose(inputs(made, "x", "number__day_id"), (np.arange(40) - 19.5) / np.arange(40).std())
    with pytest.raises(DataProblems, match=r"numbers: no site has a column 'visit' \(did you mean 'visits'\?\)"):
        Federation.from_frames(frames, target="sick", numbers=["visit"], drop="day_id")
    with pytest.raises(PerfedError, match=r"^column 'visits' is in two of numbers, dates and categories; it has one"):
        TableOptions("sick", numbers=["visits"], categories=["visits"])
