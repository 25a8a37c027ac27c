"""Files of a run that others made: nothing in them is run unless the user says that they are trusted."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from command_line import another_process, perfed
from engines import blobs, make, network_for
from sklearn.base import BaseEstimator, TransformerMixin

import perfed as package
from perfed.client_model.facts import read_facts, write_facts
from perfed.client_model.network import write_program
from perfed.client_model.site_model import SiteModel
from perfed.data.checksums import hash_file
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.run.run import Run
from perfed.tables.site import TablePreprocessor
from perfed.training.plan import Plan


class Writes:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "it ran")


class Halved(TransformerMixin, BaseEstimator):
    """A transformer that skops does not know."""

    def fit(self, x: Any, y: Any = None) -> Halved:
        return self

    def transform(self, x: Any) -> Any:
        return x[["age"]].to_numpy() / 2


@cache
def site() -> SiteModel:
    method = make("fedavg")
    run = Run(blobs((12, 9), test=9), method, network_for(method), name="fedavg", rounds=1, plan=Plan("stacked", 1))
    run.execute()
    return run.site("c0")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run directory that holds a joined site and, as nothing else of it is read, no run."""
    site().save(tmp_path / "run" / "joined" / "west")
    facts = tmp_path / "run" / "joined" / "west" / "site.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "site": "west"}))
    (tmp_path / "new.csv").write_text(",".join(site().feature_names_in_) + "\n" + ",".join(["1"] * 4) + "\n")
    return tmp_path / "run"


def predicted(run_dir: Path, *more: str) -> Any:
    out = run_dir.parent / "said.csv"
    out.unlink(missing_ok=True)
    return perfed("predict", run_dir, run_dir.parent / "new.csv", "--site", "west", "--out", out, *more)


def network_file(run_dir: Path) -> Path:
    return run_dir / "joined" / "west" / "network.pt2"


def refresh_checksum(file: Path) -> None:
    """Write the checksum of ``file`` into ``site.json``, as who changes a file on purpose would."""
    facts = read_facts(file.parent / "site.json")
    write_facts({**facts, "files": {file.name: hash_file(file)}}, file.parent / "site.json")


