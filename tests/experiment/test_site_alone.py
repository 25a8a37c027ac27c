"""One site's model out of a run reads that site's table and no other, and says what it says with all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed

from perfed import validate
from perfed.experiment.start import open_method_run, start

LINEAR = {"embedding": {"kind": "linear", "out": 3}, "head": "linear"}
MODEL = {"embedding": {"kind": "linear", "out": 3}, "body": {"kind": "hidden-layer", "out": 3}, "head": "linear"}


def ward(seed: int, rows: int = 30, **more: Any) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = {
        "age": rng.normal(60, 9, rows).round(1),
        "visits": rng.integers(0, 2 + seed % 2, rows),
        "smokes": rng.choice(["yes", "no"], rows),
        "pain": rng.choice(["mild", "severe", "none"][: 2 + seed % 2], rows),
        "race": rng.choice(["a", "b"], rows),
        "sick": rng.choice(["no", "yes"], rows),
        "value": rng.normal(3, 2, rows).round(3),
        "steps": rng.choice(12 if seed == 0 else 30, rows),
        "days": rng.exponential(99, rows).round(2) + 0.1,
        "died": rng.integers(0, 2, rows),
    }
    return pd.DataFrame({**frame, **more})


ROLES = ("sick", "value", "steps", "days", "died")
STUDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("flic-class", {"target": "sick", "columns": "own", "folds": 3}),
    "common": ("fedrep", {"target": "sick", "columns": "common", "validation_fraction": 0.2}),
    "union": ("fedavg-ft", {"target": "sick", "columns": "union"}),
    "named": ("fedavg-ft", {"target": "sick", "columns": "named"}),
    "mixed": ("mixed", {"target": "value", "columns": "named"}),
    "domains": ("feddar-wa", {"target": "sick", "columns": "common", "domain": "race", "domain_input": True}),
    "values": ("local", {"target": "value", "columns": "common"}),
    "whole numbers": ("ditto", {"target": "steps", "columns": "common", "task": "auto"}),
    "times": ("fedavg", {"target": "days", "event": "died", "columns": "common"}),
}


def files(folder: Path) -> dict[str, pd.DataFrame]:
    frames = {name: ward(seed) for seed, name in enumerate(("north", "south", "west"))}
    frames["west"] = frames["west"].assign(sugar=np.arange(30.0) ** 2)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return frames


def run_of(folder: Path, method: str, data: dict[str, Any]) -> Path:
    """A run of two rounds on the tables in ``folder``, in ``folder/run``."""
    used = {data["target"], data.get("event"), data.get("domain")}
    drop = [name for name in (*ROLES, "race") if name not in used]
    data = {"name": "tables", "files": [str(folder)], "drop": drop, **data}
    table = {"method": method, "rounds": 2, "seed": 1, "data": data, "model": MODEL if method != "local" else LINEAR}
    start(validate({**table, "plan": {"engine": "stacked", "threads": 1}}), out=folder / "run").execute()
    return folder / "run"


def assert_same(run: Path, site: str, frame: pd.DataFrame, hide: list[Path]) -> None:
    whole = open_method_run(run).site(site)
    for file in hide:
        file.rename(file.with_suffix(".hidden"))
    alone = open_method_run(run, site=site).site(site)
    assert alone.facts == whole.facts
    inputs = whole.prepare_inputs(frame)
    assert all(torch.equal(a, b) for a, b in zip(alone.prepare_inputs(frame), inputs, strict=True))
    np.testing.assert_array_equal(alone.outputs(*inputs), whole.outputs(*inputs))


@pytest.mark.long
@pytest.mark.parametrize("name", STUDIES)
def test_it_is_the_same_model_though_the_other_tables_are_gone(tmp_path, name):
    frames, others = files(tmp_path), [tmp_path / "north.csv", tmp_path / "west.csv"]
    run = run_of(tmp_path, *STUDIES[name])
    unused = [column for column in frames["south"] if column in ROLES]
    assert_same(run, "south", frames["south"].drop(columns=unused), others)


@pytest.mark.long
def test_rows_to_be_tested_on_are_read_too(tmp_path):
    frames, data = files(tmp_path), {"target": "sick", "columns": "common"}
    (tmp_path / "tests").mkdir()
    for seed, name in enumerate(("north", "south")):
        ward(seed + 7, rows=11).to_csv(tmp_path / "tests" / f"{name}.csv", index=False)
    run = run_of(tmp_path, "fedrep", {**data, "test_files": [str(tmp_path / "tests")]})
    assert open_method_run(run, site="south").site("south").facts["data"]["test"] == 11
    assert_same(run, "south", frames["south"].drop(columns=[*ROLES]), [tmp_path / "tests" / "north.csv"])


@pytest.mark.long
def test_sites_that_a_column_names_are_in_one_file(tmp_path):
    whole = pd.concat([ward(seed, ward=name) for seed, name in enumerate(("north", "south", "west"))])
    whole.to_csv(tmp_path / "all.csv", index=False)
    run = run_of(tmp_path, "fedrep", {"target": "sick", "columns": "common", "site_column": "ward"})
    assert_same(run, "west", ward(2).drop(columns=[*ROLES]), [])


@pytest.mark.long
def test_the_command_reads_one_table_and_refuses_one_that_has_changed(tmp_path, monkeypatch):
    frames = files(tmp_path)
    run = run_of(tmp_path, "fedrep", {"target": "sick", "columns": "common"})
    monkeypatch.chdir(tmp_path)
    frames["south"].drop(columns=[*ROLES]).to_csv("new.csv", index=False)
    Path("north.csv").write_text("")
    said = perfed("predict", run, "new.csv", "--site", "south", "--out", "said.csv")
    assert said.code == 0 and len(pd.read_csv("said.csv")) == 30, said.err
    assert perfed("export", run, "--site", "south", "--format", "safetensors").code == 0
    frames["south"].assign(sick="no").iloc[1:].to_csv("south.csv", index=False)
    changed = perfed("predict", run, "new.csv", "--site", "south", "--out", "again.csv")
    line = "perfed: site 'south': its data are not those that the run in run was begun with\n"
    assert (changed.code, changed.err.replace(f"{tmp_path}/", "")) == (2, line)
    Path("south.csv").unlink()
    gone = perfed("predict", run, "new.csv", "--site", "south", "--out", "again.csv")
    assert gone.err == "perfed: site 'south': its table is not among data.files any more\n"


@pytest.mark.long
def test_no_row_s_content_is_kept(tmp_path):
    frames = files(tmp_path)
    run = run_of(tmp_path, "local", {"target": "value", "columns": "union"})
    kept = json.loads((run / "sites.json").read_text())
    assert set(kept) == {"agreement", "facts"} and sorted(kept["facts"]) == ["north", "south", "west"]
    text = json.dumps(kept)
    assert not [value for frame in frames.values() for value in frame["age"] if f"{value}" in text]
