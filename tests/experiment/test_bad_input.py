"""Bad input: one line that says what, where and what is allowed; exit code 2; nothing is written or overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, Outcome, contents, perfed, run_tiny
from data_files import write_images

from perfed import load
from perfed.cli.index import index
from perfed.data.federation import Federation
from perfed.engine.evaluate import client_table
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.methods.build import build_method
from perfed.methods.extensions.clip import Clip
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.run.directory import write_marker
from perfed.run.run import Run
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty home and working directory, and no data files."""
    index()  # kept in memory from here on: a command that made it would keep it in the new home
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PERFED_DATA", raising=False)
    return Path(tmp_path)


def refused(result: Outcome, *says: str) -> None:
    """Exit code 2 and one line on stderr that says all this."""
    assert result.code == 2, result.out
    assert result.err.startswith("perfed: ") and result.err.count("\n") == 1, result.err
    for text in says:
        assert text in result.err, result.err


# Settings ----------------------------------------------------------------------------------------------------

COMPARE = ("compare", EXPERIMENT, "--methods", "local,hetfedrep")
TUNE = ("tune", EXPERIMENT, "--methods", "local,hetfedrep")
CASES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("run", "flic-digit-views"), ("unknown experiment 'flic-digit-views'", "did you mean 'flic-digits-views'?")),
    (("run", "nowhere.toml"), ("unknown experiment 'nowhere.toml' (no such file)", "one of: ")),
    (("run", EXPERIMENT, "--method", "flick"), ("unknown method 'flick'", "did you mean: flic")),
    (("run", EXPERIMENT, "training.batch_size=99999999999999999999"), ("training.batch_size: whole numbers must be",)),
    (("run", EXPERIMENT, "lamda1=0"), ("unknown key 'lamda1'", "did you mean: lambda1")),
    (("run", EXPERIMENT, "methods.flic-hl.lamda1=0"), ("unknown key 'methods.flic-hl.lamda1'", "allowed: ")),
    (("run", EXPERIMENT, "rounds"), ("'rounds' is not of the form key=value",)),
    (("run", EXPERIMENT, "rounds=ten"), ("rounds: ", "integer", "'ten'")),
    (("run", EXPERIMENT, "rounds=0"), ("rounds: ", "greater than or equal to 1")),
    (("run", EXPERIMENT, "rounds=-1"), ("rounds: ", "greater than or equal to 1")),
    (("run", EXPERIMENT, "pretrain_epochs=-1"), ("pretrain_epochs", "greater than or equal to 0", "'validated'")),
    (("run", EXPERIMENT, "lambda1=inf"), ("lambda1", "finite")),
    (("run", EXPERIMENT, "model.embedding={kind='mlp', out=64, dropout=1.0}"), ("embedding.dropout", "below 1")),
    (("run", EXPERIMENT, "model.embedding={kind=':'}"), ("model.embedding.kind: cannot load ':'",)),
    (("run", EXPERIMENT, "device=abacus"), ("device = 'abacus': unknown device; allowed: cpu, cuda",)),
    (("run", EXPERIMENT, "clients=0"), ("data.clients = 0", "integer >= 1")),
    (("run", EXPERIMENT, "clients=-5"), ("data.clients = -5", "integer >= 1")),
    (("run", EXPERIMENT, "classes_per_client=0"), ("data.classes_per_client = 0",)),
    (("run", EXPERIMENT, "classes_per_client=11"), ("11", "10")),
    (("run", EXPERIMENT, "test_fraction=1.0"), ("data.test_fraction = 1.0", "< 1")),
    (("run", EXPERIMENT, "domain_input=true"), ("data.domain_input = true needs domains", "'digits-views'")),
    (("run", "feddar-synthetic", "domains=0"), ("data.domains = 0", "integer >= 1")),
    (("run", "feddar-synthetic", "--method", "fedbn"), ("fedbn keeps batch-norm personal", "the model has none")),
    (("run", EXPERIMENT, "--method", "fedminmax", "placement={ embedding = 'personal' }"), ("needs domains",)),
    (("run", EXPERIMENT, "batch_size=0"), ("batch_size", "greater than or equal to 1")),
    (("run", EXPERIMENT, "model.embedding.out=-1"), ("model.embedding.out", "at least 1")),
    (("run", EXPERIMENT, "rate=0"), ("participation.rate", "greater than 0")),
    (("run", EXPERIMENT, "split=validation"), ("evaluation.split = 'validation'", "no client has such data")),
    (("run", EXPERIMENT, "data=5", "clients=3"), ("unknown key 'clients'",)),
    (("run", EXPERIMENT, "--seed", "-1"), ("seed: ", "greater than or equal to 0")),
    (("run", EXPERIMENT, "--seed", "x"), ("--seed", "valid integer")),
    (("run", EXPERIMENT, "--engine", "warp"), ("--engine warp", "auto, stacked, sequential")),
    (("run", EXPERIMENT, "--device", "abacus"), ("--device abacus", "allowed: cpu, cuda")),
    (("run", EXPERIMENT, "--device", "meta"), ("--device meta", "allowed: cpu, cuda")),
    (("run", EXPERIMENT, "--device", "cpu:x"), ("--device cpu:x",)),
    (("run", EXPERIMENT, "--speed", "9"), ("No such option", "--speed")),
    (("run", EXPERIMENT, "--method", "fedavg"), ("shares 'embedding.", "use a method with a personal embedding")),
    (("run",), ("Missing argument",)),
    (("fly",), ("No such command 'fly'",)),
    (("list", "engines"), ("unknown list 'engines'", "methods, datasets, experiments")),
    (("resume", "nowhere"), ("nowhere", "no run here")),
    (("report", "nowhere"), ("nowhere",)),
    ((*COMPARE, "--seeds", "2..0"), ("--seeds 2..0", "like 0..2 (inclusive), 0,3,5 or 7")),
    ((*COMPARE, "--seeds", "a"), ("--seeds a",)),
    ((*COMPARE, "--seeds", "1,1"), ("--seeds 1,1",)),
    ((*COMPARE, "--seeds", "-1..1"), ("--seeds -1..1",)),
    ((*COMPARE, "--seeds", ""), ("--seeds",)),
    ((*COMPARE, "seed=3"), ("'seed=3'", "--seeds")),
    ((*COMPARE, "method=local"), ("'method=local'", "--methods")),
    ((*COMPARE, "clients=0"), ("data.clients = 0",)),
    ((*COMPARE, "lambda1=0"), ("unknown key 'lambda1'",)),
    ((*COMPARE, "--device", "abacus"), ("--device abacus",)),
    (("compare", EXPERIMENT), ("--methods: at least one is needed",)),
    (("compare", EXPERIMENT, "--methods", "local,flick"), ("--methods: unknown method 'flick'", "did you mean: flic")),
    (("compare", EXPERIMENT, "--methods", "local,local"), ("named twice",)),
    (("compare", EXPERIMENT, "--methods", "local,fedavg"), ("fedavg: ", "shares 'embedding.")),
    (TUNE, ("--grid: at least one key=v1,v2,... is needed",)),
    ((*TUNE, "--grid", "lr"), ("--grid lr: must be key=v1,v2,...",)),
    ((*TUNE, "--grid", "lr="), ("--grid lr=: must be key=v1,v2,...",)),
    ((*TUNE, "--grid", "lr=1,x"), ("--grid with method 'local'", "lr")),
    ((*TUNE, "--grid", "body_epochs=1,2"), ("--grid", "'body_epochs'")),
    ((*TUNE, "--grid", "lr=1", "--grid", "lr=2"), ("a key is given twice",)),
    ((*TUNE, "--grid", "rounds=1,2"), ("--grid rounds", "the same for all methods")),
    ((*TUNE, "--grid", "methods.local.lr=1,2"), ("--grid methods.local.lr", "name only the setting")),
    ((*TUNE, "--grid", "lr=1", "--device", "abacus"), ("--device abacus",)),
]


