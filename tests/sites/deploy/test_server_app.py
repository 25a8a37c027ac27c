"""A whole deployment without a network: the server's program, three stations with tables, bytes between them."""

from __future__ import annotations

import errno
import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed
from stations import COLUMNS, Stations, answer_all, same_as_simulated, study, submit

from perfed.errors import PerfedError
from perfed.experiment.config import read as read_study
from perfed.experiment.config import validate
from perfed.experiment.start import open_method_run
from perfed.sites.deploy import server_app
from perfed.sites.deploy import submit as submission
from perfed.sites.deploy.own_model import load_site_model
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.deploy.study import make_deployed_study
from perfed.sites.deploy.trial import list_sent_entries
from perfed.sites.flower import journal, store
from perfed.sites.flower.hash_chain import LOG, read_log
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.transport import Answer
from perfed.tree import map_leaves


@pytest.mark.long
def test_what_leaves_is_what_was_declared_and_what_the_log_says(tables):
    """Every byte of a FLIC run: exactly the declared replies; results and models are those of a simulation."""
    text = study(tables)
    sent = submit(tables, text)
    same_as_simulated(tables)
    lines = [(tables / name / "rounds.jsonl").read_text().splitlines()[-1] for name in ("simulated", "run")]
    simulated, run = map(json.loads, lines)
    assert run["metrics"] == simulated["metrics"] and run["virtual_time"] > 0
    declared = {"loss", *(f"reply/{name}" for name in list_sent_entries(validate(tomllib.loads(text))))}
    for site, replies in sent.left.items():
        lines = [line for line in read_log(tables / f"at-{site}" / LOG) if "note" not in line and "arrived" not in line]
        assert [line["sha256"] for line in lines] == [hashlib.sha256(reply).hexdigest() for reply in replies]
        entries = {entry["name"] for line in lines for entry in line["entries"]} - {"reply///empty"}
        assert entries <= declared and not [name for name in entries if "embedding" in name or "head" in name]
        kinds = [unpack(reply)[0]["kind"] for reply in replies]
        assert kinds[:2] == ["told", "facts"] and set(kinds[2:]) == {"done"}
        told, facts = unpack(replies[0])[0]["told"], unpack(replies[1])[0]["facts"]
        assert {name for name, value in told.items() if value is not None} == {"task", "labels", "classes"}
        assert facts.keys() == {"id", "splits", "feature_names", "mark"}
        before = json.dumps([told, facts])  # columns of its own: their names stay, and what they hold
        assert not [name for name in (*COLUMNS[site], "yes") if name in before]
    assert not (tables / "run" / "predictions").exists()


@pytest.mark.long
def test_a_site_makes_its_own_model_of_what_it_has_kept_while_it_goes_on(tables):
    """Its process has the folder then: the model is made by another one."""
    with closing(Stations(tables)) as stations:
        answer_all(tables, study(tables), stations)
        model = load_site_model(tables / "at-south", "south", tables / "south.csv")
    frame = pd.read_csv(tables / "south.csv").drop(columns="ill")
    same_as_simulated(tables)
    expected = open_method_run(tables / "simulated").site("south").predict_proba(frame)
    np.testing.assert_array_equal(model.predict_proba(frame), expected)
    assert list(model.classes_) == ["ill", "well"]


@pytest.mark.long
def test_after_another_run_has_begun_the_first_ones_model_can_still_be_made(tables):
    """And a run that the site was never in is refused in one line."""
    at, frame = tables / "at-south", pd.read_csv(tables / "south.csv").drop(columns="ill")
    with closing(Stations(tables)) as stations:
        answer_all(tables, study(tables), stations)
        (run,) = [folder.name for folder in (at / "runs").iterdir()]
        expected = load_site_model(at, "south", tables / "south.csv").predict_proba(frame)
        stations.stop_after = 2
        with pytest.raises(KeyboardInterrupt):
            answer_all(tables, study(tables, seed=1), stations, "other")
        (at / "site.json").write_text(json.dumps({"name": "south", "data": str(tables / "south.csv")}))
        assert "there is no model yet" in perfed("site", "export", "--dir", at).err
        made = load_site_model(at, "south", tables / "south.csv", run)
        np.testing.assert_array_equal(made.predict_proba(frame), expected)
        assert perfed("site", "export", "--dir", at, "--run", run).code == 0 and (at / "south.onnx").exists()
        done = perfed("site", "export", "--dir", at, "--run", "another", "--out", tables / "a.onnx")
    assert done.code == 2 and "no data of run 'another' are stored; allowed: " in done.err and run in done.err


