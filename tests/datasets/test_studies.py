"""The data of the three studies: hospitals, images and texts, patients."""

from __future__ import annotations

import flamby_start
import numpy as np
import pytest
import torch
from data_files import require_file
from sklearn.model_selection import train_test_split

from perfed.datasets import describe, load
from perfed.datasets.heart import read_hospitals
from perfed.errors import PerfedError

# ---- heart-disease: four hospitals


def test_hospitals_have_the_columns_that_they_measured():
    with np.load(require_file("heart_disease.npz")) as data:
        x, names, hospital = data["x"], data["feature_names"].tolist(), data["hospital"]
        sites = data["hospital_names"].tolist()
    chol = names.index("chol")
    x[x[:, chol] == 0, chol] = np.nan
    frames = read_hospitals(None)
    for number, site in enumerate(sites):
        missing = np.isnan(x[hospital == number]).mean(0)
        expected = {name for name, share in zip(names, missing, strict=True) if share < 0.9}
        assert set(frames[site].columns) == expected | {"disease"}
    assert "ca" in frames["cleveland"] and all("ca" not in frames[site] for site in sites[1:])
    assert "thal" not in frames["hungarian"] and "chol" not in frames["switzerland"]


@pytest.mark.long
def test_every_patient_is_tested_once_in_five_folds():
    require_file("heart_disease.npz")
    federations = [load("heart-disease", {}, seed=seed) for seed in range(5)]
    frames = read_hospitals(None)
    for site, frame in frames.items():
        clients = [client for federation in federations for client in federation if client.id == site]
        assert sum(len(client.test) for client in clients) == len(frame)
        ill = sum(int(client.test.y.sum()) for client in clients)
        assert ill == (frame["disease"] == "yes").sum()
    assert federations[0].classes == ("no", "yes")
    assert len({client.input_shape for client in federations[0]}) == 4
    union = load("heart-disease", {"columns": "union"}, seed=0)
    assert len({client.input_shape for client in union}) == 1


@pytest.mark.long
def test_a_hospitals_model_takes_its_own_table():
    require_file("heart_disease.npz")
    frames = read_hospitals(None)
    for client in load("heart-disease", {}, seed=0):
        x, _ = client.table.transform(frames[client.id].drop(columns="disease"))
        assert x.shape == (len(frames[client.id]), *client.input_shape)


# ---- flamby-heart, flamby-tcga: FLamby's rows and splits


def test_flambys_hospitals_are_split_as_scikit_learn_splits_them():
    """FLamby's program: 66 % to train on, random_state 43, by class where a hospital has more than two of each."""
    with np.load(require_file("heart_disease.npz")) as data:
        rows = data["flamby_rows"]
        x, y, hospital = data["x"][rows], data["y"][rows], data["hospital"][rows]
        names, sites = data["feature_names"].tolist(), data["hospital_names"].tolist()
    assert not np.isnan(x[:, :10]).any()
    for client in load("flamby-heart", {}, seed=0):
        own = hospital == sites.index(client.id)
        strata = y[own] if min(np.bincount(y[own], minlength=2)) > 2 else None
        parts = train_test_split(
            np.arange(own.sum()), train_size=0.66, test_size=0.34, random_state=43, stratify=strata
        )
        train, test = map(np.sort, parts)
        assert client.train.y.tolist() == y[own][train].tolist() and client.test.y.tolist() == y[own][test].tolist()
        age = x[own, names.index("age")].astype(np.float64)
        expected = (age[test] - age[train].mean()) / age[train].std(ddof=1)
        np.testing.assert_allclose(client.test.x[:, 0].numpy(), expected, rtol=1e-5)
        pain, inputs = x[own, names.index("cp")][train], client.train.x[:, client.feature_names.index("cp_3")].numpy()
        high, low = inputs[pain == 3], inputs[pain != 3]
        assert np.ptp(high) < 1e-6 and np.ptp(low) < 1e-6 and high.min() > low.max()
    sizes = [(len(client.train), len(client.test)) for client in load("flamby-heart", {}, seed=1)]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]


