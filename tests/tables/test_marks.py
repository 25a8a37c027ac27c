"""Columns of numbers with marks and units: asked about, and read as a study says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from perfed import Federation, PerfedError
from perfed.data.problems import DataProblems
from perfed.tables.kinds import guess

RNG = np.random.default_rng(0)
NUMBERS = [f"{number:.1f}" for number in RNG.uniform(1, 30, 60)]


def column(mark: str, share: float = 0.6) -> list[str]:
    """Numbers, of which a share is replaced by a text without a number."""
    return [mark if position < share * len(NUMBERS) else number for position, number in enumerate(NUMBERS)]


MARKED = {
    "a point": column("."),
    "not detected": column("ND"),
    "a limit": ["<0.5" if position % 2 else number for position, number in enumerate(NUMBERS)],
    "per cent": [f"{round(float(number))}%" for number in NUMBERS],
    "a unit": [f"{number} mmol/l" for number in NUMBERS],
    "a unit and commas": [f"{number.replace('.', ',')}mmol/l" for number in NUMBERS],
    "flags": [f"{number} (H)" if position % 3 else number for position, number in enumerate(NUMBERS)],
    "a currency": [f"$ {number}" for number in NUMBERS],
    "temperatures": [f"{number} °C" for number in NUMBERS],
    "two units": [f"{number} {('mg/l', 'mg/dl')[position % 2]}" for position, number in enumerate(NUMBERS)],
}
CODES = {
    "diagnoses": [f"I2{n % 5}" for n in range(60)],
    "letters and digits": [f"A{n % 4}" for n in range(60)],
    "postcodes": [f"SW{n % 9} 1AA" for n in range(60)],
    "ages": [f"{10 * (n % 6)}-{10 * (n % 6) + 9}" for n in range(60)],
    "open ages": [("<18", "18-64", "65+")[n % 3] for n in range(60)],
    "stages": [("1A", "1B", "2A", "2B")[n % 4] for n in range(60)],
    "times": [f"{n % 12}:30" for n in range(60)],
    "counts": [f"{n % 3} of 3" for n in range(60)],
    "words": [("mild", "severe", "grade 3")[n % 3] for n in range(60)],
}


def ward(crp: Any, **more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame({"crp": crp, "age": rng.integers(20, 90, 60), "ill": rng.choice(["no", "yes"], 60), **more})


def question(**options: Any) -> str:
    with pytest.raises(DataProblems) as error:
        Federation.from_frames({"north": ward(**options)}, target="ill")
    (line,) = error.value.problems
    return line


@pytest.mark.parametrize("name", MARKED)
def test_a_column_of_marked_numbers_is_asked_about_and_can_be_a_category(name):
    line = question(crp=MARKED[name])
    assert line.startswith("site 'north': column 'crp' holds numbers, and marks, units or other texts")
    assert "missing" in line and "categories" in line
    federation = Federation.from_frames({"north": ward(MARKED[name])}, target="ill", categories="crp")
    assert federation.facts.columns["category"] == ["crp"]


@pytest.mark.parametrize("name", CODES)
def test_codes_are_not_asked_about(name):
    assert guess(pd.Series(CODES[name]), "x").kind == "category"


def test_the_question_shows_the_most_frequent_texts_and_their_answers():
    limits = ["<0.5"] * 20 + ["ND"] * 12 + [f"{number} mg/l" for number in NUMBERS[:28]]
    line = question(crp=limits)
    assert "('… mg/l' in 28 rows, '<0.5' in 20 rows, 'ND' in 12 rows)" in line
    assert '("crp=ND")' in line and '("crp=mg/l")' in line
    assert "its units differ ('mg/dl', 'mg/l')" in question(crp=MARKED["two units"])
    rare = ["seen by Dr Smith", *MARKED["a unit"][1:]]
    assert "Smith" not in question(crp=rare)


def test_a_mark_in_few_rows_is_named_with_the_rows():
    line = question(crp=column("ND", share=0.3))
    assert "something else in rows 0, 1, 2, 3, 4 and 13 more ('ND' in 18 rows)" in line


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("a point", {"missing": "crp=."}, [np.nan] * 36 + [float(number) for number in NUMBERS[36:]]),
        ("per cent", {"numbers": ["crp=%"]}, [round(float(number)) for number in NUMBERS]),
        ("a unit", {"numbers": "crp=MMOL/L"}, [float(number) for number in NUMBERS]),
        (
            "a unit and commas",
            {"numbers": ["crp=mmol/l"], "decimals": ["crp"]},
            [float(number) for number in NUMBERS],
        ),
        ("a currency", {"numbers": ["crp=$"]}, [float(number) for number in NUMBERS]),
        ("a limit", {"values": {"crp": {"<0.5": 0.25}}}, [0.25 if n % 2 else float(x) for n, x in enumerate(NUMBERS)]),
        ("flags", {"numbers": ["crp=(H)"]}, [float(number) for number in NUMBERS]),
    ],
)
def test_answers_give_the_numbers(name, options, expected):
    """The same inputs as a table that holds the numbers."""
    read = Federation.from_frames({"north": ward(MARKED[name])}, target="ill", **options)
    plain = Federation.from_frames({"north": ward(expected)}, target="ill")
    (one,), (other,) = read.clients, plain.clients
    assert one.feature_names == other.feature_names
    np.testing.assert_array_equal(one.train.x, other.train.x)
    table = one.table
    np.testing.assert_array_equal(table.transform(ward(MARKED[name]))[0], other.table.transform(ward(expected))[0])


def test_a_target_with_units_is_asked_about():
    shares = [f"{number}%" for number in NUMBERS]
    with pytest.raises(PerfedError, match=r"column 'share' holds numbers.*\"share=%\".*task = 'classification'"):
        Federation.from_frames({"north": ward(NUMBERS, share=shares)}, target="share")
    made = Federation.from_frames({"north": ward(NUMBERS, share=shares)}, target="share", numbers=["share=%"])
    assert made.task == "regression"


def test_sites_with_the_same_question_are_named_in_one_line():
    frames = {name: ward(column("ND")) for name in ("north", "south", "west")}
    with pytest.raises(DataProblems) as error:
        Federation.from_frames(frames, target="ill", columns="named")
    (line,) = error.value.problems
    assert line.startswith("site 'north' (and 2 more): column 'crp'") and "'ND' in 108 rows" in line
