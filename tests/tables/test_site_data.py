"""A site's own file: a table or arrays, told and agreed in one way."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from perfed import Federation, PerfedError
from perfed.data.federation import federation_of
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.datasets.tables import TableSettings
from perfed.tables.agreement import agree_on_schema
from perfed.tables.options import TableOptions
from perfed.tables.site_data import describe_problems, read_site_data


def arrays(seed: int, kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {"x_train": rng.normal(size=(12, 3)).astype("float32"), "x_test": rng.normal(size=(5, 3)).astype("float32")}
    for split, size in (("train", 12), ("test", 5)):
        made[f"y_{split}"] = {
            "numbers": rng.choice([3, 7, 20], size),
            "texts": rng.choice(["b", "a"], size),
            "zero and one": rng.choice([0, 1], size),
            "values": rng.normal(1e3, 5, size),
            "two values": rng.normal([5.0, 1e3], [1.0, 9.0], (size, 2)),
        }[kind]
        made[f"domain_{split}"] = rng.choice(2 + seed, size)
    return made


@pytest.mark.parametrize("kind", ["numbers", "texts", "zero and one", "values", "two values"])
def test_arrays_become_what_a_federation_makes_of_them(tmp_path, kind):
    given = {name: arrays(seed, kind) for seed, name in enumerate(("north", "south"))}
    for name, held in given.items():
        np.savez(tmp_path / f"{name}.npz", **held)
    sites = {name: read_site_data(name, tmp_path / f"{name}.npz") for name in given}
    messages = {name: json.dumps(site.create_metadata().plain()) for name, site in sites.items()}
    agreement = agree_on_schema(
        {name: SiteMetadata.of_plain(json.loads(text), name) for name, text in messages.items()}
    )
    agreement = FederationSchema.of_plain(json.loads(json.dumps(agreement.plain())), "the server")
    made = federation_of((site.client(agreement) for site in sites.values()), agreement)
    expected = Federation.from_arrays(given)
    expected = expected.standardised() if expected.task == "regression" else expected
    for fact in ("task", "classes", "class_names", "num_classes", "num_domains", "target_scale"):
        assert getattr(made, fact) == getattr(expected, fact)
    assert agreement.domains == made.num_domains == 3
    for one, two in zip(made, expected, strict=True):
        for split in ("train", "test"):
            a, b = one.split(split), two.split(split)
            assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.domain, b.domain)
    if "values" not in kind:  # labels and domains, no counts and no rows
        told = json.loads(messages["north"])
        assert {key for key, value in told.items() if value is not None} <= {
            "task", "labels", "classes", "numbers", "domains"
        }  # fmt: skip
        assert told["classes"] == sorted(
            {str(label) for label in [*given["north"]["y_train"], *given["north"]["y_test"]]}
        )


def test_survival_arrays_say_nothing():
    from perfed.data.site_arrays import SiteArrays

    pairs = {"x_train": np.ones((4, 2)), "y_train": np.array([[1.0, 0], [2, 1], [3, 1], [4, 0]])}
    site = SiteArrays.from_data("a", pairs, "survival")
    assert {key for key, value in site.create_metadata().plain().items() if value is not None} == {"task"}
    assert site.client(agree_on_schema({"a": site.create_metadata()})).train.y.tolist() == pairs["y_train"].tolist()


def table(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"age": rng.normal(60, 9, 20).round(1), "sick": ["no", "yes"] * 10})


@pytest.mark.long
def test_a_site_s_table_goes_by_the_experiment_s_data_table(tmp_path):
    for seed, name in enumerate(("north", "south")):
        (tmp_path / name).mkdir()
        table(seed).to_csv(tmp_path / name / f"{name}.csv", index=False)
        table(seed + 9).to_csv(tmp_path / name / "test.csv", index=False)
    table(5).to_parquet(tmp_path / "west.parquet")
    options = TableSettings(files=["unused"], target="sick").table_options(seed=4)
    paths = {"north": tmp_path / "north", "south": tmp_path / "south", "west": tmp_path / "west.parquet"}
    sites = {name: read_site_data(name, path, options) for name, path in paths.items()}
    agreement = agree_on_schema({name: site.create_metadata() for name, site in sites.items()}, options)
    frames = {"north": table(0), "south": table(1), "west": table(5)}
    tests = {"north": table(9), "south": table(10)}
    given = Federation.from_frames({name: frames[name] for name in tests}, target="sick", test=tests)
    split = Federation.from_frames({"west": frames["west"]}, target="sick", seed=4)
    for expected in (*given, *split):
        client = sites[expected.id].client(agreement)
        assert torch.equal(client.train.x, expected.train.x) and torch.equal(client.test.x, expected.test.x)
        assert torch.equal(client.test.y, expected.test.y)


def test_notes_and_locks_beside_a_site_s_table_are_left_out(tmp_path):
    options = TableOptions("sick")
    table(0).to_csv(tmp_path / "a.csv", index=False)
    for name in ("notes.txt", "~$a.xlsx", ".a.csv", "letter.md"):
        (tmp_path / name).write_text("Dear all,\n")
    assert describe_problems("a", tmp_path, options) == []
    (tmp_path / "b.csv").write_text("")
    assert describe_problems("a", tmp_path, options)[0].endswith(
        "at most one called 'test'; found: a.csv, b.csv, notes.txt"
    )


def test_what_is_wrong_with_a_site_s_file_is_said(tmp_path):
    options = TableOptions("sick")
    table(0).rename(columns={"sick": "Sick"}).to_csv(tmp_path / "a.csv", index=False)
    file = tmp_path / "a.csv"
    assert describe_problems("a", file, options) == [f"{file}: target: no column 'sick' (did you mean 'Sick'?)"]
    assert describe_problems("a", tmp_path / "b.csv", options) == [f"{tmp_path / 'b.csv'}: no such file"]
    assert describe_problems("a", tmp_path / "b.npz") == [f"{tmp_path / 'b.npz'}: no such file"]
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 no archive")
    assert describe_problems("a", tmp_path / "b.npz")[0].startswith(f"{tmp_path / 'b.npz'}: cannot be read: ")
    assert describe_problems("a", file) == [f"{file}: the study is of arrays; an .npz file is needed"]
    assert describe_problems("a", tmp_path, options)[0].endswith("at most one called 'test'; found: a.csv, b.npz")
    table(0).to_csv(file, index=False)
    assert describe_problems("a", file, options) == []
    agreement = FederationSchema(task="classification", classes=("ill", "well"))
    assert describe_problems("a", file, options, agreement) == [
        f"{file}: column 'sick', the target, holds no known class in rows 2, 3, 4, 5, 6 and 15 more; allowed: ill, well"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y_train": np.array([3, 9] * 6)}, "client 'a': train label '9' is not among the classes 3, 7, 20"),
        ({"y_train": np.array(["x", "y"] * 6), "y_test": np.array(["x"] * 5)}, "targets are texts; the classes are 3"),
        (
            {"y_train": np.arange(12) / 7, "y_test": np.arange(5) / 7},
            "the target is of regression, and the study is of",
        ),
        ({"domain_test": np.array([0, 1, 2, 3, 4])}, "test domain id 4 is not allowed; ids are from 0 to 2"),
    ],
)
def test_arrays_that_do_not_fit_what_was_agreed(tmp_path, change, said):
    agreement = FederationSchema(task="classification", classes=(3, 7, 20), domains=3)
    np.savez(tmp_path / "a.npz", **{**arrays(1, "numbers"), **change})
    (line,) = describe_problems("a", tmp_path / "a.npz", None, agreement)
    assert said in line and "\n" not in line


def test_arrays_with_as_many_values_as_others(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays(0, "values"))
    np.savez(tmp_path / "b.npz", **arrays(0, "two values"))
    sites = {name: read_site_data(name, tmp_path / f"{name}.npz") for name in "ab"}
    with pytest.raises(PerfedError, match="the target has 1 values in site 'a', 2 values in site 'b'"):
        agree_on_schema({name: site.create_metadata() for name, site in sites.items()})
    agreement = agree_on_schema({"a": sites["a"].create_metadata()})
    assert sites["b"].describe_misfits(agreement) == [
        "client 'b': train targets have shape (12, 2); those of others have 1 values"
    ]