def test_flambys_pooled_training_has_two_scales():
    """Training rows are scaled over all hospitals, test rows each hospital's by itself."""
    require_file("heart_disease.npz")
    own, all_, mixed = (load("flamby-heart", {"scaling": scaling}, seed=0) for scaling in ("own", "all", "mixed"))
    x = torch.cat([client.train.x for client in all_]).double()
    torch.testing.assert_close(x.mean(0), torch.zeros(13).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(13).double(), atol=1e-5, rtol=0)
    for one, other, both in zip(own, all_, mixed, strict=True):
        assert torch.equal(both.train.x, other.train.x) and torch.equal(both.test.x, one.test.x)
        assert not torch.equal(other.test.x, one.test.x)


def test_flambys_regions_have_times_events_and_its_split():
    with np.load(require_file("tcga_brca.npz")) as data:
        event, center, train = data["event"], data["center"], data["is_train"]
    federation = load("flamby-tcga", {}, seed=0)
    assert federation.task == "survival" and federation.clients[0].input_shape == (39,)
    assert [(len(c.train), len(c.test)) for c in federation] == [
        (248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)
    ]  # fmt: skip
    assert [client.test.events for client in federation] == [
        int(event[(center == region) & ~train].sum()) for region in range(6)
    ]


def test_flambys_age_can_be_scaled_over_all_regions():
    require_file("tcga_brca.npz")
    plain, scaled = (load("flamby-tcga", {"scale_age": scale}, seed=0) for scale in (False, True))
    years = torch.cat([client.train.x[:, 0] for client in plain])
    assert years.min() >= 26 and years.max() <= 90
    for before, after in zip(plain, scaled, strict=True):
        for was, now in ((before.train.x, after.train.x), (before.test.x, after.test.x)):
            torch.testing.assert_close(now[:, 0] * years.std() + years.mean(), was[:, 0])
            assert torch.equal(now[:, 1:], was[:, 1:])


@pytest.mark.long
def test_flambys_published_figures_come_again_from_their_seeds():
    require_file("tcga_brca.npz")
    require_file("heart_disease.npz")
    regions, wards = (flamby_start.sites(name) for name in ("flamby-tcga", "flamby-heart"))
    with torch.random.fork_rng():
        found = flamby_start.tcga(regions, 42)
        _, after = (flamby_start.heart(wards, seed) for seed in (42, 43))
    assert found == pytest.approx({name: flamby_start.THEIRS[name][0] for name in found}, abs=6e-5)
    assert after == pytest.approx({name: flamby_start.THEIRS[name][1] for name in after}, abs=6e-5)


@pytest.mark.parametrize(("name", "file"), [("flamby-heart", "heart_disease.npz"), ("flamby-tcga", "tcga_brca.npz")])
def test_pooled_sites_train_on_the_rows_of_all(name, file):
    require_file(file)
    apart, pooled, first = (load(name, {"train_rows": rows}, seed=0) for rows in ("own", "all", "first"))
    together = torch.cat([client.train.x for client in apart]).sum(0)
    for own, all_ in zip(apart, pooled, strict=True):
        torch.testing.assert_close(all_.train.x.sum(0), together)
        assert torch.equal(own.test.x, all_.test.x) and torch.equal(own.test.y, all_.test.y)
    assert all(torch.equal(client.train.x, apart.clients[0].train.x) for client in first)


# ---- wiki-crossmodal: images or texts


def test_half_of_the_clients_have_images_and_half_have_texts():
    require_file("wiki_crossmodal.npz")
    federation = load("wiki-crossmodal", {}, seed=3)
    kind = federation.notes["kind"]
    assert sorted(kind.values()) == ["image"] * 10 + ["text"] * 10
    total = {"train": 0, "test": 0}
    for client in federation:
        wide = {"image": 128, "text": 100}[kind[client.id]]
        assert client.input_shape == (wide,) and len(client.train.y.unique()) == 4
        assert set(client.test.y.tolist()) <= set(client.train.y.tolist())
        torch.testing.assert_close(client.train.x.mean(0), torch.zeros(wide), atol=1e-4, rtol=0)
        torch.testing.assert_close(client.train.x.std(0, correction=0), torch.ones(wide), atol=1e-3, rtol=0)
        for split in total:
            total[split] += len(client.split(split))
    held = sorted({label for client in federation for label in client.train.y.tolist()})
    assert held == list(range(10)) and total == {"train": 2173, "test": 693}  # nobody has what another has


