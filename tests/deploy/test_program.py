"""A whole deployment without a network: the server's program, three stations with tables, bytes between them."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import Outcome, perfed
from deployments import deployed
from safetensors.torch import load_file

from perfed.deploy import program, station
from perfed.deploy import submit as submission
from perfed.deploy.own_model import site_model
from perfed.deploy.station import LOG, Station
from perfed.deploy.study import study_of
from perfed.deploy.trial import entries_sent
from perfed.engine.flower import journal, store
from perfed.engine.flower.message import unpack
from perfed.engine.flower.outgoing import read
from perfed.engine.flower.transport import Answer
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import opened, start

COLUMNS = {"north": ["age", "sugar"], "south": ["age", "pulse", "smoker"], "west": ["pulse", "sugar"]}
TABLE = {
    "method": "flic-hl",
    "rounds": 3,
    "model": {"embedding": {"kind": "linear", "out": 4}, "body": {"kind": "hidden-layer", "out": 4}, "head": "linear"},
    "training": {"lr": 1e-2, "local_epochs": 1, "batch_size": 16},
    "methods": {"flic-hl": {"pretrain_epochs": 1}},
    "plan": {"engine": "sequential", "threads": 1},
    "evaluation": {"every": 3},
}


def write_tables(path: Path) -> None:
    generator = np.random.default_rng(0)
    for site, columns in COLUMNS.items():
        risk = generator.normal(size=40)
        table = {name: (risk + generator.normal(size=40)).round(2) for name in columns}
        if "smoker" in table:
            table["smoker"] = np.where(table["smoker"] > 0, "yes", "no")
        table["ill"] = np.where(risk > 0, "ill", "well")
        pd.DataFrame(table).to_csv(path / f"{site}.csv", index=False)


def study(path: Path, **changes: object) -> str:
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    table = {**TABLE, "data": {"name": "tables", "files": files, "target": "ill"}, **changes}
    return study_of(validate(table), list(COLUMNS)).to_toml()


class Stations:
    """The sites of a deployment as a transport; each exchange is counted, and all that leaves is kept."""

    def __init__(self, path: Path, study: str | None = None) -> None:
        self.at = {s: Station(path / f"at-{s}", s, path / f"{s}.csv", study) for s in COLUMNS}
        self.left: dict[str, list[bytes]] = {site: [] for site in COLUMNS}
        self.missing: list[str] = []
        self.stop_after = -1
        self.note: Callable[[str], None] = print

    def sites(self) -> list[str]:
        return sorted(set(self.at) - set(self.missing))

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        time.sleep(seconds if self.missing else 0)
        return self.missing

    def exchange(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Answer]:
        if self.stop_after == 0:
            raise KeyboardInterrupt
        self.stop_after -= 1
        for site, message in sorted(messages.items()):
            reply = self.at[site].answer(message)
            self.left[site].append(reply)
            yield Answer(site, reply, "", 1.0)

    def close(self) -> None:
        for site in self.at.values():
            site.close()


@pytest.fixture
def tables(tmp_path):
    write_tables(tmp_path)
    return tmp_path


def answer_all(path: Path, text: str, transport: Stations, name: str = "run") -> None:
    program.main(transport, {"out": str(path / name), "wait": 1.0, "deadline": 60.0, "norm": 0.0}, study=text)


def submit(path: Path, text: str, transport: Stations | None = None) -> Stations:
    transport = transport or Stations(path)
    with closing(transport):
        answer_all(path, text, transport)
    return transport


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """What the server has, but for the clients' own states, which stay at the sites."""
    found = load_file(max((run / "checkpoint").glob("server-*.safetensors")))
    return {name: tensor for name, tensor in found.items() if not name.startswith(":taken/clients")}


def same_as_simulated(path: Path, **changes: object) -> None:
    files = [str(path / f"{site}.csv") for site in COLUMNS]
    table = {**TABLE, "data": {"name": "tables", "files": files, "target": "ill"}, **changes}
    start(validate(table), out=path / "simulated").execute()
    found, expected = tensors(path / "run"), tensors(path / "simulated")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


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


def interrupted_by(stations: Stations, exchanges: int, act: Callable[[], None]) -> None:
    """``act``, in which the sites may be asked by others, before they are asked for the ``exchanges``-th time."""
    ask, count = stations.exchange, [0]

    def exchange(messages: Mapping[str, bytes], deadline: float) -> Iterator[Answer]:
        count[0] += 1
        if count[0] == exchanges:
            act()
        return ask(messages, deadline)

    stations.exchange = exchange  # type: ignore[method-assign]


@pytest.mark.parametrize("exchanges", [3, 5])
def test_a_site_in_the_middle_of_a_run_refuses_another_and_is_free_when_that_has_ended(exchanges, tables):
    """Both come to the bits of a simulation."""
    text = study(tables)

    def other() -> None:
        with pytest.raises(PerfedError) as error:
            answer_all(tables, text, stations, "other")
        said, way = str(error.value), "wait for its end, or end it ('perfed submit DIR --stop')"
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


def test_a_run_that_is_refused_by_one_site_takes_no_other(tables):
    """Two sites are free, and keep the run that they were in last."""
    text, first = study(tables), Stations(tables)

    def other() -> None:
        for site in ("north", "south"):
            first.at[site].close()
            first.at[site] = Station(tables / f"free-{site}", site, tables / f"{site}.csv", None)
        with pytest.raises(PerfedError, match=r"^site 'west': busy since"):
            answer_all(tables, text, first, "other")
        assert not list(tables.glob("free-*/run.json"))
        raise KeyboardInterrupt

    with closing(first), pytest.raises(KeyboardInterrupt):
        interrupted_by(first, 5, other)
        answer_all(tables, text, first)


