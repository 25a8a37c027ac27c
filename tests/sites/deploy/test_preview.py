"""``perfed site preview`` shows what then leaves, and a site begins when its administrator has agreed to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import perfed
from stations import COLUMNS, study, submit

from perfed.sites.deploy import preview
from perfed.sites.deploy.preview import Preview
from perfed.sites.flower.hash_chain import LOG, read_log, verify_log
from perfed.sites.flower.message import unpack


def started(monkeypatch) -> list[str]:
    """Sites that would have been started."""
    sites: list[str] = []
    monkeypatch.setattr("perfed.sites.deploy.site_agent.run_site", lambda settings, *_: sites.append(settings.name))
    return sites


def options(path: Path, text: str | None, *more: object) -> list[object]:
    given: list[object] = ["site", "--data", path / "north.csv", "--server", "127.0.0.1:9", "--name", "north"]
    if text is not None:
        (path / "study.toml").write_text(text)
        given += ["--study", path / "study.toml"]
    return [*given, "--dir", path / "at-north", *more]


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        ("own", {}),
        ("union", {"method": "ditto", "methods": {}}),
        ("own", {"evaluation": {"every": 3, "metrics": ["calibration-error"]}}),
    ],
    ids=["own columns", "one schema", "more metrics"],
)
def test_what_is_shown_is_what_leaves(tables, columns, changes):
    """Every value that is told, every fact, every entry with its shape, every metric."""
    data = {"name": "tables", "files": list(COLUMNS), "target": "ill", "columns": columns}
    for shown, headers, left in shown_and_left(tables, study(tables, data=data, **changes)):
        entries = {entry["name"]: entry for entry in shown.entries}
        assert {entry["name"] for entry in left} == {*entries}
        if columns == "own":  # else other sites' columns enter too
            assert shown.facts == headers[1]["facts"]
            assert all({**entries[entry["name"]], **entry} == entries[entry["name"]] for entry in left)


@pytest.mark.long
def test_what_is_shown_of_values_is_what_leaves(tables):
    """The study does not say that they are values; the checksum is of targets that all sites' means have scaled."""
    for site in COLUMNS:
        table = pd.read_csv(tables / f"{site}.csv")
        pd.DataFrame({"age": table.iloc[:, 0], "ill": table.iloc[:, 1]}).to_csv(tables / f"{site}.csv", index=False)
    for shown, headers, left in shown_and_left(tables, study(tables, method="ditto", methods={})):
        assert shown.facts | {"mark": 0} == headers[1]["facts"] | {"mark": 0}
        entries = {entry["name"]: entry for entry in shown.entries}
        assert left and all({**entries[entry["name"]], **entry} == entries[entry["name"]] for entry in left)


def shown_and_left(path: Path, text: str) -> Iterator[tuple[Preview, list[dict[str, Any]], list[dict[str, Any]]]]:
    """By site what is shown, the headers of all that has left in a run, and its entries by the log."""
    sent = submit(path, text)
    for site in COLUMNS:
        shown = Preview.of(site, path / f"{site}.csv", text)
        headers = [unpack(reply)[0] for reply in sent.left[site]]
        assert shown.told == headers[0]["told"]
        measured = [header["metrics"] for header in headers[2:] if header["metrics"] is not None]
        assert measured and all({*shown.metrics} == {*metrics} for metrics in measured)
        entries = [entry for line in read_log(path / f"at-{site}" / LOG) for entry in line.get("entries", ())]
        yield shown, headers, [entry for entry in entries if entry["name"] != "reply///empty"]


def test_a_value_of_four_rows_does_not_leave(tables):
    table = pd.read_csv(tables / "south.csv").assign(pain=["stabbing"] * 4 + ["dull", "none"] * 18)
    table.to_csv(tables / "south.csv", index=False)
    text = study(tables, data={"name": "tables", "files": ["x"], "target": "ill", "columns": "union"})
    told = json.dumps(Preview.of("south", tables / "south.csv", text).plain())
    assert "stabbing" not in told and "dull" in told


@pytest.mark.long
def test_copies_of_rows_are_shown_to_the_site_alone(tables):
    text, file = study(tables), tables / "north.csv"
    before = Preview.of("north", file, text)
    table = pd.read_csv(file)
    pd.concat([table, table[:10]]).to_csv(file, index=False)
    (tables / "study.toml").write_text(text)
    done = perfed("site", "preview", "--data", file, "--study", tables / "study.toml", "--name", "north")
    assert "to mind, and not told to anybody: 20 of 50 rows equal another row" in " ".join(done.out.split()), done.err
    after = Preview.of("north", file, text)
    assert (before.doubts, after.digest) == ([], before.digest) and "equal another" not in json.dumps(after.plain())


