"""Names and labels of arrays whose accents are composed (NFC) or decomposed (NFD): they are compared as the same."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import perfed
from torch.utils.data import TensorDataset

from perfed import Federation, PerfedError, load_site
from perfed.data.client import Client
from perfed.data.facts import ClientFacts, SplitFacts
from perfed.data.new_client import new_client
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.run.run import Run
from perfed.tables.site_data import read_site_data

FORMS = ("NFC", "NFD")


def write(text: str, form: str) -> str:
    return unicodedata.normalize(form, text)


def arrays(seed: int, form: str, *, frame: bool = True) -> dict[str, object]:
    """One client's arrays, whose texts are in one form."""
    rng = np.random.default_rng(seed)
    names = [write(name, form) for name in ("größe", "âge")]
    y = np.array([write(label, form) for label in ("möglich", "sûr", "non") * 4])
    x = rng.normal(size=(12, 2)) + 2 * (y == y[0])[:, None]
    x_test = pd.DataFrame(x[:6], columns=names) if frame else x[:6]
    own = {"x_train": pd.DataFrame(x, columns=names) if frame else x, "y_train": y, "x_test": x_test, "y_test": y[:6]}
    return own if frame else own | {"feature_names": np.array(names)}


def from_arrays(forms: dict[str, str]) -> Federation:
    return Federation.from_arrays({site: arrays(seed, form) for seed, (site, form) in enumerate(forms.items())})


def from_source(forms: dict[str, str]) -> Federation:
    places = list(forms)
    return Federation.from_source(lambda site: arrays(places.index(site), forms[site], frame=False), places)


def from_folder(forms: dict[str, str], folder: Path) -> Federation:
    for seed, (site, form) in enumerate(forms.items()):
        np.savez(folder / f"{site}.npz", **arrays(seed, form, frame=False))
    return Federation.from_folder(folder)


def build(way: str, forms: dict[str, str], folder: Path) -> Federation:
    if way == "folder":
        return from_folder(forms, folder)
    return {"arrays": from_arrays, "source": from_source}[way](forms)


@pytest.mark.parametrize("way", ["arrays", "source", "folder"])
def test_labels_and_columns_of_both_forms_are_the_same(way, tmp_path):
    for folder in ("mixed", "composed"):
        (tmp_path / folder).mkdir()
    mixed = build(way, {"a": "NFC", "b": "NFD"}, tmp_path / "mixed")
    composed = build(way, {"a": "NFC", "b": "NFC"}, tmp_path / "composed")
    assert mixed.classes == composed.classes == tuple(sorted(write(c, "NFC") for c in ("möglich", "sûr", "non")))
    for one, other in zip(mixed, composed, strict=True):
        assert one.feature_names == other.feature_names
        assert torch.equal(one.train.loaded().y, other.train.loaded().y)
    run = Run(mixed, build_method("fedavg", {}), Model(head=linear(3)), rounds=1)
    assert len(run.execute()["metrics"]) > 0


def test_feature_names_given_beside_a_frame_may_have_the_other_form():
    client = arrays(0, "NFC") | {"feature_names": [write("größe", "NFD"), write("âge", "NFD")]}
    assert Federation.from_arrays({"a": client}).clients[0].feature_names == ("größe", "âge")
    with pytest.raises(PerfedError, match="in column 0"):
        Federation.from_arrays({"a": client | {"feature_names": [write("âge", "NFD"), write("größe", "NFD")]}})


@pytest.mark.parametrize("form", FORMS)
def test_class_names_may_have_the_other_form(form):
    names = [write(name, form) for name in ("sûr", "non", "möglich")]
    federation = Federation.from_arrays({"a": arrays(0, "NFC"), "b": arrays(1, "NFD")}, class_names=names)
    assert federation.class_names == tuple(names) and federation.classes == ("sûr", "non", "möglich")
    assert [client.train.y[:3].tolist() for client in federation] == [[2, 0, 1], [2, 0, 1]]


def test_facts_and_clients_compose_the_names_of_their_features():
    size = write("größe", "NFD")
    facts = [
        ClientFacts(site, {"train": SplitFacts(3, (1,), classes=(3,))}, (name,))
        for site, name in (("a", size), ("b", "größe"))
    ]
    federation = Federation.from_source(None, facts, num_classes=1)
    assert [client.feature_names for client in federation] == [("größe",), ("größe",)]
    assert facts[0].nameless.feature_names == facts[1].nameless.feature_names
    client = Federation.from_arrays(
        {"a": {"x_train": torch.ones(3, 1), "y_train": torch.zeros(3, dtype=torch.int64)}}
    ).clients[0]
    named = Client("b", client.train, feature_names=(size,))
    assert named.feature_names == ("größe",) and named.original_name("größe") == size


@pytest.mark.parametrize(
    "build_twice",
    [
        lambda ids, _: Federation.from_arrays({site: arrays(0, "NFC") for site in ids}),
        lambda ids, _: Federation.from_source(lambda site: arrays(0, "NFC"), ids),
        lambda ids, _: Federation.from_datasets(
            {site: (TensorDataset(torch.eye(2), torch.arange(2)),) * 2 for site in ids}
        ),
        lambda ids, folder: from_folder(dict.fromkeys(ids, "NFC"), folder),
    ],
    ids=["arrays", "source", "data sets", "folder"],
)
def test_two_clients_whose_ids_differ_in_form_alone_are_refused(build_twice, tmp_path):
    with pytest.raises(PerfedError, match="occurs twice; ids must be unique"):
        build_twice([write("Köln", form) for form in FORMS], tmp_path)


