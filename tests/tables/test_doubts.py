"""What makes results doubtful before any training: a column that holds the answer, one class written in two ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command_line import perfed

from perfed import Federation


def ward(seed: int, rows: int = 60, **more: Any) -> pd.DataFrame:
    """A site whose columns say nothing of its target."""
    rng = np.random.default_rng(seed)
    frame = {
        "age": rng.normal(60, 10, rows).round(1),
        "visits": rng.integers(0, 3, rows),
        "smokes": rng.choice(["yes", "no"], rows),
        "pain": rng.choice(["mild", "severe", "none"], rows),
        "sick": rng.choice(["no", "yes"], rows, p=[0.55, 0.45]),
        "score": rng.normal(size=rows).round(3),
    }
    return pd.DataFrame({**frame, **more})


def doubts(frames: list[pd.DataFrame], target: str = "sick", **options: Any) -> list[str]:
    drop = [name for name in ("sick", "score") if name != target]
    sites = {f"site {number}": frame for number, frame in enumerate(frames)}
    made = Federation.from_frames(sites, target=target, drop=drop, **options)
    assert made.facts.remarks[: len(made.notes["doubts"])] == list(made.notes["doubts"])
    return list(made.notes["doubts"])


def flipped(sick: pd.Series, seed: int, share: float) -> np.ndarray:
    """Whether rows are sick, but for a share of them."""
    rng = np.random.default_rng(seed + 99)
    return (sick == "yes").to_numpy() ^ (rng.uniform(size=len(sick)) < share)


def as_category(ill: np.ndarray, rng: np.random.Generator) -> Any:
    return np.where(ill, rng.choice(["I21", "I25"], len(ill)), rng.choice(["Z00", "Z01"], len(ill)))


def as_number(ill: np.ndarray, rng: np.random.Generator) -> Any:
    return np.where(ill, rng.normal(4, 1, len(ill)), rng.normal(-4, 1, len(ill))).round(2)


def as_range(ill: np.ndarray, rng: np.random.Generator) -> Any:
    """Ill where neither low nor high: no threshold tells it."""
    return np.where(ill, rng.uniform(-1, 1, len(ill)), rng.choice([-3, 3], len(ill)) + rng.uniform(-1, 1, len(ill)))


def as_word(ill: np.ndarray, rng: np.random.Generator) -> Any:
    return np.where(ill, "yes", "no")


@pytest.mark.long
@pytest.mark.parametrize("made", [as_category, as_number, as_range, as_word])
@pytest.mark.parametrize("columns", ["own", "common"])
def test_a_column_that_holds_the_answer_is_said_with_how_often_it_is_right(made, columns):
    frames = []
    for seed in range(4):
        frame = ward(seed, rows=150)
        ill = flipped(frame["sick"], seed, 0.02)
        frames.append(frame.assign(treated=made(ill, np.random.default_rng(seed))))
    (line,) = doubts(frames, columns=columns)
    before, _, after = line.partition(" % of the rows")
    assert before.startswith("column 'treated' alone predicts 'sick' for ") and 95 <= int(before.split()[-1]) <= 99
    common = sum(max((frame["sick"] == label).sum() for label in ("no", "yes")) for frame in frames) / 600
    assert after == f" (the commonest class: {100 * common:.0f} %): does it hold the answer?"


def test_gaps_that_hold_the_answer_are_said_as_such():
    frames = [ward(seed) for seed in range(3)]
    for frame in frames:
        frame.loc[frame["sick"] == "no", "age"] = None
    (line,) = doubts(frames)
    assert line.startswith("whether column 'age' is missing predicts 'sick' for 100 % of the rows")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_columns_without_an_answer_are_not_suspected(seed):
    """Rows in the order of their class, many small sites, many values: chance is no answer."""
    frames = [ward(30 * seed + number, rows=24).sort_values("sick") for number in range(30)]
    frames = [frame.assign(code=[f"c{n % 9}" for n in range(24)], level=0.0) for frame in frames]
    frames[0].loc[frames[0].index[0], "level"] = 1.0
    assert doubts(frames) == []
    strong = [frame.assign(sign=np.where(flipped(frame["sick"], n, 0.1), "a", "b")) for n, frame in enumerate(frames)]
    assert doubts(strong) == []  # right for 90 % is a good column


@pytest.mark.long
def test_where_nearly_all_rows_are_of_one_class_saying_so_is_no_answer():
    rare = ["yes", "no", "no", *(["no"] * 57)]
    assert doubts([ward(seed, sick=rare) for seed in range(12)]) == []
    leaking = [ward(seed, sick=rare, code=["x", "y", "y", *(["y"] * 57)]) for seed in range(12)]
    assert "column 'code' alone" not in " ".join(doubts(leaking))  # a single row tells nothing of a rule
    more = ["yes", "yes", "yes", *(["no"] * 57)]
    leaking = [ward(seed, sick=more, code=["x", "x", "x", *(["y"] * 57)]) for seed in range(12)]
    assert "column 'code' alone predicts 'sick' for 100 % of the rows" in " ".join(doubts(leaking))


def test_rows_of_one_patient_tell_each_other_nothing():
    """A patient's age is in all its rows and so is its class; it says nothing of others."""
    frames = []
    for seed in range(3):
        whole = ward(seed, rows=20).assign(patient=[f"P{seed}-{n}" for n in range(20)])
        whole["age"] = np.random.default_rng(seed).permutation(20) + 40
        frames.append(whole.loc[np.repeat(whole.index, 15)].reset_index(drop=True))
    said = doubts(frames, group="patient")
    assert not [line for line in said if not line.startswith("divided by the group")]


