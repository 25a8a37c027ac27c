"""Which run a site is in, and when it takes another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
import torch
from stations import COLUMNS, Stations, answer_all, interrupted_by, same_as_simulated, study, submit, tensors

from perfed.errors import PerfedError
from perfed.sites.deploy import site_agent
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.flower.message import unpack
from perfed.sites.flower.transport import Answer


@pytest.mark.long
@pytest.mark.parametrize("exchanges", [3, 5])
def test_a_site_in_the_middle_of_a_run_refuses_another_and_is_free_when_that_has_ended(exchanges, tables):
    """Both come to the bits of a simulation."""
    text = study(tables)

    def other() -> None:
        with pytest.raises(PerfedError) as error:
            answer_all(tables, text, stations, "other")
        said, way = str(error.value), "wait until it ends, or end it ('perfed submit DIR --stop')"
        assert "'north'" in said and "'south'" in said and "'west': busy since 20" in said
        assert said.endswith(f", whose results are in {tables / 'run'} on the server; {way}")
        assert [unpack(stations.left[site][-1])[0]["kind"] for site in COLUMNS] == ["told"] * 3

    with closing(Stations(tables)) as stations:
        interrupted_by(stations, exchanges, other)
        answer_all(tables, text, stations)
        same_as_simulated(tables)
        assert not (tables / "other/config.toml").exists()
        before = len(stations.left["west"])
        answer_all(tables, text, stations, "other")
        kinds = [unpack(reply)[0]["kind"] for reply in stations.left["west"][before:]]
        assert kinds[:3] == ["told", "facts", "done"]  # with the study each has said where it was
        assert all(torch.equal(tensor, tensors(tables / "run")[n]) for n, tensor in tensors(tables / "other").items())


@pytest.mark.long
def test_a_run_whose_server_is_gone_does_not_keep_its_sites(tables):
    """Started again, sites know what they were in; another run takes them at once, and the first goes on after it."""
    text, first = study(tables), Stations(tables)
    first.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        submit(tables, text, first)

    def refused() -> None:
        with pytest.raises(PerfedError, match=f"busy since .* in {tables / 'other'} on"):
            answer_all(tables, text, stations)

    with closing(Stations(tables)) as stations:
        interrupted_by(stations, 6, refused)
        answer_all(tables, text, stations, "other")
        answer_all(tables, text, stations)
    same_as_simulated(tables)


@pytest.mark.long
def test_a_run_that_is_refused_by_one_site_takes_no_other(tables):
    """Two sites are free, and keep the run that they were in last."""
    text, first = study(tables), Stations(tables)

    def other() -> None:
        for site in ("north", "south"):
            first.at[site].close()
            first.at[site] = SiteAgent(tables / f"free-{site}", site, tables / f"{site}.csv", None)
        with pytest.raises(PerfedError, match=r"^site 'west': busy since"):
            answer_all(tables, text, first, "other")
        assert not list(tables.glob("free-*/run.json"))
        raise KeyboardInterrupt

    with closing(first), pytest.raises(KeyboardInterrupt):
        interrupted_by(first, 5, other)
        answer_all(tables, text, first)


@pytest.mark.long
def test_what_is_sent_again_before_a_run_is_answered_as_before(tables, monkeypatch):
    """Nothing is read again; and word that another run is over counts only as long as that run is silent."""
    text, reads, sent = study(tables), [], []
    read_data = site_agent.read_site_data
    monkeypatch.setattr(site_agent, "read_site_data", lambda *given: reads.append(given) or read_data(*given))

    def opening(name: str, exchanges: int) -> None:
        stations.stop_after = exchanges
        with pytest.raises(KeyboardInterrupt):
            answer_all(tables, text, stations, name)

    def kind(message: bytes) -> str:
        return unpack(stations.at["west"].answer(message))[0]["kind"]

    with closing(Stations(tables)) as stations:
        ask = stations.exchange

        def exchange(messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
            sent.append(messages["west"])
            return ask(messages, deadline)

        monkeypatch.setattr(stations, "exchange", exchange)
        opening("run", 2)
        opening("other", 1)
        _, agreement, work, _, taken_over = sent
        assert len(reads) == 2 * len(COLUMNS) and kind(agreement) == "facts" and len(reads) == 2 * len(COLUMNS)
        assert kind(work) == "done"  # the first run goes on after all
        assert kind(taken_over) == "error" and kind(taken_over) == "facts"  # and has ended when the server asks again


@pytest.mark.long
def test_a_study_that_is_mended_takes_the_sites_of_its_first_try(tables):
    """Into the same directory: some had joined when another site's table turned out not to fit."""
    with closing(Stations(tables)) as stations:
        stations.stop_after = 2
        with pytest.raises(KeyboardInterrupt):
            answer_all(tables, study(tables), stations)
        (tables / "run/agreed.json").unlink()  # as if one of them had not
        stations.stop_after = -1
        answer_all(tables, study(tables, rounds=3), stations)
    assert len((tables / "run/rounds.jsonl").read_text().splitlines()) == 3