@pytest.mark.parametrize(("arguments", "says"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_bad_settings(here, arguments, says):
    out = ("--out", "out") if arguments[0] in ("run", "compare", "tune") and len(arguments) > 1 else ()
    refused(perfed(*arguments, *out), *says)
    assert list(here.iterdir()) == []


HUGE = 99999999999999999999
TINY_TABLE = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 10, "samples": 8, "test_samples": 4},
    "model": {"head": "linear"},
    "training": {"local_epochs": 1},
}


@pytest.mark.parametrize(
    "key",
    [
        "rounds",
        "baseline_tries",
        "training.batch_size",
        "training.local_epochs",
        "training.local_steps",
        "training.lr_drops",
        "methods.fedavg.batch_size",
        "data.clients",
        "data.samples",
        "data.test_samples",
        "data.inner_fold",
        "model.body.out",
        "plan.threads",
        "plan.chunk",
        "evaluation.every",
        "participation.srpfl.first",
    ],
)
def test_whole_numbers_that_do_not_fit_are_refused_wherever_they_are(key):
    number: Any = [0, HUGE] if key.endswith(("inner_fold", "lr_drops")) else HUGE
    for part in reversed(key.split(".")):
        number = {part: number}
    table = {
        **TINY_TABLE,
        **{k: {**TINY_TABLE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in number.items()},
    }
    with pytest.raises(
        PerfedError, match=rf"^{key}: whole numbers must be between -2\*\*53 and 2\*\*53 \(given: {HUGE}"
    ):
        validate(table)
    with pytest.raises(PerfedError, match=rf"^{key}: .* more than 100 digits"):
        validate(json.loads(json.dumps(table).replace(str(HUGE), "1" * 400)))


def test_so_are_those_of_methods_and_data_sets_in_python_and_the_largest_seed_is_none():
    for attempt in (
        lambda: FedAvg(batch_size=HUGE),
        lambda: Clip(clip_norm=HUGE, lr=HUGE),
        lambda: build_method("fedavg", {"local_epochs": HUGE}),
        lambda: load("digits", {"clients": HUGE}, seed=0),
    ):
        with pytest.raises(ValueError, match="whole numbers must be between"):
            attempt()
    assert validate({**TINY_TABLE, "seed": HUGE}).seed == HUGE


@pytest.mark.parametrize("option", ["clients", "samples", "test_samples"])
def test_a_data_set_that_does_not_fit_into_memory_is_refused_in_one_line(option):
    with pytest.raises(PerfedError, match=rf"'{option}': 9000000000000000|{option}") as error:
        load("digits", {"clients": 10, "samples": 8, option: 9 * 10**15}, seed=0)
    assert "\n" not in str(error.value)


def test_more_threads_than_any_machine_has_are_refused():
    with pytest.raises(PerfedError, match=r"plan.threads: .*less than or equal to 4096"):
        validate({**TINY_TABLE, "plan": {"threads": 10**12}})
    with pytest.raises(PerfedError, match=r"plan.threads must be at most 4096"):
        Plan("stacked", threads=10**12)


def test_a_broken_experiment_file(here):
    (here / "x.toml").write_text("rounds = = 3\n")
    refused(perfed("run", "x.toml", "--out", "out"), "x.toml: not valid TOML", "line 1")
    assert [file.name for file in here.iterdir()] == ["x.toml"]


# Directories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("run", EXPERIMENT, *TINY, "--method", "local"),
        (*COMPARE, *TINY),
        (*TUNE, *TINY, "--grid", "lr=1e-3"),
    ],
    ids=["run", "compare", "tune"],
)
def test_an_out_that_already_holds_a_run(here, command):
    run_tiny(here / "out", "--method", "local")
    before = contents(here)
    refused(perfed(*command, "--out", "out"), "--out out: already holds results (config.toml)", "perfed resume out")
    assert contents(here) == before