@pytest.mark.long
def test_values_and_times_that_a_column_holds():
    frames = [ward(seed) for seed in range(3)]
    copied = [frame.assign(points=np.exp(frame["score"]), visits=frame["visits"] + frame["score"]) for frame in frames]
    (line,) = doubts(copied, target="score")
    assert line == "column 'points' alone orders the rows by 'score' (rank correlation 1.00): does it hold the answer?"
    coded = [frame.assign(score=frame["pain"].map({"mild": 1.5, "severe": 2.5, "none": 0.25})) for frame in frames]
    (line,) = doubts(coded, target="score", task="regression")
    assert line == "column 'pain' alone gives 'score' (R² 1.00): does it hold the answer?"
    days = [frame.assign(days=np.exp(frame["score"]) * 100, died=frame["sick"] == "yes") for frame in frames]
    last = [frame.assign(last=frame["days"] + 1, code=frame["sick"]) for frame in days]
    sites = {f"site {number}": frame.drop(columns=["score", "sick"]) for number, frame in enumerate(last)}
    found = Federation.from_frames(sites, target="days", event="died").notes["doubts"]
    assert [line.partition(" (")[0] for line in found] == [
        "column 'last' alone orders the rows by 'days'",
        "column 'code' alone predicts 'died' for 100 % of the rows",
    ]


@pytest.mark.long
def test_init_check_and_the_verdict_say_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    for seed, name in enumerate(("north", "south")):
        frame = ward(seed).drop(columns="score")
        frame.assign(treated=frame["sick"].map({"yes": "t", "no": "u"})).to_csv(f"wards/{name}.csv", index=False)
    line = "column 'treated' alone predicts 'sick' for 100 % of the rows"
    made = perfed("init", "wards", "--target", "sick")
    assert made.code == 0 and line in " ".join(made.out.split()), made.err
    assert line in " ".join(perfed("check", "study.toml").out.split())
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    done = perfed("compare", "study.toml", "--methods", "local,fedrep,sklearn:logistic", *quick, "--out", "out")
    assert done.code == 0 and line in " ".join(done.out.split()), done.err
    (warning,) = [w for w in json.loads(Path("out/comparison.json").read_text())["verdict"]["warnings"] if line in w]
    assert warning in Path("out/report.html").read_text().replace("&#x27;", "'")
    assert line in " ".join(perfed("report", "out").out.split())


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["01067", "99423"], "30 values of north have leading zeros, which numbers lose"),
        (["1E2", "7", "3e4", "1.5e3"], "30 values of north are written like 1E2, which is read as 100"),
        (["0.5", "10", "1e-05", "1e+16", "-0.25", "0"], None),
        (["A01", "B1E2"], None),
    ],
)
def test_codes_that_become_numbers_are_asked_about(texts, line):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"zip": (texts * 30)[:60], "ill": rng.choice(["no", "yes"], 60), "age": range(60)})
    frame["age"] = rng.permutation(frame["age"])
    expected = () if line is None else (f"column 'zip': {line}; if these are codes, name it in categories",)
    assert Federation.from_frames({"north": frame}, target="ill").notes["doubts"] == expected
    for option in ("categories", "numbers") if line else ():
        assert Federation.from_frames({"north": frame}, target="ill", **{option: ["zip"]}).notes["doubts"] == ()


def test_classes_that_lose_their_zeros_are_asked_about():
    frame = pd.DataFrame({"age": np.random.default_rng(0).permutation(60), "stage": ["01", "02", "1"] * 20})
    lines = Federation.from_frames({"north": frame}, target="stage").notes["doubts"]
    expected = "column 'stage': 40 values of north have leading zeros, which numbers lose; if these are codes, put a"
    assert any(line.startswith(expected) for line in lines)
