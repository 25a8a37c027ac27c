"""What is made of originals in the format of each, and that this is what the data files hold."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import require_file
from PIL import Image
from scipy.io import savemat

from perfed.data.files import SHIPPED
from perfed.data.originals.making import convert_originals, hash_arrays, write_arrays
from perfed.data.originals.reading import Files
from perfed.data.originals.sources import SOURCES
from perfed.datasets import load
from perfed.errors import PerfedError

Arrays = dict[str, Any]


def made(name: str, *paths: Path) -> Arrays:
    """The arrays of a source from these files."""
    return convert_originals(name, SOURCES[name], Files(paths))


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(
        struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes(), 1, mtime=0
    )


def write_idx(held: Arrays, folder: Path) -> None:
    for split, name in (("train", "train"), ("test", "t10k")):
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(held[f"x_{split}"]))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx(held[f"y_{split}"]))


def write_usps(held: Arrays, folder: Path) -> None:
    for split, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        lines = []
        for row, label in zip(held[f"x_{split}"].reshape(-1, 256) / 255 * 2 - 1, held[f"y_{split}"], strict=True):
            lines.append(f"{label + 1} " + " ".join(f"{i}:{v:.6g}" for i, v in enumerate(row, 1) if v))
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode()))


def write_leaf(held: Arrays, folder: Path) -> None:
    names = held["writer_name"].tolist()
    for part in (1, 0):  # whatever the order of the files
        for split in ("train", "test"):
            data = {}
            for number, name in enumerate(names):
                own = held[f"writer_{split}"] == number
                x = (held[f"x_{split}"][own].reshape(-1, 784) / 255).tolist()
                if number % 2 == part:
                    data[name] = {"x": x, "y": held[f"y_{split}"][own].tolist()}
            file = folder / f"all_data_{part}_niid_05_keep_0_{split}_9.json"
            file.write_text(json.dumps({"users": list(data), "user_data": data}))


def write_jpegs(held: Arrays, folder: Path) -> None:
    with zipfile.ZipFile(folder / "CIFAR-10-images.zip", "w") as file:
        for split in ("test", "train"):
            stream, ends, y = held[f"jpeg_{split}"].tobytes(), held[f"offset_{split}"], held[f"y_{split}"]
            for i in range(len(y)):
                name = held["class_names"][y[i]]
                file.writestr(f"images-abc/{split}/{name}/{i:04d}.jpg", stream[ends[i] : ends[i + 1]])


def write_fonts(held: Arrays, folder: Path) -> None:
    with zipfile.ZipFile(folder / "car_plate_localization.zip", "w") as file:
        for split in ("train", "test"):
            for x, y, font in zip(held[f"x_{split}"], held[f"y_{split}"], held[f"font_{split}"], strict=True):
                picture = io.BytesIO()
                Image.fromarray(255 - x).save(picture, "PNG")
                path = f"c/English/Fnt/Sample{y + 1:03d}/img{y + 1:03d}-{font + 1:05d}.png"
                file.writestr(path, picture.getvalue())


def write_eeg(held: Arrays, folder: Path) -> None:
    users, about = {}, {}
    for i, (code, subject) in enumerate(zip(held["dataset_of_user"], held["subject_of_user"], strict=True)):
        rows = {split: held[f"user_{split}"] == i for split in ("train", "test")}
        users[i] = [held[f"{p}_{s}"][rows[s]].astype(float) for s in ("train", "test") for p in ("x", "y")]
        about[i] = {"code": str(code), "subject": int(subject)}
    np.savez(folder / "bci_users40_5c_common.npz", user=np.array(users), meta_info=np.array(about))


def write_wiki(held: Arrays, folder: Path) -> None:
    split = {"ind_train": held["train_index"] + 1, "ind_test": held["test_index"] + 1}
    data = {"X1": held["image"].T, "X2": held["text"].T, "Y": np.eye(10)[held["y"]].T}
    savemat(folder / "wiki.mat", {"data": data, "split": split})


def cell(value: float, always: bool) -> str:
    """A number as UCI's four files have it: Cleveland's with a decimal, Switzerland's ``.7`` without its nought."""
    if np.isnan(value):
        return "?"
    value = round(float(value), 4)
    return f"{value:.1f}" if always else f"{value:g}"


