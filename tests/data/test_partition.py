from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
import pytest
from data_files import require_file

from perfed.data.files import load_npz
from perfed.data.partition import pfllib
from perfed.data.partition.shards import (
    deal_samples,
    derive_seed,
    draw_classes,
    make_generator,
    share_among_holders,
    subsample_clients,
)
from perfed.errors import PerfedError

AWKWARD = [
    (20, 100, 3),
    (10, 7, 10),
    (10, 1, 1),
    (1, 5, 1),
    (10, 3, 4),
    (7, 50, 6),
    (2, 33, 1),
    (100, 1000, 99),
]


@pytest.mark.parametrize(("num_classes", "num_clients", "each"), AWKWARD)
def test_every_client_has_distinct_classes_and_every_class_is_used_evenly(num_classes, num_clients, each):
    for seed in range(3):
        classes = draw_classes(num_classes, num_clients, each, seed=seed)
        assert classes.shape == (num_clients, each)
        assert all(len(set(row)) == each for row in classes.tolist())
        counts = np.bincount(classes.ravel(), minlength=num_classes)
        assert len(counts) == num_classes
        assert counts.max() - counts.min() <= 1


def test_class_draw_is_random_and_a_function_of_the_seed():
    first = draw_classes(10, 40, 3, seed=1)
    assert np.array_equal(first, draw_classes(10, 40, 3, seed=1))
    assert not np.array_equal(first, draw_classes(10, 40, 3, seed=2))
    pairs = {tuple(row) for seed in range(40) for row in draw_classes(5, 5, 2, seed=seed).tolist()}
    assert len(pairs) == 10  # all pairs of five classes occur


def test_class_draw_leaves_the_global_generator_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    share_among_holders(np.arange(20) % 4, draw_classes(4, 4, 2, seed=0), seed=0)
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 5, 4), "classes_per_client = 4 is more than the 3 classes"),
        ((0, 5, 1), "num_classes = 0 is not allowed; it must be at least 1"),
        ((3, -2, 1), "num_clients = -2"),
        ((3, 5, 0), "classes_per_client = 0"),
    ],
)
def test_impossible_draws_are_refused(arguments, message):
    with pytest.raises(PerfedError, match=message):
        draw_classes(*arguments, seed=0)


def test_purposes_are_independent_and_stable_across_processes():
    assert derive_seed(0, "a") != derive_seed(0, "b") != derive_seed(1, "b")
    assert not np.array_equal(
        make_generator(0, "a").integers(1000, size=8), make_generator(0, "b").integers(1000, size=8)
    )
    derive_seed(-1, "a")  # any integer is a seed
    code = "from perfed.data.partition.shards import derive_seed; print(derive_seed(3, 'x'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == derive_seed(3, "x")  # Python's own hash would differ


def test_shards_are_disjoint_even_and_of_the_clients_classes():
    labels = make_generator(0, "labels").integers(6, size=1000)
    classes = draw_classes(6, 9, 2, seed=3)
    parts = share_among_holders(labels, classes, seed=3)
    together = np.concatenate(parts)
    assert len(together) == len(np.unique(together)) == 1000
    for part, held in zip(parts, classes, strict=True):
        assert part.dtype == np.int64
        assert set(labels[part]) == set(held)
    for label in range(6):
        sizes = [np.sum(labels[p] == label) for p, held in zip(parts, classes, strict=True) if label in held]
        assert max(sizes) - min(sizes) <= 1


def test_partition_is_a_function_of_the_seed_and_train_and_test_share_the_draw():
    train, test = np.repeat(np.arange(4), 50), np.repeat(np.arange(4), 20)
    classes = draw_classes(4, 6, 2, seed=0)
    first, again = share_among_holders(train, classes, seed=5), share_among_holders(train, classes, seed=5)
    other = share_among_holders(train, classes, seed=6)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    for a, b in zip(first, share_among_holders(test, classes, seed=5), strict=True):
        assert set(train[a]) == set(test[b])


def test_samples_of_a_class_nobody_holds_are_left_out():
    labels = np.array([0, 1, 2, 0, 1, 2])
    parts = share_among_holders(labels, np.array([[0], [2]]), seed=0)
    assert [p.tolist() for p in parts] == [[0, 3], [2, 5]]


