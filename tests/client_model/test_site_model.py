"""A site's model apart from its run: it says what was evaluated, also in files that are read without perfed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from engines import awkward_domains, blobs, network
from site_models import done, finished, frames, table_site, the_data
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import perfed
from perfed.client_model.export import export, onnx_file, onnx_inputs
from perfed.client_model.site_model import SiteModel
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.registry import entry, method_names
from perfed.model.chain import Model
from perfed.model.lstm import lstm
from perfed.model.presets import cnn, linear

NAMES = [name for name in method_names() if entry(name).method.local_data is Method.local_data]
WITHOUT_PERFED = """
import json, sys
sys.modules["perfed"] = None
import numpy as np, onnxruntime, torch
from safetensors import safe_open
folder, found = sys.argv[1], {}
with np.load(folder + "/expected.npz") as held:
    expected = dict(held)
for name in sys.argv[2:]:
    x = [expected[f"{name}/{part}"] for part in ("x", "domain") if f"{name}/{part}" in expected]
    session = onnxruntime.InferenceSession(f"{folder}/{name}.onnx")
    feeds = {entry.name: value for entry, value in zip(session.get_inputs(), x)}
    alone = {key: value[:1] for key, value in feeds.items()}
    network = torch.export.load(f"{folder}/{name}.pt2").module()
    with torch.no_grad():
        said = network(*map(torch.from_numpy, x)).numpy()
    with safe_open(f"{folder}/{name}.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(key).numel() for key in file.keys())
    found[name] = {
        "onnx": session.run(None, feeds)[0].tolist(),
        "alone": session.run(None, alone)[0].tolist(),
        "metadata": session.get_modelmeta().custom_metadata_map,
        "pt2": said.tolist(),
        "parameters": parameters,
    }
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module", autouse=True)
def operators_are_read_once():
    """torch's exporter reads the source of 500 operators for every file, which takes longer than the file."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


def graph_of(site: SiteModel) -> str:
    """All that an ONNX file is made of but the values of the parameters: operations, names, shapes, types."""
    program = site.predictor.program
    tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in program.state_dict.items()}
    return f"{program.graph} {program.graph_signature} {program.range_constraints} {tensors} {program.constants}"


def with_parameters(content: bytes, site: SiteModel) -> bytes:
    """The ONNX file of another site of the same graph, with this one's parameters."""
    import onnx

    model, left = onnx.load_from_string(content), dict(site.predictor.program.state_dict)
    for held in model.graph.initializer:
        if held.name in left:
            held.CopyFrom(onnx.numpy_helper.from_array(left.pop(held.name).numpy(), held.name))
    assert not left, "the exporter has folded these into others"
    return model.SerializeToString()


@pytest.fixture(scope="module")
def elsewhere(request, tmp_path_factory) -> dict[str, Any]:
    """What the files of all methods that are tested say in one process that has no perfed.

    Methods whose graphs are the same share one pass of torch's exporter.
    """
    folder, expected, contents = tmp_path_factory.mktemp("exported"), {}, {}
    test = the_data().clients[0].test
    names = [test.callspec.params["name"] for test in request.session.items if "elsewhere" in test.fixturenames]
    for name in names:
        _, site = finished(name)
        for format_ in ("pt2", "safetensors"):
            export(site, folder / f"{name}.{format_}", format_)
        file, graph = folder / f"{name}.onnx", graph_of(site)
        if graph in contents:
            file.write_bytes(with_parameters(contents[graph], site))
        else:
            export(site, file, "onnx")
            contents[graph] = file.read_bytes()
        for part, value in zip(("x", "domain"), site.prepare_inputs(test.x, test.domain), strict=False):
            expected[f"{name}/{part}"] = value.numpy()
    np.savez(folder / "expected.npz", **expected)
    command = [sys.executable, "-c", WITHOUT_PERFED, str(folder), *names]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.long
@pytest.mark.xdist_group("files of every method")  # they are made once
@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", NAMES)
def test_a_site_says_what_the_run_says_and_so_do_its_files_without_perfed(name, elsewhere):
    run, site = finished(name)
    test = the_data().clients[0].test
    expected = run.predict("c0", test.x, test.domain).softmax(1).numpy()
    said = site.predict_proba(test.x, test.domain)
    np.testing.assert_allclose(said, expected, atol=1e-6)
    found = elsewhere[name]
    # FedProto's distances are those of cdist, which a graph for any number of rows cannot have.
    np.testing.assert_allclose(np.float32(found["pt2"]), said, rtol=1e-6 if name == "fedproto" else 0)
    np.testing.assert_allclose(found["onnx"], said, atol=1e-5)
    np.testing.assert_allclose(found["alone"], said[:1], atol=1e-5)
    accuracy = run.server.evaluate("test", ["c0"], 1)["c0"]["accuracy"]
    assert site.facts["metrics"]["of"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert (np.argmax(found["onnx"], 1) == test.y.numpy()).mean() == pytest.approx(accuracy)
    assert float(found["metadata"]["largest_difference"]) < 1e-5
    assert json.loads(found["metadata"]["classes"]) == [0, 1, 2]
    assert found["parameters"] == sum(tensor.numel() for tensor in site.predictor.program.state_dict.values())


@pytest.mark.long
@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_network_predicts_the_same_and_need_not_be_trusted(name, tmp_path):
    _, site = finished(name)
    test = the_data().clients[0].test
    folder = site.save(tmp_path / "north")
    assert {file.name for file in folder.iterdir()} == {"network.pt2", "site.json"}
    said = perfed.load_site(folder).predict_proba(test.x, test.domain)
    # FedProto's distances are those of cdist, which a graph for any number of rows cannot have.
    tolerance = 1e-6 if name == "fedproto" else 0
    np.testing.assert_allclose(said, site.predict_proba(test.x, test.domain), rtol=tolerance)


@pytest.mark.parametrize("name", ["fedavg", "knnper", "feddar-sa", "fedem"])
def test_saved_and_loaded_it_is_the_same_to_the_bit(name, tmp_path):
    _, site = finished(name)
    test = the_data().clients[0].test
    again = perfed.load_site(site.save(tmp_path / "north"))
    np.testing.assert_array_equal(again.predict_proba(test.x, test.domain), site.predict_proba(test.x, test.domain))
    assert again.facts == site.facts and list(again.feature_names_in_) == list(site.feature_names_in_)
    with pytest.raises(PerfedError, match="already holds a site's model"):
        site.save(tmp_path / "north")
    (tmp_path / "north" / "network.pt2").write_bytes(b"half")
    with pytest.raises(PerfedError, match=r"north/network\.pt2: is damaged"):
        perfed.load_site(tmp_path / "north")
    with pytest.raises(PerfedError, match="no site's model here"):
        perfed.load_site(tmp_path / "south")


@pytest.mark.long
@pytest.mark.parametrize(("one", "other"), [("fedavg", "ditto"), ("fedper", "fedpac")])
def test_of_one_graph_there_is_one_onnx_file_but_for_the_parameters(one, other):
    import onnx

    sites = [finished(name)[1] for name in (one, other)]
    assert graph_of(sites[0]) == graph_of(sites[1])
    files = [onnx_file(site)[0] for site in sites]
    shared, own = (onnx.load_from_string(content).graph for content in (with_parameters(files[0], sites[1]), files[1]))
    assert shared.SerializeToString(deterministic=True) == own.SerializeToString(deterministic=True)
    assert graph_of(finished("fedem")[1]) != graph_of(sites[0])


@pytest.mark.long
def test_only_what_predicts_is_kept():
    """kNN-Per its memory, Fed-RoD its second head, Ditto not the global model, SCAFFOLD no control variates."""
    held = {
        name: list(finished(name)[1].predictor.program.state_dict) for name in ("knnper", "fedrod", "ditto", "scaffold")
    }
    assert [k for k in held["knnper"] if k.startswith("scratch")] == [
        f"scratch.memory.{part}" for part in ("features", "labels", "held")
    ]
    assert [k for k in held["fedrod"] if k.startswith("state")] == [
        f"state.personal_head.head.{part}" for part in ("weight", "bias")
    ]
    for name in ("ditto", "scaffold"):
        assert all(key.startswith("model.") for key in held[name])


def test_labels_and_columns_keep_their_names():
    train = pd.DataFrame({"age": [1.0, 2.0, 3.0, 4.0], "weight": [4.0, 3.0, 2.0, 1.0]})
    data = {"north": {"x_train": train, "y_train": ["ill", "well", "ill", "well"]}}
    site = done("local", Federation.from_arrays(data), network(2), evaluation=perfed.Evaluation(split="train")).site(
        "north"
    )
    assert list(site.classes_) == ["ill", "well"] and list(site.feature_names_in_) == ["age", "weight"]
    said = site.predict_proba(train)
    np.testing.assert_array_equal(site.predict_proba(train[["weight", "age"]]), said)
    np.testing.assert_array_equal(site.predict_proba(train.to_numpy()), said)
    assert list(site.predict(train)) == [["ill", "well"][j] for j in said.argmax(1)]
    for frame, says in (
        (train[["age"]], "x lacks column 'weight'"),
        (train.assign(colour=1.0, smell=2.0), "remove from x the unknown columns 'colour', 'smell'"),
        (pd.concat([train, train[["age"]]], axis=1), "x has twice column 'age'"),
        (train.replace(4.0, np.nan), "missing or infinite"),
        (train.to_numpy()[:, :1], r"inputs of shape \(2,\), not \(1,\)"),
        (train[:0], "x has no rows"),
    ):
        with pytest.raises(PerfedError, match=f"site 'north'.*{says}"):
            site.predict(frame)


def test_a_domain_is_a_column_or_given_beside_an_array():
    site = finished("feddar-sa")[1]
    x = the_data().clients[0].test.x.numpy()
    frame = pd.DataFrame(x, columns=["x0", "x1", "x2", "x3"]).assign(domain=[0, 1] * 15)
    said = site.predict_proba(frame[["domain", "x3", "x2", "x1", "x0"]])
    np.testing.assert_array_equal(site.predict_proba(x, frame["domain"]), said)
    np.testing.assert_array_equal(site.predict_proba(frame.assign(domain=frame["domain"].astype(str))), said)
    for domain, says in ((None, "needs the domain of every sample"), ([5] * 30, "unknown domain 5; allowed: 0, 1")):
        with pytest.raises(PerfedError, match=says):
            site.predict(x, domain)


def test_a_domain_that_nobody_trained_on_gets_the_mean_of_the_others():
    federation = awkward_domains()
    run = done("feddar-wa", federation)
    site, test = run.site("c1"), federation.clients[1].test
    assert 3 in test.domain
    expected = run.predict("c1", test.x, test.domain).softmax(1).numpy()
    np.testing.assert_allclose(site.predict_proba(test.x, test.domain), expected, atol=1e-6)


@pytest.mark.long
def test_a_regression_predicts_values(tmp_path):
    federation = blobs((9, 8), regression=True)
    run = done("fedem", federation, network(1))
    site, x = run.site("c0"), federation.clients[0].test.x
    np.testing.assert_allclose(site.predict(x), run.predict("c0", x).numpy(), atol=1e-6)
    assert export(site, tmp_path / "a.onnx", "onnx")["largest_difference"] < 1e-5
    assert not hasattr(site, "classes_") and set(site.facts["metrics"]["of"]) == {"mse"}
    with pytest.raises(PerfedError, match="predicts values, not classes"):
        site.predict_proba(x)


def images() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(8, 1, 12, 12, generator=generator), torch.arange(8) % 3
    return Federation.from_arrays({"a": {"x_train": x, "y_train": y, "x_test": x, "y_test": y}}, num_classes=3)


def tokens() -> Federation:
    """Token ids, with padding at the end, in the middle and alone."""
    x = torch.tensor([[3, 4, 0, 0], [2, 0, 5, 1], [0, 0, 0, 0], [5, 4, 3, 2], [1, 1, 0, 0], [0, 2, 0, 3]]).float()
    y = torch.arange(6) % 2
    return Federation.from_arrays({"a": {"x_train": x, "y_train": y, "x_test": x, "y_test": y}}, num_classes=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("federation", "model"),
    [
        (images, Model(body=cnn((2, 3), 3, 5, hidden=(4,)), head=linear(3))),
        (tokens, Model(body=lstm(4, 3, width=2, layers=2), head=linear(2))),
    ],
    ids=["images", "tokens"],
)
def test_images_and_texts_are_exported_as_well(federation, model, tmp_path):
    run = done("fedavg-ft", federation(), model)
    site, x = run.site("a"), federation().clients[0].test.x
    expected = run.predict("a", x).softmax(1).numpy()
    np.testing.assert_allclose(site.predict_proba(x), expected, atol=1e-6)
    np.testing.assert_allclose(site.predict_proba(x.flatten(1).numpy()), expected, atol=1e-6)
    np.testing.assert_allclose(site.predict_proba(x[:1]), expected[:1], atol=1e-6)
    assert export(site, tmp_path / "a.onnx", "onnx")["largest_difference"] < 1e-5
    again = perfed.load_site(site.save(tmp_path / "a"))
    np.testing.assert_allclose(again.predict_proba(x), expected, atol=1e-6)


# Tables ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "columns", "domain_input"),
    [("local", "own", False), ("feddar-sa", "union", False), ("fedavg", "common", True)],
)
def test_a_table_goes_from_its_columns_to_probabilities_in_one_onnx_file(method, columns, domain_input, tmp_path):
    import onnxruntime

    site, frame = table_site(method, columns, domain_input), frames()["north"].drop(columns="sick")
    names = ["blood pressure", "smokes", "pain", "visit", *(["race"] if method == "feddar-sa" or domain_input else [])]
    assert list(site.feature_names_in_) == names and list(site.classes_) == ["no", "yes"]
    frame.loc[0, "pain"] = "cruel"  # which training has not seen
    said = site.predict_proba(frame)
    np.testing.assert_array_equal(site.predict_proba(frame[names[::-1]]), said)
    np.testing.assert_array_equal(site.predict_proba(frame[names].to_numpy()), said)
    assert export(site, tmp_path / "north.onnx", "onnx")["largest_difference"] < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "north.onnx")
    given = onnx_inputs(site.table, frame)
    inputs = [entry.name for entry in session.get_inputs()]
    assert inputs == names
    (found,) = session.run(["probabilities"], {name: given[name] for name in inputs})
    np.testing.assert_allclose(found, said, atol=1e-5)
    again = perfed.load_site(site.save(tmp_path / "north"))
    np.testing.assert_array_equal(again.predict_proba(frame), said)
    export(site, tmp_path / "north.pt2", "pt2")
    text = (tmp_path / "north.md").read_text()
    assert "the columns blood pressure, smokes, pain, visit" in text and "| visit | date | days since 1970" in text


