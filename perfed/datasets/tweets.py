"""Tweets to airlines: texts with the sentiment that readers assigned to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.files import load_npz, require
from perfed.data.partition.shards import derive_seed, select_test_samples
from perfed.data.tokens import encode, tokenise
from perfed.data.tokens import vocabulary as most_frequent
from perfed.datasets.catalogue import Positive, TestFraction
from perfed.datasets.options import change_defaults
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled_dataset

FILE = "airline_tweets.npz"


@pooled_dataset("tweets", files=(FILE,), options=change_defaults(clients=83, samples=0))
def tweets(
    seed: int,
    data_dir: Path | None,
    *,
    vocabulary: Positive = 10_000,
    length: Positive = 40,
    test_fraction: TestFraction = 0.2,
) -> Pool:
    """Tweets about airlines as token ids, of three sentiments and 7,701 users; in place of Sent140.

    Inputs are ``(length,)`` token ids: 0 for padding after the text, 1 for unknown words, and 2 and above for the
    ``vocabulary`` most frequent tokens of all training texts (:func:`perfed.data.tokens.tokenise`). The fraction
    ``test_fraction`` of each user's tweets are test samples, and at least one tweet is a training sample. With
    ``partition = "natural"``, every user is a client; clients with fewer than three tweets have no test samples.
    :class:`perfed.datasets.options.PartitionOptions` has the further options; 83 clients as in Tziotis et al. 2023.

    Source: "Twitter US Airline Sentiment" (Crowdflower 2015).
    """
    texts, y, users, class_names = _read_tweets(data_dir)
    aside = select_test_samples(users, test_fraction, seed=derive_seed(seed, "tweets"))
    tokens = [tokenise(text) for text in texts]
    words = most_frequent((t for t, test in zip(tokens, aside.tolist(), strict=True) if not test), vocabulary)
    x = encode(tokens, words, length)
    number = np.arange(int(users.max()) + 1)
    return Pool(
        x[~aside],
        y[~aside],
        x[aside],
        y[aside],
        num_classes=len(class_names),
        class_names=class_names,
        owner_train=users[~aside],
        owner_test=users[aside],
        owners=tuple(f"user {user}" for user in number.tolist()),
        words=words,
    )


def _read_tweets(data_dir: Path | None) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Return texts, classes, users and names of the classes, after checking them."""
    data = load_npz(FILE, data_dir, ["text_utf8", "y", "user", "class_names"])
    require(FILE, data["class_names"].dtype.kind == "U", "'class_names' must hold text")
    raw, names = data["text_utf8"], tuple(data["class_names"].tolist())
    require(FILE, raw.dtype == np.uint8 and raw.ndim == 1, f"'text_utf8' is {raw.dtype} {raw.shape}, not bytes")
    try:
        texts = raw.tobytes().decode().split("\n")
    except UnicodeDecodeError as error:
        require(FILE, False, f"'text_utf8' is not UTF-8 ({error.reason} at byte {error.start})")
    columns: dict[str, NDArray[Any]] = {}
    for key in ("y", "user"):
        column = data[key]
        good = column.shape == (len(texts),) and np.issubdtype(column.dtype, np.integer)
        require(FILE, good, f"'{key}' is {column.dtype} {column.shape}, not one integer for each of {len(texts)} lines")
        columns[key] = column.astype(np.int64)
    y, users = columns["y"], columns["user"]
    require(FILE, y.min() >= 0 and y.max() < len(names), f"'y' must hold classes in 0..{len(names) - 1}")
    require(FILE, users.min() >= 0, "'user' must not be negative")
    return texts, y, users, names