def test_shared_shards_overlap_when_samples_are_few():
    labels = np.repeat(np.arange(10), 100)
    classes = draw_classes(10, 20, 2, seed=0)  # 50 samples per client: few
    apart, shared = (share_among_holders(labels, classes, seed=0, shared=s) for s in (False, True))
    assert sum(len(p) for p in apart) == 1000
    for part, held in zip(shared, classes, strict=True):
        assert len(part) == 2 * 50 * 25  # two classes, 50 draws of shards of 100 / 4 samples
        assert set(labels[part]) == set(held)
    holders = [set(p) for p, held in zip(shared, classes, strict=True) if 0 in held]
    assert holders[0] & holders[1]


def test_shared_shards_do_not_overlap_when_samples_are_many():
    labels = np.repeat(np.arange(10), 100)
    classes = draw_classes(10, 10, 2, seed=0)  # 100 samples per client: not few
    apart, shared = (share_among_holders(labels, classes, seed=0, shared=s) for s in (False, True))
    assert all(np.array_equal(a, b) for a, b in zip(apart, shared, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_too_few_samples_are_refused_not_searched_for(shared):
    labels = np.array([0] * 50 + [1])
    with pytest.raises(PerfedError, match=r"class 1 has 1 samples for the 30 clients .* use fewer clients"):
        share_among_holders(labels, np.tile([0, 1], (30, 1)), seed=0, shared=shared)
    with pytest.raises(PerfedError, match="class 7 has 0 samples for the 1 clients"):
        share_among_holders(labels, np.array([[0], [7]]), seed=0, shared=shared)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (np.zeros((2, 2), int), np.array([[0]]), r"labels have shape \(2, 2\)"),
        (np.zeros(0, int), np.array([[0]]), r"labels have shape \(0,\)"),
        (np.zeros(4, int), np.array([0]), r"classes have shape \(1,\)"),
        (np.zeros(4, int), np.array([[1, 0], [0, 0]]), "client 1 holds a class twice"),
    ],
)
def test_malformed_arguments_are_refused(labels, classes, message):
    with pytest.raises(PerfedError, match=message):
        share_among_holders(labels, classes, seed=0)


def test_subsample_keeps_a_random_part_without_replacement():
    given = [np.arange(1000, 2000), np.arange(1000), np.array([7])]
    kept = subsample_clients(given, low=0.05, high=0.5, seed=0)
    for before, after in zip(given, kept, strict=True):
        assert set(after) <= set(before)
        assert len(set(after)) == len(after) >= 1
    assert 50 <= len(kept[0]) <= 500 and len(kept[0]) != len(kept[1])
    assert np.array_equal(kept[1], subsample_clients(given, low=0.05, high=0.5, seed=0)[1])
    assert not np.array_equal(kept[1], subsample_clients(given, low=0.05, high=0.5, seed=1)[1])
    assert np.array_equal(subsample_clients(given, low=1, high=1, seed=0)[0], given[0])


def test_subsample_draws_the_fraction_uniformly():
    sizes = [len(k) for k in subsample_clients([np.arange(200)] * 2000, low=0.05, high=1.0, seed=0)]
    assert abs(np.mean(sizes) / 200 - 0.525) < 0.02
    assert min(sizes) < 14 and max(sizes) > 196


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.5, 0.4), (-0.1, 0.5), (0.5, 1.5), (float("nan"), 1)])
def test_subsample_refuses_impossible_fractions(low, high):
    with pytest.raises(PerfedError, match="0 < low <= high <= 1 is needed"):
        subsample_clients([np.arange(3)], low=low, high=high, seed=0)
    with pytest.raises(PerfedError, match="client 1 has no samples"):
        subsample_clients([np.arange(3), np.arange(0)], low=0.5, high=1, seed=0)


# deal --------------------------------------------------------------------------------------------------------


def drawn_counts(num_clients: int = 12, num_classes: int = 5):
    return make_generator(3, "counts").integers(0, 9, (num_clients, num_classes))