def write_heart(held: Arrays, folder: Path) -> None:
    for number, hospital in enumerate(held["hospital_names"].tolist()):
        lines = []
        for i in np.flatnonzero(held["hospital"] == number):
            cells = [cell(value, number == 0) for value in held["x"][i]]
            if hospital == "switzerland":
                cells = [c.replace("0.", ".", 1) if c.lstrip("-").startswith("0.") else c for c in cells]
            lines.append(",".join([*cells, str(held["y_severity"][i])]) + "\n")
        (folder / f"processed.{hospital}.data").write_text("".join(lines))


def write_adult(held: Arrays, folder: Path) -> None:
    order = "age workclass fnlwgt education education-num marital-status occupation relationship race sex"
    order += " capital-gain capital-loss hours-per-week native-country"
    numbers, categories = held["num_names"].tolist(), held["cat_names"].tolist()
    for split, name, head, end in (("train", "data", "", ""), ("test", "test", "|1x3 Cross validator\n", ".")):
        columns = []
        for column in order.split():
            if column in numbers:
                columns.append([str(value) for value in held[f"num_{split}"][:, numbers.index(column)]])
            else:
                codes = held[f"cat_{split}"][:, categories.index(column)]
                columns.append(held[f"categories_{column}"][codes].tolist())
        columns.append([(">50K" if value else "<=50K") + end for value in held[f"y_{split}"]])
        rows = "".join(", ".join(row) + "\n" for row in zip(*columns, strict=True))
        (folder / f"adult.{name}").write_text(f"{head}{rows}\n")


def write_parkinsons(held: Arrays, folder: Path) -> None:
    names = held["feature_names"].tolist()
    lines = [["subject#", *names[:3], "motor_UPDRS", "total_UPDRS", *names[3:]]]
    scores = held["motor_updrs"], held["total_updrs"]
    for row, motor, total, patient in zip(held["x"], *scores, held["patient"], strict=True):
        lines.append([str(value) for value in (patient, *row[:3], motor, total, *row[3:])])
    (folder / "parkinsons_updrs.data").write_text("\n".join(map(",".join, lines)))


def write_tcga(held: Arrays, folder: Path) -> None:
    with (folder / "brca.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["pid", *held["feature_names"], "E", "T"])
        for i, row in enumerate(held["x"]):
            table.writerow([f"TCGA-{i}", *row, held["event"][i], held["time"][i]])
        table.writerow(["TCGA-in-no-split", *row, 0, 1])
    halves = np.where(held["is_train"], "train", "test")
    lines = [f"TCGA-{i},{half},{half}_{of}" for i, (half, of) in enumerate(zip(halves, held["center"], strict=True))]
    (folder / "train_test_split.csv").write_text("\n".join(["pid,fold,fold2", *lines[::-1]]))


def write_tweets(held: Arrays, folder: Path) -> None:
    texts = held["text_utf8"].tobytes().decode().split("\n")
    keys = ["tweet_id", "airline_sentiment", "airline_sentiment_confidence", "airline", "name", "text"]
    with (folder / "Tweets.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(keys)
        for i in reversed(range(len(texts))):
            values = [
                held["class_names"][held["y"][i]],
                held["confidence"][i],
                held["airline_names"][held["airline"][i]],
            ]
            table.writerow([5.67e17 + i * 1e9, *values, f"name {held['user'][i]}", texts[i]])


WRITERS: dict[str, Callable[[Arrays, Path], None]] = {
    "mnist": write_idx,
    "fashion-mnist": write_idx,
    "usps": write_usps,
    "femnist62": write_leaf,
    "cifar10": write_jpegs,
    "font-digits": write_fonts,
    "bci-common": write_eeg,
    "wiki-crossmodal": write_wiki,
    "heart-disease": write_heart,
    "adult": write_adult,
    "parkinsons": write_parkinsons,
    "tcga-brca": write_tcga,
    "tweets": write_tweets,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.long]
            if name in ("mnist", "fashion-mnist", "usps", "femnist62", "cifar10", "font-digits")
            else [],
        )
        for name in WRITERS
    ],
)
def test_originals_become_what_the_data_file_holds(name, tmp_path):
    """From the arrays back to the originals in their format, and from there to the same arrays, bit for bit."""
    source = SOURCES[name]
    with np.load(require_file(source.file)) as file:
        held = dict(file)
    assert hash_arrays(held) == source.contents, "the catalogue speaks of another file"
    WRITERS[name](held, tmp_path)
    found = made(name, tmp_path)
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in held.items()}
    for key in held:
        np.testing.assert_array_equal(found[key], held[key], err_msg=key)
    assert hash_arrays(found) == source.contents
    if name == "femnist62":
        assert hash_arrays(made("femnist-digits", tmp_path)) == SOURCES["femnist-digits"].contents