def test_columns_that_differ_in_form_alone_are_refused():
    names = [write("größe", form) for form in FORMS]
    with pytest.raises(PerfedError, match="several columns are called 'größe'"):
        Federation.from_arrays({"a": {"x_train": np.eye(2), "y_train": [0, 1], "feature_names": names}})


def test_a_site_sends_composed_labels(tmp_path):
    for form in FORMS:
        np.savez(tmp_path / f"{form}.npz", **arrays(0, form, frame=False))
    composed, decomposed = (read_site_data("a", tmp_path / f"{form}.npz").create_metadata() for form in FORMS)
    assert composed == decomposed and composed.classes == ("möglich", "non", "sûr")


def finished(forms: dict[str, str]) -> Run:
    run = Run(from_arrays(forms), build_method("fedavg", {}), Model(head=linear(3)), rounds=2)
    run.execute()
    return run


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_new_client_and_new_rows_may_have_either_form(form, tmp_path):
    town = write("Köln", "NFD")
    run = finished({town: "NFD", "b": "NFC"})
    with pytest.raises(PerfedError, match="is in the run already"):
        new_client(run.federation, write("Köln", form), arrays(2, form))
    joined = new_client(run.federation, "new", arrays(2, form))
    assert torch.equal(joined.train.y, new_client(run.federation, "new", arrays(2, "NFC")).train.y)
    assert list(run.join(joined).classes_) == [write(label, form) for label in ("möglich", "non", "sûr")]

    site = run.site(write("Köln", form))
    assert site.site == town
    frame = arrays(3, form)["x_test"][[write("âge", form), write("größe", form)]]  # in another order
    expected = site.predict_proba(arrays(3, "NFD")["x_test"])
    for model in (site, load_site(site.save(tmp_path / "site"))):
        np.testing.assert_array_equal(model.predict_proba(frame), expected)
        assert list(model.feature_names_in_) == [write("größe", "NFD"), write("âge", "NFD")]
        assert set(model.classes_) == {write(label, "NFD") for label in ("möglich", "sûr", "non")}
    logits = run.predict(write("Köln", form), arrays(3, form)["x_test"])
    assert logits.shape == (6, 3)


@pytest.mark.parametrize("form", FORMS)
def test_domains_of_new_rows_may_have_either_form(form):
    client = arrays(0, "NFC") | {"domain_train": [0, 1] * 6, "domain_test": [0, 1] * 3}
    names = [write("Süd", "NFD"), "Nord"]
    federation = Federation.from_arrays({"a": client, "b": client}, domain_names=names)
    run = Run(federation, build_method("feddar-wa", {}), Model(head=linear(3)), rounds=1)
    run.execute()
    site, x = run.site("a"), np.asarray(client["x_test"])
    domain = [write("Süd", form), "Nord"] * 3
    np.testing.assert_array_equal(site.predict_proba(x, domain), site.predict_proba(x, [0, 1] * 3))


DATA = """
import unicodedata
import numpy as np
from perfed import Federation
from perfed.datasets import dataset

@dataset("wards")
def wards(seed, data_dir):
    labels, names = (unicodedata.normalize("NFD", text).split() for text in ("möglich sûr", "größe âge"))
    y = np.array(labels * 10)
    arrays = {"x_train": np.eye(2)[[0, 1] * 10], "y_train": y, "feature_names": names}
    arrays |= {"x_test": arrays["x_train"], "y_test": y}
    return Federation.from_arrays({unicodedata.normalize("NFD", "Köln"): arrays, "Bonn": arrays})
"""


@pytest.mark.long
def test_commands_take_both_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("accented_wards.py").write_text(DATA, encoding="utf-8")
    Path("study.toml").write_text(
        'method = "fedavg"\nrounds = 2\n[data]\nname = "accented_wards:wards"\n[model]\nhead = "linear"\n'
    )
    assert perfed("run", "study.toml", "--out", "run", "--trust").code == 0
    rows = "âge,größe,y\n" + "0,1,möglich\n1,0,sûr\n" * 8
    for name, form in (("NFC", "NFC"), ("NFD", "NFD")):
        Path(f"{name}.csv").write_text(write(rows, form), encoding="utf-8")
        Path(f"{name}-rows.csv").write_text(write("âge,größe\n0,1\n1,0\n", form), encoding="utf-8")
        taken = perfed("join", "run", "--trust", f"{name}.csv", "--site", write("Köln", form))
        assert taken.code == 2 and "is in the run already" in taken.err
    ordered = rows.replace("âge,größe", "größe,âge")
    Path("new.csv").write_text(write(ordered, "NFC"), encoding="utf-8")
    assert perfed("join", "run", "--trust", "new.csv", "--site", write("Süd", "NFD")).code == 0
    again = perfed("join", "run", "--trust", "new.csv", "--site", write("Süd", "NFC"))
    assert again.code == 2 and "has joined already" in again.err
    for site in ("Köln", "Süd"):
        answers = []
        for form in FORMS:
            result = perfed(
                "predict",
                "run",
                "--trust",
                f"{form}-rows.csv",
                "--site",
                write(site, form),
                "--out",
                f"{form}-{site}.csv",
            )
            assert result.code == 0, result.err
            answers.append(Path(f"{form}-{site}.csv").read_text(encoding="utf-8"))
        assert answers[0] == answers[1]
        assert write("möglich", "NFD" if site == "Köln" else "NFC") in answers[0]
