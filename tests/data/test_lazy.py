"""Clients whose samples are read when they are used, or are not here at all."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import blobs

from perfed.data.client import Split
from perfed.data.domain_input import with_domain_input
from perfed.data.facts import SPLITS, ClientFacts, SplitFacts
from perfed.data.federation import Federation
from perfed.data.held_out import split_validation, with_validation
from perfed.data.lazy import LazySplit, SplitCache
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.participation.clock import Population
from perfed.run.callbacks.results import describe_holdings

EAGER = blobs((12, 7, 5), dims=(4, 3), validation=4)


def arrays(federation: Federation, client: str, domains: bool = True) -> dict[str, object]:
    """What ``from_arrays`` takes for one client."""
    known = next(c for c in federation if c.id == client)
    found: dict[str, object] = {}
    for name in SPLITS:
        if (split := known.split(name)) is not None:
            found |= {f"x_{name}": split.x.numpy(), f"y_{name}": split.y.numpy()}
            if domains and split.domain is not None:
                found[f"domain_{name}"] = split.domain.numpy()
    return found


class Counting:
    """A user's function that counts its calls."""

    def __init__(self, federation: Federation, domains: bool = True) -> None:
        self.federation, self.domains, self.calls = federation, domains, 0

    def __call__(self, client: str) -> dict[str, object]:
        self.calls += 1
        return arrays(self.federation, client, self.domains)


def equal(one: Split | None, other: Split | None) -> bool:
    if one is None or other is None:
        return one is other
    domains = one.domain is other.domain is None or torch.equal(one.domain, other.domain)
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and domains


def assert_same_data(one: Federation, other: Federation) -> None:
    assert one.ids == other.ids and one.classes == other.classes and one.num_domains == other.num_domains
    for mine, its in zip(one, other, strict=True):
        assert all(equal(mine.split(name), its.split(name)) for name in SPLITS), mine.id
        for name in SPLITS:
            if (split := mine.split(name)) is not None:
                assert split.facts() == its.split(name).facts() and split.bytes == its.split(name).bytes


@pytest.mark.parametrize("domains", [True, False])
def test_what_is_read_is_what_arrays_give_and_facts_are_known_without_reading(domains):
    eager = Federation.from_arrays({i: arrays(EAGER, i, domains) for i in EAGER.ids})
    read = Counting(EAGER, domains)
    deferred = Federation.from_source(read, EAGER.ids).to(dtype=torch.float64)
    looked = read.calls
    assert looked == len(EAGER)
    assert str(deferred.facts) == str(eager.facts) and repr(deferred) == repr(eager)
    known, there = describe_holdings(deferred), describe_holdings(eager)
    assert known | {"data": 0} == there | {"data": 0}
    assert deferred.num_domains == eager.num_domains and deferred.domain_samples("test") == eager.domain_samples("test")
    assert read.calls == looked
    assert_same_data(deferred, eager)


def test_validation_data_domains_as_inputs_and_scaled_targets_are_made_when_samples_are_read():
    for domains in (True, False):
        eager = Federation.from_arrays({i: arrays(EAGER, i, domains) for i in EAGER.ids})
        read = Counting(EAGER, domains)
        deferred = Federation.from_source(read, EAGER.ids).to(dtype=torch.float64)
        looked, parts = read.calls, []
        for federation in (eager, deferred):
            bare = replace(federation, clients=tuple(replace(c, validation=None) for c in federation))
            cut = tuple(with_validation(c, 0.3, True, 5) for c in bare)
            made = split_validation(replace(bare, clients=cut), 3)
            parts.append(with_domain_input(made) if domains else made)
        assert domains or read.calls == looked  # without domains, counts say how many of each class there will be
        assert all(isinstance(client.train, LazySplit) for client in parts[1])
        assert_same_data(parts[1], parts[0])
    values = blobs(regression=True)
    deferred = Federation.from_source(Counting(values), values.ids, task="regression").to(dtype=torch.float64)
    assert_same_data(deferred.standardised(), values.standardised())


