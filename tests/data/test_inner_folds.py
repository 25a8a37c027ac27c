"""Folds of training samples in the place of test data: each sample in one, each class in all, nothing of the test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perfed.data.federation import Federation
from perfed.data.held_out import fold_as_test
from perfed.data.lazy import LazySplit
from perfed.datasets import load

K = 4


def federation(counts=((9, 6, 1), (4, 4, 4)), **more):
    """Samples that are numbered, so many of each class."""
    parts, start = {}, 0
    for name, held in zip("ab", counts, strict=True):
        y = np.repeat(np.arange(len(held)), held)
        x = (start + np.arange(len(y), dtype=np.float32))[:, None]
        parts[name] = {"x_train": x, "y_train": y, "x_test": x + 1000, "y_test": y}
        start += 100
    return Federation.from_arrays(parts, **more)


def numbers(split):
    return [] if split is None else sorted(split.x[:, 0].tolist())


def test_every_sample_is_in_one_fold_but_the_only_one_of_its_class():
    whole = federation()
    for client in whole:
        made = [fold_as_test(client, (i, K), True, seed=3) for i in range(K)]
        for one in made:
            assert sorted(numbers(one.train) + numbers(one.test)) == numbers(client.train)
            assert max(numbers(one.test)) < 1000  # nothing of the test data
            assert set(one.train.y.tolist()) == set(client.train.y.tolist())
        held = [number for one in made for number in numbers(one.test)]
        alone = [15.0] if client.id == "a" else []
        assert sorted(held + alone) == numbers(client.train)
        sizes = [len(one.test) for one in made]
        assert max(sizes) - min(sizes) <= 1
        for label in range(3):
            each = [int((one.test.y == label).sum()) for one in made]
            assert max(each) - min(each) <= 1


def test_folds_are_the_same_whenever_asked_and_others_with_another_seed():
    (client, _) = federation()
    first, again, other = (numbers(fold_as_test(client, (0, K), True, seed=s).test) for s in (1, 1, 2))
    assert first == again != other


def test_values_are_in_folds_whatever_they_are():
    y = np.linspace(0, 1, 10, dtype=np.float32)
    (client,) = Federation.from_arrays({"a": {"x_train": y[:, None], "y_train": y}})
    made = [fold_as_test(client, (i, 3), False, seed=0) for i in range(3)]
    assert sorted(n for one in made for n in numbers(one.test)) == pytest.approx(sorted(y.tolist()))
    assert sorted(len(one.test) for one in made) == [3, 3, 4]


def test_a_client_with_fewer_samples_than_folds_is_in_some():
    (client, _) = federation(((2, 1, 1), (4, 4, 4)))
    held = [fold_as_test(client, (i, K), True, seed=0) for i in range(K)]
    assert sorted(n for one in held for n in numbers(one.test)) == [0.0, 1.0]
    assert sum(one.test is None for one in held) == 2
    assert all(len(one.train) >= 3 for one in held)


def test_samples_that_are_read_when_used_are_in_the_same_folds():
    whole = federation()
    given = {c.id: {"x_train": c.train.x.numpy(), "y_train": c.train.y.numpy()} for c in whole}
    for eager, lazy in zip(whole, Federation.from_source(given.__getitem__, ["a", "b"]), strict=True):
        for fold in range(K):
            one, other = (fold_as_test(client, (fold, K), True, seed=0) for client in (eager, lazy))
            assert isinstance(other.test, LazySplit)
            assert other.test.facts() == one.test.facts()
            assert numbers(other.test.loaded()) == numbers(one.test)
            assert numbers(other.train.loaded()) == numbers(one.train)


def test_data_sets_have_it_and_validation_data_are_of_the_rest():
    whole = load("digits", {"clients": 3, "samples": 40}, seed=0)
    made = [load("digits", {"clients": 3, "samples": 40, "inner_fold": [i, 5]}, seed=0) for i in range(5)]
    for place, client in enumerate(whole):
        rows = torch.cat([one.clients[place].test.x for one in made])
        assert len(torch.unique(rows, dim=0)) == len(torch.unique(client.train.x, dim=0))
    options = {"clients": 3, "samples": 40, "inner_fold": [0, 5], "validation_fraction": 0.2}
    for less, client in zip(load("digits", options, seed=0), made[0], strict=True):
        assert torch.equal(less.test.x, client.test.x)
        assert len(less.train) + len(less.validation) == len(client.train)
