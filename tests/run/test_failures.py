"""What goes wrong in one run of many, between processes, or in files of the user's own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, another_process, contents, perfed, run_tiny

from perfed import resume, start
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.comparison import Comparison
from perfed.experiment.config import Experiment, find_experiment, read, validate
from perfed.experiment.overrides import override
from perfed.method.registry import entry
from perfed.methods.build import build_method
from perfed.methods.fedavg import FedAvg
from perfed.run.directory import RunDirectory

DIVERGES = ('methods.local.optimizer="sgd"', "methods.local.lr=1e12")
OWN = '''
from perfed.methods.fedper import FedPer
from perfed.registry import register


@register("mine")
class Mine(FedPer):
    """A method of the user's own."""
'''


OWN_TERM = '''
from pydantic import Field

from perfed.extensions import Extension, register_extension


@register_extension
class Shrink(Extension):
    """Weight decay on the head, in the loss."""

    name = "shrink"
    shrinking: float = Field(5.0, ge=0, description="weight")

    def loss(self, cohort, payload):
        return lambda step: self.shrinking * step.params["head.0.weight"].square().flatten(1).sum(1)
'''

OWN_DATA = """
import numpy as np

from perfed.datasets import dataset
from perfed import Federation
from perfed.experiment.overrides import override


@dataset("hospitals")
def hospitals(seed, data_dir, *, sites: int = 4):
    \"\"\"Tables of several hospitals with columns of their own.\"\"\"
    draw = np.random.default_rng(seed)
    tables = {}
    for i in range(sites):
        x, y = draw.normal(size=(30, 3 + i)), draw.integers(0, 3, 30)
        tables[f"site-{i}"] = {"x_train": x[:20], "y_train": y[:20], "x_test": x[20:], "y_test": y[20:]}
    return Federation.from_arrays(tables, num_classes=3)
"""


@pytest.fixture
def here(tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in ("own_data", "own_methods", "own_terms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.long
def test_a_run_that_diverges_does_not_stop_a_comparison(here):
    command = ("compare", EXPERIMENT, "--methods", "local,hetfedrep", *TINY, *DIVERGES, "--out", "out")
    result = perfed(*command)
    assert result.code == 2
    assert result.err.startswith("perfed: 1 of 2 runs failed; local, seed 0: round ") and result.err.count("\n") == 1
    assert [row["method"] for row in json.loads((here / "out" / "comparison.json").read_text())["runs"]] == [
        "hetfedrep"
    ]
    again = perfed("resume", "out")
    assert again.code == 2 and "1 of 2 runs failed; local, seed 0" in again.err


@pytest.mark.long
def test_a_search_leaves_out_what_diverges(here):
    grid = ("--grid", "lr=1e12,1e-2", "--grid", 'optimizer="sgd"')
    result = perfed("tune", EXPERIMENT, "--methods", "local", *grid, *TINY, "--out", "out")
    assert result.code == 0, result.err
    bad, good = json.loads((here / "out" / "grid.json").read_text())
    assert bad["mean"] is None and "seed 0: round" in bad["failed"]
    assert good["mean"] > 0 and "failed" not in good
    assert "lr=1e-2" in result.out
    grid = ("--grid", "lr=1e12", "--grid", 'optimizer="sgd"')
    every = perfed("tune", EXPERIMENT, "--methods", "local", *grid, *TINY, "--out", "no")
    assert every.code == 2
    assert "local: no point of the grid could be trained to the end; the first: lr=1e12" in every.err


def test_a_model_that_is_no_numbers_after_its_last_step_is_no_result(here):
    settings = ("rounds=1", "clients=4", "local_epochs=1", "lr=1e160", 'optimizer="sgd"', "batch_size=1000")
    result = perfed("run", EXPERIMENT, "--method", "local", *settings, "--out", "out")
    assert result.code == 2
    assert "round 1: the model of client '00" in result.err and "not numbers; lower the learning rate" in result.err
    assert not (here / "out" / "summary.json").exists()


@pytest.mark.long
def test_two_processes_do_not_work_on_one_run(here):
    result = perfed("run", EXPERIMENT, *TINY, "--method", "local", "rounds=0", "--out", "out")
    assert result.code == 2
    run_tiny(here / "out", "--method", "local")
    (here / "out" / "summary.json").unlink()
    with RunDirectory(here / "out").lock():
        busy = perfed("resume", "out")
        assert busy.code == 2 and "out: another process is working on this run" in busy.err
    assert perfed("resume", "out").code == 0


def test_a_second_process_leaves_a_running_run_as_it_is(here):
    table = read_experiment("rounds=6", "checkpoint_seconds=1000")
    run = start(table, out=here / "out")

    def look(number: int, total: int, accuracy: float | None) -> None:
        if number == 4:
            before = contents(here / "out")
            with pytest.raises(PerfedError, match="another process is working on this run"):
                resume(here / "out")
            assert contents(here / "out") == before

    run.execute(look)
    assert (here / "out" / "rounds.jsonl").read_text().count("\n") == 6


def read_experiment(*settings: str) -> Experiment:
    return validate(override(find_experiment(EXPERIMENT), [*TINY, 'method="local"', *settings], ["local"]))


@pytest.mark.long
def test_a_run_that_cannot_be_restored_does_not_stop_a_comparison(here):
    command = ("compare", EXPERIMENT, "--methods", "local,hetfedrep", *TINY, "--out", "out")
    assert perfed(*command).code == 0
    broken = here / "out" / "local" / "seed-0"
    (broken / "summary.json").unlink()
    for manifest in (broken / "checkpoint").glob("*.json"):
        manifest.write_text("{")
    (here / "out" / "hetfedrep" / "seed-0" / "summary.json").unlink()
    result = perfed("resume", "out")
    assert result.code == 2 and "1 of 2 runs failed; local, seed 0" in result.err
    assert (here / "out" / "hetfedrep" / "seed-0" / "summary.json").exists()


def test_two_classes_and_no_numbers_are_one_line(here):
    two = OWN_DATA.replace("integers(0, 3", "integers(0, 2").replace("num_classes=3", "num_classes=2")
    (here / "own_data.py").write_text(two)
    (here / "mine.toml").write_text(f"extends = '{EXPERIMENT}'\n[data]\nname = 'own_data:hospitals'\n")
    bad = ('methods.local.optimizer="sgd"', "methods.local.lr=1e160", "batch_size=100", "rounds=1")
    result = perfed("compare", "mine.toml", "--methods", "local,hetfedrep", *TINY[3:], *bad, "--out", "out")
    assert result.code == 2 and "1 of 2 runs failed; local, seed 0: round 1" in result.err


def test_settings_of_a_method_in_a_file_of_ones_own(here):
    (here / "own_methods.py").write_text(OWN)
    for name in ("mine", "own_methods:mine"):
        for method in ("own_methods:mine", "own_methods:mine+deadline"):
            table = {**find_experiment(EXPERIMENT), "method": method, "methods": {name: {"lr": 0.5}}}
            table["participation"] = {"deadline": {"seconds": 1.0}}
            assert validate(table).built_method.lr == 0.5, (name, method)


def test_a_data_file_that_does_not_import_says_why(here):
    (here / "own_data.py").write_text(OWN_DATA + "\nnonsense\n")
    (here / "mine.toml").write_text(f"extends = '{EXPERIMENT}'\n[data]\nname = 'own_data:hospitals'\n")
    result = perfed("run", "mine.toml", "sites=3", "--out", "out")
    assert result.code == 2 and "name 'nonsense' is not defined" in result.err


def federation(seed: int) -> Federation:
    draw = np.random.default_rng(seed)
    return Federation.from_arrays(
        {
            f"{i:03d}": {
                f"{part}_{split}": draw.normal(size=(8, 64)) if part == "x" else draw.integers(0, 10, 8)
                for part in "xy"
                for split in ("train", "test")
            }
            for i in range(4)
        },
        num_classes=10,
    )


@pytest.mark.long
def test_a_run_on_data_of_ones_own_is_continued_on_these_alone(here):
    run_tiny(here / "model", "--method", "local", "checkpoint_seconds=0")
    checked = read((here / "model" / "config.toml").read_text(), "config.toml")
    run = start(checked, out=here / "out", federation=federation(0))
    run.execute()
    (here / "out" / "summary.json").unlink()
    result = perfed("resume", "out")
    assert result.code == 2 and "this run was on other clients, samples or targets" in result.err
    with pytest.raises(PerfedError, match="on other clients"):
        resume(here / "out", federation=federation(1))
    assert resume(here / "out", federation=federation(0)).execute()["rounds"] == 3


@pytest.mark.long
def test_a_run_is_not_continued_on_another_trace(here):
    def trace(*seconds: int) -> None:
        lines = [f"{i:03d},*,{s}" for i, s in enumerate(seconds)]
        Path("trace.csv").write_text("\n".join(["client,round,seconds", *lines]) + "\n")

    trace(1, 2, 3, 4)
    options = ("--method", "local", "checkpoint_seconds=0", "clock={speeds='trace', trace={file='trace.csv'}}")
    run_tiny(here / "out", *options)
    (here / "out" / "summary.json").unlink()
    trace(1, 2, 3, 5)
    refused = perfed("resume", "out")
    assert refused.code == 2 and "trace.csv: this run followed a trace with other times" in refused.err
    trace(1, 2, 3, 4)
    assert perfed("resume", "out").code == 0


@pytest.mark.long
def test_a_method_in_a_file_of_ones_own(here):
    (here / "own_methods.py").write_text(OWN)
    result = perfed("compare", EXPERIMENT, "--methods", "own_methods:mine,local", *TINY, "--out", "out")
    assert result.code == 2 and "shares 'embedding" in result.err  # FedPer has no personal embedding
    placed = 'methods.own_methods:mine.placement={embedding="personal"}'
    result = perfed("compare", EXPERIMENT, "--methods", "own_methods:mine,local", *TINY, placed, "--out", "out")
    assert result.code == 0, result.err
    summary = here / "out" / "own_methods.mine" / "seed-0" / "summary.json"
    assert "own_methods:mine" in result.out and ":" not in "".join(contents(here / "out"))
    summary.unlink()
    assert perfed("resume", "out").code == 2  # a directory's own modules are imported only if it is trusted
    assert perfed("resume", "out", "--trust").code == 0
    assert json.loads(summary.read_text())["method"] == "own_methods:mine"
    (here / "out" / "own_methods.mine").rename(here / "out" / "own_methods:mine")  # as comparisons once had it
    before = contents(here / "out" / "own_methods:mine")
    again = perfed("resume", "out", "--trust")
    assert again.code == 0 and not (here / "out" / "own_methods.mine").exists()
    assert contents(here / "out" / "own_methods:mine") == before
    for name, says in (
        ("nowhere:mine", "cannot import 'nowhere'"),
        ("own_methods:yours", "'own_methods' registers no 'yours'; it has: mine"),
    ):
        refused = perfed("run", EXPERIMENT, "--method", name, "--out", "other")
        assert refused.code == 2 and says in refused.err


def test_every_method_of_a_comparison_has_a_folder_that_any_system_can_make(tmp_path):
    names = ["a:b", "a.b", "A:b", "b", "a:b+deadline"]
    planned = Comparison({}, names, [0], tmp_path)
    folders = [planned.directory(name, 0).parent.name for name in names]
    assert folders == ["a.b", "a.b_", "A.b__", "b", "a.b+deadline"]
    assert len({folder.casefold() for folder in folders}) == len(names)


@pytest.mark.long
def test_a_name_is_that_of_one_method(here, monkeypatch):
    """A second method of the same name, perfed's or another file's, must not take its place without a word."""
    text = OWN.replace("class Mine", "class Other")
    Path("v1.py").write_text(text)
    Path("v2.py").write_text(text)
    Path("z1.py").write_text(text.replace('"mine"', '"fedavg"'))
    for name in ("v1", "v2", "z1"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for methods, says in (
        ("v1:mine,v2:mine", "method 'mine' is registered twice, by 'v1' and by 'v2'"),
        ("fedavg,z1:fedavg", "method 'fedavg' is registered twice, by 'perfed.methods.fedavg' and by 'z1'"),
        ("fedavg,v1:fedavg", "method 'v1:fedavg': 'v1' registers no 'fedavg'; perfed has it"),
        ("v1.py:mine,fedavg", "no module's name; a file mine.py is 'mine'"),
    ):
        result = perfed("compare", EXPERIMENT, "--methods", methods, *TINY, "--out", "out")
        assert result.code == 2 and says in result.err and result.err.count("\n") == 1, result.err
    assert entry("fedavg").method is FedAvg
    sys.modules.pop("v1", None)
    Path("script.py").write_text(
        text.replace('"mine"', '"scripted"') + "\n\nif __name__ == '__main__':\n    import script\n"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a script may import itself


@pytest.mark.long
def test_a_mistake_in_a_method_leaves_no_directory_in_the_way(here):
    Path("own_methods.py").write_text(OWN + "\n    def round(self, server, clients):\n        server.shraed += 1\n")
    placed = 'methods.own_methods:mine.placement={embedding="personal"}'
    command = ("run", EXPERIMENT, "--method", "own_methods:mine", *TINY, placed, "--out", "out")
    refused = perfed(*command)
    assert refused.code == 2 and refused.err.startswith("perfed: own_methods.py, line 11, in round: AttributeError: ")
    assert "no parameter set 'shraed'" in refused.err and refused.err.count("\n") == 1
    assert not Path("out").exists()
    whole = OWN + "\n    def round(self, server, clients):\n        pass\n"
    Path("own_methods.py").write_text(whole)
    sys.modules.pop("own_methods")
    assert perfed(*command).code == 0
    for name in ("summary.json", "checkpoint/state-000003.json"):
        Path("out", name).unlink()
    Path("own_methods.py").write_text(whole.replace("pass", "1 / 0  # not there yesterday"))
    sys.modules.pop("own_methods")
    refused = perfed("resume", "out", "--trust")
    assert refused.code == 2 and "own_methods.py, line 11, in round: ZeroDivisionError: division by zero" in refused.err
    assert Path("out", "config.toml").exists()
    both = ("compare", EXPERIMENT, "--methods", "own_methods:mine,local", *TINY, placed, "--out", "both")
    failed = perfed(*both)  # a mistake in one method does not stop the others
    assert failed.code == 2 and "1 of 2 runs failed; own_methods:mine, seed 0: own_methods.py, line 11" in failed.err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("(seed, data_dir):\n    pass", "its function returned NoneType, not a Federation"),
        ("(seed):\n    pass", "its function must take (seed, data_dir, *, options), not (seed)"),
        ("(seed, data_dir, sites):\n    pass", "its function must take (seed, data_dir, *, options)"),
        ("(seed, data_dir):\n    pass\n\n1 / 0", "cannot import 'own_data': own_data.py, line 7: ZeroDivisionError"),
        ("(seed, data_dir):\n    return 1 / seed", "own_data.py, line 5, in mine: ZeroDivisionError: division by zero"),
        ("(seed, data_dir):\n    open('x.csv')", "own_data.py, line 5, in mine: FileNotFoundError: [Errno 2] No such"),
    ],
)
def test_a_mistake_in_a_data_function_is_one_line(here, body, says):
    Path("own_data.py").write_text(f"from perfed.datasets import dataset\n\n@dataset('mine')\ndef mine{body}\n")
    result = perfed("run", EXPERIMENT, 'data={name="own_data:mine"}', "--method", "local", "--out", "out")
    assert result.code == 2 and says in result.err and result.err.count("\n") == 1, result.err


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        ('extensions=["own_terms:shrink"]', "shrinking=3.0"),
        ("extensions=[own_terms:shrink]", "shrinking=3.0"),  # as the shell leaves it
        ("extensions=[own_terms:shrink, prototypes]", "methods.local.shrinking=3.0"),
        ("methods.local.extensions=['own_terms:shrink']", "methods.local.shrinking=3.0"),
    ],
    ids=str,
)
def test_a_run_with_a_term_in_a_file_of_ones_own_is_run_again_and_continued_by_another_process(here, given):
    (here / "own_terms.py").write_text(OWN_TERM)
    model = "model.head={kind='mlp', hidden=[4]}"
    plain, shrunk = (
        run_tiny(here / name, "--method", "local", "checkpoint_seconds=0", model, *more)
        for name, more in (("plain", ()), ("out", given))
    )
    assert plain.out != shrunk.out.replace("out", "plain")
    kept = read((here / "out" / "config.toml").read_text(), "config.toml").methods["local"]
    assert kept["extensions"][0] == "own_terms:shrink" and kept["shrinking"] == 3.0
    first = json.loads((here / "out" / "summary.json").read_text())
    assert first["settings"]["shrinking"] == 3.0
    for name in ("summary.json", "checkpoint/state-000003.json"):
        (here / "out" / name).unlink()
    for directory, command in (
        ("out", ["resume", "out", "--trust"]),
        ("again", ["run", "out/config.toml", "--out", "again"]),
    ):
        done = another_process(*command)
        assert done.code == 0, done.err
        summary = json.loads((here / directory / "summary.json").read_text())
        assert summary["metrics"] == first["metrics"] and summary["settings"] == first["settings"]


def test_the_configuration_of_a_run_names_the_module_of_a_term_that_a_script_imported(here):
    (here / "own_terms.py").write_text(OWN_TERM.replace('"shrink"', '"imported"').replace("head.0", "head"))
    importlib.import_module("own_terms")
    table = read_experiment('methods.local={ extensions = ["imported"] }')
    start(table, out=here / "out").execute()
    assert read((here / "out" / "config.toml").read_text(), "x").methods["local"]["extensions"] == [
        "own_terms:imported"
    ]


def test_names_of_methods_are_printed_as_they_are(here):
    Path("own_methods.py").write_text(OWN.replace('"mine"', '"x"'))
    placed = 'methods.own_methods:x.placement={embedding="personal"}'
    result = perfed("run", EXPERIMENT, "--method", "own_methods:x", *TINY, placed, "--out", "out")
    assert "own_methods:x: before local training" in result.out


@pytest.mark.long
def test_data_in_a_file_of_ones_own(here):
    (here / "own_data.py").write_text(OWN_DATA)
    (here / "mine.toml").write_text(f"extends = '{EXPERIMENT}'\n[data]\nname = 'own_data:hospitals'\n")
    result = perfed("compare", "mine.toml", "--methods", "local,hetfedrep", "sites=3", *TINY[3:], "--out", "out")
    assert result.code == 0, result.err
    summary = json.loads((here / "out" / "local" / "seed-0" / "summary.json").read_text())
    assert summary["dataset"] == "own_data:hospitals"
    assert len((here / "out" / "local" / "seed-0" / "clients.csv").read_text().splitlines()) == 4
    result = perfed("run", "mine.toml", "sites=none", "--out", "other")
    assert result.code == 2 and "sites" in result.err
    result = perfed("run", "mine.toml", 'data={name="own_data:hospitls"}', "--out", "other")
    assert result.code == 2 and "'own_data' registers no 'hospitls'; it has: hospitals" in result.err


def test_an_experiment_extends_the_file_beside_it(here):
    folder = Path("folder")
    folder.mkdir()
    (folder / "base.toml").write_text(f'extends = "{EXPERIMENT}"\nrounds = 2\n')
    (folder / "mine.toml").write_text('extends = "base.toml"\nname = "mine"\n')
    result = perfed("run", "folder/mine.toml", "--method", "local", *TINY[1:], "--out", "out")
    assert result.code == 0, result.err
    assert json.loads((here / "out" / "summary.json").read_text())["rounds"] == 2


def test_a_data_folder_that_is_not_there_is_not_passed_over(here, monkeypatch):
    (here / "data").mkdir()
    np.savez(here / "data" / "mnist.npz", x_train=np.zeros(1))
    monkeypatch.setenv("PERFED_DATA", str(here / "data"))
    result = perfed("run", "flic-mnist-usps", "--data-dir", "dta", "--out", "out")
    assert result.code == 2 and "--data-dir dta: no such folder" in result.err


@pytest.mark.parametrize("name", ["fedrep-srpfl", "flanp", "fedpac+srpfl"])
def test_a_policy_is_not_dropped_silently_in_python(name):
    with pytest.raises(PerfedError, match=f"'{name.replace('+', '.')}' is the method .* under the policy"):
        build_method(name, {})


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y_train": np.array(["cat", None], object)}, "y_train holds None among texts, in row 1"),
        (
            {"x_train": np.array([[1.0], [None]], object)},
            "x_train holds missing values, not numbers, in column 0, row 1",
        ),
        ({"y_train": np.array([[0], [1]])}, r"train labels have shape \(2, 1\); \(2,\) is needed"),
    ],
)
def test_what_labels_and_columns_must_be(arrays, says):
    with pytest.raises(PerfedError, match=f"client 'a': {says}"):
        Federation.from_arrays({"a": {"x_train": np.ones((2, 3)), "y_train": np.array([0, 1]), **arrays}})


def test_every_class_has_a_name_or_none():
    with pytest.raises(PerfedError, match="1 class names for 2 classes"):
        Federation.from_arrays({"a": {"x_train": np.ones((2, 3)), "y_train": np.array([0, 1])}}, class_names=["cat"])