def test_all_features_with_zeros_for_those_that_a_client_has_not():
    require_file("wiki_crossmodal.npz")
    own, union = (load("wiki-crossmodal", {"clients": 4, "columns": columns}, seed=1) for columns in ("own", "union"))
    for ours, wide in zip(own, union, strict=True):
        zeros = torch.zeros(len(ours.test), 228 - ours.input_shape[0])
        parts = [ours.test.x, zeros] if own.notes["kind"][ours.id] == "image" else [zeros, ours.test.x]
        torch.testing.assert_close(wide.test.x, torch.cat(parts, 1), atol=0, rtol=0)
        assert torch.equal(ours.test.y, wide.test.y)


def test_few_articles_per_client():
    require_file("wiki_crossmodal.npz")
    federation = load("wiki-crossmodal", {"clients": 5, "samples_per_client": 30}, seed=0)
    assert [len(client.train) for client in federation] == [30] * 5
    assert sorted(federation.notes["kind"].values()) == ["image"] * 2 + ["text"] * 3


# ---- parkinsons: one client a patient


def test_patients_are_tested_on_their_later_recordings():
    with np.load(require_file("parkinsons.npz")) as data:
        y, patient, names = data["motor_updrs"], data["patient"], data["feature_names"].tolist()
    federation = load("parkinsons", {"target": "motor", "later_validation": 0.25}, seed=0)
    assert len(federation) == 42 and federation.task == "regression"
    time, age = names.index("test_time"), names.index("age")
    for client in federation:
        parts = [client.train, client.validation, client.test]
        assert parts[0].x[:, time].max() <= parts[1].x[:, time].min()
        assert parts[1].x[:, time].max() <= parts[2].x[:, time].min()
        assert client.train.x[:, age].unique().numel() == 1
        found = np.sort(np.concatenate([federation.target_scale.up(part.y).numpy() for part in parts]))
        np.testing.assert_allclose(found, np.sort(y[patient == int(client.id)]), rtol=1e-6)
    x = torch.cat([client.train.x for client in federation]).double()
    torch.testing.assert_close(x.mean(0), torch.zeros(19).double(), atol=1e-5, rtol=0)
    together = torch.cat([client.train.y for client in federation]).double()
    assert float(together.mean()) == pytest.approx(0, abs=1e-6) and float(together.std()) == pytest.approx(1, abs=1e-3)
    assert describe("parkinsons").task == "regression"


def test_recordings_at_random():
    require_file("parkinsons.npz")
    later, mixed = (load("parkinsons", {"split": split}, seed=0) for split in ("later", "random"))
    assert [len(client.test) for client in later] == [len(client.test) for client in mixed]
    assert all(client.train.x[:, 2].max() > client.test.x[:, 2].min() for client in mixed)


# ---- files that are not what they should be


@pytest.mark.parametrize(
    ("name", "arrays", "problem"),
    [
        ("heart-disease", {"y": np.array([0, 1, 2])}, "'y' must hold 0 or 1 for every row of 'x'"),
        ("heart-disease", {"hospital": np.array([0, 0, 1])}, "'hospital' must hold positions in 'hospital_names'"),
        ("wiki-crossmodal", {"text": np.zeros((2, 4))}, "'text' must have a row per label"),
        ("wiki-crossmodal", {"y": np.array([0, 1, 10])}, r"'y' must hold labels in 0\.\.9"),
        ("parkinsons", {"patient": np.array([1, 2])}, "'x', the scores and 'patient' differ"),
        ("parkinsons", {"feature_names": np.array(["age", "sex"])}, "'feature_names' must have 'test_time'"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, name, arrays, problem):
    whole = {
        "heart-disease": {
            "x": np.zeros((3, 2), np.float32),
            "y": np.array([0, 1, 1]),
            "hospital": np.zeros(3, int),
            "hospital_names": np.array(["one"]),
            "feature_names": np.array(["age", "chol"]),
        },
        "wiki-crossmodal": {
            "image": np.zeros((3, 5)),
            "text": np.zeros((3, 4)),
            "y": np.array([0, 1, 1]),
            "train_index": np.arange(2),
            "test_index": np.array([2]),
        },
        "parkinsons": {
            "x": np.zeros((3, 2)),
            "total_updrs": np.zeros(3),
            "patient": np.array([1, 1, 2]),
            "feature_names": np.array(["age", "test_time"]),
        },
    }[name]
    (file,) = describe(name).files
    np.savez(tmp_path / file, **(whole | arrays))
    with pytest.raises(PerfedError, match=f"file '{file}': {problem}"):
        load(name, {}, seed=0, data_dir=tmp_path)