@pytest.mark.parametrize("name", ["adult", "heart-disease"])
def test_rebuilt_originals_are_uci_s_to_the_byte(name, tmp_path):
    """So that it is the published file, and not only our idea of it, that the converter was tried on."""
    published = {
        "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        "processed.cleveland.data": "sha256:a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
        "processed.hungarian.data": "sha256:d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
        "processed.switzerland.data": "sha256:834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
        "processed.va.data": "sha256:e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
    }
    with np.load(require_file(SOURCES[name].file)) as file:
        WRITERS[name](dict(file), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == (2 if name == "adult" else 4)
    for file in files:
        assert f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" == published[file.name], file.name


def test_what_ships_is_what_the_catalogue_says():
    for name in ("heart-disease", "parkinsons"):
        with np.load(SHIPPED / SOURCES[name].file) as file:
            assert hash_arrays(dict(file)) == SOURCES[name].contents
        assert SOURCES[name].licence.startswith("CC BY 4.0")
        assert SOURCES[name].file in (SHIPPED / "NOTICE.md").read_text()


def cifar_archive(path: Path, x: np.ndarray, y: np.ndarray, **more: bytes) -> None:
    """CIFAR-10 as published: pickles of Python 2 (text is bytes) in a packed tar archive."""
    batches = {f"data_batch_{i + 1}": {b"data": x[i::6], b"labels": y[i::6].tolist()} for i in range(5)}
    batches["test_batch"] = {b"data": x[5::6], b"labels": y[5::6].tolist()}
    batches["batches.meta"] = {b"label_names": [f"class {i}".encode() for i in range(10)]}
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {**{n: pickle.dumps(b, protocol=2) for n, b in batches.items()}, **more}.items():
            item = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))