@pytest.mark.long
@pytest.mark.parametrize("exchanges", [3, 4, 5])
def test_a_run_that_is_submitted_again_goes_on_to_the_same_bits(exchanges, tables):
    text, first = study(tables), Stations(tables)
    first.stop_after = exchanges
    with pytest.raises(KeyboardInterrupt):
        submit(tables, text, first)
    submit(tables, text)
    same_as_simulated(tables)


@pytest.mark.long
def test_patients_of_several_sites_are_divided_as_in_a_simulation(tables):
    for n, site in enumerate(COLUMNS):
        numbers = np.arange(40) // 2 + 10 * n
        frame = pd.read_csv(tables / f"{site}.csv").assign(patient=numbers if n else [f"{k}.0" for k in numbers])
        frame.to_csv(tables / f"{site}.csv", index=False)
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "group": "patient", "folds": 4}
    data |= {"validation_fraction": 0.3, "group_draw": 1}
    submit(tables, study(tables, data=data))
    same_as_simulated(tables, data=data)


@pytest.mark.long
def test_models_of_each_sites_best_round_are_those_of_a_simulation(tables):
    changes = {"evaluation": {"every": 1, "stop": "validated", "patience": 2}, "rounds": 4}
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "validation_fraction": 0.3}
    submit(tables, study(tables, data=data, **changes))
    same_as_simulated(tables, data=data, **changes)
    summaries = [json.loads((tables / name / "summary.json").read_text()) for name in ("run", "simulated")]
    assert summaries[0]["taken_rounds"] == summaries[1]["taken_rounds"]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


@pytest.mark.long
def test_what_does_not_fit_is_said_in_one_line(tables, capsys, monkeypatch):
    text = study(tables)
    absent = Stations(tables)
    absent.missing = ["south", "west"]
    with pytest.raises(PerfedError, match="not there after 1 seconds: south, west"):
        submit(tables, text, absent)
    assert '"error": "not there after' in capsys.readouterr().out
    monkeypatch.setattr(server_app, "LOOK", 0.4)
    with pytest.raises(PerfedError, match="is 'perfed site' running there, and what does it print"):
        submit(tables, text, absent)
    said = [json.loads(line.removeprefix(submission.LINE)) for line in capsys.readouterr().out.splitlines()]
    assert [line["stage"] for line in said[:-1]] == [
        "waiting for 3 sites, 1 seconds at most (--wait)",
        "still waiting for south, west",
    ]
    other = Stations(tables, study=study(tables, rounds=7))
    with pytest.raises(PerfedError, match="the server's study is not the one that this site was given"):
        submit(tables, text, other)
    assert {unpack(reply)[0]["kind"] for replies in other.left.values() for reply in replies} == {"error"}
    data = {"name": "tables", "files": ["x"], "target": "ill", "drop": ["smokr"], "columns": "union"}
    with pytest.raises(PerfedError, match=r"drop: no site has a column 'smokr' \(did you mean 'smoker'\?\)"):
        submit(tables, study(tables, data=data))
    table = pd.read_csv(tables / "west.csv")
    table.rename(columns={"ill": "il"}).to_csv(tables / "west.csv", index=False)
    said: list[str] = []
    with pytest.raises(PerfedError, match=r"site 'west': the site's data do not fit the study; its administrator sees"):
        submit(tables, text, Stations(tables, note=said.append))
    assert any("no column 'ill'" in line for line in said)
    table.to_csv(tables / "west.csv", index=False)
    submit(tables, text)
    with pytest.raises(PerfedError, match="holds a run of another study"):
        submit(tables, study(tables, seed=1))
    table.iloc[::-1].to_csv(tables / "west.csv", index=False)
    with pytest.raises(PerfedError, match="site 'west': its data have changed since the run"):
        submit(tables, text)


@pytest.mark.long
def test_a_site_joins_a_study_and_the_others_keep_what_they_were_given(tables):
    """North and south have the study from before there was west."""
    text = study(tables)
    before = make_deployed_study(read_study(text, "the study"), ["north", "south"]).to_toml()
    assert before != text
    with closing(Stations(tables, text)) as stations:
        for site in ("north", "south"):
            stations.at[site].close()
            stations.at[site] = SiteAgent(tables / f"at-{site}", site, tables / f"{site}.csv", before)
        answer_all(tables, text, stations)
    same_as_simulated(tables)