@pytest.mark.long
def test_all_of_it_is_printed(tables):
    text = study(tables, data={"name": "tables", "files": ["x"], "target": "ill", "columns": "union", "drop": ["age"]})
    (tables / "study.toml").write_text(text)
    command = ("site", "preview", "--data", tables / "south.csv", "--study", tables / "study.toml", "--name", "south")
    done = perfed(*command)
    assert done.code == 0, done.err
    for said in (
        "classes: ill, well",
        "columns that the study names and this site has: age",
        "column pulse: number\n",
        "column smoker: boolean: no, yes",
        "train: samples 32; input_shape 2; ",
        "2 inputs, and in the place of their names one hash",
        "reply/shared/body.0.weight: 4x4 float32\n",
        "loss: 1 float64\n",
        "the metrics accuracy",
    ):
        assert said in done.out, said
    shown = json.loads(perfed(*command, "--json").out)
    assert shown.keys() == {"site", "study", "told", "facts", "entries", "bytes", "metrics", "consent"}
    assert f"for --consent: {shown['consent']}\n" in done.out
    assert not (tables / "perfed-site-south").exists()


def test_what_depends_on_other_sites_is_said(tables):
    table = pd.read_csv(tables / "north.csv").assign(ill="ill")
    table.to_csv(tables / "north.csv", index=False)
    shown = Preview.of("north", tables / "north.csv", study(tables))
    assert shown.facts is None and "is the same in all rows" in shown.why and shown.entries


@pytest.mark.long
def test_a_site_begins_when_somebody_at_its_terminal_has_said_yes(tables, monkeypatch, capsys):
    sites, typed = started(monkeypatch), ["y", "yes"]
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: typed.pop(0))
    done = perfed(*options(tables, study(tables)))
    assert (done.code, sites) == (2, []) and "you have not agreed; nothing has left" in done.err
    assert "before training: classes ill, well" in done.out and not (tables / "at-north").exists()
    assert perfed(*options(tables, study(tables))).code == 0 and sites == ["north"]
    assert perfed(*options(tables, study(tables))).code == 0 and sites == ["north"] * 2  # nobody is asked again


@pytest.mark.long
def test_a_service_says_the_hash_and_is_refused_when_something_else_would_leave(tables, monkeypatch):
    sites = started(monkeypatch)
    digest = Preview.of("north", tables / "north.csv", study(tables)).digest
    done = perfed(*options(tables, study(tables)))
    assert done.code == 2 and done.err.count("\n") == 1 and "nobody has agreed to what would leave" in done.err
    assert "perfed site preview --data" in done.err
    done = perfed(*options(tables, study(tables), "--consent", "0" * 16))
    assert done.code == 2 and f"--consent {'0' * 16}: what would leave has the hash {digest}" in done.err
    assert not sites and not (tables / "at-north").exists()
    for more in (("--consent", digest), (), ("--consent", digest)):
        assert perfed(*options(tables, study(tables), *more)).code == 0
    more_rows = pd.read_csv(tables / "north.csv")
    pd.concat([more_rows, more_rows.tail(3)]).to_csv(tables / "north.csv", index=False)
    assert perfed(*options(tables, study(tables))).code == 0 and len(sites) == 4
    for other in (study(tables, rounds=7), study(tables, method="flic-class", methods={})):
        assert "nobody has agreed" in perfed(*options(tables, other)).err
    more_rows.assign(weight=more_rows["age"].to_numpy()[::-1]).to_csv(tables / "north.csv", index=False)
    assert "nobody has agreed" in perfed(*options(tables, study(tables))).err and len(sites) == 4
    assert perfed(*options(tables, study(tables), "--consent", "yes")).code == 0
    log = tables / "at-north" / LOG
    lines = read_log(log)
    assert lines[0]["consent"] == digest and len(lines) == 2 and verify_log(log) is None
    assert (
        f"the administrator agrees to what leaves ({digest})" in perfed("site", "log", "--dir", tables / "at-north").out
    )


def test_without_a_study_consent_is_to_anything(tables, monkeypatch):
    sites = started(monkeypatch)
    for given in ((), ("--consent", "yes")):
        done = perfed(*options(tables, None, "--any-study", *given))
        assert done.code == 2 and "with --any-study nobody knows what would leave" in done.err
    for given in (("--consent", "any"), ()):
        assert perfed(*options(tables, None, "--any-study", *given)).code == 0
    assert sites == ["north"] * 2


@pytest.mark.long
def test_a_damaged_consent_is_said_in_one_line(tables):
    (tables / "at-north").mkdir()
    (tables / "at-north" / preview.CONSENT).write_text("{")
    done = perfed(*options(tables, study(tables), "--consent", "yes"))
    assert done.code == 2 and done.err.count("\n") == 1 and "consent.json: cannot be read" in done.err
