"""A run with a file that is damaged goes on to the same bits, is restored, refused, or says what is lost."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import perfed
from damage import DAMAGES

from perfed.codec import flatten
from perfed.experiment.config import Experiment, validate
from perfed.experiment.start import start
from perfed.run.directory import RunDirectory

ROUNDS = 6
FILES = (
    "rounds.jsonl",
    "clients.csv",
    "federation.json",
    "sites.json",
    "summary.json",
    "config.toml",
    "version.json",
    "SHA256SUMS",
    "losses/round-0002.npz",
    "losses/round-0006.npz",
    "snapshots/round-0003.npz",
    "predictions/round-0006.npz",
    "checkpoint/state-000006.json",
    "checkpoint/server-000006.safetensors",
    "checkpoint/clients/000000@000006.safetensors",
)


class Stop(Exception):
    """Ends a run in the middle."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs over two tables: "finished", "stopped" after four rounds with a line of a fifth, and "other" with a seed."""
    place = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("north", "south")):
        values = torch.randn(30, 2, generator=torch.Generator().manual_seed(number)).round(decimals=2).tolist()
        with (place / f"{name}.csv").open("w", newline="") as file:
            rows = [[x, y, "yes" if x + y > 0 else "no"] for x, y in values]
            csv.writer(file).writerows([["age", "size", "sick"], *rows])

    def experiment(seed: int) -> Experiment:
        files = [str(place / f"{name}.csv") for name in ("north", "south")]
        return validate(
            {
                "method": "fedrep",
                "rounds": ROUNDS,
                "seed": seed,
                "checkpoint_seconds": 0,
                "data": {"name": "tables", "files": files, "target": "sick"},
                "model": {"body": {"kind": "mlp", "hidden": [4]}, "head": "linear"},
                "snapshots": {"rounds": [3], "losses": True},
                "plan": {"engine": "stacked", "threads": 1},
            }
        )

    start(experiment(0), out=place / "finished").execute()
    start(experiment(1), out=place / "other").execute()

    def stop(number: int, rounds: int, accuracy: float | None) -> None:
        if number == 4:
            raise Stop

    with pytest.raises(Stop):
        start(experiment(0), out=place / "stopped").execute(stop)
    fifth, sixth = (place / "finished" / "rounds.jsonl").read_bytes().splitlines(keepends=True)[4:]
    with (place / "stopped" / "rounds.jsonl").open("ab") as file:  # as a killed process leaves it
        file.write(fifth + sixth[:40])
    return place


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = RunDirectory(directory).load()
    assert found is not None
    return flatten({"server": found.server, **found.clients})


def timeless(record: Any) -> Any:
    return {key: value for key, value in record.items() if not key.endswith("_seconds") and key != "peak_memory_mb"}


def records(directory: Path) -> list[dict[str, Any]]:
    return [timeless(json.loads(line)) for line in (directory / "rounds.jsonl").read_text().splitlines()]


def figures(directory: Path) -> str:
    """What the report prints, without times."""
    told = perfed("report", directory, "--json")
    assert told.code == 0, told.err
    return told.out


def damaged_copy(runs: Path, name: str, state: str, damage: Any, to: Path) -> Path:
    """A copy of the run whose file ``name`` is damaged; one that is stopped has checkpoints of earlier rounds."""
    out = Path(shutil.copytree(runs / state, to / "run"))
    file = out / (name if state == "finished" else name.replace("6.", "4."))
    if not file.exists():
        pytest.skip(f"a run that was stopped has no {name}")
    if damage == "of another run":
        shutil.copy(runs / "other" / name, file)
    else:
        damage(file)
    return out


@pytest.mark.parametrize("damage", [*DAMAGES, "of another run"], ids=lambda how: getattr(how, "__name__", how))
@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("name", FILES)
def test_a_resumed_run_is_whole_or_says_what_is_lost(runs, tmp_path, name, state, damage):
    out = damaged_copy(runs, name, state, damage, tmp_path)
    resumed = perfed("resume", out)
    if resumed.code:
        assert resumed.is_refusal, resumed
        assert name in ("config.toml", "version.json", "summary.json") or "checkpoint" in name, resumed
        return
    summary, whole = (json.loads((place / "summary.json").read_text()) for place in (out, runs / "finished"))
    notes = [note for note in summary["notes"] if note not in whole["notes"]]
    lost = summary.get("lost_rounds", [])
    assert [line for line in records(runs / "finished") if line["round"] not in lost] == records(out)
    assert summary["metrics"] == whole["metrics"]
    for file in ("clients.csv", "federation.json", "sites.json"):
        assert (out / file).read_bytes() == (runs / "finished" / file).read_bytes()
    a, b = tensors(out), tensors(runs / "finished")
    assert a.keys() == b.keys() and all(torch.equal(tensor, b[key]) for key, tensor in a.items())
    if lost:
        assert name == "rounds.jsonl" and any("lost" in note and note in resumed.said for note in notes)
        assert all(str(number) in "".join(notes) for number in (lost[0], lost[-1]))
        (shown,) = [note for note in notes if "lost" in note]
        page = (out / "report.html").read_text()
        assert shown in page
    for file in (*(runs / "finished").glob("*/*.npz"),):
        copy = out / file.relative_to(runs / "finished")
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            assert not copy.exists() and any(copy.name in note and "lost" in note for note in notes), copy
    assert "this run has finished" in perfed("resume", out).out  # and once is enough


@pytest.mark.parametrize("damage", [*DAMAGES, "of another run"], ids=lambda how: getattr(how, "__name__", how))
@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("name", [name for name in FILES if "checkpoint" not in name])
def test_a_report_does_not_show_what_is_damaged(runs, tmp_path, name, state, damage):
    expected = figures(runs / state)
    out = damaged_copy(runs, name, state, damage, tmp_path)
    told = perfed("report", out, "--json")
    assert told.is_refusal or (told.code == 0 and told.out.replace(str(out), str(runs / state)) == expected), told