@pytest.mark.long
def test_columns_of_a_table_are_refused_by_name():
    site, frame = table_site("local", "own"), frames()["north"]
    for changed, says in (
        (frame.drop(columns="smokes"), "no column 'smokes'"),
        (frame.assign(colour=1), "unknown column 'colour', remove it; the site's columns: "),
        (frame.to_numpy()[:, :2], r"x has shape \(40, 2\), not \(rows, 4\)"),
    ):
        with pytest.raises(PerfedError, match=f"site 'north': {says}"):
            site.predict(changed)


@pytest.mark.long
def test_what_onnx_says_otherwise_is_not_written(tmp_path, monkeypatch):
    site = table_site("local", "own")
    monkeypatch.setattr(type(site), "outputs", lambda self, *arguments: np.full((64, 2), 0.5, np.float32))
    with pytest.raises(PerfedError, match=r"its ONNX model differs from perfed's by 0\.\d+ on 64 drawn rows; nothing"):
        export(site, tmp_path / "north.onnx", "onnx")
    assert not list(tmp_path.iterdir())


def codes(rows: int, seed: int = 0) -> pd.DataFrame:
    """A table whose columns are called as an ONNX file calls its own tensors, with a code and texts with accents."""
    rng = np.random.default_rng(seed)
    age, code = rng.integers(20, 90, rows), rng.choice([1, 2, 30], rows)
    return pd.DataFrame(
        {
            "probabilities": age,
            "values": rng.normal(25, 4, rows).round(1),
            "transformed_column": np.where(rng.random(rows) < 0.2, None, code.astype(str)),
            "perfed/0": rng.choice(["Süd", "Nord"], rows),
            "perfed//network/x": rng.choice(["yes", "no"], rows),
            "sick": np.where(age + 20 * (code == 2) + rng.normal(0, 15, rows) > 65, "yes", "no"),
        }
    )


