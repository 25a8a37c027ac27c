"""Tweets as token ids: the rule for tokens, the vocabulary of training texts, users as clients."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from data_files import require_file

from perfed.data.federation import Federation
from perfed.data.tokens import FIRST_WORD, UNKNOWN, encode, tokenise, vocabulary
from perfed.datasets import describe, load
from perfed.errors import PerfedError

TEXTS = ["late late late flight!", "thanks @united", "LATE again #fail http://t.co/Ab1 https://x.y/z", "ok"]


def write(folder, texts, labels, users, **change):
    """A file of tweets; ``change``: other arrays in their place, ``None``: left out."""
    arrays = {
        "text_utf8": np.frombuffer("\n".join(texts).encode(), dtype=np.uint8),
        "y": np.array(labels, dtype=np.uint8),
        "user": np.array(users, dtype=np.int16),
        "class_names": np.array(["negative", "neutral", "positive"]),
    }
    found = {key: value for key, value in {**arrays, **change}.items() if value is not None}
    np.savez(folder / "airline_tweets.npz", **found)
    return folder


def made(folder, sizes=(5, 1, 2, 10, 3)):
    """Every tweet says whose it is and which: "u3 n27"."""
    user = np.repeat(np.arange(len(sizes)), sizes)
    texts = [f"u{owner} n{number}" for number, owner in enumerate(user)]
    return write(folder, texts, np.arange(len(user)) % 3, user)


def said(federation: Federation, split: str) -> list[list[str]]:
    """The words of every client's tweets."""
    words = ["", "?", *federation.words]
    return [[" ".join(words[int(i)] for i in row if i > 0) for row in getattr(c, split).x] for c in federation]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Don't GO, don’t", ["don't", "go", ",", "don't"]),
        ("@united: #fail!!", ["@united", ":", "#fail", "!", "!"]),
        ("see http://t.co/aB1,now  or HTTPS://x.y", ["see", "<link>", "or", "<link>"]),
        ("é 😡😡 747", ["é", "😡", "😡", "747"]),
        ("  ", []),
    ],
)
def test_tokens(text, tokens):
    assert tokenise(text) == tokens


def test_the_vocabulary_is_the_most_frequent_tokens_with_ties_in_alphabetical_order():
    tokens = [tokenise(text) for text in TEXTS]
    assert vocabulary(tokens, 4) == ("late", "<link>", "!", "#fail")
    counts = Counter(token for text in tokens for token in text)
    assert set(vocabulary(tokens, 1000)) == set(counts)


def test_ids_are_positions_in_the_vocabulary():
    ids = encode([["b", "x", "a"], ["a"], [], list("aaaaa")], ("a", "b"), 3)
    assert ids.tolist() == [[3, UNKNOWN, FIRST_WORD], [2, 0, 0], [0, 0, 0], [2, 2, 2]] and ids.dtype == np.float32


def test_users_are_clients_and_every_user_gives_up_the_same_part_for_testing(tmp_path):
    federation = load("tweets", {"partition": "natural", "test_fraction": 0.3}, seed=0, data_dir=made(tmp_path))
    assert list(federation.notes["owner"].values()) == [f"user {u}" for u in range(5)]
    assert [(len(c.train), len(c.test)) for c in federation] == [(3, 2), (1, 0), (1, 1), (7, 3), (2, 1)]
    for user, (train, test) in enumerate(zip(said(federation, "train"), said(federation, "test"), strict=True)):
        assert all(text.startswith(f"u{user} n") for text in train)
        assert not set(train) & set(test)
        # What only a test tweet says is not in the vocabulary.
        assert all(text == f"u{user} ?" for text in test)
    again = load("tweets", {"partition": "natural", "test_fraction": 0.3}, seed=0, data_dir=tmp_path)
    other = load("tweets", {"partition": "natural", "test_fraction": 0.3}, seed=1, data_dir=tmp_path)
    assert said(again, "train") == said(federation, "train") != said(other, "train")


def test_users_with_too_few_tweets_may_be_left_out(tmp_path):
    options = {"partition": "natural", "test_fraction": 0.3, "min_samples": 3}
    federation = load("tweets", options, seed=0, data_dir=made(tmp_path))
    assert list(federation.notes["owner"].values()) == ["user 0", "user 3"]
    with pytest.raises(PerfedError, match=r"clients = 3 is more than the 2 there are .* at least 3 training samples"):
        load("tweets", {**options, "clients": 3}, seed=0, data_dir=tmp_path)
    with pytest.raises(PerfedError, match=r"min_samples = 9: nobody has so many training samples; at most 7"):
        load("tweets", {**options, "min_samples": 9}, seed=0, data_dir=tmp_path)