def test_an_out_that_is_a_file(here):
    (here / "out").write_text("precious")
    refused(perfed("run", EXPERIMENT, *TINY, "--out", "out"), "--out out: exists and is not a directory")
    refused(perfed("run", EXPERIMENT, *TINY, "--out", "out/below"), "--out out/below: cannot be created")
    assert contents(here) == {"out": b"precious"}


def test_a_finished_search_is_not_overwritten(here):
    tune = (*TUNE, *TINY, "--grid", "lr=1e-3", "--out", "out")
    assert perfed(*tune).code == 0
    before = contents(here)
    refused(perfed(*tune), "--out out: already holds results")
    refused(perfed("run", EXPERIMENT, *TINY, "--out", "out"), "--out out: already holds results")
    assert contents(here) == before


def test_a_damaged_summary_or_configuration(here):
    run_tiny(here / "out", "--method", "local")
    (here / "out" / "summary.json").write_text("{")
    refused(perfed("resume", "out"), "summary.json, line 1: not JSON")
    refused(perfed("report", "out"), "summary.json, line 1: not JSON")
    (here / "out" / "summary.json").write_text("{}")
    refused(perfed("resume", "out"), "summary.json: method: field required")
    (here / "out" / "summary.json").unlink()
    (here / "out" / "config.toml").write_text("rounds = 'x'")
    refused(perfed("resume", "out"), "out/config.toml: ")
    (here / "out" / "config.toml").write_bytes(b"\xff\xfe")
    refused(perfed("resume", "out"), "out/config.toml: is not text")


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("", b"\xff\xfe"),
        ("", b"methods = ['local']\nseeds = [0]\nexperiment = {}"),
        ("other", {"methods": ["local"], "seeds": [0], "experiment": {}}),
        ("comparison", {"methods": 5, "seeds": [0], "experiment": {}}),
        ("campaign", {"key": "", "comparisons": 5}),
    ],
)
def test_a_damaged_study(here, kind, content):
    if isinstance(content, bytes):
        (here / "comparisons.toml").write_bytes(content)
    else:
        write_marker(here, kind, content)
    for command in ("resume", "report"):
        refused(perfed(command, "."), "comparisons.toml: cannot be read")