def session_of(site: SiteModel) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(onnx_file(site)[0])


def answers(session: Any, frame: pd.DataFrame) -> np.ndarray:
    """What an exported file says of the columns of a frame, of which no text but yes and no is changed."""
    feeds = {}
    for column in session.get_inputs():
        values = frame[[column.name]]
        if column.type == "tensor(string)":
            feeds[column.name] = values.fillna("missing").to_numpy(object)
        else:
            feeds[column.name] = values.replace({"yes": "1", "no": "0"}).to_numpy(np.float32)
    return session.run(None, feeds)[0]


@cache
def site_of_codes() -> SiteModel:
    federation = Federation.from_frames(
        {"north": codes(100), "south": codes(80, 1)}, target="sick", categories=["transformed_column"], missing=["-9"]
    )
    return done("local", federation, network(2)).site("north")


@cache
def session_of_codes() -> Any:
    return session_of(site_of_codes())


@pytest.mark.long
@pytest.mark.parametrize(
    ("texts", "same_as"),
    [
        (["1.0", "1.00", " 1", "1.000 ", "\u00a01\t"], "1"),
        (["30.0", " 30.00"], "30"),
        (["", "  ", "-9", " -9.0", "?"], "missing"),
        (["01", "1.5", "1x", "3", "-1", "unheard of"], "anything else"),
    ],
)
def test_an_onnx_file_takes_every_spelling_that_a_table_may_have(texts, same_as):
    site, session, frame = site_of_codes(), session_of_codes(), codes(4)
    by_code = {
        code: answers(session, frame.assign(transformed_column=code)) for code in ("1", "30", "missing", same_as)
    }
    expected = by_code.pop(same_as)
    for text in texts:
        found = answers(session, frame.assign(transformed_column=text))
        np.testing.assert_array_equal(found, expected)
        assert all(np.abs(found - other).max() > 1e-4 for other in by_code.values())
        if text != "?":  # which files, not frames, have for what is missing
            said = site.predict_proba(frame.drop(columns="sick").assign(transformed_column=text))
            np.testing.assert_allclose(found, said, atol=1e-6)


