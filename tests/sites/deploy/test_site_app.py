"""What a site says and writes down of the app that somebody has submitted: its hash, and nothing is loaded."""

from __future__ import annotations

import pytest
from stations import study

from perfed.experiment.config import read as read_study
from perfed.sites.deploy.server_files import app_hash
from perfed.sites.deploy.site_agent import Station
from perfed.sites.flower.hash_chain import LOG, read, verify

pytest.importorskip("flwr", reason="needs the extra flower")


def said(tables, given: str | None, app: str) -> str:
    """The one line that the site prints, which is in its log too."""
    notes: list[str] = []
    station = Station(tables / "site", "north", tables / "north.csv", given, notes.append)
    station.began(app)
    station.close()
    (note,) = notes
    assert [line.get("note") for line in read(tables / "site" / LOG)][1:-1] == [note]  # between start and end
    assert verify(tables / "site" / LOG) is None
    return note


def test_the_app_of_the_site_s_study_is_named_with_its_hash(tables):
    text = study(tables)
    expected = app_hash(read_study(text, "the study"))
    line = f"a run begins, whose app has the SHA-256 {expected}; it is not loaded here"
    assert said(tables, text, expected) == line


@pytest.mark.parametrize("given", [True, False])
def test_another_app_is_named_and_the_site_s_own_where_it_knows_one(tables, given):
    text = study(tables)
    own = f"; with the sites of this site's own study it is {app_hash(read_study(text, 'the study'))}" * given
    line = f"a run begins, whose app has the SHA-256 abc{own}; it is not loaded here"
    assert said(tables, text if given else None, "abc") == line


def test_another_study_has_another_hash(tables):
    hashes = {app_hash(read_study(study(tables, rounds=rounds), "the study")) for rounds in (1, 2, 2)}
    assert len(hashes) == 2


def test_what_is_no_message_of_a_run_is_in_the_log_and_on_the_terminal(tables):
    notes: list[str] = []
    station = Station(tables / "site", "north", tables / "north.csv", study(tables), notes.append)
    line = "a message is refused, and the server is told: a message of type 'train'"
    station.heard(line)
    station.close()
    assert notes == [line] and line in [entry.get("note") for entry in read(tables / "site" / LOG)]