def test_what_cannot_begin_leaves_no_directory(here):
    """The method finds out only with the data at hand."""
    settings = ("rounds=1", "clients=3", "plan.engine=stacked", "plan.threads=1", "model.body={kind='linear', out=300}")
    settings += ("head_epochs=1", "methods.feddar-sa.hessian_limit_mb=1")
    for command, option in (("run", "--method"), ("compare", "--methods")):
        result = perfed(command, "feddar-synthetic", option, "feddar-sa", *settings, "--out", "out")
        refused(result, "one client's Hessians take 4 MB", "(a projection)")
        assert list(here.iterdir()) == []


# Data files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("run",), ("compare", "--methods", "local")], ids=["run", "compare"])
def test_a_missing_data_file(here, monkeypatch, command):
    monkeypatch.setenv("PERFED_DATA", str(here / "environment"))
    name, *options = command
    result = perfed(name, "flic-bci-common", *options, "--data-dir", "folder", "--out", "out")
    folders = ("folder", str(here / "environment"), str(here / "home" / ".cache" / "perfed"))
    refused(result, "'bci_flic_common.npz' was not found", *folders, "--data-dir or PERFED_DATA")
    assert result.err.endswith("perfed data get bci-common\n")
    assert list(here.iterdir()) == []


def no_archive(file: Path) -> None:
    file.write_bytes(b"this is not an archive")


def truncated(file: Path) -> None:
    np.savez(file, x=np.zeros((100, 6)), y=np.zeros(100))
    file.write_bytes(file.read_bytes()[:500])


def without_keys(file: Path) -> None:
    np.savez(file, something_else=np.zeros(3))


def encrypted(file: Path) -> None:
    np.savez(file, x_train=np.zeros((100, 6)))
    data = bytearray(file.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + flags] |= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [no_archive, truncated, without_keys, encrypted])
def test_a_corrupt_data_file(here, damage):
    damage(here / "bci_flic_common.npz")
    before = contents(here)
    refused(perfed("run", "flic-bci-common", "--data-dir", ".", "--out", "out"), "bci_flic_common.npz")
    assert contents(here) == before


# Partitions --------------------------------------------------------------------------------------------------

PARTITION = """
rounds = 1
data = { name = "mnist", partition = "dominant", clients = 10, samples = 20 }
model = { head = "linear" }
"""


@pytest.mark.parametrize("command", ["run", "partition"])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["partition=shards"], ("data.partition = 'shards'", "one of 'iid', 'dominant', 'pathological', 'dirichlet'")),
        (["uniform=-1"], ("data.uniform = -1", "number >= 0 and <= 100")),
        (["uniform=100.1"], ("data.uniform = 100.1", "number >= 0 and <= 100")),
        (["concentration=1"], ("data.concentration is not an option of partition 'dominant'", "uniform")),
        (["data.partition=inner-dirichlet", "concentration=0"], ("data.concentration = 0", "number > 0")),
        (["data.partition=pathological", "classes_per_client=11"], ("classes_per_client = 11", "10 classes")),
        (["data.partition=pathological", "classes_per_client=[1,1]", "clients=2"], ("class ", "is held by no client")),
        (["clients=12"], ("clients = 12 cannot be cut into 5 equal groups", "a multiple of 5")),
        (["clients=20"], ("20 clients ask for 400 training samples, but there are 300", "data.samples")),
        (["uniform=0", "samples=30"], ("class ", "has 30 samples, but the clients need", "data.overlap = 'all'")),
        (["test_samples=50"], ("class ", "has 6 samples", "data.test_samples", "data.overlap = 'test'")),
        (["rotations=[0,90]"], ("data.rotations holds 2 angles for 5 groups",)),
    ],
    ids=str,
)
def test_bad_partitions(here, command, settings, says):
    (here / "x.toml").write_text(PARTITION)
    write_images(here, "mnist.npz")
    before = contents(here)
    refused(perfed(command, "x.toml", *settings, "--data-dir", ".", "--out", "out"), *says)
    assert contents(here) == before


# Data from Python --------------------------------------------------------------------------------------------


def client(size: int = 8, *, label: int | None = None, seed: int = 0, test: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, size) if label is None else np.full(size, label)
    arrays: dict[str, Any] = {"x_train": rng.normal(size=(size, 4)), "y_train": y}
    return arrays | ({"x_test": rng.normal(size=(5, 4)), "y_test": rng.integers(0, 3, 5)} if test else {})


