"""What ``perfed submit`` does: without torch, so that it is there at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from perfed.cli.console import CTRL_C, Stopped, say, say_where, say_whole
from perfed.deploy.submit import RESULTS, stop, submit
from perfed.errors import some


def submit_command(directory: Path, out: Path | None, **settings: float) -> None:
    """Submit a run and follow it; ``settings`` as :class:`perfed.deploy.server_app.Settings` has them."""
    place = _results(directory, out)
    config = {"out": str(place), **settings}
    try:
        submit(directory, config, _show, directory / "server" / "submit.log")
    except KeyboardInterrupt:
        said = f"interrupted; the run goes on, and {_again(directory, out)} follows it (with --stop: ends it)"
        raise Stopped(said, CTRL_C) from None
    say_where("results", place)


def stop_command(directory: Path, out: Path | None) -> None:
    """End a run that was submitted."""
    place = _results(directory, out)
    done = stop(directory, place)
    where = f"after round {done}" if done else "before the end of its first round"
    say_whole(f"the run in {place} was ended {where}; {_again(directory, out)} goes on from there")


def _results(directory: Path, out: Path | None) -> Path:
    return (out or directory / RESULTS).resolve()


def _again(directory: Path, out: Path | None) -> str:
    """The command that submits once more, in quotes."""
    return f"'{shlex.join(['perfed', 'submit', str(directory), *(['--out', str(out)] if out else [])])}'"


def _show(told: dict[str, Any]) -> None:
    """Say how far a submitted run is: a line for each stage and each round, which takes seconds."""
    if "stage" in told:
        say_whole(told["stage"])
    elif "round" in told:
        reached = "" if told["accuracy"] is None else f", {100 * told['accuracy']:.1f} %"
        lost = "; ".join(f"{name.replace('_', ' ')}: {some(ids)}" for name, ids in told["counts"].items() if ids)
        say(f"round {told['round']} of {told['rounds']}{reached}{lost and f' ({lost})'}")