def test_no_more_is_held_than_the_bound_and_what_was_used_last_stays():
    read = Counting(EAGER)
    size = [c.train.x.nbytes + c.train.y.nbytes + c.train.domain.nbytes for c in EAGER]
    federation = Federation.from_source(read, EAGER.ids, hold=size[0] + size[1])
    held, looked = federation.clients[0].train.source.cache, read.calls
    first, second, third = (client.train for client in federation)
    for split in (first, third, first, first):
        split.loaded()
    assert read.calls - looked == held.reads == 2 and held.bytes == size[0] + size[2]
    second.loaded()  # in place of the third, which was used before the first
    first.loaded()
    assert held.reads == 3 and held.bytes == size[0] + size[1]
    third.loaded()
    assert held.reads == 4 and held.bytes <= held.limit
    small = Federation.from_source(read, EAGER.ids, hold=1)
    assert (
        equal(small.clients[0].train.loaded(), EAGER.clients[0].train)
        and small.clients[0].train.source.cache.bytes == 0
    )


def test_threads_share_what_is_held():
    federation = Federation.from_source(Counting(EAGER), EAGER.ids, hold=600)
    held = federation.clients[0].train.source.cache
    with ThreadPoolExecutor(8) as pool:
        splits = [(c.train, e.train) for c, e in zip(federation, EAGER, strict=True)] * 200
        assert all(pool.map(lambda pair: equal(pair[0].loaded(), pair[1]), splits))
    assert 0 < held.bytes <= 600


def test_another_process_gets_a_federation_that_reads_for_itself():
    federation = Federation.from_source(Counting(EAGER), EAGER.ids).to(dtype=torch.float64)
    federation.clients[0].train.loaded()
    sent = pickle.loads(pickle.dumps(federation))
    assert sent.clients[0].train.source.cache.bytes == 0 and sent.fingerprint == federation.fingerprint
    assert_same_data(sent, EAGER)


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 11, "classes": (4, 4, 3), "domains": (11,)}, "samples = 12, but the client's facts say 11"),
        ({"input_shape": (5,)}, r"input_shape = \(4,\), but the client's facts say \(5,\)"),
        ({"classes": (12,)}, r"classes = \(4, 4, 4\), but the client's facts say \(12,\)"),
        ({"domains": (12,)}, r"domains = .*, but the client's facts say \(12,\)"),
        ({"target_shape": (2,)}, r"target_shape = \(\), but the client's facts say \(2,\)"),
    ],
)
def test_facts_that_lie_are_refused_when_the_samples_are_read(changes, says):
    facts = [client.facts() for client in EAGER]
    lie = replace(facts[0].splits["train"], **changes)
    facts[0] = replace(facts[0], splits={"train": lie})
    federation = Federation.from_source(Counting(EAGER), facts, num_classes=3)
    with pytest.raises(PerfedError, match=f"^client 'c0': train samples have {says}$"):
        federation.clients[0].train.loaded()
    assert equal(federation.clients[1].train.loaded(), EAGER.clients[1].train)


def test_samples_are_checked_when_they_are_read():
    def read(client):
        found = arrays(EAGER, client)
        if client == "c1":
            found["x_test"] = found["x_test"].copy()
            found["x_test"][2, 1] = np.nan
        return found

    federation = Federation.from_source(read, [client.facts() for client in EAGER], num_classes=3)
    assert len(federation.clients[1].train.loaded()) == 7
    with pytest.raises(PerfedError, match=r"^client 'c1': test inputs hold NaN or infinity in column 1, row 2;"):
        federation.clients[1].test.loaded()


def test_a_source_that_raises_is_named():
    def read(client):
        raise OSError("the disk\nis gone")

    federation = Federation.from_source(read, [client.facts() for client in EAGER], num_classes=3)
    with pytest.raises(PerfedError, match=r"^client 'c2': test samples cannot be read: the disk is gone$"):
        federation.clients[2].test.loaded()
    with pytest.raises(PerfedError, match=r"^client 'c0': its data cannot be read: the disk is gone$"):
        Federation.from_source(read, EAGER.ids)