def with_nan() -> dict[str, Any]:
    arrays = client()
    arrays["x_train"][5, 2] = np.nan
    return arrays


def with_infinity_in_test() -> dict[str, Any]:
    arrays = client()
    arrays["x_test"][1, 0] = np.inf
    return arrays


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (with_nan(), "client 'b': train inputs hold NaN or infinity in column 2, row 5"),
        (with_infinity_in_test(), "client 'b': test inputs hold NaN or infinity in column 0, row 1"),
        (with_nan() | {"feature_names": list("pqrs")}, r"column 2 \('r'\)"),
        (client(label=3), r"client 'b': train label 3 is outside the classes 0\.\.2"),
        (client(label=-1), "client 'b': train label -1 is outside the classes"),
        (client(0), "client 'b' has no training data"),
        ({"x_test": np.ones((2, 4)), "y_test": np.zeros(2, int)}, "client 'b' has no training data"),
        ({"x_train": np.ones((2, 4))}, "client 'b': 'y_train' is missing"),
        (
            client() | {"y_test": np.full(5, 0.5)},
            r"client 'b': test targets hold 0\.5; classes are whole numbers or texts",
        ),
        (client() | {"z_train": 3}, "client 'b': unknown key 'z_train'; allowed: "),
    ],
)
def test_bad_clients(arrays, says):
    with pytest.raises(PerfedError, match=says):
        Federation.from_arrays({"a": client(seed=1), "b": arrays}, num_classes=3)


def test_inputs_without_features_and_runs_without_rounds():
    with pytest.raises(PerfedError, match=r"client 'a': train inputs have shape \(0,\), so no features at all"):
        Federation.from_arrays({"a": {"x_train": np.ones((3, 0)), "y_train": np.zeros(3, int)}})
    federation = Federation.from_arrays({"a": client(), "b": client(seed=1)})
    for rounds in (0, -1):
        with pytest.raises(PerfedError, match="rounds must be at least 1"):
            Run(federation, build_method("local", {}), Model(head=linear(3)), rounds=rounds)


def test_a_single_value_is_not_an_array():
    with pytest.raises(PerfedError, match="must have the same length"):
        Federation.from_arrays({"a": {"x_train": np.zeros((2, 2)), "y_train": np.int64(3)}})


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_fine():
    x, y = np.ones((3, 2)), np.zeros(3, int)
    x.flags.writeable = y.flags.writeable = False
    assert len(Federation.from_arrays({"a": {"x_train": x, "y_train": y}}).clients[0].train) == 3


def trained(federation: Federation, method: str, **options: Any) -> Run:
    """Two rounds in memory."""
    pretrain = {"pretrain_epochs": "validated", "pretrain_max_epochs": 2} if method.startswith("flic") else {}
    made = build_method(method, {"local_epochs": 1, "batch_size": 4, **pretrain})
    model = Model(embedding=mlp((5,), 3), body=mlp((4,), 4), head=linear(federation.num_classes or 1))
    run = Run(federation, made, model, rounds=2, plan=Plan("stacked", threads=1), **options)
    run.execute()
    return run


@pytest.mark.parametrize("method", ["local", "fedavg-ft", "hetfedrep", "flic-class", "flic-hl"])
def test_clients_with_one_sample_one_class_or_no_test_data_work(method):
    clients = {
        "alone": client(1, seed=1),
        "one class": client(6, label=2, seed=2),
        "untested": client(7, seed=3, test=False),
        "ordinary": client(9, seed=4),
    }
    run = trained(Federation.from_arrays(clients, num_classes=3), method)
    assert np.isfinite(run.summary["accuracy"]["mean"])
    columns, rows = client_table(run.federation, "test", {}, {}, dict.fromkeys(clients, 1), {}, {})
    assert columns[:3] == ["id", "n_train", "n_test"]
    assert {row[0]: row[1:3] for row in rows} == {
        "alone": [1, 5],
        "one class": [6, 5],
        "untested": [7, 0],
        "ordinary": [9, 5],
    }


def test_a_single_client_with_a_single_sample_works():
    run = trained(Federation.from_arrays({"only": client(1)}, num_classes=3), "flic-hl")
    assert run.summary["accuracy"]["std"] == 0


def test_nobody_has_test_data():
    federation = Federation.from_arrays({"a": client(test=False)}, num_classes=3)
    with pytest.raises(PerfedError, match=r"evaluation\.split = 'test': no client has such data"):
        trained(federation, "local")
    assert "accuracy" in trained(federation, "local", evaluation=Evaluation(split="train")).summary
