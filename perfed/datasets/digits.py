"""Handwritten digits at clients that differ in resolution, features, classes, writer or origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from perfed.data.federation import Federation
from perfed.data.files import load_images, load_npz, require
from perfed.data.partition.shards import Indices, derive_seed, draw_classes, make_generator, share_among_holders
from perfed.datasets.catalogue import (
    NonNegative,
    Positive,
    PositiveReal,
    TestFraction,
    dataset,
    make_client_ids,
)
from perfed.datasets.options import change_defaults
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled_dataset
from perfed.errors import PerfedError

Array = NDArray[np.float64]
VIEWS = ("pixels", "blocks", "subset", "linear")
AtLeastTwo = Annotated[int, Field(ge=2)]


@dataset("digits-views")
def digits_views(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Positive = 20,
    classes_per_client: Positive = 4,
    samples_per_client: NonNegative = 60,
    test_fraction: TestFraction = 0.3,
    standardise: bool = True,
) -> Federation:
    """Real 8x8 digits that come with scikit-learn (no download), each client seeing them in its own way.

    A client's view is one of "pixels" (all 64), "blocks" (the 16 means of 2x2 pixels, a 4x4 image), "subset"
    (a random subset of the pixels) and "linear" (a random linear map of the pixels, N(0, 1/64) entries),
    equally often and in random order; subsets and maps differ between clients and give 10 to 40
    numbers. Inputs are flat vectors. The 1797 samples are split into train and test by class first, then both
    are shared by class without overlap.

    ``samples_per_client``: the largest number of training samples, which are drawn at random; 0 for all.
    ``standardise``: scale inputs to zero mean and unit variance over the client's training samples, including samples
    that become validation data; constant columns become 0.
    ``notes["view"]`` maps client id to view.
    """
    x, y = _read_embedded_digits()
    train, test = _split_by_class(y, test_fraction, seed)
    classes = draw_classes(10, clients, classes_per_client, seed=seed)
    train_parts = share_among_holders(y[train], classes, seed=seed)
    test_parts = share_among_holders(y[test], classes, seed=seed)
    order = make_generator(seed, "digits views").permutation(clients) % len(VIEWS)
    arrays = {}
    for i, client in enumerate(make_client_ids(clients)):
        rng = make_generator(seed, f"digits of {client}")
        view = view_matrix(VIEWS[order[i]], int(rng.integers(10, 40, endpoint=True)), rng)
        part = train_parts[i]
        if 0 < samples_per_client < len(part):
            part = np.sort(rng.choice(part, size=samples_per_client, replace=False))
        x_train, x_test = x[train[part]] @ view, x[test[test_parts[i]]] @ view
        if standardise:
            x_train, x_test = _standardise(x_train, x_test)
        arrays[client] = _make_arrays(x_train, y[train[part]], x_test, y[test[test_parts[i]]])
    views = {client: VIEWS[k] for client, k in zip(arrays, order, strict=True)}
    return replace(Federation.from_arrays(arrays, num_classes=10), notes={"view": views})


@pooled_dataset("digits", options=change_defaults(partition="pathological", classes_per_client=4, samples=12))
def digits(
    seed: int,
    data_dir: Path | None,
    *,
    test_fraction: TestFraction = 0.3,
    inverted: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> Pool:
    """Real 8x8 digits that come with scikit-learn (no download), all clients seeing the same 64 pixels in [0, 1].

    The 1797 samples are split into train and test by class first. Further options are those of
    :class:`perfed.datasets.options.PartitionOptions`; by default clients hold four classes and three samples of each.

    ``inverted``: share of the samples that are dark on light, which form a second domain; 0 for no domains.
    """
    x, y = _read_embedded_digits()
    train, test = _split_by_class(y, test_fraction, seed)
    pixels, names = x.astype(np.float32), tuple("0123456789")
    if not inverted:
        return Pool(pixels[train], y[train], pixels[test], y[test], 10, class_names=names)
    domain = (make_generator(seed, "inverted digits").random(len(y)) < inverted).astype(np.int64)
    pixels = np.where(domain[:, None] == 1, 1 - pixels, pixels)
    return Pool(
        pixels[train],
        y[train],
        pixels[test],
        y[test],
        10,
        class_names=names,
        domain_train=domain[train],
        domain_test=domain[test],
        domain_names=("light on dark", "dark on light"),
    )


def _read_embedded_digits() -> tuple[Array, NDArray[np.int64]]:
    """Return pixels in [0, 1] and classes of scikit-learn's digits, read directly since its reader imports the whole
    package.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None  # it is a dependency of perfed
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)