def test_an_onnx_file_takes_composed_and_decomposed_accents():
    found = [
        answers(session_of_codes(), codes(4).assign(**{"perfed/0": text})) for text in ("Süd", "Su\u0308d", "Nord")
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-4


@pytest.mark.long
def test_a_transformer_of_one_s_own_gets_codes_as_training_has_them():
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    mine = ColumnTransformer([("code", one_hot, ["transformed_column"]), ("age", StandardScaler(), ["probabilities"])])
    frame = codes(80)[["probabilities", "transformed_column", "sick"]].fillna("2")
    federation = Federation.from_frames(
        {"north": frame}, target="sick", categories=["transformed_column"], preprocess=mine
    )
    site, new = done("local", federation, network(2)).site("north"), codes(40, 3)[["probabilities"]]
    session = session_of(site)
    for text, spelt in (("1", "1.0"), ("30", " 30"), ("30", "30.00 "), ("unheard of", "unheard of")):
        said = site.predict_proba(new.assign(transformed_column=text))
        np.testing.assert_allclose(answers(session, new.assign(transformed_column=spelt)), said, atol=1e-5)


@pytest.mark.long
def test_columns_may_be_called_as_the_output_and_the_tensors_of_an_onnx_file(tmp_path):
    import onnx

    site = site_of_codes()
    export(site, tmp_path / "north.onnx", "onnx")
    model, text = onnx.load(tmp_path / "north.onnx"), (tmp_path / "north.md").read_text()
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == list(site.feature_names_in_)
    assert [value.name for value in model.graph.output] == ["probabilities_"]
    assert "The output of an ONNX file is called `probabilities_`: `probabilities` is a column." in text
    assert "| transformed_column | category | a text, `missing` where it is: `1`, `2`, `30` |" in text
    (columns,) = [json.loads(entry.value) for entry in model.metadata_props if entry.key == "columns"]
    assert columns[2] == {"name": "transformed_column", "kind": "category", "texts": ["1", "2", "30"]}


@pytest.mark.long
def test_a_column_called_values_and_the_values_of_a_regression():
    frames = {site: codes(60, seed).drop(columns="sick") for seed, site in enumerate(("north", "south"))}
    federation = Federation.from_frames(frames, target="probabilities", categories=["transformed_column"])
    site = done("local", federation, network(1)).site("north")
    frame = frames["north"].drop(columns="probabilities")
    np.testing.assert_allclose(answers(session_of(site), frame).ravel(), site.predict(frame).ravel(), rtol=1e-5)
    assert site.facts["output"] == "values_"


@pytest.mark.long
def test_files_are_checked_on_every_training_row(tmp_path, monkeypatch):
    """The answer to one training row is changed; those to drawn rows are not."""
    site = site_of_codes()
    outputs, rows = type(site).outputs, len(site.training_rows)

    def of_one_row(self, *arguments):
        said = outputs(self, *arguments)
        if len(said) == rows:
            said[-1] = 0.5
        return said

    monkeypatch.setattr(type(site), "outputs", of_one_row)
    with pytest.raises(PerfedError, match=rf"differs from perfed's by 0\.\d+ on its {rows} training rows; nothing"):
        export(site, tmp_path / "north.onnx", "onnx")
    assert not list(tmp_path.iterdir())
    export(replace(site, training_rows=None), tmp_path / "north.onnx", "onnx")


@pytest.mark.long
@pytest.mark.parametrize("method", ["forest", "boost"])
def test_trees_of_an_onnx_file_say_the_same_of_rows_between_those_of_training(method):
    """Every age and every tenth; in float32, and one rounding more or less."""
    frames = {site: codes(80, seed).drop(columns="perfed//network/x") for seed, site in enumerate(("north", "south"))}
    federation = Federation.from_frames(frames, target="sick", categories=["transformed_column"])
    site = done(method, federation, Model(head=linear(2))).site("north")
    new, session = codes(300, 7).drop(columns=["sick", "perfed//network/x"]), session_of(site)
    said = site.predict_proba(new)
    for factor in (1, 1 - 1e-7, 1 + 1e-7):
        changed = new.assign(**{name: new[name] * factor for name in ("probabilities", "values")})
        np.testing.assert_array_equal(site.predict_proba(changed), said)
        np.testing.assert_allclose(answers(session, changed), said, atol=1e-6)


@pytest.mark.long
def test_what_cannot_be_a_site_is_refused(tmp_path):
    run = done("fedrep-tsne", blobs((12, 9, 7)))
    with pytest.raises(PerfedError, match="it has no model for new ones"):
        run.site("c0")
    with pytest.raises(PerfedError, match="unknown client 'nobody'"):
        finished("fedavg")[0].site("nobody")

    class Fickle(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else -super().forward(x)

    model = Model(body=lambda shape: Fickle(shape[0], 4), head=linear(3))
    site = done("local", blobs(), model).site("c0")
    assert site.predict_proba(np.ones((2, 4))).shape == (2, 3)  # which needs no graph
    with pytest.raises(PerfedError, match=r"site 'c0': its model cannot be made a graph by torch\.export") as error:
        site.save(tmp_path / "site")
    assert "\n" not in str(error.value)


def test_another_format_and_missing_packages_are_one_line(tmp_path, monkeypatch):
    site = finished("fedavg")[1]
    with pytest.raises(PerfedError, match="format 'pmml' is not known; allowed: onnx, pt2, safetensors"):
        export(site, tmp_path / "a.pmml", "pmml")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PerfedError, match=r"writing ONNX files needs .*\[onnx\]"):
        export(site, tmp_path / "a.onnx", "onnx")
    assert not list(tmp_path.iterdir())