def test_what_is_sent_again_before_a_run_is_answered_as_before(tables, monkeypatch):
    """Nothing is read again; and word that another run is over counts only as long as that run is silent."""
    text, reads, sent = study(tables), [], []
    read_data = station.site_data
    monkeypatch.setattr(station, "site_data", lambda *given: reads.append(given) or read_data(*given))

    def opening(name: str, exchanges: int) -> None:
        stations.stop_after = exchanges
        with pytest.raises(KeyboardInterrupt):
            answer_all(tables, text, stations, name)

    def kind(message: bytes) -> str:
        return unpack(stations.at["west"].answer(message))[0]["kind"]

    with closing(Stations(tables)) as stations:
        ask = stations.exchange

        def exchange(messages: Mapping[str, bytes], deadline: float) -> Iterator[Answer]:
            sent.append(messages["west"])
            return ask(messages, deadline)

        monkeypatch.setattr(stations, "exchange", exchange)
        opening("run", 2)
        opening("other", 1)
        _, agreement, work, _, taken_over = sent
        assert len(reads) == 2 * len(COLUMNS) and kind(agreement) == "facts" and len(reads) == 2 * len(COLUMNS)
        assert kind(work) == "done"  # the first run goes on after all
        assert kind(taken_over) == "error" and kind(taken_over) == "facts"  # and has ended when the server asks again


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


class Flower:
    """In the place of a SuperLink: runs by number, and how each ends."""

    def __init__(self, *ends: str) -> None:
        self.ends, self.submitted, self.followed = list(ends), 0, list[int]()

    def submit(self, app: Path, config: Mapping[str, object]) -> int:
        self.submitted += 1
        return self.submitted

    def follow(self, run: int, write: Callable[[str], None], deadline: float, note: Callable[[str], None]) -> str:
        self.followed.append(run)
        return self.ends.pop(0)


def test_a_run_that_goes_on_is_followed_and_not_begun_twice(tables, monkeypatch):
    place = deployed(tables)
    out = tables / "run"

    def submitted(*ends: str) -> Flower:
        flower = Flower(*ends)
        flower.submitted = 7
        (place / "server/flwr-submit").mkdir(exist_ok=True)
        monkeypatch.setattr(submission, "Submitter", lambda *arguments: flower)
        submission.submit(place, {"out": str(out)}, lambda told: None, tables / "log")
        return flower

    assert submitted("finished:completed").followed == [8]
    first = Stations(tables)
    ask, text = first.exchange, study(tables)

    def exchange(messages: Mapping[str, bytes], deadline: float) -> Iterator[Answer]:
        if "followed" not in seen:
            seen["followed"] = submitted("finished:completed").followed
            seen["again"] = submitted("finished:failed", "finished:completed").followed
            with pytest.raises(PerfedError, match="somebody has ended the run; submit again"):
                submitted("finished:stopped")
            with pytest.raises(PerfedError, match="this run is going on already"):
                answer_all(tables, text, first)
        return ask(messages, deadline)

    seen: dict[str, list[int]] = {}
    monkeypatch.setattr(first, "exchange", exchange)
    submit(tables, text, first)
    assert seen == {"followed": [8], "again": [8, 8]}  # the second 8 is a new run, after the first has failed
    assert submitted("finished:completed").followed == [8]
    with pytest.raises(PerfedError, match="submit again, and it goes on where it was"):
        submitted("finished:failed")


class Stoppable(Flower):
    """One at which run 8 goes on until it is stopped."""

    def __init__(self) -> None:
        super().__init__("finished:failed")
        self.submitted, self.stopped = 7, threading.Event()

    def status(self, run: int) -> str:
        assert run == 8
        return "finished:stopped" if self.stopped.is_set() else "running"

    def stop(self, run: int) -> None:
        self.stopped.set()


def test_a_run_is_ended_by_one_word_and_the_same_command_goes_on_to_the_same_bits(tables, monkeypatch):
    place, text, first, flower = deployed(tables), study(tables), Stations(tables), Stoppable()
    out, reached = tables / "run", threading.Event()
    monkeypatch.setattr(submission, "Submitter", lambda *arguments: flower)
    (place / "server/flwr-submit").mkdir()

    def ended(*options: object) -> Outcome:
        return perfed("submit", place, "--stop", *options)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            submit(tables, text, first)

    def wait() -> None:
        reached.set()
        assert flower.stopped.wait(60)
        first.stop_after = 0  # as the program ends that Flower does not answer any more

    assert ended("--out", out).err == f"perfed: {out}: no run goes on there\n"
    with pytest.raises(PerfedError, match="the SuperLink has ended the run"):
        submission.submit(place, {"out": str(out)}, print, tables / "log")
    interrupted_by(first, 6, wait)
    running = threading.Thread(target=work)
    running.start()
    assert reached.wait(60)
    assert f"no run goes on there; one does in {out} (--out)" in ended().err
    done = ended("--out", out)
    assert done.code == 0 and not submission.goes_on(out), done.err
    running.join()
    again = f"'perfed submit {place} --out {out}' goes on from there"
    assert done.out == f"the run in {out} was ended after round 2; {again}\n"
    assert ended("--out", out).code == 2
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
    said = [json.loads(line.removeprefix(program.LINE)) for line in capsys.readouterr().out.splitlines()]
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
