"""Trackers keep the numbers of every round, as the libraries themselves read them back; nothing leaves this machine."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.start import resume, start
from perfed.run import callback

ROUNDS = 5
CUT = 3


def table(**settings: Any) -> dict[str, Any]:
    return {
        "method": "fedavg",
        "rounds": ROUNDS,
        "checkpoint_seconds": 0.0,
        "callbacks": [settings],
        "data": {"name": "digits", "clients": 3},
        "model": {"head": "linear"},
        "training": {"lr": 0.05, "local_epochs": 1},
        "evaluation": {"every": 1},
        "plan": {"threads": 1},
    }


def cut_and_resumed(path: Path, **settings: Any) -> list[dict[str, Any]]:
    """The lines of a run that was interrupted and went on."""

    def interrupt(number: int, rounds: int, accuracy: float | None) -> None:
        if number == CUT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(validate(table(**settings)), out=path).execute(interrupt)
    resume(path).execute()
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = cut_and_resumed(tmp_path / "run", name="tensorboard")
    found = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert {"train_loss", "bytes_up", "accuracy/mean"} <= set(found.Tags()["scalars"])
    means = [(event.step, event.value) for event in found.Scalars("accuracy/mean")]
    assert means == [(line["round"], pytest.approx(line["accuracy"]["mean"])) for line in lines]
    with pytest.raises(PerfedError, match=r"callbacks\.tensorboard\.folder: is needed where the run has no directory"):
        start(validate(table(name="tensorboard"))).execute()


@pytest.mark.long
def test_mlflow(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="perfed[mlflow] is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # databases need more than mlflow-skinny
    uri = (tmp_path / "store").as_uri()
    lines = cut_and_resumed(tmp_path / "run", name="mlflow", uri=uri, experiment="mine")
    client = MlflowClient(uri)
    home = client.get_experiment_by_name("mine")
    assert home is not None
    (run,) = client.search_runs([home.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["training.lr"] == "0.05"
    history = client.get_metric_history(run.info.run_id, "accuracy/mean")
    assert [(m.step, m.value) for m in history] == [(line["round"], line["accuracy"]["mean"]) for line in lines]
    with pytest.raises(PerfedError, match=r"callbacks\.mlflow: .*nowhere"):
        start(validate(table(name="mlflow", uri="nowhere://"))).execute()


@pytest.mark.long
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="perfed[wandb] is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    lines = cut_and_resumed(tmp_path / "run", name="wandb", mode="offline", project="mine")
    found, ids = {}, set()
    for file in sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb")):
        for record in kept_by_wandb(file):
            ids |= {record.run.run_id} if record.run.run_id else set()
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            if "accuracy/mean" in items:
                found[items["_step"]] = items["accuracy/mean"]
    assert found == {line["round"]: line["accuracy"]["mean"] for line in lines} and len(ids) == 1


def kept_by_wandb(file: Path) -> Iterator[Any]:
    """The records of a W&B file: blocks of 32 KiB, in them pieces behind checksum, length and kind, as in LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_without_its_library_nothing_is_begun(tmp_path, monkeypatch, name):
    monkeypatch.setattr(callback, "find_spec", lambda module: None)
    with pytest.raises(PerfedError, match=rf"callback '{name}' needs {name}: pip install .*\[{name}\]"):
        start(validate(table(name=name)), out=tmp_path / "run").execute()
    assert not (tmp_path / "run").exists()


def test_logging(caplog, capsys):
    caplog.set_level(logging.INFO, logger="perfed")
    start(validate({**table(name="tensorboard"), "callbacks": []})).execute()
    said = [record.getMessage() for record in caplog.records if record.name == "perfed.run"]
    assert len(said) == ROUNDS + 2 and said[0] == "fedavg, seed 0: begins, 5 rounds"
    assert said[1].startswith("fedavg, seed 0: round 1, training loss ") and "accuracy 0." in said[1]
    assert said[-1] == "fedavg, seed 0: ended after round 5"
    assert capsys.readouterr().err == ""
