"""No person is trained on at one site and tested on at another; rows that are there several times are reported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed

from perfed import Federation, PerfedError
from perfed.data.federation import federation_of
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.problems import DataProblems
from perfed.tables.agreement import agree_on_schema
from perfed.tables.joining import new_client_from_frame
from perfed.tables.options import TableOptions
from perfed.tables.site_data import read_site_data

Frames = dict[str, pd.DataFrame]


def patients(seed: int = 0, number: int = 40, first: int = 0, visits: int = 2) -> pd.DataFrame:
    """Noise with a row for each visit; ``mark`` is the patient's number, which tests read from the inputs."""
    rng = np.random.default_rng(seed)
    mark = np.repeat(np.arange(first, first + number), visits)
    frame = {
        "patient": [f"P{n:03d}" for n in mark],
        "mark": mark.astype(float),
        "x": rng.normal(size=len(mark)).round(3),
        "ill": rng.choice(["yes", "no"], len(mark)),
    }
    return pd.DataFrame(frame)


def two_sites() -> Frames:
    """Two sites, at both of which the patients 20 to 39 are."""
    return {"north": patients(0), "south": patients(1, first=20)}


def marks(federation: Federation, split: str) -> set[int]:
    """The patients of a split at any site, as their inputs say."""
    found: set[int] = set()
    for client in federation:
        rows = client.split(split)
        if rows is not None:
            (column,) = [column for column in client.table.columns if column.name == "mark"]
            scaler = client.table.transformer.named_transformers_["number"]
            at = list(client.table.transformer.feature_names_in_).index(column.name)
            assert at == 0
            values = rows.x[:, 0].double().numpy() * scaler[-1].scale_[0] + scaler[-1].mean_[0]
            found |= set(values.round().astype(int).tolist())
    return found


@pytest.mark.long
@pytest.mark.parametrize("split", [{"folds": 5}, {"folds": 2}, {"test": 0.3}, {"folds": 4, "group_draw": 3}])
def test_a_patient_of_two_sites_is_trained_or_tested_on(split):
    number = split.get("folds", 3)
    made = [Federation.from_frames(two_sites(), target="ill", group="patient", seed=s, **split) for s in range(number)]
    for federation in made:
        assert not marks(federation, "train") & marks(federation, "test")
        assert marks(federation, "train") | marks(federation, "test") == set(range(60))
    if "folds" in split:
        assert sum(len(marks(federation, "test")) for federation in made) == 60


