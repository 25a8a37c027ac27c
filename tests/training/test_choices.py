from __future__ import annotations

import json
import multiprocessing
import time

import numpy as np
import pytest

import perfed
from perfed.training import choices
from perfed.training.plan import Path, Plan, PlanSettings
from perfed.training.trials import Trial

WORK = {"model": "Linear", "clients": 10, "inputs": ["torch.float32", 3]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFED_PLANS", str(tmp_path / "plans"))
    return tmp_path / "plans"


def trial(counted=None, **workload):
    def begin(chunk):
        while True:
            if counted is not None:
                counted.append(chunk)
            time.sleep(1e-4)
            yield chunk

    return Trial(begin, 100, lambda: workload)


def never(chunk):
    raise AssertionError("tried")


def test_another_plan_takes_what_the_first_has_chosen(folder):
    first = Plan("auto", threads=1)
    chosen = first.path("fit", 40, trial(model="A"))
    again = Plan("auto", threads=1)
    told: list[None] = []
    again.on_choice = lambda: told.append(None)
    assert again.path("fit", 40, Trial(never, 100, lambda: {"model": "A"})) == chosen
    assert again.paths == first.paths and told  # recorded as any other


@pytest.mark.parametrize(
    ("kind", "clients", "threads", "model"),
    [("fit head", 40, 1, "A"), ("fit", 41, 1, "A"), ("fit", 40, 2, "A"), ("fit", 40, 1, "B")],
)
def test_other_work_is_tried_again(folder, kind, clients, threads, model):
    Plan("auto", threads=1).path("fit", 40, trial(model="A"))
    counted: list[int] = []
    Plan("auto", threads=threads).path(kind, clients, trial(counted, model=model))
    assert counted and len(list(folder.iterdir())) == 2


def test_a_recorded_plan_comes_before_what_is_remembered(folder):
    Plan("auto", threads=1).path("fit", 40, trial())
    recorded = Plan("auto", threads=1, paths={"fit": Path(7, 1)})
    assert recorded.path("fit", 40, Trial(never, 100)) == Path(7, 1)


def test_a_setting_turns_it_off(folder):
    plan = PlanSettings(remember=False, threads=1).build()
    plan.path("fit", 40, trial())
    assert not folder.exists()
    assert PlanSettings.model_validate(plan.to_dict()).build() == plan
    Plan("auto", threads=1).path("fit", 40, trial())
    counted: list[int] = []
    plan.paths.clear()
    plan.path("fit", 40, trial(counted))
    assert counted


def test_the_empty_variable_turns_it_off(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFED_PLANS", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    choices.save_choice(WORK, 4, 1)
    assert choices.find_choice(WORK) is None and not list(tmp_path.iterdir())


def test_by_default_the_user_s_cache_holds_them(tmp_path, monkeypatch):
    monkeypatch.delenv("PERFED_PLANS")
    monkeypatch.setenv("HOME", str(tmp_path))
    choices.save_choice(WORK, 4, 1)
    assert choices.find_choice(WORK) == (4, 1)
    assert len(list((tmp_path / ".cache" / "perfed" / "plans").glob("*.json"))) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        {"chunk": True},
        {"chunk": "4"},
        {"chunk": -1},
        {"threads": 0},
        {"work": {}},
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(folder, content):
    choices.save_choice(WORK, 4, 1)
    (file,) = folder.iterdir()
    whole = json.loads(file.read_text())
    file.write_bytes(json.dumps({**whole, **content}).encode() if isinstance(content, dict) else content)
    assert choices.find_choice(WORK) is None
    choices.save_choice(WORK, 8, 2)
    assert choices.find_choice(WORK) == (8, 2)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the place of a folder")
    monkeypatch.setenv("PERFED_PLANS", str(tmp_path / "file" / "plans"))
    choices.save_choice(WORK, 4, 1)
    assert choices.find_choice(WORK) is None


def write(number):
    for chunk in range(20):
        choices.save_choice({**WORK, "own": number}, chunk, 1)
        choices.save_choice(WORK, chunk, 1)
        assert choices.find_choice(WORK) is not None


@pytest.mark.long
def test_processes_that_write_at_the_same_time_lose_nothing(folder):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [choices.find_choice({**WORK, "own": number}) for number in range(3)] == [(19, 1)] * 3
    assert choices.find_choice(WORK) == (19, 1) and len(list(folder.iterdir())) == 4


def run(lr=0.1, hidden=8, batch=5, seed=0, method="fedavg", optimizer="sgd"):
    rng = np.random.default_rng(seed)
    arrays = {
        str(i): {
            f"{name}_{split}": part
            for split in ("train", "test")
            for name, part in {"x": rng.normal(size=(10 + i, 3)).astype(np.float32), "y": np.arange(10 + i) % 2}.items()
        }
        for i in range(6)
    }
    plan = Plan("auto", threads=1)
    settings = {"lr": lr, "batch_size": batch, "local_epochs": 1, "optimizer": optimizer}
    model = perfed.Model(body=perfed.mlp((), hidden), head=perfed.linear(2))
    federation = perfed.Federation.from_arrays(arrays)
    perfed.Run(federation, perfed.build_method(method, settings), model, rounds=1, seed=seed, plan=plan).execute()
    return plan


@pytest.mark.long
def test_runs_of_a_comparison_try_each_workload_once(folder):
    plan = run()
    kept = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert len(kept) == len(plan.paths) > 0
    assert run(seed=1).paths == run(lr=0.2).paths == plan.paths  # other data, other rates: the same work
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == kept


@pytest.mark.long
@pytest.mark.parametrize("change", [{"hidden": 9}, {"batch": 4}, {"optimizer": "adam"}, {"method": "fedprox"}])
def test_another_model_batch_optimiser_or_method_is_other_work(folder, change):
    before = set(run().paths) and set(folder.iterdir())
    run(**change)
    assert len(set(folder.iterdir())) > len(before)


def test_another_processor_is_another_machine(folder, monkeypatch):
    run()
    count = len(list(folder.iterdir()))
    monkeypatch.setattr("perfed.training.view.describe_arithmetic", lambda device: "another processor")
    run()
    assert len(list(folder.iterdir())) == 2 * count
