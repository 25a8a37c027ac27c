"""``perfed site leave``: the log says it, the server is told it, and the site does not start again."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from command_line import perfed
from stations import Stations, answer_all, interrupted_by, same_as_simulated, study

from perfed.errors import PerfedError
from perfed.sites.deploy.site_agent import SiteSettings, check_site
from perfed.sites.flower.hash_chain import LOG, read_log, verify_log
from perfed.sites.flower.message import unpack
from perfed.sites.flower.probe import ServerAddress


def leave(tables: Path) -> str:
    folder = tables / "at-north"
    (folder / "site.json").write_text(json.dumps({"name": "north", "data": str(tables / "north.csv")}))
    done = perfed("site", "leave", "--dir", folder)
    assert done.code == 0, done.err
    return done.said


def notes(tables: Path) -> list[str]:
    log = tables / "at-north" / LOG
    assert verify_log(log) is None
    return [line["note"] for line in read_log(log) if "note" in line]


@pytest.mark.long
def test_a_site_that_leaves_in_a_run_is_named_and_the_run_goes_on_when_it_is_back(tables):
    text = study(tables)
    with closing(Stations(tables)) as stations:
        interrupted_by(stations, 5, lambda: leave(tables))
        with pytest.raises(PerfedError, match="site 'north': this site has left the study"):
            answer_all(tables, text, stations)
        assert unpack(stations.left["north"][-1])[0]["error"] == "this site has left the study"
    assert [note[:16] for note in notes(tables)].count("the site has lef") == 1
    (tables / "at-north/left").unlink()
    with closing(Stations(tables)) as stations:
        answer_all(tables, text, stations)
    same_as_simulated(tables)


def test_a_site_that_has_left_does_not_start_until_its_mark_is_gone(tables):
    Stations(tables).close()
    assert "nothing runs here that could tell the server" in leave(tables)
    assert notes(tables)[-1].startswith("the site has left, at 20")
    folder = tables / "at-north"
    settings = SiteSettings("north", tables / "north.csv", ServerAddress("127.0.0.1:9"), folder)
    with pytest.raises(PerfedError, match=f"this site has left, at .*; to take part again, remove {folder / 'left'}"):
        check_site(settings)
    again = perfed("site", "leave", "--dir", folder)
    assert again.code == 2 and "has left already" in " ".join(again.err.split())
    (folder / "left").unlink()
    check_site(settings)