def west_says(stations: Stations, change: Callable[[dict, dict], object]) -> Stations:
    """What west replies is changed on the way, where it is of the kind that ``change`` changes."""
    ask = stations.exchange

    def exchange(messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        for answer in ask(messages, deadline):
            header, tree = unpack(answer.body)
            if answer.site == "west":
                change(header, tree)
            yield replace(answer, body=pack(header, tree))

    stations.exchange = exchange  # type: ignore[method-assign]
    return stations


@pytest.mark.long
def test_a_site_that_sends_anchors_of_1e30_is_named_and_the_run_may_go_on_without_it(tables, capsys):
    def enlarge(header, tree):
        if header.get("round") == 2:
            tree["reply"]["extensions"] = map_leaves(
                tree["reply"].get("extensions", {}), lambda _, t: torch.full_like(t, 1e30)
            )

    text, settings = study(tables), {"out": str(tables / "run"), "wait": 1.0, "deadline": 60.0}
    with closing(west_says(Stations(tables), enlarge)) as stations:
        with pytest.raises(
            PerfedError, match=r"round 2: refused: the reply of site 'west': the norm of entry 'reply/e"
        ):
            server_app.main(stations, settings, study=text)
        server_app.main(stations, {**settings, "at_least": 2.0}, study=text)
    assert json.loads((tables / "run" / "rounds.jsonl").read_text().splitlines()[1])["counts"] == {"refused": ["west"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"samples": -5}, "splits.train.samples: input should be greater than or equal to 0"),
        ({"classes": [-1, 100]}, "splits.train.classes.0: input should be greater than or equal to 0"),
        ({"samples": 7}, "splits.train: the samples of the classes are "),
        ({"events": 1000}, "splits.train: 1000 samples have an event, of "),
    ],
)
def test_counts_that_cannot_be_are_refused_and_the_site_is_named(fields, said, tables):
    def lie(header, tree):
        if "facts" in header:
            header["facts"]["splits"]["train"].update(fields)

    with pytest.raises(PerfedError, match=f"^facts of client 'west': {said}"):
        submit(tables, study(tables), west_says(Stations(tables), lie))


@pytest.mark.long
@pytest.mark.parametrize("field", ["told", "facts"])
@pytest.mark.parametrize("value", [None, "text", [1], {"id": "north"}, "nothing"])
def test_what_is_no_told_and_no_facts_is_refused_and_the_site_is_named(field, value, tables):
    def lie(header, tree):
        if header.pop(field, None) is not None and value != "nothing":
            header[field] = value

    with pytest.raises(PerfedError, match=r"(site|client) 'west'") as error:
        submit(tables, study(tables), west_says(Stations(tables), lie))
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_message_are_refused_and_the_site_is_named(tables):
    stations = Stations(tables)
    ask = stations.exchange
    nonsense = lambda answer: replace(answer, body=b"nonsense" * 10) if answer.site == "west" else answer  # noqa: E731
    stations.exchange = lambda *given: map(nonsense, ask(*given))
    with pytest.raises(PerfedError, match=r"^site 'west': these bytes are not a message"):
        submit(tables, study(tables), stations)


@pytest.mark.long
def test_a_site_that_does_not_return_ends_a_run_unless_enough_others_are_there(tables, capsys):
    """The message names the way on; with it rounds say who was missing, also where the site is not there at all."""
    text, settings = study(tables), {"out": str(tables / "run"), "wait": 1.0, "deadline": 60.0}
    with closing(Stations(tables)) as stations:
        ask, asked = stations.exchange, [0]

        def exchange(messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
            asked[0] += 1
            without = ["west"] if asked[0] > 4 else []
            yield from ask({site: message for site, message in messages.items() if site not in without}, deadline)
            yield from (Answer(site, None, f"site '{site}': not connected", 60.0) for site in without)

        stations.exchange = exchange
        with pytest.raises(PerfedError, match=r"round 2: site 'west': not connected; .*submit again.*--at-least N"):
            server_app.main(stations, settings, study=text)
        stations.missing = ["west"]
        with pytest.raises(PerfedError, match="not there after 1 seconds: west"):
            server_app.main(stations, {**settings, "at_least": 3.0}, study=text)
        capsys.readouterr()
        server_app.main(stations, {**settings, "at_least": 2.0}, study=text)
    said = [json.loads(line.removeprefix(submission.LINE)) for line in capsys.readouterr().out.splitlines()]
    assert {"stage": "goes on without west"} in said
    assert {line["round"]: line["counts"].get("no_reply") for line in said if line.get("round", 0) > 1} == {
        2: ["west"], 3: ["west"]
    }  # fmt: skip
    summary = json.loads((tables / "run/summary.json").read_text())
    assert summary["rounds"] == 3


@pytest.mark.long
@pytest.mark.parametrize("where", ["site", "server"])
def test_a_full_disk_loses_nothing(where, tables, monkeypatch):
    text, writes = study(tables), [0]
    target = store if where == "site" else journal
    real = target.write_atomic

    def full(path: Path, data: bytes | str) -> None:
        writes[0] += 1
        if writes[0] == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(target, "write_atomic", full)
    with pytest.raises((PerfedError, OSError), match=r"No space left on device|the site's disk cannot be written to"):
        submit(tables, text)
    submit(tables, text)
    same_as_simulated(tables)
