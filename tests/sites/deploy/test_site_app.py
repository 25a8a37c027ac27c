"""What a site says and writes down of the app that somebody has submitted: its hash, and nothing is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from stations import study, submit

from perfed.errors import PerfedError
from perfed.experiment.config import read as read_study
from perfed.sites.deploy.part import SiteRun
from perfed.sites.deploy.server_files import hash_app
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.flower.hash_chain import LOG, read_log, verify_log
from perfed.training.plan import THREAD_VARIABLES, use_threads

pytest.importorskip("flwr", reason="needs the extra flower")


def said(tables, given: str | None, app: str) -> str:
    """The one line that the site prints, which is in its log too."""
    notes: list[str] = []
    station = SiteAgent(tables / "site", "north", tables / "north.csv", given, notes.append)
    station.log_app(app)
    station.close()
    (note,) = notes
    assert [line.get("note") for line in read_log(tables / "site" / LOG)][1:-1] == [note]  # between start and end
    assert verify_log(tables / "site" / LOG) is None
    return note


def test_the_app_of_the_site_s_study_is_named_with_its_hash(tables):
    text = study(tables)
    expected = hash_app(read_study(text, "the study"))
    line = f"a run begins, whose app has the SHA-256 {expected}; this site does not load the app"
    assert said(tables, text, expected) == line


@pytest.mark.parametrize("given", [True, False])
def test_another_app_is_named_and_the_site_s_own_where_it_knows_one(tables, given):
    text = study(tables)
    own = f"; the app of this site's study has {hash_app(read_study(text, 'the study'))}" * given
    line = f"a run begins, whose app has the SHA-256 abc{own}; this site does not load the app"
    assert said(tables, text if given else None, "abc") == line


def test_another_study_has_another_hash(tables):
    hashes = {hash_app(read_study(study(tables, rounds=rounds), "the study")) for rounds in (1, 2, 2)}
    assert len(hashes) == 2


def test_what_is_no_message_of_a_run_is_in_the_log_and_on_the_terminal(tables):
    notes: list[str] = []
    station = SiteAgent(tables / "site", "north", tables / "north.csv", study(tables), notes.append)
    line = "a message is refused, and the server receives: a message of type 'train'"
    station.log_event(line)
    station.close()
    assert notes == [line] and line in [entry.get("note") for entry in read_log(tables / "site" / LOG)]


@pytest.mark.long
def test_a_site_records_the_threads_that_its_trials_choose(tables, monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with use_threads(4):
        stations = submit(tables, study(tables, plan={"engine": "sequential"}, rounds=1))
        assert torch.get_num_threads() == 4
    for site in stations.at:
        folder = tables / f"at-{site}"
        (recorded,) = folder.rglob("plan.json")
        plan = json.loads(recorded.read_text())
        assert (plan["threads"], plan["untimed_threads"]) == (4, 1) and plan["paths"]
        plan["paths"] = {kind: {"chunk": 1, "threads": 3} for kind in plan["paths"]}
        recorded.write_text(json.dumps(plan))
        part = SiteRun.read_current(folder, site, tables / f"{site}.csv")
        assert {path.threads for path in part.load_plan(folder).paths.values()} == {3}
        recorded.write_text("{")
        with pytest.raises(PerfedError, match=r"plan.json"):
            part.load_plan(folder)