@pytest.mark.parametrize(
    ("clients", "options", "says"),
    [
        (["c0", "c0"], {}, "client id 'c0' occurs twice"),
        ([EAGER.clients[0].facts(), "c1"], {}, "facts of all clients, or only ids"),
        ([EAGER.clients[0].facts()], {"num_classes": 2}, "client 'c0': train label 2 is outside the classes 0..1"),
        (["c0"], {"hold": -1}, "hold is -1 bytes"),
        (["c0"], {"num_classes": 2}, "client 'c0': train label 2 is outside the classes 0..1"),
        ([], {}, "has no clients"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_at_once(clients, options, says):
    with pytest.raises(PerfedError, match=says):
        Federation.from_source(Counting(EAGER), clients, **options)


def test_values_need_a_task_and_texts_become_classes():
    values = blobs(regression=True)
    with pytest.raises(PerfedError, match="floating-point numbers; say task = "):
        Federation.from_source(Counting(values), values.ids)
    given = {i: {"x_train": np.eye(3), "y_train": ["well", "ill", "well"]} for i in ("a", "b")}
    texts = Federation.from_source(given.__getitem__, given)
    assert texts.classes == ("ill", "well") and texts.clients[0].train.y.tolist() == [1, 0, 1]


# Clients whose data are elsewhere ----------------------------------------------------------------------------


def test_a_server_builds_the_same_federation_of_facts_as_the_sites_have():
    told = json.loads(json.dumps([client.facts().plain() for client in EAGER]))
    facts = [ClientFacts.of_plain(value) for value in told]
    assert facts == [client.facts() for client in EAGER]
    server = Federation.from_source(None, facts, num_classes=3, name=EAGER.name)
    one, other = (Population.from_federation(f, 5, lambda round_: 1) for f in (server, EAGER))
    assert (
        one.ids == other.ids and (one.num_samples == other.num_samples).all() and (one.batches == other.batches).all()
    )
    assert describe_holdings(server) | {"data": 0} == describe_holdings(EAGER) | {"data": 0}
    with pytest.raises(PerfedError, match=r"^client 'c1': its data stay at the site$"):
        server.clients[1].train.take(torch.tensor([0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v | {"id": 3}, "facts of a client: id: input should be a valid string"),
        (lambda v: {"id": "c0"}, "facts of client 'c0': splits: field required"),
        (lambda v: v | {"splits": {}}, "client 'c0' has no training data"),
        (lambda v: v | {"mark": -1}, "facts of client 'c0': mark: input should be greater than or equal to 0"),
        (lambda v: v | {"feature_names": [1]}, "feature_names.0: input should be a valid string"),
        (
            lambda v: v | {"splits": {"train": v["splits"]["train"] | {"samples": 1.5}}},
            "train.samples: input should be a valid integer",
        ),
        (lambda v: v | {"splits": {"train": v["splits"]["train"] | {"classes": [1]}}}, "samples of the classes are 1"),
        (lambda v: v | {"splits": {"dev": v["splits"]["train"]}}, "facts of 'dev'; allowed: train, validation, test"),
    ],
)
def test_facts_from_elsewhere_are_checked(change, says):
    with pytest.raises(PerfedError, match=says):
        ClientFacts.of_plain(change(EAGER.clients[0].facts().plain()))


def test_the_fingerprint_changes_with_ids_facts_and_marks():
    facts = [client.facts() for client in EAGER]
    read = Counting(EAGER)
    whole = Federation.from_source(read, facts, num_classes=3)
    marks = [
        whole.fingerprint,
        Federation.from_source(read, [replace(facts[0], mark=1), *facts[1:]], num_classes=3).fingerprint,
        Federation.from_source(read, [replace(facts[0], id="other"), *facts[1:]], num_classes=3).fingerprint,
        Federation.from_source(read, facts[1:], num_classes=3).fingerprint,
        replace(whole, clients=tuple(replace(c, validation=None) for c in whole)).fingerprint,
    ]
    assert len(set(marks)) == len(marks)
    assert whole.to(dtype=torch.float32).fingerprint == whole.fingerprint


# A folder ----------------------------------------------------------------------------------------------------


def write(folder, client, found, kind):
    if kind == "npz":
        np.savez(folder / f"{client}.npz", **found)
        return
    (folder / client).mkdir()
    for name, array in found.items():
        np.save(folder / client / f"{name}.npy", array)


@pytest.mark.parametrize("kinds", [("npz",), ("npy",), ("npz", "npy")])
def test_a_folder_gives_what_arrays_give(tmp_path, kinds):
    for number, client in enumerate(EAGER.ids):
        names = [f"f{j}" for j in range(EAGER.clients[number].input_shape[0])]
        write(tmp_path, client, arrays(EAGER, client) | {"feature_names": names}, kinds[number % len(kinds)])
    (tmp_path / "README.md").write_text("not a client")
    federation = Federation.from_folder(tmp_path)
    assert federation.clients[1].feature_names == ("f0", "f1", "f2")
    assert federation.clients[0].train.source.cache.reads == 0
    assert_same_data(federation.to(dtype=torch.float64), EAGER)
    named = load("folder", {"path": str(tmp_path), "validation_fraction": 0.2, "hold_megabytes": 1}, seed=0)
    assert_same_data(named.to(dtype=torch.float64), EAGER)  # which has validation data of its own


def test_of_inputs_only_the_header_is_read_at_first(tmp_path):
    write(tmp_path, "a", arrays(EAGER, "c0"), "npy")
    file = tmp_path / "a" / "x_train.npy"
    file.write_bytes(file.read_bytes()[:140])  # cut off within the samples
    federation = Federation.from_folder(tmp_path)
    assert federation.clients[0].input_shape == (4,)
    with pytest.raises(PerfedError, match=r"a.x_train.npy: 'x_train' cannot be read: "):
        federation.clients[0].train.loaded()


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(PerfedError, match="there is no such folder"):
        Federation.from_folder(tmp_path / "none")
    with pytest.raises(PerfedError, match=r"no client is in it"):
        Federation.from_folder(tmp_path)
    with pytest.raises(PerfedError, match=r"data.path is needed"):
        load("folder", seed=0)
    (tmp_path / "a.npz").write_bytes(b"not a zip file")
    with pytest.raises(PerfedError, match=r"a.npz: cannot be read: File is not a zip file"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", **(arrays(EAGER, "c0") | {"weights": np.ones(3)}))
    with pytest.raises(PerfedError, match="client 'a': unknown key 'weights'"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x_train=np.array([{}, {}], dtype=object), y_train=np.array([0, 1]))
    with pytest.raises(PerfedError, match=r"a.npz: 'x_train' cannot be read: Object arrays"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", **arrays(EAGER, "c0"))
    write(tmp_path, "a", arrays(EAGER, "c0"), "npy")
    with pytest.raises(PerfedError, match="client 'a' is there twice"):
        Federation.from_folder(tmp_path)


def test_a_linear_problem_drawn_on_demand_has_the_same_numbers():
    options = {"clients": 30, "test_samples": 7}
    eager = load("linear-domains", options, seed=3)
    deferred = load("linear-domains", options | {"deferred": True}, seed=3)
    assert deferred.clients[0].train.source.cache.reads == 0
    assert_same_data(deferred.to(dtype=torch.float64), eager)
    assert (
        deferred.fingerprint != load("linear-domains", options | {"deferred": True, "noise": 0.1}, seed=3).fingerprint
    )


def test_a_limit_below_zero_is_no_limit():
    with pytest.raises(PerfedError, match="at least 0"):
        SplitCache(-1)


def test_facts_without_samples_are_none():
    with pytest.raises(PerfedError, match="at least one sample"):
        SplitFacts(0, (3,))
