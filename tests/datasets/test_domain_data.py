"""Data whose domains are known: mixtures at the clients, digits of five origins, UCI Adult, folders of images."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import perfed
from data_files import require_file
from engines import ENGINES, difference, quick, serve, train
from scipy.stats import kstest
from test_pooled import counts, give, names, pool
from test_pooled import folder as folder  # a fixture

from perfed.data.federation import Federation
from perfed.data.partition.dirichlet import balance_labels, draw_inner_dirichlet_counts
from perfed.data.partition.label_skew import distribute_all
from perfed.datasets import describe, load
from perfed.datasets.digits import DOMAINS, Resized
from perfed.datasets.pool import Pool
from perfed.errors import PerfedError
from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import start
from perfed.methods.feddar.feddar import FedDAR
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp


def with_domains(shares: Sequence[float], per_class: int = 300) -> Pool:
    """The pool of the other tests, each sample of a random domain."""
    plain = pool(per_class=per_class)
    rng = np.random.default_rng(0)
    drawn = {f"domain_{s}": rng.choice(len(shares), size=len(getattr(plain, f"y_{s}")), p=shares) for s in SPLITS}
    return replace(plain, domain_names=tuple(f"d{m}" for m in range(len(shares))), **drawn)


SPLITS = ("train", "test")
SHARES = (0.5, 0.3, 0.15, 0.05)


def held(federation: Federation, split: str, domains: int = 4) -> np.ndarray:
    """``(clients, domains)`` samples."""
    parts = [getattr(client, split).domain for client in federation]
    return np.array([np.bincount(part, minlength=domains) for part in parts])


def total(pool_: Pool, split: str) -> np.ndarray:
    return np.bincount(getattr(pool_, f"domain_{split}"), minlength=len(pool_.domain_names))


# Mixtures ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_mixtures_have_the_moments_of_the_dirichlet_distribution(alpha):
    """Mean p and variance p (1 - p) / (alpha + 1), where no domain runs out."""
    p, clients, size = np.array(SHARES), 4000, 500
    table = draw_inner_dirichlet_counts(np.full(4, clients * size), np.full(clients, size), alpha * p, seed=0)
    assert (table.sum(axis=1) == size).all()
    mixtures = table / size
    variance = p * (1 - p) / (alpha + 1)
    assert np.abs(mixtures.mean(axis=0) - p).max() < 4 * np.sqrt(variance.max() / clients)
    assert np.allclose(mixtures.var(axis=0), variance, rtol=0.15, atol=1e-6)


def test_a_domain_that_is_not_to_be_drawn_is_not_and_one_value_means_all():
    none_of_last = draw_inner_dirichlet_counts(np.full(3, 1000), np.full(10, 50), np.array([1.0, 1.0, 0.0]), seed=0)
    assert (none_of_last[:, 2] == 0).all() and (none_of_last.sum(axis=1) == 50).all()
    same = [draw_inner_dirichlet_counts(np.full(3, 1000), np.full(10, 50), c, seed=0) for c in (0.7, np.full(3, 0.7))]
    assert np.array_equal(*same)
    tiny = draw_inner_dirichlet_counts(np.full(3, 1000), np.full(10, 50), np.full(3, 1e-4), seed=0)
    assert (tiny.max(axis=1) == 50).all()
    for bad in (0.0, np.zeros(3)):
        with pytest.raises(PerfedError, match=r"concentration = 0.0 is not allowed"):
            draw_inner_dirichlet_counts(np.full(3, 1000), np.full(10, 50), bad, seed=0)


def test_exact_sizes_no_sample_twice_and_the_domains_are_the_samples_own():
    source = with_domains(SHARES)
    federation = give(of=source, partition="domain-mixed", clients=8, samples=[100, 200], alpha=0.5)
    assert set(held(federation, "train").sum(axis=1)) == {100, 200}
    for split in SPLITS:
        found = names(federation, split)
        together = np.concatenate(found)
        assert len(together) == len(np.unique(together))
        for part, client in zip(found, federation, strict=True):
            data = getattr(client, split)
            assert np.array_equal(getattr(source, f"domain_{split}")[part], data.domain)
            assert np.array_equal(getattr(source, f"y_{split}")[part], data.y)
    assert federation.domain_names == ("d0", "d1", "d2", "d3") and federation.num_domains == 4


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_every_client_can_have_as_many_of_each_label(alpha):
    """With the mixtures that the same draw has without it, where no label of a domain runs out."""
    source = with_domains((0.4, 0.3, 0.3))
    options = {"partition": "domain-mixed", "clients": 5, "samples": 104, "alpha": alpha}
    even, plain = (give(of=source, **options, uniform_labels=flag) for flag in (True, False))
    labels = counts(even, "train")
    assert (labels.sum(axis=1) == 104).all() and set(labels.ravel()) == {10, 11}
    assert np.array_equal(held(even, "train", 3), held(plain, "train", 3))
    assert (counts(plain, "train").std(axis=1) > labels.std(axis=1)).all()
    found = np.concatenate(names(even, "train"))
    assert len(found) == len(np.unique(found)) and np.array_equal(held(even, "test", 3), held(plain, "test", 3))


def test_a_label_that_a_domain_lacks_comes_from_the_others():
    available = np.array([[0, 50], [50, 50]])  # none of label 0 in the first domain
    table = balance_labels(np.array([[18, 2], [6, 4]]), available, seed=0)
    assert table.sum(axis=1).tolist() == [[10, 10], [5, 5]]
    assert table[:, 0, 0].tolist() == [0, 0] and table[0].tolist() == [[0, 10], [10, 0]]
    with pytest.raises(PerfedError, match="label 0 has 50 samples, but the clients need 60 for as many of each label"):
        balance_labels(np.array([[60, 60]]), available, seed=0)


def test_other_partitions_keep_the_domains_too():
    source = with_domains(SHARES)
    federation = give(of=source, partition="dirichlet", clients=4)
    for part, client in zip(names(federation, "train"), federation, strict=True):
        assert np.array_equal(source.domain_train[part], client.train.domain)
    assert give(partition="iid", clients=4).num_domains == 0


def test_the_test_data_of_every_domain_are_used_once_in_proportion_to_the_training_samples():
    source = with_domains(SHARES)
    federation = give(of=source, partition="domain-mixed", clients=6, samples=200, alpha=1.0)
    given, tested = held(federation, "train"), held(federation, "test")
    assert np.array_equal(tested.sum(axis=0), total(source, "test"))
    assert np.abs(tested - given / given.sum(axis=0) * total(source, "test")).max() < 1
    assert (tested[given == 0] == 0).all() and (given == 0).any()
    fixed = give(of=source, partition="domain-mixed", clients=6, samples=200, test_samples=40, alpha=1.0)
    assert np.abs(held(fixed, "test") - held(fixed, "train") / 200 * 40).max() < 1
    assert distribute_all(np.array([[3, 0], [1, 0]]), np.array([8, 5]), seed=0).tolist() == [[6, 0], [2, 0]]


def test_a_domain_that_runs_out_is_used_up_and_clients_get_more_of_their_others():
    source = with_domains((0.49, 0.49, 0.02))  # about 60 of 3000 samples; 10 x 100 / 3 are wanted
    options = {"partition": "domain-mixed", "clients": 10, "samples": 100, "alpha": 5.0, "prior": "uniform"}
    given = held(give(of=source, **options), "train", 3)
    assert given[:, 2].sum() == total(source, "train")[2] and (given.sum(axis=1) == 100).all()
    everything = held(give(of=source, **{**options, "samples": 300}), "train", 3)
    assert np.array_equal(everything.sum(axis=0), total(source, "train"))
    with pytest.raises(PerfedError) as error:
        give(of=source, **{**options, "samples": 301})
    assert str(error.value) == (
        "10 clients ask for 3010 training samples, but there are 3000; use fewer clients or a smaller data.samples"
    )
    with pytest.raises(PerfedError, match=r"domain 'd2' has \d+ test samples, but the clients need \d+; use a smaller"):
        give(of=source, **options, test_samples=100)


def test_the_prior_is_the_share_of_the_training_data_or_uniform():
    source = with_domains(SHARES, per_class=6000)
    options = {"partition": "domain-mixed", "clients": 200, "samples": 10, "alpha": 1000.0}
    mean = {p: held(give(of=source, prior=p, **options), "train").mean(axis=0) / 10 for p in ("shares", "uniform")}
    assert np.abs(mean["shares"] - SHARES).max() < 0.03
    assert np.abs(mean["uniform"] - 0.25).max() < 0.03


@pytest.mark.long
def test_alpha_is_that_of_the_whole_distribution():
    source = with_domains(SHARES, per_class=6000)
    federation = give(of=source, partition="domain-mixed", clients=1000, samples=20, alpha=1.0)
    p = total(source, "train") / 60_000
    mixtures = held(federation, "train") / 20
    assert mixtures.var(axis=0).sum() == pytest.approx((p * (1 - p) / 2).sum(), rel=0.1)


def test_domains_without_holders_are_noted_and_their_test_data_left_out():
    source = with_domains((0.25, 0.25, 0.25, 0.25))
    federation = give(of=source, partition="domain-mixed", clients=2, samples=50, alpha=0.01)
    absent = np.flatnonzero(held(federation, "train").sum(axis=0) == 0)
    assert federation.notes["domains_nobody_holds"] == [f"d{m}" for m in absent] and len(absent) > 0
    assert (held(federation, "test").sum(axis=0)[absent] == 0).all()


def test_mixtures_are_functions_of_the_seed_and_take_bounded_time():
    source = with_domains(SHARES, per_class=6000)
    options = {"partition": "domain-mixed", "clients": 100, "samples": 400, "alpha": 0.3}
    start = time.perf_counter()
    first, again, other = (names(give(seed, of=source, **options), "train") for seed in (0, 0, 1))
    assert time.perf_counter() - start < 10
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.long
def test_clients_with_mixtures_can_have_log_normal_sizes_too():
    source = with_domains(SHARES, per_class=16_000)
    federation = give(of=source, partition="domain-mixed", clients=2000, samples=60, size_spread=0.7)
    sizes = held(federation, "train").sum(axis=1)
    assert kstest(np.log(sizes), "norm", (np.log(60), 0.7)).pvalue > 0.05


# Digits of five origins --------------------------------------------------------------------------------------


def write_digits(folder: Path, name: str, num_train: int, num_test: int) -> None:
    """Images of one brightness each: image i has 4 (i mod 60)."""
    size, colour = DOMAINS[name]
    arrays: dict[str, Any] = {}
    for split, number in (("train", num_train), ("test", num_test)):
        value = (4 * (np.arange(number) % 60)).astype(np.uint8)
        shape = (size, size, 3) if colour else (size, size)
        arrays[f"x_{split}"] = np.broadcast_to(value.reshape(-1, *[1] * len(shape)), (number, *shape)).copy()
        arrays[f"y_{split}"] = np.arange(number) % 10
    np.savez(folder / f"{name}.npz", **arrays)


@pytest.fixture
def digits(folder) -> Path:
    for number, name in enumerate(DOMAINS):
        write_digits(folder, name, 100 * (number + 1), 20 * (number + 1))
    return Path(folder)


def test_five_origins_become_colour_images_of_one_size(digits):
    federation = load("digit-domains", {"samples": 200}, seed=0, data_dir=digits)
    assert len(federation) == 5 and federation.num_classes == 10 and federation.domain_names == tuple(DOMAINS)
    for client in federation:
        assert client.train.x.shape == (200, 3, 32, 32)
        grey = (client.train.x * 0.5 + 0.5) * 255
        assert (grey == grey[:, :1, :1, :1]).all()  # one brightness stays one brightness, in every colour
        assert torch.equal((grey[:, 0, 0, 0] / 4).round().long() % 10, client.train.y)  # 60 is a multiple of 10
    assert held(federation, "test", 5).sum(axis=0).tolist() == [20, 40, 60, 80, 100]


def test_images_are_resized_as_torch_does_it_and_found_in_their_array():
    rng = np.random.default_rng(0)
    grey, colour = rng.integers(0, 256, (7, 16, 16), np.uint8), rng.integers(0, 256, (5, 28, 28, 3), np.uint8)
    same = rng.integers(0, 256, (3, 32, 32, 3), np.uint8)
    index = np.array([14, 6, 0, 11, 7, 12])
    found = Resized([grey, colour, same])[index]
    assert found.shape == (6, 3, 32, 32) and found.dtype == np.uint8
    assert np.array_equal(found[0], same[2].transpose(2, 0, 1)) and np.array_equal(found[5], same[0].transpose(2, 0, 1))
    for row, source in ((1, grey[6][None]), (2, grey[0][None]), (3, colour[4].transpose(2, 0, 1))):
        assert (found[row, 0] == found[row, 1]).all() == (len(source) == 1)
        side = source.shape[-1]
        place = (np.arange(32) + 0.5) * side / 32 - 0.5  # centres of pixels, edges repeated
        low = np.clip(np.floor(place).astype(int), 0, side - 1)
        high, part = np.minimum(low + 1, side - 1), np.clip(place - np.floor(place), 0, 1) * (place > 0)
        for channel, image in enumerate(source.astype(float)):
            rows = image[low] * (1 - part)[:, None] + image[high] * part[:, None]
            by_hand = rows[:, low] * (1 - part) + rows[:, high] * part
            assert np.abs(found[row, channel] - by_hand).max() <= 0.5 + 1e-3
    assert len(Resized([grey])[np.zeros(0, dtype=np.int64)]) == 0


def test_some_of_the_origins_need_only_their_files(folder):
    write_digits(folder, "usps", 50, 10)
    write_digits(folder, "street_digits", 50, 10)
    options = {"domains": ["street_digits", "usps"], "clients": 2, "samples": 50}
    assert load("digit-domains", options, seed=0, data_dir=folder).domain_names == ("street_digits", "usps")
    for domains in ([], ["usps", "usps"]):
        with pytest.raises(PerfedError, match=r"data.domains = .* is not allowed; it must be different names, at lea"):
            load("digit-domains", {"domains": domains}, seed=0, data_dir=folder)
    with pytest.raises(PerfedError, match="it must be: list of one of 'mnist', 'usps', 'mnist_m_remade'"):
        load("digit-domains", {"domains": ["svhn"]}, seed=0, data_dir=folder)
    with pytest.raises(PerfedError, match=r"file 'mnist.npz' was not found"):
        load("digit-domains", {}, seed=0, data_dir=folder)
    np.savez(folder / "mnist_m_remade.npz", **dict(np.load(folder / "usps.npz")))
    with pytest.raises(PerfedError, match=r"'x_train' is uint8 \(50, 16, 16\), not uint8 \(samples, 28, 28, 3\)"):
        load("digit-domains", {"domains": ["mnist_m_remade"]}, seed=0, data_dir=folder)


# UCI Adult ---------------------------------------------------------------------------------------------------

NUMBERS = ["age", "hours"]
VALUES = {
    "row": [str(i) for i in range(300)],  # tells which row of the file a sample is
    "race": ["A", "B", "C"],
    "sex": ["F", "M"],
    "land": ["here", "there"],
}
COLUMNS = list(VALUES)
OPTIONS = {"clients": 4, "samples": 50}


def write_adult(folder: Path, **change: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"num_names": np.array(NUMBERS), "cat_names": np.array(COLUMNS)}
    arrays |= {f"categories_{name}": np.array(values) for name, values in VALUES.items()}
    for split, number in (("train", 300), ("test", 100)):
        others = [rng.integers(0, 3, number), rng.integers(0, 2, number), np.zeros(number)]  # nobody is from "there"
        arrays[f"cat_{split}"] = np.stack([np.arange(number), *others], axis=1).astype(np.int16)
        arrays[f"num_{split}"] = rng.integers(0, 90 if split == "train" else 900, (number, 2)).astype(np.int32)
        arrays[f"y_{split}"] = rng.integers(0, 2, number).astype(np.uint8)
    np.savez(folder / "adult.npz", **{**arrays, **change})
    return arrays


@pytest.mark.parametrize("domain", ["race", "sex"])
def test_categories_are_one_hot_and_numbers_standardised_over_training_rows(folder, domain):
    arrays = write_adult(folder)
    federation = load("adult", {**OPTIONS, "domain": domain}, seed=0, data_dir=folder)
    kept = [name for name in COLUMNS if name != domain]
    features = (*NUMBERS, *(f"{name}={value}" for name in kept for value in VALUES[name]))
    assert federation.domain_names == tuple(VALUES[domain]) and federation.num_classes == 2
    rows = {s: [getattr(c, s).x[:, 2:302].argmax(1).numpy() for c in federation] for s in SPLITS}
    used = np.concatenate(rows["train"])
    assert len(np.unique(used)) == 200 and sorted(np.concatenate(rows["test"])) == list(range(100))
    mean, std = arrays["num_train"][used].mean(axis=0), arrays["num_train"][used].std(axis=0)
    for split in SPLITS:
        for client, own in zip(federation, rows[split], strict=True):
            assert client.feature_names == features
            data = getattr(client, split)
            assert np.allclose(data.x[:, :2], (arrays[f"num_{split}"][own] - mean) / std, atol=1e-4)
            codes = arrays[f"cat_{split}"][own]
            by_hand = [np.eye(len(VALUES[name]))[codes[:, COLUMNS.index(name)]] for name in kept]
            assert np.array_equal(data.x[:, 2:], np.concatenate(by_hand, axis=1))
            assert np.array_equal(data.y, arrays[f"y_{split}"][own])
            assert np.array_equal(data.domain, codes[:, COLUMNS.index(domain)])


def test_clients_lack_whole_columns_of_their_own(folder):
    write_adult(folder)
    whole = load("adult", {**OPTIONS, "domain": "race"}, seed=0, data_dir=folder)
    lacking = load("adult", {**OPTIONS, "domain": "race", "missing": 0.4}, seed=0, data_dir=folder)
    absent = []
    for before, after in zip(whole, lacking, strict=True):
        kept = {name.partition("=")[0] for name in after.feature_names}
        place = [i for i, name in enumerate(before.feature_names) if name.partition("=")[0] in kept]
        assert after.feature_names == tuple(before.feature_names[i] for i in place) and len(kept) == 3  # of 5
        for split in SPLITS:
            one, other = getattr(before, split), getattr(after, split)
            assert torch.equal(one.x[:, place], other.x) and torch.equal(one.domain, other.domain)
        absent.append(frozenset({*NUMBERS, *COLUMNS} - {"race"} - kept))
    assert len(set(absent)) > 1
    most = load("adult", {**OPTIONS, "missing": 0.99}, seed=0, data_dir=folder)
    assert all(len({name.partition("=")[0] for name in client.feature_names}) == 1 for client in most)
    with pytest.raises(PerfedError, match=r"data.missing = 1.0 is not allowed; it must be: number >= 0 and < 1"):
        load("adult", {"missing": 1.0}, seed=0, data_dir=folder)


@pytest.mark.long
def test_flic_embeddings_under_heads_per_domain_where_columns_lack(folder):
    write_adult(folder)
    federation = load("adult", {**OPTIONS, "missing": 0.4}, seed=0, data_dir=folder)
    assert len({client.input_shape for client in federation}) > 1
    method = quick(FedDAR, placement={"embedding": "personal"}, extensions=(quick(Anchors),))
    model = Model(embedding=mlp((6,), 4), body=mlp((), 3), head=linear(2))
    runs = [train(serve(method, federation, model=model, **options), 1) for options in ENGINES.values()]
    assert all(difference(run, runs[0]) < 1e-8 for run in runs[1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cat_names": np.array(["row", "race", "colour", "land"])}, "'cat_names' does not hold 'sex'"),
        ({"num_test": np.zeros((9, 2), np.int32)}, "'num_test', 'cat_test' and 'y_test' do not fit each other and"),
        ({"categories_land": np.array([], dtype="U4")}, "'cat_train' must hold positions in 'categories_NAME'"),
        ({"cat_test": np.full((100, 4), -1)}, "'cat_test' must hold positions in 'categories_NAME'"),
        ({"y_train": np.full(300, 2)}, "'y_train' must hold 0 and 1"),
    ],
)
def test_broken_adult_files_are_refused(folder, change, says):
    write_adult(folder, **change)
    with pytest.raises(PerfedError) as error:
        load("adult", {"domain": "sex"}, seed=0, data_dir=folder)
    assert says in str(error.value) and "adult.npz" in str(error.value) and "\n" not in str(error.value)


# A folder of images ------------------------------------------------------------------------------------------

AGES, RACES = ("0-2", "20-29", "3-9"), ("Black", "White")


def write_faces(folder: Path, table: str = "faces.csv", first: int = 0, number: int = 60, **change: str) -> list[str]:
    """PNG images of one colour (4 i, 0, 255 - 4 i) and their table; returns its lines."""
    image = pytest.importorskip("PIL.Image", reason="Pillow (perfed[datasets]) is not installed")
    (folder / "img").mkdir(exist_ok=True)
    lines = [["file", "age", "race", "part", "sure"]]
    for i in range(first, first + number):
        image.new("RGB", (12, 9), (4 * i, 0, 255 - 4 * i)).save(folder / "img" / f"{i}.png")
        lines.append([f"img/{i}.png", AGES[i % 3], RACES[i // 3 % 2], "test" if i % 5 == 0 else "train", "yes"])
    with (folder / table).open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(lines)
    return (folder / table).read_text().splitlines()


def faces(where: Path, **options: Any) -> Federation:
    given = {"folder": str(where), "csv": "faces.csv", "clients": 2, "samples": 10, "image_size": 8}
    return load("faces", {**given, **options}, seed=0)


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """Which images these are, by their red."""
    assert (x == x[:, :, :1, :1]).all() and x.shape[1:] == (3, 8, 8)
    red, blue = (255 * (x[:, c, 0, 0] * s + m) for c, m, s in ((0, 0.485, 0.229), (2, 0.406, 0.225)))
    assert torch.allclose(red + blue, torch.full_like(red, 255), atol=1e-3)
    return (red / 4).round().long()


@pytest.mark.parametrize("how", [{"split": "part"}, {"test_csv": "more.csv"}, {"test_fraction": 0.25}])
def test_faces_have_the_labels_and_domains_of_their_rows(tmp_path, how):
    write_faces(tmp_path, number=48)
    write_faces(tmp_path, "more.csv", 48, 12)
    federation = faces(tmp_path, **how)
    assert federation.class_names == AGES and federation.domain_names == RACES and federation.augment is None
    found = {}
    for split in SPLITS:
        parts = [getattr(client, split) for client in federation]
        for part in parts:
            number = numbers_of(part.x)
            assert torch.equal(part.y, number % 3) and torch.equal(part.domain, number // 3 % 2)
        found[split] = torch.cat([numbers_of(part.x) for part in parts]).tolist()
        assert len(found[split]) == len(set(found[split]))
    assert not set(found["train"]) & set(found["test"]) and len(found["train"]) == 20
    if "split" in how:
        assert set(found["test"]) == {i for i in range(48) if i % 5 == 0}
    elif "test_csv" in how:
        assert set(found["test"]) == set(range(48, 60))
    else:  # a quarter of the 8 images of each label and domain
        assert np.bincount([i % 6 for i in found["test"]]).tolist() == [2] * 6


def test_columns_are_the_users_choice_and_tables_may_come_from_spreadsheets(tmp_path):
    write_faces(tmp_path)
    text = (tmp_path / "faces.csv").read_text()
    (tmp_path / "faces.csv").write_text("\ufeff" + text.replace("race", "Rasse"), encoding="utf-8")
    options = {"label": "Rasse", "domain": "age", "flip": True, "split": "part", "test_samples": 1}
    federation = faces(tmp_path, **options)
    assert federation.class_names == RACES and federation.domain_names == AGES
    assert federation.augment.flip and federation.augment.padding == 0
    assert [len(client.test) for client in federation] == [1, 1]


def test_only_images_that_clients_hold_are_read(tmp_path):
    write_faces(tmp_path)
    first = faces(tmp_path, split="part", test_samples=1)
    used = {int(i) for client in first for split in SPLITS for i in numbers_of(getattr(client, split).x)}
    unused = next(i for i in range(60) if i not in used)
    (tmp_path / "img" / f"{unused}.png").write_bytes(b"no image")
    again = faces(tmp_path, split="part", test_samples=1)
    assert all(torch.equal(a.train.x, b.train.x) for a, b in zip(first, again, strict=True))
    whole = (tmp_path / "img" / f"{min(used)}.png").read_bytes()
    for broken in (b"no image", whole[: len(whole) // 2]):
        (tmp_path / "img" / f"{min(used)}.png").write_bytes(broken)
        with pytest.raises(PerfedError) as error:
            faces(tmp_path, split="part", test_samples=1)
        says = str(error.value)
        assert says.startswith(f"'faces.csv', line {min(used) + 2}: image '") and f"{min(used)}.png' cannot be" in says
        assert "\n" not in says


@pytest.mark.parametrize(
    ("options", "edit", "says"),
    [
        ({"folder": ""}, None, "data.folder = '' is not a folder; it must be the one that holds the images"),
        ({"folder": "nowhere"}, None, "data.folder = 'nowhere' is not a folder"),
        ({"csv": ""}, None, "data.csv = '' is not a file in"),
        ({"csv": "labels.csv"}, None, "data.csv = 'labels.csv' is not a file in"),
        ({"test_csv": "labels.csv"}, None, "data.test_csv = 'labels.csv' is not a file in"),
        ({"test_csv": "faces.csv"}, None, "img/0.png' is already in 'faces.csv', line 2"),
        ({"test_csv": "faces.csv", "split": "part"}, None, "data.test_csv and data.split both say which images are"),
        (
            {"label": "gender"},
            None,
            "data.label = 'gender': 'faces.csv' has no such column; it has file, age, race, pa",
        ),
        ({"domain": "group"}, None, "data.domain = 'group': 'faces.csv' has no such column"),
        ({"file": "path"}, None, "data.file = 'path': 'faces.csv' has no such column"),
        ({"split": "fold"}, None, "data.split = 'fold': 'faces.csv' has no such column"),
        ({"split": "sure"}, None, "'faces.csv', line 2: column 'sure' says 'yes'; it must be train or test"),
        ({"split": "part"}, (",test,", ",train,"), "data.split = 'part': no row says 'test'; some must"),
        (
            {"split": "part"},
            ("0-2,Black,test", "80,Black,test"),
            "line 2: column 'age' says '80', which no training ro",
        ),
        ({"label": "sure"}, None, "data.label = 'sure': all training rows say 'yes'; two classes are needed"),
        ({}, ("img/7.png", "img/70.png"), "'faces.csv', line 9: there is no image '"),
        ({}, ("img/7.png,20-29", "img/7.png,"), "'faces.csv', line 9: column 'age' is empty"),
        ({"domain": "sure"}, ("img/7.png,20-29", "img/7.png"), "'faces.csv', line 9: column 'sure' is empty"),
        ({}, ("img/7.png", "img/8.png"), "line 10: image '"),
        ({"test_fraction": 1.0}, None, "data.test_fraction = 1.0 is not allowed; it must be: number > 0 and < 1"),
        (
            {"samples": 100},
            None,
            "2 clients ask for 200 training samples, but there are 48; use fewer clients or a small",
        ),
    ],
)
def test_faults_of_a_folder_are_one_line(tmp_path, options, edit, says):
    write_faces(tmp_path)
    if edit:
        text = (tmp_path / "faces.csv").read_text()
        assert edit[0] in text
        (tmp_path / "faces.csv").write_text(text.replace(*edit))
    with pytest.raises(PerfedError) as error:
        faces(tmp_path, **options)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"file,age,race\n"])
def test_tables_without_rows_or_text_are_refused(tmp_path, content):
    write_faces(tmp_path)
    (tmp_path / "faces.csv").write_bytes(content)
    with pytest.raises(PerfedError) as error:
        faces(tmp_path)
    assert "faces.csv" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("drops", [(), ("lr_drops=[1]",)])
def test_the_experiment_with_faces_has_as_many_of_each_label_and_drops_its_rate(tmp_path, monkeypatch, drops):
    """As it is shipped, with FairFace's names of files, on few small images and with one step a round.

    A first step of Adam moves a number by the rate; the mean over clients moves by it where they agree.
    """
    (tmp_path / "fairface").mkdir()
    write_faces(tmp_path / "fairface", "fairface_label_train.csv", number=48)
    write_faces(tmp_path / "fairface", "fairface_label_val.csv", 48, 12)
    monkeypatch.chdir(tmp_path)
    few = ("clients=3", "samples=12", "image_size=16", "rounds=2", "local_epochs=1", "dtype=float64")
    run = start(validate(override(find_experiment("feddar-faces"), [*few, *drops], ["feddar-sa"])))
    assert run.federation.class_names == AGES and run.federation.domain_names == RACES
    assert counts(run.federation, "train").tolist() == [[4, 4, 4]] * 3
    after: list[dict[str, torch.Tensor]] = []
    run.execute(lambda *_: after.append({name: x.clone() for name, x in run.server.sets["shared"].items()}))
    moved = [max(float((now[name] - then[name]).abs().max()) for name in then) for then, now in pairwise(after)]
    assert moved == pytest.approx([1e-4, 1e-5 if drops else 1e-4], rel=1e-3)


# The command line --------------------------------------------------------------------------------------------


def test_the_tables_show_the_domains(digits, monkeypatch):
    monkeypatch.setenv("PERFED_DATA", str(digits))
    monkeypatch.setenv("COLUMNS", "200")
    options = {"samples": 40, "alpha": 0.5}
    page = digits / "p.html"
    given = [f"{key}={value}" for key, value in options.items()]
    result = perfed("partition", "feddar-digits", "--show", *given, "--seed", 2, "--out", page)
    assert (result.code, result.err) == (0, "")
    federation = load("digit-domains", options, seed=2, data_dir=digits)
    shown = (held(federation, "train", 5) > 0).sum(axis=1)
    assert f"5 domains, {shown.min()} to {shown.max()} per client; train 40 each, 200 in all" in result.said
    lines = [line.split() for line in result.out.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[-1:] == ["street_digits"])
    assert lines[start][-5:] == list(DOMAINS)
    for row, (own, tested) in enumerate(zip(held(federation, "train", 5), held(federation, "test", 5), strict=True)):
        expected = [f"{a}/{b}" if a or b else "·" for a, b in zip(own, tested, strict=True)]
        assert lines[start + 1 + row][-5:] == expected
    text = page.read_text()
    kinds = [f"{part} samples by client and {kind}" for part in ("Training", "Test") for kind in ("class", "domain")]
    assert all(title in text for title in kinds)


# Real files --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_real_digits():
    for name in DOMAINS:
        require_file(f"{name}.npz")
    federation = load("digit-domains", {}, seed=0)
    assert (held(federation, "train", 5).sum(axis=1) == 500).all()
    assert held(federation, "test", 5).sum(axis=0).tolist() == [10_000, 2_007, 1_000, 2_000, 264]
    small = load("digit-domains", {"alpha": 1000.0, "samples": 900, "test_samples": 10}, seed=0)
    assert held(small, "train", 5)[:, 4].sum() == 621  # all there are
    grey = [p.train.x[p.train.domain == m].mean() for p in small.clients[:1] for m in (0, 1, 3)]
    assert max(grey) < -0.2  # bright on black
    assert counts(federation, "train").sum() == 2500


@pytest.mark.long
def test_real_adult():
    require_file("adult.npz")
    federation = load("adult", {"samples": 1000, "alpha": 10.0}, seed=0)
    assert federation.clients[0].input_shape == (6 + 102 - 5,) and len(federation) == 20
    assert held(federation, "test", 5).sum() == 16_281
    assert federation.domain_names == ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White")
    y = torch.cat([client.train.y for client in federation]).double()
    assert abs(float(y.mean()) - 0.2408) < 0.02
    by_sex = load("adult", {"domain": "sex"}, seed=0)
    assert held(by_sex, "test", 2).sum(axis=0).tolist() == [5_421, 10_860]
    assert describe("adult").files == ("adult.npz",)