def test_dealing_gives_what_the_table_says_and_no_sample_twice():
    counts = drawn_counts()
    labels = make_generator(1, "labels").integers(5, size=800)
    parts = deal_samples(labels, counts, seed=0)
    for part, row in zip(parts, counts, strict=True):
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()
        assert np.bincount(labels[part], minlength=5).tolist() == row.tolist()
    together = np.concatenate(parts)
    assert len(together) == len(np.unique(together)) == counts.sum()
    assert all(np.array_equal(a, b) for a, b in zip(parts, deal_samples(labels, counts, seed=0), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, deal_samples(labels, counts, seed=1), strict=True))


def test_shared_samples_are_used_equally_often_and_never_twice_by_a_client():
    counts = drawn_counts()
    labels = np.repeat(np.arange(5), 10)
    parts = deal_samples(labels, counts, seed=0, share=True)
    for part, row in zip(parts, counts, strict=True):
        assert len(np.unique(part)) == len(part)
        assert np.bincount(labels[part], minlength=5).tolist() == row.tolist()
    used = np.bincount(np.concatenate(parts), minlength=50).reshape(5, 10)
    assert ((used.max(axis=1) - used.min(axis=1)) <= 1).all() and used.max() > 1
    plenty = make_generator(1, "labels").integers(5, size=800)
    apart = zip(deal_samples(plenty, counts, seed=0), deal_samples(plenty, counts, seed=0, share=True), strict=True)
    assert all(np.array_equal(a, b) for a, b in apart)  # nothing is shared without need


def test_a_class_that_does_not_suffice_is_named():
    labels = np.array([0] * 5 + [1] * 3)
    with pytest.raises(PerfedError, match="class 1 has 3 samples, but the clients need 4 in all"):
        deal_samples(labels, np.array([[1, 2], [0, 2]]), seed=0)
    with pytest.raises(PerfedError, match="class 1 has 3 samples, but client 1 needs 4"):
        deal_samples(labels, np.array([[1, 2], [0, 4]]), seed=0, share=True)
    assert [len(p) for p in deal_samples(labels, np.array([[0, 0], [5, 3]]), seed=0)] == [0, 8]


# ---- PFLlib's splits


@pytest.mark.parametrize(
    ("split", "first", "last", "all_indices"),
    [  # client 0's first training samples, client 19's first test samples, CRC-32 of everybody's, of PFLlib's own files
        (lambda y: pfllib.split_pathological(y, 20, 2), [3325, 3246, 6191], [49304, 45670, 65554], 3533790442),
        (lambda y: pfllib.split_dirichlet(y, 20, 0.1), [58868, 64121, 24995], [50402, 11989, 51161], 2751157962),
    ],
)
def test_pfllibs_splits_are_the_published_ones_sample_by_sample(split, first, last, all_indices):
    require_file("fashion_mnist.npz")
    data = load_npz("fashion_mnist.npz", None, ["y_train", "y_test"])
    parts = split(np.concatenate([data["y_train"], data["y_test"]]).astype(np.int64))
    assert parts[0][0][:3].tolist() == first
    assert parts[19][1][:3].tolist() == last
    everything = np.concatenate([part for pair in parts for part in pair])
    assert zlib.crc32(everything.astype("<i8").tobytes()) == all_indices


@pytest.mark.parametrize(
    ("split", "classes"),
    [(lambda y: pfllib.split_pathological(y, 8, 2), 2), (lambda y: pfllib.split_dirichlet(y, 8, 0.5), 4)],
)
def test_pfllibs_splits_use_every_sample_once_three_quarters_to_train(split, classes):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 500))
    parts = split(labels)
    everything = np.concatenate([part for pair in parts for part in pair])
    assert np.array_equal(np.sort(everything), np.arange(2000))
    for train, test in parts:
        assert len(train) == int(0.75 * (len(train) + len(test)))
        assert len(set(labels[np.concatenate([train, test])].tolist())) <= classes
    sizes = [len(train) for train, _ in parts]
    assert max(sizes) > 1.5 * min(sizes)  # uneven


def test_pfllibs_splits_refuse_what_cannot_be_shared_out():
    with pytest.raises(PerfedError, match="class 0 has 3 samples for 4 clients: too few, or nobody"):
        pfllib.split_pathological(np.repeat([0, 1], 3), 8, 1)
    with pytest.raises(PerfedError, match="no draw gives each of 50 clients 2 samples; use a larger concentration"):
        pfllib.split_dirichlet(np.repeat(np.arange(4), 50), 50, 1e-3)
