"""What columns are taken for, and how they are read."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perfed import Federation
from perfed.data.column import Column
from perfed.tables.kinds import guess, read

TWELVE = range(12)
GUESSES = {
    "numbers": ([61, 48.5, None], "number"),
    "numbers as texts": (["61", " 48.5", "", "1e3"], "number"),
    "0 and 1": (["0", "1", "1"], "number"),
    "0 and 1 as numbers": ([0.0, 1.0, np.nan], "number"),
    "truth": ([True, False, True], "boolean"),
    "yes and no": (["Yes", "no", None], "boolean"),
    "few texts": (["mild", "severe", "mild"], "category"),
    "many numbers, some texts": (["1", "2", "3", "12 mg"], "number"),
    "some numbers, many texts": (["I", "II", "3", "IV"], "category"),
    "iso dates": (["2024-03-31", "2023-12-01"], "date"),
    "german dates": (["31.03.2024", "01.12.2023"], "date"),
    "dates and a slip": (["31.03.2024", "01.12.2023", "soon"], "date"),
    "timestamps": (pd.to_datetime(["2024-03-31", "2023-12-01"]), "date"),
    "record numbers": ([f"K-{number:05d}" for number in TWELVE], "id"),
    "row numbers": ([str(number) for number in range(100, 112)], "id"),
    "remarks": ([f"patient came in on day {number} in pain" for number in TWELVE], "text"),
    "nothing": ([None, "", np.nan], "empty"),
    "one sex": (["f", "f"], "boolean"),
    "never, former, yes": (["N", "F", "Y"], "category"),
    "former and yes": (["F", "Y", None], "category"),
    "n and no": (["n", "no"], "category"),
    "y and t": (["Y", "T"], "category"),
    "yes and false": (["yes", "false"], "category"),
    "in capitals and not": (["YES", "No", "yes"], "boolean"),
    "letters": (["t", "F"], "boolean"),
    "nullable": (pd.array([1, None, 7], dtype="Int64"), "number"),
    "categorical": (pd.Categorical(["a", "b", "a"]), "category"),
}


@pytest.mark.parametrize("name", GUESSES)
def test_what_a_column_is_taken_for(name):
    values, kind = GUESSES[name]
    assert guess(pd.Series(values), "x").kind == kind


@pytest.mark.parametrize("name", ["id", "patient_id", "patientId", "MRN"])
def test_whole_numbers_under_the_name_of_an_id_are_ids(name):
    assert guess(pd.Series([812, 17, 17, 440]), name).kind == "id"
    assert guess(pd.Series([812.5, 17]), name).kind == "number"
    assert guess(pd.Series([812, 17, 17]), name, kind="category").kind == "category"


def test_what_is_said_of_a_column_holds():
    assert guess(pd.Series([1, 4, 2]), "cp", kind="category").kind == "category"
    assert guess(pd.Series(["1999", "2004"]), "since", kind="date").kind == "date"
    assert guess(pd.Series([1, 2, 3]), "visit_id", kind="number").kind == "number"
    assert guess(pd.Series(["I", "II", "3"]), "stage", kind="number").kind == "number"


def test_a_column_of_0_and_1_takes_further_numbers_and_words_and_others_do_not_take_words():
    column = guess(pd.Series(["0", "1", "1"]), "visits")
    values, problems = read(pd.Series(["2", "yes", "No", "0", None, "TRUE"]), column)
    np.testing.assert_array_equal(values, [2, 1, 0, 0, np.nan, 1])
    assert not problems
    counts = guess(pd.Series(["0", "1", "2"]), "visits")
    assert read(pd.Series(["yes", "1"]), counts)[1] == [
        "column 'visits' holds numbers, and something else in row 0; write numbers alone, put what means a "
        "missing value into missing, or name the column in categories"
    ]
    words = guess(pd.Series(["yes", "no"]), "visits", kind="number")
    assert read(pd.Series(["yes", "no", "2"]), words)[0].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["2024-03-01", "2024-03-31T12:00"], "ISO8601"),
        (["01.03.2024", "31.03.2024"], "%d.%m.%Y"),
        (["01/03/2024", "31/03/2024"], "%d/%m/%Y"),
        (["03/01/2024", "03/31/2024"], "%m/%d/%Y"),
        (["2024-03-01 00:00:00", "2024-03-31 12:00:00"], "ISO8601"),
        (["2024-03-01", "2024-03-31T14:00:00+02:00"], "ISO8601"),
        (["01.03.2024", "31.03.2024 12:00"], "%d.%m.%Y"),
        (["01.03.2024 00:00:00", "31.03.2024T12:00:00"], "%d.%m.%Y"),
        (["03/01/2024 12:00 AM", "03/31/2024 12:00 PM"], "%m/%d/%Y"),
        (["01/03/2024 0:00:00", "31/03/2024  12:00:00.000"], "%d/%m/%Y"),
    ],
)
def test_dates_become_days_and_times_of_day_their_fractions(texts, form):
    column = guess(pd.Series(texts), "visit")
    assert (column.kind, column.format) == ("date", form)
    days, problems = read(pd.Series([*texts, None]), column)
    expected = pd.DatetimeIndex(["2024-03-01", "2024-03-31T12:00" if ":" in texts[1] else "2024-03-31"])
    np.testing.assert_allclose(days[:2], (expected - pd.Timestamp("1970-01-01")).total_seconds() / 86400)
    assert np.isnan(days[2]) and not problems


def test_times_that_are_none_are_refused_by_row():
    column = guess(pd.Series(["31.03.2024 12:00", "01.12.2023 9:15"]), "visit")
    problems = read(pd.Series(["31.03.2024 25:00", "31.03.2024 noon", "30.03.2024 9:15"]), column)[1]
    assert problems == [
        "column 'visit' holds dates, and something else in rows 0, 1; write DD.MM.YYYY or YYYY-MM-DD, "
        "or put what means a missing value into missing"
    ]


def test_dates_that_could_be_read_in_two_ways_are_refused():
    values = pd.Series(["01/03/2024", "02/04/2024"])
    column = guess(values, "visit")
    assert read(values, column)[1] == [
        "column 'visit': its dates can be read with the day or the month first; write dates as YYYY-MM-DD"
    ]


def test_iso_dates_are_read_whatever_the_others_are():
    column = guess(pd.Series(["26.09.2020", "01.03.2024"]), "visit")
    days, problems = read(pd.Series(["2020-10-08", "08.10.2020", "08/10/2020", "2020-13-08"]), column)
    expected = (pd.Timestamp("2020-10-08") - pd.Timestamp("1970-01-01")).days
    assert days[:2].tolist() == [expected, expected]
    assert problems == [
        "column 'visit' holds dates, and something else in rows 2, 3; write DD.MM.YYYY or YYYY-MM-DD, "
        "or put what means a missing value into missing"
    ]


def test_what_does_not_fit_is_named_by_row_and_not_shown():
    values = pd.Series(["61", "about 60", "48", "inf", "ca. 5"], index=[2, 3, 4, 5, 6])
    problems = read(values, Column(name="age", kind="number"))[1]
    assert problems == [
        "column 'age' holds numbers, and something else in rows 3, 6; write numbers alone, put what means a "
        "missing value into missing, or name the column in categories",
        "column 'age' holds infinity in row 5; numbers must be finite, or missing",
    ]
    values = pd.Series(["2024-03-31", "31.3.24"], index=[7, 8])
    assert read(values, Column(name="visit", kind="date", format="ISO8601"))[1] == [
        "column 'visit' holds dates, and something else in row 8; write YYYY-MM-DD, or put what means a missing "
        "value into missing"
    ]
    assert read(pd.Series([0, 1, 3]), Column(name="sex", kind="boolean"))[1] == [
        "column 'sex' holds booleans, and other numbers in row 2; allowed: 0, 1, yes, no, true, false"
    ]


def test_a_category_has_one_name_whatever_its_type():
    column = Column(name="cp", kind="category")
    assert read(pd.Series([3.0, None, 4.0]), column)[0].tolist() == ["3", None, "4"]
    assert read(pd.Series(["3.0", "", "4.0"]), column)[0].tolist() == ["3", None, "4"]
    assert read(pd.Series(["3", "", " 4 "]), column)[0].tolist() == ["3", None, "4"]


def test_reading_keeps_rows_whose_labels_occur_twice():
    days, _ = read(
        pd.Series(["2024-01-01", None, "2024-01-02"], index=[5, 5, 5]), Column(name="v", kind="date", format="ISO8601")
    )
    assert np.isnan(days.to_numpy()[1]) and days.to_numpy()[2] - days.to_numpy()[0] == 1
    timed = pd.Series(["01.01.2024", "01.01.2024 18:00"], index=[5, 5])
    assert np.diff(read(timed, Column(name="v", kind="date", format="%d.%m.%Y"))[0]) == [0.75]


@pytest.mark.parametrize(("letters", "others"), [(["Y", "N"], ["F", "T"]), (["T", "F"], ["N", "y"]), (["n"], ["f"])])
def test_letters_of_another_pair_are_not_read(letters, others):
    column = guess(pd.Series(letters), "smoking")
    assert column.kind == "boolean"
    values, problems = read(pd.Series([*letters, *others, "yes", "False"]), column)
    expected = [1.0 if letter in "YT" else 0.0 for letter in letters]
    assert values.tolist()[: len(letters)] == expected and values.tolist()[-2:] == [1, 0]
    assert np.isnan(values[len(letters) : -2]).all() and len(problems) == 1
    counts = guess(pd.Series(["0", "1", "1"]), "smoking")
    assert len(read(pd.Series(["yes", "F"]), counts)[1]) == 1


@pytest.mark.parametrize(
    ("north", "south", "kind"),
    [
        (["N", "Y"], ["F", "F"], "category"),
        (["F", "F"], ["N", "Y"], "category"),
        (["N", "N"], ["F", "F"], "category"),
        (["N", "Y"], ["F", "Y"], "category"),
        (["N", "Y"], ["F", "T"], "boolean"),
        (["N", "Y"], ["no", "yes"], "boolean"),
        (["f", "f"], ["true", "false"], "boolean"),
    ],
)
def test_letters_that_may_mean_several_things_at_sites_are_categories(north, south, kind):
    rows = {"age": [30 + 7 * at % 41 for at in range(40)], "ill": ["no", "yes", "yes", "no"] * 10}
    frames = {name: pd.DataFrame({**rows, "x": words * 20}) for name, words in (("north", north), ("south", south))}
    made = Federation.from_frames(frames, target="ill", columns="named")
    assert [column.kind for client in made for column in client.table.columns if column.name == "x"] in ([kind] * 2, [])
    assert any(column.name == "x" and column.kind == kind for column in made.columns)
