"""How far the work is: stages, elapsed and remaining, with a clock that the tests set."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from command_line import is_plain
from engines import blobs
from rich.console import Console

from perfed import Model, Run, build_method, linear
from perfed.cli import console as consoles
from perfed.cli import progress
from perfed.cli.progress import EVERY, Work, show_progress
from perfed.experiment.factory import DATA, ROUNDS, ProgressEvent
from perfed.training.plan import Plan


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def printed(monkeypatch) -> io.StringIO:
    out = io.StringIO()
    pipe = Console(file=out, width=80, emoji=False, markup=False, highlight=False)
    monkeypatch.setattr(progress, "console", pipe)
    monkeypatch.setattr(consoles, "console", pipe)
    return out


def test_a_line_every_half_a_minute(printed):
    clock = Clock()
    work = Work(4, clock)
    work.set_finished(1)
    seen = []

    def execute(update):
        for number in range(11):
            clock.now += 10.0
            update(number, 10, 0.5 + number / 100 if number % 2 == 0 else None)
            work.print_if_due()
            seen.extend(work.format_lines())
        return {"done": True}

    run = SimpleNamespace(rounds=10, done=-1, resumed=None, plan=Plan(threads=1), execute=execute)
    assert work.execute(lambda: run, "fedpac seed 1") == {"done": True}
    # 110 s in all: a line at 30, 60 and 90
    lines = printed.getvalue().splitlines()
    assert len(lines) == 3 and is_plain(printed.getvalue()) and max(map(len, lines)) <= 80
    # after 30 s 2 of 10 rounds of one of the three runs that were left: 30 / (0.2 / 3) - 30 = 420 s
    assert lines[0] == "0:30 elapsed, 7:00 left: run 2 of 4, fedpac seed 1, rounds 2 of 10, 52.0 %"
    assert seen[2].endswith("rounds 2 of 10, 52.0 %") and seen[3].endswith("rounds 3 of 10, 52.0 %")
    assert work.finished == 2


def test_a_long_name_does_not_break_the_line(printed):
    clock = Clock()
    work = Work(100, clock)
    work.update("my_methods:a-method-with-a-name+overselection seed 10", ProgressEvent(ROUNDS, 0, 100, accuracy=0.5))
    clock.now = 36000.0
    work.print_if_due()
    (line,) = printed.getvalue().splitlines()
    assert len(line) == 80 and "…" in line and line.endswith("rounds 0 of 100, 50.0 %")


def test_before_anything_is_known(printed):
    clock = Clock()
    work = Work(1, clock)
    work.update("local", ProgressEvent(DATA))
    clock.now = EVERY - 1
    work.print_if_due()
    assert printed.getvalue() == ""
    clock.now = 4000.0
    work.print_if_due()
    work.print_if_due()
    assert printed.getvalue() == "1:06:40 elapsed, ? left: local, data\n"


def test_a_run_passes_through_its_stages():
    """A real run: its data are made ready, ways are tried out, what comes before round 1, then rounds."""
    work, stages = Work(1, Clock()), []

    def note() -> None:
        stages.append(work.running["local"].news.stage)

    class Watched(Plan):
        def path(self, kind, clients, trial, **options):
            watched = replace(trial, begin=lambda chunk: (note(), trial.begin(chunk))[1])
            return super().path(kind, clients, watched, **options)

    def make() -> Run:
        note()
        method = build_method("local")
        run = Run(blobs(), method, Model(head=linear(3)), name="local", rounds=2, plan=Watched(threads=1))
        prepare = run.server.prepare
        run.server.prepare = lambda: (note(), prepare())[1]
        return run

    told, heard = work.update, []
    work.update = lambda label, news: (heard.append(news), told(label, news))
    work.execute(make, "local")
    assert stages[:2] == ["data", "pre-training"] and set(stages[2:]) == {"planning"}
    *_, last, ended = heard
    assert (last.stage, last.done, last.total, ended, work.finished) == ("rounds", 2, 2, None, 1)


def test_a_run_that_goes_on_counts_from_where_it_stood():
    clock = Clock()
    work = Work(1, clock)

    def execute(update):
        clock.now = 20.0
        update(8, 10, None)
        # two rounds took 20 s, and two are left
        assert work.running["local"].span.estimate_remaining(clock.now) == pytest.approx(20.0)
        return {}

    run = SimpleNamespace(rounds=10, done=6, resumed=None, plan=Plan(threads=1), execute=execute)
    work.execute(lambda: run, "local")


def test_on_a_terminal_three_lines_in_40_columns(monkeypatch):
    clock = Clock()
    work = Work(9, clock)
    work.update("sklearn:gradient-boosting seed 1", ProgressEvent(ROUNDS, 3, 12, accuracy=0.5))
    clock.now = 61.0
    for width in (80, 40):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr(progress, "console", terminal)
        terminal.print(work)
        lines = terminal.file.getvalue().splitlines()
        assert len(lines) == 3 and max(map(len, lines)) <= width
        assert lines[0].startswith("overall") and "0 of 9 runs" in lines[0] and "rounds 3 of 12" in lines[2]
        assert ("1:01 elapsed" in lines[0]) == (width == 80) and "…" in lines[1] and "left" in lines[1]


def several(clock: Clock) -> Work:
    """Two of five runs are done, and two are under way: one goes on from where it was."""
    work = Work(5, clock)
    work.set_finished(1)
    for label in ("local seed 0", "fedpac seed 0", "ditto seed 0"):
        work.update(label, ProgressEvent(DATA))
    clock.now = 31.0
    work.update("fedpac seed 0", ProgressEvent(ROUNDS, 4, 8, before=2, accuracy=0.5))
    work.update("local seed 0", None)
    return work


def test_several_runs_are_a_line_each_every_half_a_minute(printed):
    work = several(Clock())
    work.print_if_due()
    work.print_if_due()
    # in 31 s 1.5 of the four runs that were left: 31 / 1.5 * 2.5 = 51.7 s
    assert printed.getvalue().splitlines() == [
        "0:31 elapsed, 0:52 left: 2 of 5 runs",
        "  fedpac seed 0, rounds 4 of 8, 50.0 %",
        "  ditto seed 0, data",
    ]


def test_on_a_terminal_several_runs_are_a_line_each(monkeypatch):
    for width in (80, 40):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr(progress, "console", terminal)
        terminal.print(several(Clock()))
        lines = terminal.file.getvalue().splitlines()
        assert len(lines) == 3 and max(map(len, lines)) <= width
        assert lines[0].startswith("overall") and "2 of 5 runs" in lines[0]
        assert lines[1].startswith("fedpa") and "rounds 4 of 8" in lines[1]
        assert lines[2].startswith("ditto") and "data" in lines[2]
        assert ("50.0 %, 1:02 left" in lines[1]) == (width == 80)  # two rounds took 31 s, and four are left


def test_nothing_is_left_behind_when_the_work_fails(printed):
    with pytest.raises(KeyboardInterrupt), show_progress(Work(1)):
        raise KeyboardInterrupt
    assert printed.getvalue() == ""
