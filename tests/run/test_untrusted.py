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
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import BaseEstimator, TransformerMixin

import perfed as package
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.run.run import Run
from perfed.run.site import SiteModel, write_program
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


def pickled_network(run_dir: Path) -> Path:
    """The joined site's network in torch's own format, as one is kept that is more than operations of torch."""
    file = run_dir / "joined" / "west" / "network.pt2"
    (file.parent / "network.safetensors").unlink()
    write_program(site().program, file)
    return file


def edited(file: Path, change: Any) -> None:
    """The members of a zip file after ``change`` of their contents by name."""
    with zipfile.ZipFile(file) as held:
        members = {name: held.read(name) for name in held.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as made:
        for name, content in members.items():
            made.writestr(name, content)


def test_a_network_that_is_pickled_is_not_read(run_dir):
    file, mark = pickled_network(run_dir), run_dir.parent / "mark"

    def attack(members: dict[str, bytes]) -> None:
        config = next(name for name in members if name.endswith("weights_config.json"))
        content = json.loads(members[config])
        first = next(iter(content["config"].values()))
        for entry in content["config"].values():
            entry["use_pickle"] = entry["path_name"] == first["path_name"]
        weight, held = f"{config.rpartition('/')[0]}/{first['path_name']}", io.BytesIO()
        torch.save(Writes(mark), held)
        members |= {config: json.dumps(content).encode(), weight: held.getvalue()}

    edited(file, attack)
    found = predicted(run_dir)
    assert found.code == 2 and found.err.startswith(f"perfed: {file}: a network in torch's own format, which can run")
    assert found.err.count("\n") == 1 and "--trust" in found.err and not mark.exists()
    with pytest.raises(PerfedError, match="which can run code"):
        package.load_site(file.parent)
    with suppress(Exception):
        package.load_site(file.parent, trust=True)
    assert mark.exists()  # the attack is one


def test_a_network_of_an_earlier_version_is_read_if_it_is_trusted(run_dir):
    file = pickled_network(run_dir)
    assert predicted(run_dir).code == 2 and predicted(run_dir, "--trust").code == 0
    assert perfed("export", run_dir, "--site", "west", "--format", "safetensors").code == 2
    assert perfed("export", run_dir, "--site", "west", "--format", "safetensors", "--trust").code == 0
    x = np.ones((3, 4))
    np.testing.assert_array_equal(package.load_site(file.parent, trust=True).predict_proba(x), site().predict_proba(x))


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_damaged_network_in_torch_s_format_is_one_line(run_dir, part):
    file = pickled_network(run_dir)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph["steps"].__setitem__(0, ["a", "aten.from_file.default", ["FILE"], {}]),
        lambda graph: graph["steps"].__setitem__(0, ["a", "aten.save.default", [{"node": "x"}, "FILE"], {}]),
        lambda graph: graph["steps"].__setitem__(0, ["a", "aten.__class__.mro", [], {}]),
        lambda graph: graph["steps"].__setitem__(0, ["a", "operator.attrgetter", ["__class__"], {}]),
        lambda graph: graph["steps"].__setitem__(0, ["a", "builtins.eval", ["1"], {}]),
        lambda graph: graph["tensors"].update({"w": 'a"),print("it ran")#'}),
        lambda graph: graph.pop("steps"),
        lambda graph: graph.update(output={"node": "x"}),
    ],
)
def test_a_graph_holds_operations_of_torch_on_tensors_alone(run_dir, change):
    file, mark = run_dir / "joined" / "west" / "network.safetensors", run_dir.parent / "mark"
    with safe_open(file, "pt") as held:
        graph = json.loads(held.metadata()["graph"])
        tensors = {name: held.get_tensor(name) for name in list(held.keys())}
    change(graph)
    tensors = {path: tensors.get(path, torch.zeros(1)) for path in {*tensors, *graph["tensors"].values()}}
    save_file(tensors, file, {"graph": json.dumps(graph).replace("FILE", str(mark))})
    found = predicted(run_dir)
    assert found.code == 2 and found.err.count("\n") == 1 and str(file) in found.err and not mark.exists()
    assert "it ran" not in found.out


def test_who_can_be_pickled_is_the_attack_of_these_tests(tmp_path):
    pickle.loads(pickle.dumps(Writes(tmp_path / "mark")))
    assert (tmp_path / "mark").read_text() == "it ran"