def test_the_other_partitions_share_all_tweets(tmp_path):
    made(tmp_path, (3,) * 60)
    iid = load("tweets", {"clients": 7}, seed=0, data_dir=tmp_path)
    assert sum(len(c.train) for c in iid) == 120 and {len(c.train) for c in iid} == {17, 18}
    shards = load("tweets", {"clients": 6, "partition": "pathological"}, seed=0, data_dir=tmp_path)
    assert all(len(set(c.train.y.tolist())) == 2 for c in shards)
    for client in shards:
        assert set(client.test.y.tolist()) <= set(client.train.y.tolist())
    with pytest.raises(PerfedError, match=r"samples = 0 \(all there are\) is for the partitions 'iid' and 'pathologi"):
        load("tweets", {"partition": "dominant"}, seed=0, data_dir=tmp_path)
    assert len(load("tweets", {"partition": "dirichlet", "clients": 4}, seed=0, data_dir=tmp_path)) == 4


def test_texts_are_cut_and_rare_words_unknown(tmp_path):
    write(tmp_path, ["a b c d", "a b c", "a b", "a"] * 5, [0, 1, 2, 0] * 5, [0] * 20)
    options = {"partition": "iid", "clients": 1, "vocabulary": 2, "length": 3}
    federation = load("tweets", options, seed=0, data_dir=tmp_path)
    assert federation.words == ("a", "b") and federation.clients[0].input_shape == (3,)
    rows = {tuple(row) for row in federation.clients[0].train.x.long().tolist()}
    assert rows <= {(2, 3, 1), (2, 3, 0), (2, 0, 0)}


FAULTS = {
    "no users": ({"user": None}, r"has no array 'user'"),
    "another length": ({"y": np.zeros(3, dtype=np.int64)}, r"'y' is int64 \(3,\), not one integer for each of 4 lines"),
    "real users": ({"user": np.zeros(4)}, r"'user' is float64 \(4,\), not one integer"),
    "a fourth class": ({"y": np.array([0, 1, 2, 3])}, r"'y' must hold classes in 0..2"),
    "negative users": ({"user": np.array([0, 1, -1, 2])}, r"'user' must not be negative"),
    "no text": ({"text_utf8": np.zeros(9)}, r"'text_utf8' is float64 \(9,\), not bytes"),
    "not UTF-8": ({"text_utf8": np.array([99, 233], dtype=np.uint8)}, r"'text_utf8' is not UTF-8 \(.* at byte 1\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_are_one_line(tmp_path, fault):
    change, message = FAULTS[fault]
    with pytest.raises(PerfedError, match=message) as error:
        load("tweets", {"clients": 1}, seed=0, data_dir=write(tmp_path, TEXTS, [0, 1, 2, 0], [0, 1, 2, 3], **change))
    assert "\n" not in str(error.value) and "airline_tweets.npz" in str(error.value)


@pytest.mark.long
def test_the_real_file():
    folder = require_file("airline_tweets.npz").parent
    federation = load("tweets", {}, seed=0, data_dir=folder)
    assert len(federation) == 83 and federation.class_names == ("negative", "neutral", "positive")
    counts = np.bincount(torch.cat([s.y for c in federation for s in (c.train, c.test)]), minlength=3)
    assert counts.sum() == 14640 and counts.argmax() == 0
    assert len(federation.words) == 10_000 and "@united" in federation.words[:20]
    x = torch.cat([c.test.x for c in federation])
    unknown = float((x == UNKNOWN).sum() / (x > 0).sum())
    assert 0.005 < unknown < 0.05 and float(x.max()) <= 10_001
    users = load("tweets", {"partition": "natural", "min_samples": 4}, seed=0, data_dir=folder)
    sizes = np.array([len(c.train) for c in users])
    assert len(users) > 400 and sizes.min() == 4 and sizes.max() > 30
    assert all(c.test is not None and len(c.test) for c in users)


def test_the_description_lists_the_options():
    found = {option.name: option.default for option in describe("tweets").options}
    assert (found["vocabulary"], found["length"], found["clients"], found["samples"]) == (10_000, 40, 83, 0)
