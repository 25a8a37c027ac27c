"""A whole deployment without a network: the server's program, three stations with tables, bytes between them."""

from __future__ import annotations

import errno
import hashlib
import json
import tomllib
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from stations import COLUMNS, Stations, answer_all, same_as_simulated, study, submit

from perfed.deploy import program
from perfed.deploy import submit as submission
from perfed.deploy.own_model import site_model
from perfed.deploy.trial import entries_sent
from perfed.engine.flower import journal, store
from perfed.engine.flower.chain import LOG, read
from perfed.engine.flower.message import unpack
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import opened


def test_what_leaves_is_what_was_declared_and_what_the_log_says(tables):
    """Every byte of a FLIC run: exactly the declared replies; results and models are those of a simulation."""
    text = study(tables)
    sent = submit(tables, text)
    same_as_simulated(tables)
    lines = [(tables / name / "rounds.jsonl").read_text().splitlines()[-1] for name in ("simulated", "run")]
    simulated, run = map(json.loads, lines)
    assert run["metrics"] == simulated["metrics"] and run["virtual_time"] > 0
    declared = {"loss", *(f"reply/{name}" for name in entries_sent(validate(tomllib.loads(text))))}
    for site, replies in sent.left.items():
        lines = [line for line in read(tables / f"at-{site}" / LOG) if "note" not in line]
        assert [line["sha256"] for line in lines] == [hashlib.sha256(reply).hexdigest() for reply in replies]
        entries = {entry["name"] for line in lines for entry in line["entries"]} - {"reply///empty"}
        assert entries <= declared and not [name for name in entries if "embedding" in name or "head" in name]
        kinds = [unpack(reply)[0]["kind"] for reply in replies]
        assert kinds[:2] == ["told", "facts"] and set(kinds[2:]) == {"done"}
        told, facts = unpack(replies[0])[0]["told"], unpack(replies[1])[0]["facts"]
        assert {name for name, value in told.items() if value is not None} == {"task", "labels", "classes"}
        assert facts.keys() == {"id", "splits", "feature_names", "mark"}
    assert not (tables / "run" / "predictions").exists()


def test_a_site_makes_its_own_model_of_what_it_has_kept_while_it_goes_on(tables):
    """Its process has the folder then: the model is made by another one."""
    with closing(Stations(tables)) as stations:
        answer_all(tables, study(tables), stations)
        model = site_model(tables / "at-south", "south", tables / "south.csv")
    frame = pd.read_csv(tables / "south.csv").drop(columns="ill")
    same_as_simulated(tables)
    expected = opened(tables / "simulated").site("south").predict_proba(frame)
    np.testing.assert_array_equal(model.predict_proba(frame), expected)
    assert list(model.classes_) == ["ill", "well"]


@pytest.mark.parametrize("exchanges", [3, 4, 5])
def test_a_run_that_is_submitted_again_goes_on_to_the_same_bits(exchanges, tables):
    text, first = study(tables), Stations(tables)
    first.stop_after = exchanges
    with pytest.raises(KeyboardInterrupt):
        submit(tables, text, first)
    submit(tables, text)
    same_as_simulated(tables)


def test_models_of_each_sites_best_round_are_those_of_a_simulation(tables):
    changes = {"evaluation": {"every": 1, "stop": "validated", "patience": 2}, "rounds": 4}
    files = [str(tables / f"{site}.csv") for site in COLUMNS]
    data = {"name": "tables", "files": files, "target": "ill", "validation_fraction": 0.3}
    submit(tables, study(tables, data=data, **changes))
    same_as_simulated(tables, data=data, **changes)
    summaries = [json.loads((tables / name / "summary.json").read_text()) for name in ("run", "simulated")]
    assert summaries[0]["taken_rounds"] == summaries[1]["taken_rounds"]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


def test_what_does_not_fit_is_said_in_one_line(tables, capsys, monkeypatch):
    text = study(tables)
    absent = Stations(tables)
    absent.missing = ["south", "west"]
    with pytest.raises(PerfedError, match="not there after 1 seconds: south, west"):
        submit(tables, text, absent)
    assert '"error": "not there after' in capsys.readouterr().out
    monkeypatch.setattr(program, "LOOK", 0.4)
    with pytest.raises(PerfedError, match="is 'perfed site' running there, and what does it print"):
        submit(tables, text, absent)
    said = [json.loads(line.removeprefix(submission.LINE)) for line in capsys.readouterr().out.splitlines()]
    assert [line["stage"] for line in said[:-1]] == ["waiting for 3 sites", "still waiting for south, west"]
    other = Stations(tables, study=study(tables, rounds=7))
    with pytest.raises(PerfedError, match="the server's study is not the one that this site was given"):
        submit(tables, text, other)
    data = {"name": "tables", "files": ["x"], "target": "ill", "drop": ["smokr"], "columns": "union"}
    with pytest.raises(PerfedError, match=r"drop: no site has a column 'smokr' \(did you mean 'smoker'\?\)"):
        submit(tables, study(tables, data=data))
    table = pd.read_csv(tables / "west.csv")
    table.rename(columns={"ill": "il"}).to_csv(tables / "west.csv", index=False)
    with pytest.raises(PerfedError, match=r"site 'west': .*no column 'ill'.*'il'"):
        submit(tables, text)
    table.to_csv(tables / "west.csv", index=False)
    submit(tables, text)
    with pytest.raises(PerfedError, match="holds a run of another study"):
        submit(tables, study(tables, seed=1))
    table.iloc[::-1].to_csv(tables / "west.csv", index=False)
    with pytest.raises(PerfedError, match="site 'west': its data are not those"):
        submit(tables, text)


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
    with pytest.raises((PerfedError, OSError), match="No space left on device"):
        submit(tables, text)
    submit(tables, text)
    same_as_simulated(tables)
