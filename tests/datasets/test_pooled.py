"""Pooled data sets: what every partition gives to clients, shifts between groups, the files behind them."""

from __future__ import annotations

import io
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import require_file, write_images
from scipy.stats import kstest

from perfed.data.federation import Federation
from perfed.datasets import check_options, cifar, describe, load
from perfed.datasets.options import PartitionOptions
from perfed.datasets.pool import Pool, draw_label_permutations, rotate_images
from perfed.datasets.pooled import partition_pool
from perfed.errors import PerfedError

POOLED = ["adult", "cifar10", "digit-domains", "faces", "fashion-mnist", "femnist62", "huggingface", "mnist", "tweets"]
PARTITIONS = {
    "iid": {"samples": 90},
    "dominant": {"samples": 60, "uniform": 50.0},
    "pathological": {"samples": [30, 60], "classes_per_client": [3, 3, 5, 5, 8]},
    "dirichlet": {"concentration": 0.7},
    "inner-dirichlet": {"samples": 80, "concentration": 0.7},
}


def pool(num_classes: int = 10, per_class: int = 300, **change: Any) -> Pool:
    """Images of 4x4 pixels that tell which they are: (0, 0) the class, (0, 1..3) the number of the sample."""
    made = {}
    for split, size in (("train", per_class), ("test", per_class // 3)):
        y = np.random.default_rng(size).permutation(np.repeat(np.arange(num_classes), size))
        x = np.zeros((len(y), 1, 4, 4), dtype=np.uint8)
        x[:, 0, 0, 0] = y
        for place in range(3):
            x[:, 0, 0, 1 + place] = np.arange(len(y)) // 256**place % 256
        made |= {f"x_{split}": x, f"y_{split}": y}
    return replace(Pool(**made, num_classes=num_classes, mean=(0.0,), std=(1.0,)), **change)


def give(seed: int = 0, of: Pool | None = None, **options: Any) -> Federation:
    return partition_pool(of or pool(), PartitionOptions.model_validate(options), seed)


def names(federation: Federation, split: str) -> list[np.ndarray]:
    """The numbers of the samples of each client."""
    pixels = [(255 * getattr(client, split).x).round().long() for client in federation]
    return [(x[:, 0, 0, 1:] * torch.tensor([1, 256, 65536])).sum(1).numpy() for x in pixels]


def counts(federation: Federation, split: str) -> np.ndarray:
    rows = [np.bincount(getattr(c, split).y, minlength=federation.num_classes) for c in federation]
    return np.array(rows)


# What every partition does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
def test_clients_are_disjoint_and_hold_what_the_labels_say(partition):
    source = pool()
    federation = give(of=source, partition=partition, **PARTITIONS[partition])
    assert federation.ids == [f"{i:03d}" for i in range(20)]
    for split in ("train", "test"):
        found = names(federation, split)
        assert all(len(part) > 0 for part in found)
        together = np.concatenate(found)
        assert len(together) == len(np.unique(together))
        for part, client in zip(found, federation, strict=True):
            data = getattr(client, split)
            assert np.array_equal(getattr(source, f"y_{split}")[part], data.y.numpy())
            assert data.x.shape == (len(part), 1, 4, 4) and data.x.dtype == torch.float32


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("test_samples", [0, 40])
def test_train_and_test_follow_one_draw(partition, test_samples):
    options = {**PARTITIONS[partition], "test_samples": test_samples, "overlap": "test"}
    federation = give(partition=partition, **options)
    train, test = counts(federation, "train"), counts(federation, "test")
    exact = train / train.sum(axis=1, keepdims=True) * test_samples if test_samples else train / 3
    assert np.abs(test - exact).max() < 1
    if test_samples:
        assert set(test.sum(axis=1)) == {40}
    assert set(np.concatenate(names(federation, "train"))) <= set(range(3000))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_partitions_are_functions_of_the_seed(partition):
    first, again, other = (give(seed, partition=partition, **PARTITIONS[partition]) for seed in (0, 0, 1))
    pairs = [names(f, "train") for f in (first, again, other)]
    assert all(np.array_equal(a, b) for a, b in zip(pairs[0], pairs[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(pairs[0], pairs[2], strict=True))


def test_dominant_clients_are_those_of_the_paper():
    federation = give(partition="dominant", samples=100, uniform=20)
    train = counts(federation, "train")
    for client, row in enumerate(train):
        dominant = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]][client // 4]
        by_hand = np.full(10, 2.0)
        by_hand[dominant] += 80 / 3
        assert np.abs(row - by_hand).max() < 1
    assert list(federation.notes["group"].values()) == [i // 4 for i in range(20)]
    interleaved = give(partition="dominant", samples=100, group_order="interleaved")
    assert list(interleaved.notes["group"].values()) == [i % 5 for i in range(20)]
    own = give(partition="dominant", samples=50, uniform=0, dominant_classes=[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    assert [set(np.flatnonzero(row)) for row in counts(own, "train")] == [set(range(5))] * 10 + [set(range(5, 10))] * 10


def test_sizes_come_from_the_set():
    sizes = counts(give(partition="dominant", samples=[30, 60, 120]), "train").sum(axis=1)
    assert set(sizes) == {30, 60, 120}


@pytest.mark.long
@pytest.mark.parametrize("partition", ["iid", "dominant", "pathological", "inner-dirichlet"])
def test_sizes_can_be_log_normal_in_every_partition_that_has_sizes(partition):
    """The option's median and deviation, on 2000 clients that share the samples; sizes are whole numbers."""
    options = {"partition": partition, "samples": 60, "clients": 2000, "overlap": "all"}
    source = pool(per_class=900)
    plain, spread = (counts(give(of=source, **options, size_spread=s), "train").sum(axis=1) for s in (0.0, 0.7))
    assert set(plain) == {60}
    assert kstest(np.log(spread), "norm", (np.log(60), 0.7)).pvalue > 0.05


@pytest.mark.long
def test_all_samples_can_be_given_in_log_normal_shares():
    """No two clients share any: the sizes sum to all samples, and vary about their median as the option says."""
    shares = counts(give(of=pool(per_class=40_000), partition="iid", samples=0, clients=1000, size_spread=0.7), "train")
    sizes = shares.sum(axis=1)
    assert sizes.sum() == 400_000
    assert kstest(np.log(sizes / np.median(sizes)), "norm", (0, 0.7)).pvalue > 0.05


def test_all_samples_are_used_where_no_size_is_asked_for():
    for partition, options in (("iid", {"samples": 0}), ("pathological", {"samples": 0}), ("dirichlet", {})):
        federation = give(partition=partition, **options)
        assert counts(federation, "train").sum(axis=0).tolist() == [300] * 10
        assert abs(counts(federation, "test").sum() - 1000) < 20
    held = (counts(give(partition="pathological", samples=0, classes_per_client=3), "train") > 0).sum(axis=1)
    assert set(held) == {3}


def test_overlap_is_only_where_it_is_asked_for():
    options = {"partition": "dominant", "samples": 140}  # class 0 is asked for 8 x 40.1 + 12 x 2.8 times
    with pytest.raises(PerfedError, match=r"not enough train samples: class 0 has 300 samples, but the clients need 3"):
        give(**options)
    with pytest.raises(PerfedError, match="not enough train samples"):
        give(**options, overlap="test")
    shared = names(give(**options, overlap="all"), "train")
    assert len(np.unique(np.concatenate(shared))) < 20 * 140 == sum(len(np.unique(part)) for part in shared)
    with pytest.raises(
        PerfedError, match=r"not enough test samples: .*smaller data.test_samples, or data.overlap = 't"
    ):
        give(partition="iid", samples=60, test_samples=80)
    with pytest.raises(PerfedError, match=r"but client \d+ needs 105; use a smaller data.test_samples$"):
        give(partition="pathological", samples=60, classes_per_client=2, test_samples=210, overlap="all")
    tested = give(partition="iid", samples=60, test_samples=80, overlap="test")
    assert len(np.unique(np.concatenate(names(tested, "train")))) == 20 * 60
    assert len(np.unique(np.concatenate(names(tested, "test")))) == 1000  # all of them, some twice
    assert all(len(np.unique(part)) == 80 for part in names(tested, "test"))


def test_many_tiny_clients():
    federation = give(of=pool(per_class=3000), partition="dominant", clients=1000, samples=50, overlap="all")
    assert len(federation) == 1000 and federation.ids[-1] == "999"
    assert set(counts(federation, "train").sum(axis=1)) == {50}
    assert counts(federation, "test").sum(axis=1).min() >= 1


# Shifts between groups ---------------------------------------------------------------------------------------


def test_concept_shift_permutes_the_labels_of_a_group_in_train_and_test():
    plain = give(partition="dominant", samples=60)
    shifted = give(partition="dominant", samples=60, permute_labels=True)
    permutations = shifted.notes["label_permutation"]
    assert len({tuple(p) for p in permutations.values()}) == 5
    for before, after in zip(plain, shifted, strict=True):
        permutation = torch.tensor(permutations[shifted.notes["group"][after.id]])
        for split in ("train", "test"):
            assert torch.equal(getattr(before, split).x, getattr(after, split).x)
            assert torch.equal(permutation[getattr(before, split).y], getattr(after, split).y)
    few = draw_label_permutations(2, 3, seed=0).tolist()
    assert few[0] != few[1] and all(sorted(row) == [0, 1] for row in few)


def test_feature_skew_turns_the_images_of_a_group():
    plain = give(partition="iid", samples=30, groups=4)
    turned = give(partition="iid", samples=30, rotations=[0, 90, 180, 270])
    assert list(turned.notes["group"].values()) == [i // 5 for i in range(20)]
    assert turned.notes["rotation"] == {0: 0, 1: 90, 2: 180, 3: 270}
    for number, (before, after) in enumerate(zip(plain, turned, strict=True)):
        for split in ("train", "test"):
            x = getattr(before, split).x
            assert torch.equal(torch.rot90(x, number // 5, dims=(2, 3)), getattr(after, split).x)
            assert torch.equal(getattr(before, split).y, getattr(after, split).y)


def test_any_angle_turns_the_same_way():
    x = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate_images(x, 90), torch.rot90(x, 1, dims=(2, 3)))  # counter-clockwise
    assert torch.allclose(rotate_images(x, 90.0001), rotate_images(x, 90), atol=1e-3)
    assert torch.allclose(rotate_images(x, -0.0001), x, atol=1e-3)
    assert torch.allclose(rotate_images(x, 360), x)
    spot = torch.zeros(1, 1, 21, 21)
    spot[0, 0, 10, 18] = 1  # to the right of the centre: 30 degrees up
    place = (rotate_images(spot, 30)[0, 0] == rotate_images(spot, 30).max()).nonzero()[0].tolist()
    assert place == [6, 17]
    wide = torch.zeros(1, 1, 5, 21)
    wide[0, 0, 2, 11] = 1  # pixels are square whatever the picture's shape
    assert rotate_images(wide, 90)[0, 0].argmax().item() == 1 * 21 + 10
    assert rotate_images(wide, 180)[0, 0].argmax().item() == 2 * 21 + 9
    with pytest.raises(PerfedError, match=r"rotations need images .* not inputs \(4,\)"):
        rotate_images(torch.zeros(2, 4), 90)


def test_what_comes_in_from_outside_is_black_after_normalisation():
    white = Pool(
        *[np.full((40, 1, 8, 8), 255, np.uint8), np.arange(40) % 2] * 2, num_classes=2, mean=(0.2,), std=(0.4,)
    )
    federation = give(of=white, partition="iid", clients=2, samples=0, rotations=[0, 45])
    assert federation.clients[0].train.x.unique().tolist() == pytest.approx([2.0])
    assert federation.clients[1].train.x.min().item() == pytest.approx(-0.5)


# Natural -----------------------------------------------------------------------------------------------------


def test_natural_clients_are_the_owners():
    rng = np.random.default_rng(0)
    owned = pool(owners=("ann", "bob", "cy", "di"))
    owned = replace(owned, owner_train=rng.choice([0, 1, 3], 3000), owner_test=rng.choice([0, 1, 3], 1000))
    federation = give(of=owned, partition="natural")
    assert federation.notes["owner"] == {"000": "ann", "001": "bob", "002": "di"}  # cy has no training samples
    assert np.array_equal(names(federation, "train")[2], np.flatnonzero(owned.owner_train == 3))
    assert np.array_equal(names(federation, "test")[0], np.flatnonzero(owned.owner_test == 0))
    assert "classes_nobody_holds" not in federation.notes
    assert len(give(of=owned, partition="natural", clients=2)) == 2
    with pytest.raises(PerfedError, match=r"data.clients = 4 is more than the 3 there are in the natural partition"):
        give(of=owned, partition="natural", clients=4)
    with pytest.raises(PerfedError, match=r"data.partition = 'natural' needs to know whose the samples are"):
        give(partition="natural")
    rare = replace(owned, owner_train=np.where(owned.y_train == 7, 3, rng.choice([0, 1], 3000)))
    assert give(of=rare, partition="natural", clients=2).notes["classes_nobody_holds"] == [7]


# Bad options -------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"partition": "shards"}, "data.partition = 'shards' is not allowed; it must be: one of 'iid', 'dominant', 'patho"),
    ({"partition": "dominant", "uniform": 101}, "data.uniform = 101 is not allowed; it must be: number >= 0 and <= 10"),
    ({"partition": "dominant", "uniform": -1}, "data.uniform = -1 is not allowed"),
    ({"partition": "dirichlet", "concentration": 0}, "data.concentration = 0 is not allowed; it must be: number > 0"),
    ({"partition": "dirichlet", "concentration": -0.5}, "data.concentration = -0.5 is not allowed"),
    (
        {"samples": [300, 0]},
        "data.samples = [300, 0] is not allowed; it must be: integer >= 0, or list of integer >= 1",
    ),
    ({"samples": []}, "data.samples = [] is not allowed; the list needs at least one number"),
    ({"samples": "600"}, "data.samples = '600' is not allowed"),
    ({"partition": "dominant", "samples": 0}, "data.samples = 0 (all there are) is for the partitions 'iid' and 'path"),
    (
        {"uniform": 20},
        "data.uniform is not an option of partition 'iid'; its options: partition, clients, samples, test",
    ),
    ({"partition": "dirichlet", "samples": 600}, "data.samples is not an option of partition 'dirichlet'; its options"),
    ({"partition": "natural", "overlap": "all"}, "data.overlap is not an option of partition 'natural'; its options: "),
    ({"beta": 1}, "data.beta is not an option of 'mnist'; its options: partition, clients, samples"),
    ({"alpha": 1}, "data.alpha is not an option of partition 'iid'; its options: partition, clients, samples"),
    ({"partition": "domain-mixed", "overlap": "all"}, "data.overlap is not an option of partition 'domain-mixed'"),
    ({"partition": "pathological", "samples": 0, "size_spread": 1.0}, "data.size_spread needs data.samples above 0 in"),
    ({"partition": "dirichlet", "size_spread": 1.0}, "data.size_spread is not an option of partition 'dirichlet'"),
    ({"partition": "domain-mixed", "samples": 0}, "data.samples = 0 (all there are) is for the partitions 'iid'"),
    ({"partition": "domain-mixed"}, "data.partition = 'domain-mixed' needs the samples' domains, which these data do"),
    ({"overlap": True}, "data.overlap = True is not allowed; it must be: one of 'none', 'test', 'all'"),
    (
        {"permute_labels": True},
        "data.permute_labels has no effect on a single group of clients; make groups with data.",
    ),
    ({"rotations": [0, 90], "groups": 4}, "data.rotations holds 2 angles for 4 groups; one each is needed"),
    ({"partition": "dominant", "rotations": [0, 90]}, "data.rotations holds 2 angles for 5 groups"),
    ({"partition": "dominant", "clients": 7}, "clients = 7 cannot be cut into 5 equal groups; use a multiple of 5, or"),
    ({"groups": 3}, "clients = 20 cannot be cut into 3 equal groups"),
    (
        {"partition": "pathological", "samples": 9, "classes_per_client": 11},
        "classes_per_client = 11 is more than the 10 classes",
    ),
    (
        {"partition": "pathological", "samples": 9, "classes_per_client": [3, 12]},
        "classes_per_client = 12 is more than the 10",
    ),
    (
        {"partition": "pathological", "samples": 0, "clients": 2},
        "is held by no client; use more clients, more classes or samples per",
    ),
    ({"partition": "dominant", "samples": 10, "uniform": 0, "dominant_classes": [[0, 1]]}, "class 2 is held by no"),
    ({"partition": "dominant", "samples": 9, "dominant_classes": [[0, 10]]}, "dominant_classes: group 0 is [0, 10]"),
    (
        {"samples": 601},
        "20 clients ask for 12020 training samples, but there are 300; use fewer clients or a smaller dat",
    ),
    ({"samples": 301, "overlap": "all"}, "a client asks for 301 training samples, but there are 300"),
    ({"partition": "dirichlet", "min_samples": 16}, "20 clients with at least 16 samples each need 320, but there are"),
    ({"partition": "dirichlet", "concentration": 0.01, "min_samples": 9}, "use a larger concentration, fewer clients"),
    ({"partition": "natural"}, "needs to know whose the samples are"),
]


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """A folder for data files; no others are found, and the cache is the test's own."""
    monkeypatch.delenv("PERFED_DATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return Path(tmp_path)


@pytest.mark.parametrize(("options", "says"), BAD, ids=[str(options) for options, _ in BAD])
def test_bad_options_are_refused_in_one_line(folder, options, says):
    write_images(folder, "mnist.npz")
    with pytest.raises(PerfedError) as error:
        load("mnist", options, seed=0, data_dir=folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_all_pooled_data_sets_have_the_same_partition_options():
    for name in POOLED:
        found = [option.name for option in describe(name).options]
        last = found.index("validation_fraction")
        assert found[last - len(PartitionOptions.model_fields) : last] == list(PartitionOptions.model_fields)
    documented = PartitionOptions.__doc__ or ""
    assert all(f"\n        {option}: " in documented for option in PartitionOptions.model_fields)


def test_the_examples_in_the_docs_are_valid():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    lines = [line for line in blocks[0].splitlines() if line]
    tables = [tomllib.loads(line)["data"] for line in lines] + [tomllib.loads(block)["data"] for block in blocks[1:]]
    assert len(tables) == 11
    for table in tables:
        check_options(table.pop("name"), table)
    rows = set(re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE))
    assert set(PartitionOptions.model_fields) - {"partition"} <= rows


# Files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file"), [("mnist", "mnist.npz"), ("fashion-mnist", "fashion_mnist.npz")])
def test_grey_images_are_normalised(folder, name, file):
    write_images(folder, file)
    federation = load(name, {"clients": 3, "samples": 0, "validation_fraction": 0.2}, seed=0, data_dir=folder)
    x = federation.clients[0].train.x
    assert x.shape[1:] == (1, 28, 28) and federation.num_classes == 10 and len(federation.class_names) == 10
    assert x[:, 0, 0, 0].unique().item() == pytest.approx((1 - 0.1307) / 0.3081)
    assert x[:, 0, 1, 1].unique().item() == pytest.approx(-0.1307 / 0.3081)
    assert [len(c.train) + len(c.validation) for c in federation] == [100, 100, 100]


def test_femnist_groups_are_digits_upper_and_lower_case(folder):
    writers = {"writer_train": np.arange(62 * 30) % 4, "writer_test": np.arange(62 * 6) % 4}
    more = {"writer_name": np.array(["w", "x", "y", "z"]), **writers}
    write_images(folder, "femnist62.npz", 62, **more)
    options = {"partition": "dominant", "clients": 6, "samples": 62, "uniform": 0}
    federation = load("femnist62", options, seed=0, data_dir=folder)
    groups = [set(range(10)), set(range(10, 36)), set(range(36, 62))]
    assert [set(np.flatnonzero(row)) for row in counts(federation, "train")] == [g for g in groups for _ in range(2)]
    assert federation.class_names[9:11] == ("9", "A") and federation.class_names[-1] == "z"
    black = federation.clients[0].train.x[0, 0, 0, 0].item()
    assert black == pytest.approx(-0.1307 / 0.3081)  # 255 is paper there: ink is bright here
    natural = load("femnist62", {"partition": "natural"}, seed=0, data_dir=folder)
    assert list(natural.notes["owner"].values()) == ["w", "x", "y", "z"]
    write_images(folder, "femnist62.npz", 62, **{**more, "writer_test": np.full(62 * 6, 4)})
    with pytest.raises(PerfedError, match=r"femnist62.npz': 'writer_test' must hold positions in 'writer_name', 0..3"):
        load("femnist62", {}, seed=0, data_dir=folder)


def write_cifar(folder: Path, **change: Any) -> np.ndarray:
    """JPEG images of one colour each: image i of train is (10 i, 20 i, 5 i); returns these colours."""
    image = pytest.importorskip("PIL.Image", reason="Pillow (perfed[datasets]) is not installed")
    colours = {s: np.arange(n)[:, None] * np.array([10, 20, 5]) % 256 for s, n in (("train", 20), ("test", 10))}
    arrays: dict[str, Any] = {"class_names": np.array([f"class {k}" for k in range(10)])}
    for split, rows in colours.items():
        parts = []
        for colour in rows:
            stream = io.BytesIO()
            image.fromarray(np.broadcast_to(colour.astype(np.uint8), (32, 32, 3)).copy()).save(
                stream, "JPEG", quality=95
            )
            parts.append(np.frombuffer(stream.getvalue(), np.uint8))
        arrays[f"jpeg_{split}"] = np.concatenate(parts)
        arrays[f"offset_{split}"] = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        arrays[f"y_{split}"] = (np.arange(len(rows)) % 10).astype(np.uint8)
    np.savez(folder / "cifar10_jpeg.npz", **{**arrays, **change})
    return colours["train"]


def cached(folder: Path) -> list[Path]:
    return list((folder / "home" / ".cache" / "perfed").glob("*"))


def test_cifar_is_decoded_once(folder, monkeypatch):
    colours = write_cifar(folder)
    first = cifar.read_jpeg_images(folder)
    assert first["x_train"].shape == (20, 3, 32, 32) and first["x_train"].dtype == np.uint8
    assert np.abs(first["x_train"].mean(axis=(2, 3)) - colours).max() < 4
    (cache,) = cached(folder)
    monkeypatch.setattr(cifar, "optional_package", lambda *_: pytest.fail("decoded a second time"))
    again = cifar.read_jpeg_images(folder)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    federation = load("cifar10", {"clients": 2, "samples": 0}, seed=0, data_dir=folder)
    pixels = federation.clients[0].train.x * torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1)
    pixels = 255 * (pixels + torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1))
    assert torch.allclose(pixels, pixels.round(), atol=1e-3) and -0.001 <= pixels.min() <= pixels.max() <= 255.001
    assert federation.class_names[3] == "class 3" and federation.augment is None
    augmented = load("cifar10", {"clients": 2, "samples": 0, "augment": True}, seed=0, data_dir=folder)
    assert augmented.augment.fill == pytest.approx((-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010))  # black
    assert cached(folder) == [cache]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other", "empty"])
def test_a_damaged_cache_is_made_anew(folder, damage):
    write_cifar(folder)
    first = cifar.read_jpeg_images(folder)
    (cache,) = cached(folder)
    whole = cache.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(255 - b for b in whole[middle : middle + 9]) + whole[middle + 9 :]
    contents = {"truncated": whole[:middle], "flipped": flipped, "empty": b""}
    if damage == "other":
        np.savez(cache, x_train=np.zeros((3, 3, 32, 32), np.uint8), x_test=np.zeros((3, 3, 32, 32), np.uint8))
    else:
        cache.write_bytes(contents[damage])
    again = cifar.read_jpeg_images(folder)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert cached(folder) == [cache] and cache.read_bytes() == whole


def test_a_changed_file_is_decoded_anew(folder):
    write_cifar(folder)
    cifar.read_jpeg_images(folder)
    write_cifar(folder, class_names=np.array([f"other {k}" for k in range(10)]))
    assert cifar.read_jpeg_images(folder)["class_names"][0] == "other 0"
    assert len(cached(folder)) == 2


def test_a_cache_that_cannot_be_written_is_done_without(folder, monkeypatch):
    write_cifar(folder)
    (folder / "home").write_text("a file where the folder should be")
    assert len(cifar.read_jpeg_images(folder)["x_train"]) == 20
    (folder / "home").unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(cifar.read_jpeg_images(folder)["x_train"]) == 20
    assert cached(folder) == []  # no half-written file stays


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y_train": np.full(20, 10, np.uint8)}, "'y_train' must hold labels in 0..9"),
        ({"offset_train": np.zeros(21, np.int32)}, "'offset_train' does not fit 'y_train' and 'jpeg_train'"),
        ({"offset_test": np.zeros(3, np.int32)}, "'offset_test' does not fit 'y_test' and 'jpeg_test'"),
        ({"class_names": np.array(["one"])}, "'class_names' must hold 10 names"),
        (
            {"jpeg_test": np.zeros(300, np.uint8), "offset_test": np.arange(0, 301, 30)},
            "test image 0 cannot be decoded",
        ),
    ],
)
def test_broken_cifar_files_are_refused(folder, change, says):
    write_cifar(folder, **change)
    with pytest.raises(PerfedError) as error:
        load("cifar10", {}, seed=0, data_dir=folder)
    assert says in str(error.value) and "cifar10_jpeg.npz" in str(error.value) and "\n" not in str(error.value)


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    write_cifar(folder)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(PerfedError, match=r"decoding 'cifar10_jpeg.npz' needs the package 'PIL', .*\[datasets\]"):
        load("cifar10", {}, seed=0, data_dir=folder)


# Real files --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_real_fashion_mnist_as_in_the_paper():
    require_file("fashion_mnist.npz")
    federation = load("fashion-mnist", {"partition": "dominant"}, seed=0)
    train = counts(federation, "train")
    assert train[0].tolist() == [172, 172, 172, *[12] * 7] and set(train.sum(axis=1)) == {600}
    assert set(counts(federation, "test").sum(axis=1)) == {100}
    hundred = load("fashion-mnist", {"partition": "dominant", "clients": 100, "overlap": "all"}, seed=0)
    assert set(counts(hundred, "train").sum(axis=1)) == {600}
    everything = load("fashion-mnist", {"partition": "dirichlet", "clients": 100}, seed=0)
    assert counts(everything, "train").sum() == 60_000


def test_real_mnist_has_its_mean_and_deviation():
    require_file("mnist.npz")
    federation = load("mnist", {"clients": 5, "samples": 2000}, seed=0)
    x = torch.cat([client.train.x for client in federation])
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02


def test_real_femnist_characters():
    require_file("femnist62.npz")
    natural = load("femnist62", {"partition": "natural"}, seed=0)
    assert len(natural) == 110
    assert counts(natural, "train").sum() == 14_697 and counts(natural, "test").sum() == 1_695
    options = {"partition": "dominant", "samples": 1000, "overlap": "all", "group_order": "interleaved"}
    assert set(counts(load("femnist62", options, seed=0), "train").sum(axis=1)) == {1000}
    assert float(natural.clients[5].train.x.mean()) < 0.6  # mostly black


@pytest.mark.long
def test_real_cifar_with_a_thousand_clients():
    require_file("cifar10_jpeg.npz")
    pytest.importorskip("PIL", reason="Pillow (perfed[datasets]) is not installed")
    options = {"partition": "dominant", "clients": 1000, "samples": 50, "overlap": "all"}
    federation = load("cifar10", options, seed=0)
    assert set(counts(federation, "train").sum(axis=1)) == {50}
    assert set(counts(federation, "test").sum(axis=1)) == {10}
    some = torch.cat([client.train.x for client in federation.clients[::20]])
    assert some.mean(dim=(0, 2, 3)).abs().max() < 0.1 and (some.std(dim=(0, 2, 3)) - 1).abs().max() < 0.35
