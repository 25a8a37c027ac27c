"""Files of a finished run with a bit, a piece or a value that is wrong: one line and exit code 2, or all goes well."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Outcome, perfed

from perfed.errors import PerfedError
from perfed.run import predictions
from perfed.tables.site import TablePreprocessor

SEEDS = (4,)
OTHERS = (None, True, -1, 1.5, "text", [], ["text"], [1, [2]], {}, {"text": 1}, 10**30)
REPORT = ("report", "RUN", "--out", "NEW.html", "--csv", "NEW.csv")
PREDICT = ("predict", "RUN", "new.csv", "--site", "west", "--out", "NEW.csv")
EXPORT = ("export", "RUN", "--site", "north", "--format", "safetensors", "--out", "NEW.safetensors")
RESUME = ("resume", "RUN", "rounds=4")
READERS = {
    "summary.json": (REPORT, ("resume", "RUN")),
    "rounds.jsonl": (REPORT, RESUME),
    "clients.csv": (REPORT,),
    "federation.json": (REPORT,),
    "sites.json": (EXPORT,),
    "config.toml": (REPORT, EXPORT),
    "version.json": (REPORT, RESUME, EXPORT),
    "predictions/round-0003.npz": (REPORT,),
    "checkpoint/state-000003.json": (RESUME, EXPORT),
    "checkpoint/server-000003.safetensors": (EXPORT,),
    "joined/west/site.json": (PREDICT, (*EXPORT[:3], "west", *EXPORT[4:])),
    "joined/west/network.pt2": (PREDICT,),
    "joined/west/table.zip": (PREDICT,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run over two tables that a third site has joined, and new rows."""
    place, rng = tmp_path_factory.mktemp("damaged"), np.random.default_rng(0)
    for name in ("north", "south", "west", "new"):
        with (place / f"{name}.csv").open("w", newline="") as file:
            header = ["age", "ward"] if name == "new" else ["age", "ward", "sick"]
            rows = [[x, "ab"[i % 2], ["no", "yes"][i % 3 == 0]] for i, x in enumerate(rng.normal(size=24).round(2))]
            csv.writer(file).writerows([header, *(row[: len(header)] for row in rows)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        more = ("rounds=3", "plan.engine=stacked", "plan.threads=1", "checkpoint_seconds=0")
        for command in (
            ("init", "north.csv", "south.csv", "--target", "sick"),
            ("run", "study.toml", *more, "--out", "run"),
            ("join", "run", "west.csv", "--site", "west"),
        ):
            done = perfed(*command)
            assert done.code == 0, done.err
    return place


def values(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of JSON content is."""
    yield path
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield from values(content[key], (*path, key))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The content with another value in one place."""
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


def retyped(data: bytes, rng: np.random.Generator) -> bytes:
    """JSON, or one of its lines, with a value of another type; a manifest gets the checksum that fits."""
    lines = (
        data.decode().splitlines(keepends=True) if b"\n{" in data and not data.startswith(b"{\n") else [data.decode()]
    )
    place = int(rng.integers(len(lines)))
    content = json.loads(lines[place])
    manifest = isinstance(content, dict) and content.keys() == {"sha256", "body"}
    inner = json.loads(content["body"]) if manifest else content
    places = list(values(inner))
    changed = replaced(inner, places[rng.integers(len(places))], OTHERS[rng.integers(len(OTHERS))])
    if manifest:
        body = json.dumps(changed)
        changed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}
    lines[place] = json.dumps(changed) + "\n"
    return "".join(lines).encode()


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    place = int(rng.integers(len(data)))
    return data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def damages(name: str) -> list[Any]:
    return [flipped, cut, *([retyped] if "json" in name else [])]


def read(place: Path, command: tuple[str, ...]) -> Outcome:
    return perfed(*("run" if part == "RUN" else part.replace("NEW", "made") for part in command))


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_line(folder, tmp_path, monkeypatch, name):
    for seed in SEEDS:
        for number, damage in enumerate(damages(name)):
            for command in READERS[name]:
                place = tmp_path / f"{seed}-{number}-{READERS[name].index(command)}"
                shutil.copytree(folder, place)
                monkeypatch.chdir(place)
                file = place / "run" / name
                file.write_bytes(damage(file.read_bytes(), np.random.default_rng([seed, number])))
                found = read(place, command)
                assert found.code == 0 or (found.code == 2 and found.err.count("\n") == 1), (command, found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("predictions/round-0003.npz", lambda file: predictions.read_predictions(file.parents[1])),
        ("joined/west/table.zip", TablePreprocessor.load),
    ],
)
def test_every_bit_of_an_archive_may_be_wrong(folder, tmp_path, name, load):
    rng, file = np.random.default_rng(0), tmp_path / name
    shutil.copytree(folder / "run", tmp_path, dirs_exist_ok=True)
    whole, refused = file.read_bytes(), 0
    for _ in range(150):
        file.write_bytes(flipped(whole, rng))
        try:
            load(file)
        except PerfedError as error:
            refused += 1
            assert str(file) in str(error) and "\n" not in str(error)
    assert refused > 50