def edited(file: Path, change: Any) -> None:
    """Replace the members of a zip file by what ``change`` makes of their contents by name."""
    with zipfile.ZipFile(file) as held:
        members = {name: held.read(name) for name in held.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as made:
        for name, content in members.items():
            made.writestr(name, content)


def edit_json(file: Path, member: str, change: Any) -> None:
    """Change the values of a JSON file whose name ends so in the zip file ``file``."""

    def rewrite(members: dict[str, bytes]) -> None:
        name = next(name for name in members if name.endswith(member))
        content = json.loads(members[name])
        change(content)
        members[name] = json.dumps(content).encode()

    edited(file, rewrite)
    refresh_checksum(file)


def pickle_weight(file: Path, content: Any) -> None:
    """Replace the tensors of a network by pickled ones, the first of them by ``content``."""

    def attack(members: dict[str, bytes]) -> None:
        config = next(name for name in members if name.endswith("weights_config.json"))
        entries = json.loads(members[config])["config"]
        for entry in entries.values():
            entry["use_pickle"] = True
        first, buffer = next(iter(entries.values()))["path_name"], io.BytesIO()
        torch.save(content, buffer)
        members[config] = json.dumps({"config": entries}).encode()
        members[f"{config.rpartition('/')[0]}/{first}"] = buffer.getvalue()

    edited(file, attack)
    refresh_checksum(file)


@pytest.mark.long
def test_a_network_that_is_pickled_is_not_read(run_dir):
    file, mark = network_file(run_dir), run_dir.parent / "mark"
    pickle_weight(file, Writes(mark))
    found = predicted(run_dir)
    assert found.code == 2 and found.err.startswith(f"perfed: {file}: a network with pickled tensors, which can run")
    assert found.err.count("\n") == 1 and "--trust" in found.err and not mark.exists()
    with pytest.raises(PerfedError, match="which can run code"):
        package.load_site(file.parent)
    with suppress(Exception):
        package.load_site(file.parent, trust=True)
    assert mark.exists()  # the attack is one


@pytest.mark.long
@pytest.mark.parametrize("trust", [False, True])
def test_a_saved_network_predicts_the_same_and_is_exported_again(run_dir, trust):
    folder, x = network_file(run_dir).parent, np.ones((3, 4))
    loaded = package.load_site(folder, trust)
    np.testing.assert_array_equal(loaded.predict_proba(x), site().predict_proba(x))
    with torch.no_grad():  # torch's own reader
        expected = torch.export.load(network_file(run_dir)).module()(torch.ones(3, 4)).numpy()
    np.testing.assert_array_equal(loaded.predict_proba(x), expected)
    parameters, original = loaded.predictor.program.state_dict, site().predictor.program.state_dict
    assert parameters.keys() == original.keys()
    assert all(torch.equal(parameters[name], value) for name, value in original.items())


@pytest.mark.long
def test_an_operation_of_other_libraries_is_read_only_if_it_is_trusted(run_dir):
    """What torch.export wrote for a function beside ATen: a square root of a size."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, :3] * torch.sym_float(x.shape[0])).softmax(1)

    file = network_file(run_dir)
    shapes = ({0: torch.export.Dim("batch")},)
    write_program(torch.export.export(Scaled(), (torch.ones(3, 4),), dynamic_shapes=shapes), file)
    refresh_checksum(file)
    found = predicted(run_dir)
    assert found.code == 2 and "a network with the operation torch.sym_float, which can run code" in found.err
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    expected = torch.softmax(torch.from_numpy(2 * x[:, :3]), 1)
    np.testing.assert_allclose(package.load_site(file.parent, trust=True).predict_proba(x), expected, rtol=1e-6)
    assert perfed("export", run_dir, "--site", "west", "--format", "safetensors").code == 2
    assert perfed("export", run_dir, "--site", "west", "--format", "safetensors", "--trust").code == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_damaged_network_in_torch_s_format_is_one_line(run_dir, part):
    file = network_file(run_dir)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    command = ("predict", run_dir, run_dir.parent / "new.csv", "--site", "west", "--out", "said.csv", "--trust")
    found = another_process(*command)  # torch's log goes to this process's standard error
    assert found.code == 2 and found.err.startswith(f"perfed: {file}: is damaged") and found.err.count("\n") == 1


def test_a_preprocessing_that_is_pickled_is_not_read(run_dir):
    import pandas as pd

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(size=30), "sick": ["no", "yes"] * 15})
    federation = Federation.from_frames({"a": frame, "b": frame}, target="sick", preprocess=Halved())
    place, mark = run_dir / "joined" / "west", run_dir.parent / "mark"
    federation.clients[0].table.save(place / "table.zip")
    with pytest.raises(
        PerfedError, match=r"table\.zip: a preprocessing that is pickled \(joblib\), which can run code"
    ):
        TablePreprocessor.load(place / "table.zip")
    assert TablePreprocessor.load(place / "table.zip", trust=True).site == "a"
    facts = json.loads((place / "site.json").read_text())
    columns = [{"name": "age", "kind": "number"}]
    (place / "site.json").write_text(json.dumps({**facts, "columns": columns}))
    content = io.BytesIO()
    joblib.dump(Writes(mark), content)
    edited(place / "table.zip", lambda members: members.update({"transformer.joblib": content.getvalue()}))
    found = predicted(run_dir)
    assert found.code == 2 and found.err.count("\n") == 1 and f"{place / 'table.zip'}: a preprocessing" in found.err
    assert "--trust" in found.err and not mark.exists()
    predicted(run_dir, "--trust")
    assert mark.exists()  # the attack is one


def first_step(target: str, *arguments: Any) -> Any:
    """Return a change of a program by which its first step calls ``target``."""

    def change(model: dict[str, Any]) -> None:
        inputs = [{"name": "a", "arg": argument, "kind": 1} for argument in arguments]
        model["graph_module"]["graph"]["nodes"][0].update(target=target, inputs=inputs)

    return change


TEXT, X = {"as_string": "FILE"}, {"as_tensor": {"name": "x"}}


@pytest.mark.parametrize(
    "change",
    [
        first_step("torch.ops.aten.from_file.default", TEXT),
        first_step("torch.ops.aten.save.default", X, TEXT),
        first_step("torch.ops.aten.__class__.mro"),
        first_step("torch.hub.load", TEXT),
        first_step("_operator.attrgetter", {"as_string": "__class__"}),
        first_step("builtins.eval", {"as_string": "1"}),
        first_step("torch.ops.aten.relu.default", {"as_operator": "builtins.print"}),
        lambda model: model["graph_module"]["signature"]["input_specs"][0]["buffer"].update(
            buffer_name='a"),print("it ran")#'
        ),
        lambda model: model["schema_version"].update(major=7),
        lambda model: model["graph_module"].pop("graph"),
        lambda model: model["graph_module"]["signature"]["output_specs"].clear(),
    ],
)
def test_a_network_calls_operations_of_torch_on_tensors_only(run_dir, change):
    file, mark = network_file(run_dir), run_dir.parent / "mark"
    edit_json(file, "models/model.json", change)
    edited(file, lambda members: members.update({n: c.replace(b"FILE", bytes(mark)) for n, c in members.items()}))
    refresh_checksum(file)
    found = predicted(run_dir)
    assert found.code == 2 and found.err.count("\n") == 1 and str(file) in found.err and not mark.exists()
    assert "it ran" not in found.out


def test_expressions_in_a_network_are_not_evaluated(run_dir):
    file, mark = network_file(run_dir), run_dir.parent / "mark"

    def attack(model: dict[str, Any]) -> None:
        size = model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]
        size["as_expr"]["expr_str"] = f"open({str(mark)!r}, 'w')"

    edit_json(file, "models/model.json", attack)
    x = np.ones((3, 4))
    np.testing.assert_array_equal(package.load_site(file.parent).predict_proba(x), site().predict_proba(x))
    assert not mark.exists()
    with suppress(Exception):
        torch.export.load(file)
    assert mark.exists()  # the attack is one


def test_a_folder_with_a_changed_file_is_refused(run_dir):
    file = network_file(run_dir)

    def change(members: dict[str, bytes]) -> None:
        weight = next(name for name in members if name.endswith("weights/weight_0"))
        members[weight] = bytes(len(members[weight]))

    edited(file, change)
    found = predicted(run_dir)
    assert found.code == 2 and f"{file}: has changed since it was written" in found.err


def test_who_can_be_pickled_is_the_attack_of_these_tests(tmp_path):
    pickle.loads(pickle.dumps(Writes(tmp_path / "mark")))
    assert (tmp_path / "mark").read_text() == "it ran"
