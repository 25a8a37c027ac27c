"""A site's model on the command line: export, predict, join, and more rounds."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import contents, perfed, run_tiny

import perfed as package
from perfed.cli.options import file_name
from perfed.experiment.start import open_method_run
from perfed.run.directory import write_marker


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "out"
    run_tiny(directory)
    return directory


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def written(file: Path, names: list[str], x: np.ndarray, **more: list[object]) -> Path:
    table = [[*row, *rest] for row, *rest in zip(x.tolist(), *more.values(), strict=True)]
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([[*names, *more], *table])
    return file


@pytest.mark.long
def test_export_writes_a_model_and_a_card_and_nothing_else(run_dir, tmp_path):
    import onnxruntime

    before = contents(run_dir)
    result = perfed("export", run_dir, "--site", "001", "--format", "onnx", "--out", tmp_path / "north.onnx")
    assert result.code == 0, result.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["north.md", "north.onnx"]
    assert contents(run_dir) == before
    run = open_method_run(run_dir)
    x = run.federation.clients[1].test.x.float()
    session = onnxruntime.InferenceSession(tmp_path / "north.onnx")
    expected = run.predict("001", x).softmax(1).numpy()
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], expected, atol=1e-5)
    again = perfed("export", run_dir, "--site", "001", "--out", tmp_path / "north.onnx")
    assert again.code == 2 and again.err == f"perfed: {tmp_path}/north.onnx: exists already; choose another name\n"


@pytest.mark.long
def test_predict_writes_what_the_site_says_of_each_row(run_dir, tmp_path):
    run = open_method_run(run_dir)
    site = run.site("002")
    x = run.federation.clients[2].test.x.numpy()
    names = [f"x{j}" for j in range(x.shape[1])]
    new = written(tmp_path / "new.csv", names[::-1], x[:, ::-1])
    result = perfed("predict", run_dir, new, "--site", "002", "--out", tmp_path / "proba.csv")
    assert result.code == 0, result.err
    found = rows(tmp_path / "proba.csv")
    said = np.array([[float(row[f"probability of {label}"]) for label in site.classes_] for row in found])
    np.testing.assert_allclose(said, site.predict_proba(x), atol=1e-6)
    assert [int(row["prediction"]) for row in found] == site.predict(x).tolist()
    assert [int(row["row"]) for row in found] == list(range(2, len(x) + 2))  # the header is row 1


@pytest.mark.long
def test_a_site_joins_and_every_other_file_stays_as_it_was(run_dir, tmp_path):
    before = contents(run_dir)
    client = open_method_run(run_dir).federation.clients[0]
    x, y = client.train.x.numpy(), client.train.y.numpy()
    np.savez(tmp_path / "west.npz", x=x, y=y)
    joined = perfed("join", run_dir, tmp_path / "west.npz", "--site", "west")
    assert joined.code == 0, joined.err
    assert re.search(r"accuracy: [\d.]+ % \(95 %: [\d.]+ % to [\d.]+ %\)", joined.out)
    after = contents(run_dir)
    new = {"card.md", "network.pt2", "site.json"}
    assert set(after) - set(before) == {f"joined/west/{name}" for name in new}
    assert all(after[name] == content for name, content in before.items())
    facts = json.loads(after["joined/west/site.json"])
    assert facts["joined"] == 3 and facts["data"]["train"] + facts["data"]["test"] == len(x)
    # the same from a table, and it predicts as those that were there
    names = [f"x{j}" for j in range(x.shape[1])]
    table = written(tmp_path / "east.csv", names, x, y=y.tolist())
    assert perfed("join", run_dir, table, "--site", "east").code == 0
    new_rows = written(tmp_path / "new.csv", names, x)
    for site in ("west", "east"):
        out = tmp_path / f"{site}-proba.csv"
        assert perfed("predict", run_dir, new_rows, "--site", site, "--out", out).code == 0
        assert len(rows(out)) == len(x)
    assert perfed("export", run_dir, "--site", "west", "--format", "pt2").code == 0
    assert sorted(file.name for file in (run_dir / "models").iterdir()) == ["west.md", "west.pt2"]
    again = perfed("join", run_dir, tmp_path / "west.npz", "--site", "west")
    assert again.code == 2 and "site 'west' has joined already" in again.err
    assert package.load_site(run_dir / "joined" / "west").site == "west"


@pytest.mark.long
def test_ids_that_were_dropped_come_with_the_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        x = rng.normal(size=(30, 2))
        ids = [f"{site[0]}-{number:03d}" for number in range(30)]
        written(tmp_path / f"{site}.csv", ["a", "b"], x, patient=ids, ward=["x", "y"] * 15, sick=["no", "yes"] * 15)
    drop = ("--drop", "patient", "--drop", "ward")
    assert perfed("init", "north.csv", "south.csv", "--target", "sick", *drop).code == 0
    assert perfed("run", "study.toml", "rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run").code == 0
    new = written(Path("new.csv"), ["a", "b"], rng.normal(size=(3, 2)), ward=["x"] * 3, patient=["p7", "p9", "p8"])
    assert perfed("predict", "run", new, "--site", "north", "--out", "said.csv").code == 0
    found = rows(Path("said.csv"))
    assert [*found[0]][:2] == ["patient", "prediction"] and [row["patient"] for row in found] == ["p7", "p9", "p8"]
    bare = written(Path("bare.csv"), ["b", "a"], rng.normal(size=(3, 2)))
    assert perfed("predict", "run", bare, "--site", "north", "--out", "said/bare.csv").code == 0
    assert [row["row"] for row in rows(Path("said/bare.csv"))] == ["2", "3", "4"]
    assert perfed("join", "run", "south.csv", "--site", "west").code == 0
    nobody = perfed("predict", "run", new, "--site", "oslo", "--out", "no.csv")
    assert nobody.err == "perfed: unknown client 'oslo'; ids are: north, south; joined: west\n"


def test_where_predictions_go_is_looked_at_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("perfed.cli.sites.predict", lambda *given: pytest.fail("it was loaded"))
    out = tmp_path / "there.csv"
    out.touch()
    result = perfed("predict", tmp_path / "run", "new.csv", "--site", "000", "--out", out)
    assert result.code == 2 and result.err == f"perfed: {out}: exists already; choose another name\n"


@pytest.mark.long
def test_a_finished_run_goes_on_to_more_rounds(tmp_path):
    run_tiny(tmp_path / "long", "rounds=5")
    run_tiny(tmp_path / "short", "rounds=3")
    result = perfed("resume", tmp_path / "short", "rounds=5")
    assert result.code == 0, result.err
    lines = [(tmp_path / name / "rounds.jsonl").read_text().splitlines() for name in ("long", "short")]
    participants = [[json.loads(line)["participants"] for line in part] for part in lines]
    assert participants[0][:2] == participants[1][:2] and len(participants[1]) == 5
    assert "rounds = 5" in (tmp_path / "short" / "config.toml").read_text()
    assert "this run has finished" in perfed("resume", tmp_path / "short", "rounds=5").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("export", "RUN", "--site", "nobody"), "unknown client 'nobody'; ids are: 000, 001, 002, 003"),
        (("export", "RUN", "--site", "000", "--format", "pmml"), "--format pmml: unknown format; allowed: onnx, pt2"),
        (("export", "ELSEWHERE", "--site", "000"), "no run here"),
        (("predict", "RUN", "ELSEWHERE/new.csv", "--site", "000", "--out", "OUT"), "new.csv: no such file"),
        (("join", "RUN", "ELSEWHERE/new.npz", "--site", "south"), "new.npz: no such file"),
        (("join", "RUN", "ELSEWHERE/new.csv", "--site", "000"), "new.csv: no such file"),
        (("resume", "RUN", "rounds=2"), "rounds = 2 is less than the 3"),
        (("resume", "RUN", "lr=2"), "'lr=2': a run goes on with the settings that it has; allowed: rounds=NUMBER"),
    ],
)
def test_errors_are_one_line(run_dir, tmp_path, arguments, says):
    before = contents(run_dir)
    places = {"RUN": run_dir, "ELSEWHERE": tmp_path, "OUT": tmp_path / "out.csv"}
    given = [
        str(places[part.split("/")[0]] / part.split("/")[1]) if "/" in part else places.get(part, part)
        for part in arguments
    ]
    result = perfed(*given)
    assert result.code == 2 and says in result.err and result.err.count("\n") == 1
    assert contents(run_dir) == before and not (tmp_path / "out.csv").exists()


def test_a_comparison_is_no_run(tmp_path):
    write_marker(tmp_path, "comparison", {})
    result = perfed("export", tmp_path, "--site", "000")
    assert result.code == 2 and f"{tmp_path}: a comparison, not a run; its runs are METHOD/seed-N in it" in result.err


@pytest.mark.long
def test_new_rows_that_do_not_fit_are_named(run_dir, tmp_path):
    x = open_method_run(run_dir).federation.clients[0].test.x.numpy()
    names = [f"x{j}" for j in range(x.shape[1])]
    for file, says in (
        (written(tmp_path / "less.csv", names[1:], x[:, 1:]), "x lacks column 'x0'"),
        (written(tmp_path / "more.csv", names, x, colour=[1] * len(x)), "remove from x the unknown column 'colour'"),
        (written(tmp_path / "text.csv", names[:-1], x[:, :-1], **{names[-1]: ["a"] * len(x)}), "and something else in"),
    ):
        result = perfed("predict", run_dir, file, "--site", "000", "--out", tmp_path / "out.csv")
        assert result.code == 2 and says in result.err and result.err.count("\n") == 1
        assert not (tmp_path / "out.csv").exists()


@pytest.mark.long
def test_formats_of_one_model_lie_side_by_side_with_one_card(run_dir, tmp_path):
    """A card is written anew on another day; what is no card of this model is not written over."""
    for format_ in ("onnx", "pt2", "safetensors"):
        file = tmp_path / f"north.{format_}"
        done = perfed("export", run_dir, "--site", "001", "--format", format_, "--out", file)
        assert done.code == 0 and f"card: {tmp_path}/north.md" in done.out.replace("\n", ""), done.err
        text = (tmp_path / "north.md").read_text()
        (tmp_path / "north.md").write_text(re.sub(r"written on \d{4}-\d\d-\d\d", "written on 2020-01-31", text))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "north.md", "north.onnx", "north.pt2", "north.safetensors"
    ]  # fmt: skip
    other = perfed("export", run_dir, "--site", "002", "--format", "pt2", "--out", tmp_path / "north.pt2x")
    assert other.code == 2 and other.err == f"perfed: {tmp_path}/north.md: exists already; choose another name\n"
    (tmp_path / "mine.md").write_text("my notes")
    mine = perfed("export", run_dir, "--site", "001", "--format", "pt2", "--out", tmp_path / "mine.pt2")
    assert mine.code == 2 and "mine.md: exists already" in mine.err and not (tmp_path / "mine.pt2").exists()
    assert (tmp_path / "mine.md").read_text() == "my notes" and not (tmp_path / "north.pt2x").exists()


@pytest.mark.long
def test_a_site_that_has_joined_is_one_of_the_run_s_in_python_too(tmp_path):
    run_tiny(tmp_path / "out")
    client = open_method_run(tmp_path / "out").federation.clients[0]
    np.savez(tmp_path / "west.npz", x=client.train.x.numpy(), y=client.train.y.numpy())
    assert perfed("join", tmp_path / "out", tmp_path / "west.npz", "--site", "far west").code == 0
    expected = package.load_site(tmp_path / "out" / "joined" / "far_west").predict_proba(client.test.x)
    for run in (package.resume(tmp_path / "out"), open_method_run(tmp_path / "out")):
        np.testing.assert_array_equal(run.site("far west").predict_proba(client.test.x), expected)
        with pytest.raises(package.PerfedError, match=r"unknown client 'oslo'; ids are: 000, .*; joined: far west$"):
            run.site("oslo")


def test_names_of_exported_files_are_safe_and_differ_where_those_of_sites_do():
    sites = [
        "a:b",
        "a?b",
        "a/b",
        "a_b",
        "a b:",
        'a"b',
        "a*b",
        "a|b",
        "a<b",
        "a>b",
        "a\\b",
        "a\nb",
        "..",
        ".a",
        "a.",
        "x" * 300,
    ]
    names = [file_name(site) for site in sites]
    assert len(set(names)) == len(sites)
    for name in names:
        assert re.fullmatch(r"[\w-][\w.-]{0,80}", name) and not name.endswith(".")
    assert [file_name(site) for site in ("north", "far west", "Süd-2.1")] == ["north", "far_west", "Süd-2.1"]


@pytest.mark.long
@pytest.mark.parametrize("rows", ["", "\n", ",,,\n"])
def test_a_table_without_rows_is_refused_in_one_line(tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        more = {"c": ["x", "y"] * 15, "sick": ["no", "yes"] * 15}
        written(tmp_path / f"{site}.csv", ["a", "b"], rng.normal(size=(30, 2)), **more)
    assert perfed("init", "north.csv", "south.csv", "--target", "sick").code == 0
    assert perfed("run", "study.toml", "rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run").code == 0
    Path("new.csv").write_text("a,b,c,sick\n" + rows)
    refused = perfed("predict", "run", "new.csv", "--site", "north", "--out", "said.csv")
    assert (refused.code, refused.err) == (2, "perfed: new.csv: there are no rows\n")
    assert not Path("said.csv").exists()
    with pytest.raises(package.PerfedError, match=r"^site 'north': there are no rows$"):
        package.resume("run").site("north").predict(pd.read_csv("north.csv").iloc[:0])