def _split_by_class(y: NDArray[np.int64], test_fraction: float, seed: int) -> tuple[Indices, Indices]:
    rng = make_generator(seed, "digits test")
    train, test = [], []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        size = round(test_fraction * len(members))
        test.append(members[:size])
        train.append(members[size:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def view_matrix(name: str, dims: int, rng: np.random.Generator) -> Array:
    """Return the matrix ``(64, d)`` that maps the pixels to a client's inputs."""
    if name == "pixels":
        return np.eye(64)
    if name == "blocks":
        pair = np.repeat(np.eye(4), 2, axis=0) / 2  # (8, 4): means of neighbouring rows or columns
        return np.kron(pair, pair).astype(np.float64)
    if name == "subset":
        return np.eye(64)[:, np.sort(rng.choice(64, size=dims, replace=False))]
    return rng.standard_normal((64, dims)) / 8


def _standardise(train: Array, test: Array) -> tuple[Array, Array]:
    mean, std = train.mean(axis=0), train.std(axis=0)
    varies = std > 1e-8
    std = np.where(varies, std, 1.0)
    # A column that is constant in training has no scale; a different value in a test sample must not become huge.
    return (train - mean) / std * varies, (test - mean) / std * varies


def _make_arrays(x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> dict[str, Any]:
    def to_float32(x: Any) -> Any:
        return x if isinstance(x, Tensor) else x.astype(np.float32)

    return {"x_train": to_float32(x_train), "y_train": y_train, "x_test": to_float32(x_test), "y_test": y_test}


@dataset("mnist-usps", files=("mnist.npz", "usps.npz"))
def mnist_usps(
    seed: int,
    data_dir: Path | None,
    *,
    clients: AtLeastTwo = 100,
    classes_per_client: Positive = 3,
    shared_shards: bool = False,
    resize: bool = False,
) -> Federation:
    """Half of the clients hold MNIST digits (28x28), half USPS digits (16x16), a few classes each ("Digits").

    Inputs are ``(1, 28, 28)`` and ``(1, 16, 16)`` in [-1, 1], or all ``(1, 28, 28)`` with ``resize``
    (bilinear; "Digits-resize"). The assignment is random; if the number of clients is odd, one more client has MNIST.
    ``notes["host"]`` maps client id to "mnist" or "usps".

    By default all samples of a data set are distributed to its clients without overlap. ``shared_shards=True`` follows
    the authors' program instead: each data set is divided for the total number of clients, half of these parts are
    never used, and the parts overlap if there are few samples per client (see
    :func:`perfed.data.partition.shards.share_among_holders`).

    Source: Rakotomamonjy et al. 2024 (TMLR), sections 5 and S3.2.
    """
    num_usps = clients // 2
    is_usps = make_generator(seed, "hosts").permutation(clients) < num_usps
    ids = np.array(make_client_ids(clients))
    arrays: dict[str, Any] = {}
    for host, size, owners in (("mnist", 28, ids[~is_usps]), ("usps", 16, ids[is_usps])):
        data = load_images(f"{host}.npz", data_dir, size)
        own_seed = derive_seed(seed, host)
        num_parts = clients if shared_shards else len(owners)
        classes = draw_classes(10, num_parts, classes_per_client, seed=own_seed)
        parts = {
            split: share_among_holders(data[f"y_{split}"], classes, seed=own_seed, shared=shared_shards)
            for split in ("train", "test")
        }
        for i, owner in enumerate(owners.tolist()):
            arrays[owner] = {}
            for split in ("train", "test"):
                index = parts[split][i]
                arrays[owner][f"x_{split}"] = _scale_images(data[f"x_{split}"][index], resize)
                arrays[owner][f"y_{split}"] = data[f"y_{split}"][index]
    hosts = {client: "usps" if usps else "mnist" for client, usps in zip(ids.tolist(), is_usps, strict=True)}
    return replace(Federation.from_arrays(arrays, num_classes=10), notes={"host": hosts})


def _scale_images(images: NDArray[np.uint8], resize: bool) -> Tensor:
    x = (torch.from_numpy(images).unsqueeze(1).float() / 255 - 0.5) / 0.5
    if resize and x.shape[-1] != 28:
        x = torch.nn.functional.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    return x


@dataset("femnist-digits", files=("femnist_digits.npz",))
def femnist_digits(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Positive = 50,
    min_samples: Positive = 1,
    image: bool = False,
    scale: PositiveReal = 1.0,
) -> Federation:
    """Digits of FEMNIST, one writer per client; all clients have the same features.

    The clients are the first ``clients`` writers, in the order of the file, with at least ``min_samples``
    training digits and one test digit; ``seed`` has no effect. Inputs are ``(784,)``, or ``(1, 28, 28)`` with
    ``image``: bright ink on black in [0, 1], times ``scale`` (0.1 reproduces the authors' program).
    ``notes["writer"]`` maps client id to writer.

    Raises:
        PerfedError: if there are fewer such writers than ``clients``.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.9; Caldas et al. 2018 (LEAF).
    """
    file = "femnist_digits.npz"
    data = load_images(file, data_dir, 28, ("writer",))
    names = load_npz(file, data_dir, ["writer_name"])["writer_name"].tolist()
    last = max(int(data["writer_train"].max()), int(data["writer_test"].max()))
    require(file, last < len(names), f"writer {last} has no name in 'writer_name'")
    num_train = np.bincount(data["writer_train"], minlength=len(names))
    num_test = np.bincount(data["writer_test"], minlength=len(names))
    writers = np.flatnonzero((num_train >= min_samples) & (num_test >= 1))
    if len(writers) < clients:
        raise PerfedError(
            f"data.clients = {clients} is more than the {len(writers)} writers of '{file}' with at least "
            f"{min_samples} training digits (data.min_samples) and one test digit"
        )
    shape = (1, 28, 28) if image else (784,)
    arrays: dict[str, Any] = {}
    for client, writer in zip(make_client_ids(clients), writers, strict=False):
        arrays[client] = {}
        for split in ("train", "test"):
            is_writer = data[f"writer_{split}"] == writer
            ink = (255 - data[f"x_{split}"][is_writer]).astype(np.float32) / 255
            arrays[client][f"x_{split}"] = (ink * np.float32(scale)).reshape(-1, *shape)
            arrays[client][f"y_{split}"] = data[f"y_{split}"][is_writer]
    writer_names = {client: names[writer] for client, writer in zip(arrays, writers, strict=False)}
    return replace(Federation.from_arrays(arrays, num_classes=10), notes={"writer": writer_names})


SIZE = 32
DomainName = Literal["mnist", "usps", "mnist_m_remade", "font_digits", "street_digits"]
# Height and width of the images, and whether they are in colour; the file is NAME.npz.
DOMAINS: dict[DomainName, tuple[int, bool]] = {
    "mnist": (28, False),
    "usps": (16, False),
    "mnist_m_remade": (28, True),
    "font_digits": (28, False),
    "street_digits": (32, True),
}


@pooled_dataset(
    "digit-domains",
    files=tuple(f"{name}.npz" for name in DOMAINS),
    options=change_defaults(partition="domain-mixed", clients=5, samples=500, prior="uniform"),
)
def digit_domains(seed: int, data_dir: Path | None, *, domains: list[DomainName] = list(DOMAINS)) -> Pool:  # noqa: B006
    """Digits of five origins (MNIST, USPS, MNIST-M, fonts, street photos) as domains, mixed at every client.

    Inputs are ``(3, 32, 32)`` in [-1, 1]: all images are resized to 32x32 (bilinear), and grey images are repeated in
    each colour channel. Domains are in the order of ``domains``. Their sizes differ by a factor of a hundred (60,000 to
    621), hence ``prior = "uniform"``; if a domain has too few samples for a client, the client gets more samples of its
    other domains. :class:`perfed.datasets.options.PartitionOptions` has the further options.

    ``font_digits`` stands for FedDAR's SynthDigits, ``street_digits`` for SVHN, and MNIST-M is recreated
    (docs/data.md): results are comparable with each other, not with the paper's.

    Source: Zhong et al. 2023 (FedDAR), section 5 and appendix B.
    """
    if not domains or len(set(domains)) < len(domains):
        raise PerfedError(f"data.domains = {domains} is not allowed; it must be different names, at least one")
    read = {}
    for name in domains:
        size, colour = DOMAINS[name]
        read[name] = load_images(f"{name}.npz", data_dir, size, colour=colour)
    parts: dict[str, Any] = {}
    for split in ("train", "test"):
        parts[f"x_{split}"] = Resized([data[f"x_{split}"] for data in read.values()])
        parts[f"y_{split}"] = np.concatenate([data[f"y_{split}"] for data in read.values()])
        lengths = [len(data[f"y_{split}"]) for data in read.values()]
        parts[f"domain_{split}"] = np.repeat(np.arange(len(read)), lengths)
    return Pool(**parts, num_classes=10, class_names=tuple("0123456789"), domain_names=tuple(domains))


class Resized:
    """The concatenated images of several arrays, in one size and in colour, computed on access.

    Args:
        parts: uint8, ``(samples, height, width)`` or ``(samples, height, width, 3)``, which may differ in size.
    """

    def __init__(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __getitem__(self, index: Indices, /) -> NDArray[np.uint8]:
        """Return the images at the positions ``index``, ``(n, 3, 32, 32)`` uint8."""
        index = np.asarray(index)
        pixels = np.empty((len(index), 3, SIZE, SIZE), dtype=np.uint8)
        owner = np.searchsorted(self.ends, index, side="right")
        for number in np.unique(owner):
            rows = owner == number
            part = self.parts[number]
            images = torch.from_numpy(part[index[rows] - (self.ends[number] - len(part))])
            images = images.permute(0, 3, 1, 2) if images.ndim == 4 else images.unsqueeze(1)
            resized = torch.nn.functional.interpolate(images.float(), size=(SIZE, SIZE), mode="bilinear")
            pixels[rows] = resized.round().to(torch.uint8).expand(-1, 3, -1, -1).numpy()
        return pixels
