"""A run that is submitted: followed, ended, and gone on with."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from command_line import Outcome, perfed
from deployments import deployed, open_to_others
from stations import Stations, answer_all, interrupted_by, same_as_simulated, study, submit

from perfed.errors import PerfedError
from perfed.sites.deploy import submit as submission
from perfed.sites.flower import submission as flower_submission
from perfed.sites.flower.transport import Answer


class Flower:
    """In the place of a SuperLink: runs by number, and how each ends."""

    def __init__(self, *ends: str) -> None:
        self.ends, self.submitted, self.followed = list(ends), 0, list[int]()

    def submit(self, app: Path, config: Mapping[str, object]) -> int:
        self.submitted += 1
        return self.submitted

    def follow_log(self, run: int, write: Callable[[str], None], deadline: float, note: Callable[[str], None]) -> str:
        self.followed.append(run)
        return self.ends.pop(0)


@pytest.mark.sampled(2)
def test_a_run_that_goes_on_is_followed_and_not_begun_twice(tables, monkeypatch):
    place = deployed(tables)
    out = tables / "run"

    def submitted(*ends: str) -> Flower:
        flower = Flower(*ends)
        flower.submitted = 7
        (place / "server/flwr-submit").mkdir(0o700, exist_ok=True)
        monkeypatch.setattr(submission, "Submitter", lambda *arguments: flower)
        submission.submit(place, {"out": str(out)}, lambda told: None, place / "server/log")
        return flower

    assert submitted("finished:completed").followed == [8]
    assert os.name == "nt" or not open_to_others(place)
    first = Stations(tables)
    ask, text = first.exchange, study(tables)

    def exchange(messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
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


def test_who_follows_a_run_whose_superlink_has_gone_is_told_to_submit_again(tmp_path, monkeypatch):
    monkeypatch.setattr(flower_submission, "build_command", lambda *words: ["false"])
    monkeypatch.setattr(flower_submission, "MAX_SILENCE", 0.0)
    submitter = flower_submission.Submitter(tmp_path, "127.0.0.1:9")
    with pytest.raises(PerfedError, match=r"no answer for 0 seconds: .*; submit again when the SuperLink is available"):
        submitter.follow_log(8, print, 60.0)


class Stoppable(Flower):
    """One at which run 8 goes on until it is stopped."""

    def __init__(self) -> None:
        super().__init__("finished:failed")
        self.submitted, self.stopped = 7, threading.Event()

    def read_status(self, run: int) -> str:
        assert run == 8
        return "finished:stopped" if self.stopped.is_set() else "running"

    def stop(self, run: int) -> None:
        self.stopped.set()


@pytest.mark.sampled(2)
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
    assert done.code == 0 and not submission.is_running(out), done.err
    running.join()
    again = f"'perfed submit {place} --out {out}' goes on from there"
    assert done.out == f"the run in {out} was ended after round 2; {again}\n"
    assert ended("--out", out).code == 2
    submit(tables, text)
    same_as_simulated(tables)