def test_cifar_as_published(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 3072), dtype=np.uint8), rng.integers(0, 10, 60)
    cifar_archive(tmp_path / "cifar-10-python.tar.gz", x, y)
    found = made("cifar10-original", tmp_path / "cifar-10-python.tar.gz")
    train = np.concatenate([np.arange(i, 60, 6) for i in range(5)])
    np.testing.assert_array_equal(found["x_train"].reshape(50, -1), x[train])
    np.testing.assert_array_equal(found["y_train"], y[train])
    assert found["x_test"][3, 2, 31, 30] == x[5 + 18, 3072 - 2] and found["class_names"][9] == "class 9"
    write_arrays(tmp_path / "cifar10_original.npz", found)
    options = {"images": "original", "clients": 1, "samples": 0, "partition": "iid"}
    (client,) = load("cifar10", options, seed=0, data_dir=tmp_path).clients
    assert len(client.train) == 50 and client.train.x.shape[1:] == (3, 32, 32)
    shown = client.train.x.numpy()[:, 0, 0, 0] * 0.2023 + 0.4914  # the first red pixels
    np.testing.assert_allclose(np.sort(shown), np.sort(x[train][:, 0] / 255), atol=1e-5)
    with pytest.raises(PerfedError, match=r"perfed data get cifar10-original$"):
        load("cifar10", options, seed=0, data_dir=SHIPPED)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((60, 3072), np.uint8), np.zeros(60, int)
    cifar_archive(tmp_path / "c.tar.gz", x, y, test_batch=pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(PerfedError, match=r"^cifar10-original: the file would run code \((posix|nt).mkdir\)"):
        made("cifar10-original", tmp_path / "c.tar.gz")
    np.savez(tmp_path / "bci_users40_5c_common.npz", user=np.array({0: Evil()}), meta_info=np.array({}))
    with pytest.raises(PerfedError, match=r"^bci-common: the file would run code"):
        made("bci-common", tmp_path / "bci_users40_5c_common.npz")
    assert not Path("evil").exists()


@pytest.mark.long
def test_usps_as_openml_has_it(tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (7293, 256)), rng.integers(0, 10, 7293)
    lines = ["@RELATION usps", *(f"@ATTRIBUTE double{i} NUMERIC" for i in range(1, 257))]
    lines += ["@ATTRIBUTE int0 {" + ",".join(map(str, range(1, 11))) + "}", "@DATA"]
    rows = zip(pixels / 255 * 2 - 1, labels, strict=True)
    lines += [",".join([*(f"{v:.5f}" for v in row), str(label + 1)]) for row, label in rows]
    (tmp_path / "usps.arff").write_text("\n".join(lines))
    found = made("usps", tmp_path / "usps.arff")
    assert len(found["x_train"]) == 7291 and len(found["x_test"]) == 2
    np.testing.assert_array_equal(found["x_test"].reshape(2, -1), pixels[7291:])
    np.testing.assert_array_equal(found["y_train"], labels[:7291])


def test_users_are_not_named_in_tweets(tmp_path):
    row = '3,neutral,1.0,Delta,{name},"@JetBlue  says @jane\n{name}: see @United"\n'
    head = "tweet_id,airline_sentiment,airline_sentiment_confidence,airline,name,text\n"
    (tmp_path / "Tweets.csv").write_text(
        head + row.format(name="ann") + row.format(name="ben").replace("3,", "2.9e0,", 1)
    )
    found = made("tweets", tmp_path / "Tweets.csv")
    assert found["text_utf8"].tobytes().decode().split("\n")[0] == "@JetBlue says @user ben: see @United"
    assert found["user"].tolist() == [0, 1]
    assert set(found) == {"text_utf8", "y", "airline", "user", "airline_names", "class_names", "confidence"}


@pytest.mark.parametrize(
    ("name", "file", "content", "problem"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", b"<html>moved</html>", "not an idx file"),
        ("mnist", "train-images-idx3-ubyte.gz", idx(np.zeros((3, 28, 28), np.uint8))[:40], "cannot be read"),
        ("mnist", "train-labels-idx1-ubyte.gz", idx(np.zeros(4, np.uint8)), "3 images and 4 labels"),
        ("usps", "usps.bz2", b"BZh9 not packed", "cannot be read"),
        ("usps", "usps.bz2", b"11 1:0.5\n", "labels from 1 to 10"),
        ("adult", "adult.data", b"39, State-gov\n", "row 1 has 2 cells, not 15"),
        ("heart-disease", "processed.va.data", b"<html>\n", "row 1 has 1 cells, not 14"),
        ("parkinsons", "parkinsons_updrs.data", b"age,sex\n1,2\n", "no column 'motor_UPDRS'"),
        ("cifar10", "CIFAR-10-images.zip", b"PK\x03\x04 half", "neither a zip nor a tar"),
        ("wiki-crossmodal", "wiki.mat", b"MATLAB 5.0", "cannot be read"),
        ("bci-common", "bci_users40_5c_common.npz", b"PK", "cannot be read"),
        ("femnist62", "all_data_0_train_9.json", b"{", "cannot be read"),
        ("tweets", "Tweets.csv", b"tweet_id,text\n1,a\n", "cannot be read"),
    ],
)
def test_what_is_no_original_is_one_line(name, file, content, problem, tmp_path):
    write_idx({k: np.zeros((3, 28, 28) if k[0] == "x" else 3, np.uint8) for k in
               ("x_train", "y_train", "x_test", "y_test")}, tmp_path)  # fmt: skip
    for hospital in ("cleveland", "hungarian", "switzerland"):
        (tmp_path / f"processed.{hospital}.data").write_text(",".join("0" * 14) + "\n")
    for other in ("usps.t.bz2", "adult.test"):
        (tmp_path / other).touch()
    (tmp_path / file).write_bytes(content)
    paths = [tmp_path / file] if name in ("cifar10", "wiki-crossmodal") else [tmp_path]
    with pytest.raises(PerfedError) as error:
        made(name, *paths)
    assert str(error.value).startswith(f"{name}: ") and problem in str(error.value) and "\n" not in str(error.value)