SPELLINGS = {
    "text": lambda mark: mark.astype(int).astype(str),
    "decimal": lambda mark: mark.astype(float),
    "text of a decimal": lambda mark: mark.astype(float).astype(str),
    "zeros": lambda mark: mark.astype(int).map("{:05d}".format),
    "nullable": lambda mark: mark.astype(int).astype("Int64"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_patient_s_number_may_be_written_differently(spelling):
    frames = two_sites()
    frames["north"]["patient"] = frames["north"]["mark"].astype(int)
    frames["south"]["patient"] = SPELLINGS[spelling](frames["south"]["mark"])
    federation = Federation.from_frames(frames, target="ill", group="patient", folds=5)
    assert not marks(federation, "train") & marks(federation, "test")
    assert federation.notes["doubts"][0].startswith("20 of 60 values of the group 'patient' occur at several sites")


def alone(folder: Path, frames: Mapping[str, pd.DataFrame], options: TableOptions) -> Federation:
    """Each site makes its client from its own file and from what all agree on, as real sites do."""
    sites = {}
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
        sites[name] = read_site_data(name, folder / f"{name}.csv", options)
    messages = {name: json.dumps(site.create_metadata().plain()) for name, site in sites.items()}
    schema = agree_on_schema(
        {name: SiteMetadata.of_plain(json.loads(text), name) for name, text in messages.items()}, options
    )
    plain = schema.plain()
    clients = [site.client(FederationSchema.of_plain(plain, "the server")) for site in sites.values()]
    assert "P0" not in json.dumps([messages, plain, *(client.facts().plain() for client in clients)])
    return federation_of(clients, schema)


@pytest.mark.long
@pytest.mark.parametrize("split", [{"folds": 5}, {"test_fraction": 0.3, "group_draw": 2}])
def test_real_sites_divide_patients_as_a_simulation_does_and_tell_none(split, tmp_path):
    options = TableOptions("ill", group="patient", seed=3, **split)
    simulated = {("test" if key == "test_fraction" else key): value for key, value in split.items()}
    one = Federation.from_frames(two_sites(), target="ill", group="patient", seed=3, **simulated)
    for a, b in zip(one, alone(tmp_path, two_sites(), options), strict=True):
        assert torch.equal(a.train.x, b.train.x) and torch.equal(a.test.x, b.test.x)
        assert torch.equal(a.train.group, b.train.group)


@pytest.mark.long
def test_how_many_patients_are_at_several_sites_is_said():
    frames = two_sites()
    line = (
        "20 of 60 values of the group 'patient' occur at several sites (north, south); all rows of one value are on "
        "the same side of the split at every site"
    )
    assert line in Federation.from_frames(frames, target="ill", group="patient", folds=2).facts.remarks
    frames["south"] = patients(1, first=50)
    apart = Federation.from_frames(frames, target="ill", group="patient", folds=2)
    assert not any("several sites" in text for text in apart.facts.remarks)


def small_sites() -> Frames:
    """Sites of which a division of patients by chance leaves some without test rows."""
    frames = {name: patients(n, 7, first=100 * n) for n, name in enumerate("abcdef")}
    for frame in frames.values():
        frame["ill"] = np.where(frame["mark"] % 7 < 3, "yes", "no")
    return frames


@pytest.mark.long
def test_a_site_without_test_rows_is_named_with_what_helps():
    made = [Federation.from_frames(small_sites(), target="ill", group="patient", folds=5, seed=s) for s in range(5)]
    (line,) = {text for federation in made for text in federation.notes["doubts"]}
    lacking = {c.id: seed for seed, federation in enumerate(made) for c in federation if c.split("test") is None}
    assert lacking and all(f"site '{site}' has no test rows with seed" in line for site in list(lacking)[:5])
    draw = int(line.partition("group_draw = ")[2].split()[0])
    assert "fewer folds help" in line
    better = [
        Federation.from_frames(small_sites(), target="ill", group="patient", folds=5, seed=s, group_draw=draw)
        for s in range(5)
    ]
    assert sum(c.split("test") is None for federation in better for c in federation) < len(lacking)


@pytest.mark.long
def test_a_site_of_which_nothing_is_left_to_train_on_is_refused():
    frames = {"north": patients(0), "south": patients(1, 2, first=500)}
    texts = []
    for draw in range(20):
        try:
            federation = Federation.from_frames(frames, target="ill", group="patient", folds=2, group_draw=draw)
            assert all(len(client.test) == 2 for client in federation if client.id == "south")
        except DataProblems as error:
            texts.append(str(error))
    assert len(texts) in range(3, 18)  # half of all draws
    assert set(texts) == {
        "site 'south': all its 2 values of the group 'patient' are in one of the 2 folds, and nothing is left to "
        "train on; other folds, another group_draw or another group helps"
    }


def test_test_rows_of_patients_that_some_site_trains_on_are_refused():
    frames, later = two_sites(), {"north": patients(2, 5, first=58), "south": patients(3, 5, first=90)}
    with pytest.raises(DataProblems) as refused:
        Federation.from_frames(frames, target="ill", group="patient", test=later)
    assert refused.value.problems == (
        "site 'north' (test): it has 2 values of the group 'patient' that rows to train on have too (site 'south'); "
        "leave these out of one of the two, or name 'patient' in drop if this is meant",
    )
    later["north"] = patients(2, 5, first=70)
    assert (
        Federation.from_frames(frames, target="ill", group="patient", test=later).notes["doubts"][0].startswith("20 of")
    )
    frames.pop("south")
    with pytest.raises(DataProblems, match="site 'north'"):
        Federation.from_frames(frames, target="ill", group="patient", test={"north": patients(2, 5, first=38)})


@pytest.mark.parametrize("split", [{"folds": 5, "seed": 2}, {"test": 0.3, "seed": 1}])
def test_a_site_that_joins_tests_on_no_patient_that_others_trained_on(split):
    federation = Federation.from_frames(two_sites(), target="ill", group="patient", **split)
    client = new_client_from_frame(federation, "west", patients(5, 30, first=10), "west.csv", split["seed"])
    assert client.test is not None and client.table.ids == ("patient",)
    tested = marks(federation_of([client], federation.schema), "test")
    assert tested and tested == marks(federation, "test") & set(range(10, 40))
    trained = next(n for n in range(60) if n not in marks(federation, "test"))
    small = new_client_from_frame(federation, "west", patients(5, 1, first=trained, visits=6), "west.csv")
    assert len(small.train) == 6 and small.test is None
    with pytest.raises(PerfedError, match=r"west\.csv: group: no column 'patient'"):
        new_client_from_frame(federation, "west", patients(5, 30).drop(columns="patient"), "west.csv")


def test_a_site_that_joins_sites_with_test_files_is_not_tested_on_their_patients():
    later = {"north": patients(2, 5, first=90), "south": patients(3, 5, first=90)}
    federation = Federation.from_frames(two_sites(), target="ill", group="patient", test=later)
    with pytest.raises(
        PerfedError, match=r"west\.csv: its test rows have \d+ values of the group on which other sites"
    ):
        new_client_from_frame(federation, "west", patients(5, 30, first=10), "west.csv")
    client = new_client_from_frame(federation, "west", patients(5, 30, first=100), "west.csv")
    assert not marks(federation_of([client], federation.schema), "test") & set(range(100))


# Rows that are there several times -------------------------------------------------------------------------------


def noise(seed: int, rows: int = 40, times: int = 1) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.normal(size=(rows, 4)).round(3), columns=list("pqrs"))
    frame["ill"] = rng.choice(["yes", "no"], rows)
    return pd.concat([frame] * times, ignore_index=True).sample(frac=1, random_state=seed)


def copies(frames: Any, **options: Any) -> list[str]:
    """What is said of copies."""
    made = Federation.from_frames(frames, **{"target": "ill", **options})
    return [text for text in made.notes["doubts"] if "equal" in text]


def test_copies_are_counted():
    assert copies({"north": noise(0), "south": noise(1)}) == []
    (line,) = copies({"north": noise(0, times=3), "south": noise(1)})
    assert line == (
        "120 of 160 rows equal another row in all columns and in 'ill': a model may know a test row from its copy; if "
        "these are copies, leave them out, or name as group what they belong to, such as a patient"
    )
    (line,) = copies({"north": noise(0), "south": pd.concat([noise(0)[:10], noise(1)])})
    assert line.startswith(
        "20 of 90 rows equal another row in all columns and in 'ill' (20 of them a row of another site)"
    )


def spaces(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype(str).map(lambda cell: f" {cell}  ")


def digits(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(p=frame["p"].map("{:.5f}".format), q=frame["q"].map("{:e}".format))


def ids(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(record=[f"R{n}" for n in range(len(frame))])


@pytest.mark.parametrize("change", [spaces, digits, ids])
def test_copies_are_recognised_in_another_format_and_under_another_id(change):
    first = noise(0).assign(record=[f"A{n}" for n in range(40)])
    again = change(noise(0).assign(record=[f"B{n}" for n in range(40)]))
    (line,) = copies({"north": pd.concat([first, again], ignore_index=True), "south": noise(1)}, drop=["record"])
    assert line.startswith("80 of 120 rows")


@pytest.mark.parametrize("target", ["value", "days"])
def test_copies_of_rows_with_values_and_times(target):
    def site(seed: int) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        return noise(seed).assign(
            value=rng.normal(size=40), days=rng.exponential(size=40) + 0.1, died=rng.choice([0, 1], 40)
        )

    more = {"event": "died", "drop": ["value"]} if target == "days" else {"drop": ["days", "died"]}
    frame = pd.concat([site(0), site(0)[:15]], ignore_index=True)
    (line,) = copies({"north": frame, "south": site(1)}, target=target, **more)
    assert line.startswith(f"30 of 95 rows equal another row in all columns and in '{target}'")


def test_copies_of_one_patient_stay_together_and_are_not_mentioned():
    frame = noise(0, times=2).sort_values(list("pqrs")).assign(patient=np.repeat(np.arange(40), 2))
    assert copies({"north": frame, "south": noise(1).assign(patient=range(100, 140))}, group="patient") == []
    frame["patient"] = range(80)
    assert copies({"north": frame, "south": noise(1).assign(patient=range(100, 140))}, group="patient") != []


def test_test_files_with_rows_of_the_training_files():
    tests = {"north": pd.concat([noise(0)[:6], noise(3)[:14]]), "south": noise(1)[:3]}
    (line,) = copies({"north": noise(0), "south": noise(2)}, test=tests)
    assert line.startswith("6 of 23 test rows equal a training row in all columns and in 'ill':")


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_few_values_are_equal_by_chance(columns, seed):
    rng = np.random.default_rng(seed)
    frames = {name: pd.DataFrame(rng.integers(0, 2, (150, columns))).add_prefix("c") for name in ("north", "south")}
    frames = {name: frame.assign(ill=rng.choice(["yes", "no"], 150)) for name, frame in frames.items()}
    assert copies(frames) == []


# The command line ------------------------------------------------------------------------------------------------


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long
def test_init_check_and_the_verdict_say_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    for name, frame in two_sites().items():
        pd.concat([frame, frame.assign(patient=frame["patient"] + "x")[:8]]).to_csv(f"wards/{name}.csv", index=False)
    lines = ["20 of 68 values of the group 'patient' occur at several sites", "32 of 176 rows equal another row"]
    made = perfed("init", "wards", "--target", "ill", "--group", "patient")
    assert made.code == 0 and all(line in words(made.out) for line in lines), made.out + made.err
    checked = perfed("check", "study.toml")
    assert checked.code == 0 and all(line in words(checked.out) for line in lines)
    quick = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    done = perfed("compare", "study.toml", "--methods", "local,sklearn:logistic", *quick, "--out", "out")
    assert done.code == 0 and all(line in words(done.out) for line in lines), done.err
    verdict = json.loads(Path("out/comparison.json").read_text())["verdict"]
    assert all(any(line in warning for warning in verdict["warnings"]) for line in lines)


@pytest.mark.long
def test_init_chooses_a_division_with_test_rows_at_every_site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wards").mkdir()
    for name, frame in list(small_sites().items())[:3]:
        frame.to_csv(f"wards/{name}.csv", index=False)
    made = perfed("init", "wards", "--target", "ill", "--group", "patient")
    assert made.code == 0 and "no test rows with" not in words(made.out), made.out + made.err
    for seed in range(5):
        checked = json.loads(perfed("check", "study.toml", f"seed={seed}", "--json").out)
        assert all(site["rows"].get("test") for site in checked["sites"])
