"""A new site after a run: it trains what is its own, and nothing else moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import blobs, every_tensor, make, network
from site_models import done, frames

import perfed
from perfed.data.federation import Federation
from perfed.data.new_client import new_client
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.registry import entry, method_names
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.tables.joining import new_client_from_frame

CANNOT = {"fedamp", "fedfomo", "pfedhn"}


def arrays(federation: Federation, client: str) -> dict[str, Any]:
    """A client's data as they were given."""
    held = {c.id: c for c in federation}[client]
    parts = {name: held.split(name) for name in ("train", "test")}
    return {f"{k}_{name}": getattr(part, k) for name, part in parts.items() for k in ("x", "y", "domain")}


def without(federation: Federation, client: str) -> Federation:
    return Federation(tuple(c for c in federation if c.id != client), federation.num_classes)


@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", method_names())
def test_a_new_site_of_every_method_leaves_all_others_as_they_were(name):
    whole = blobs((12, 9, 7), test=9)
    run = done(name, without(whole, "c2"), rounds=2)
    west = new_client(run.federation, "west", arrays(whole, "c2"))
    before = {path: t.clone() for path, t in every_tensor(run.server).items()}
    if name in CANNOT or entry(name).method.local_data is not Method.local_data:
        with pytest.raises(PerfedError, match=r"a new site cannot join a run of .*; train again with it"):
            run.join(west)
        return
    site = run.join(west)
    assert site.predict_proba(west.test.x, west.test.domain).shape == (9, 3)
    assert site.facts["joined"] == 2 and site.facts["data"]["train"] == 7
    after = every_tensor(run.server)
    assert after.keys() == before.keys() and all(torch.equal(after[path], t) for path, t in before.items())
    assert run.federation.ids == ["c0", "c1"]


@pytest.mark.long
def test_what_a_new_site_trains_is_its_own_and_nothing_of_the_others():
    """FedRep's head, to where a plain loop of its gradient takes it; the shared stages to the bit."""
    whole = blobs((12, 9, 8), test=9)
    run = done("fedrep", without(whole, "c2"), rounds=1)
    west = new_client(run.federation, "west", arrays(whole, "c2"))
    joined = run.join(west, rounds=300)
    shared, own = run.server.sets["shared"], joined.predictor.program.state_dict
    assert all(torch.equal(own[f"model.{key}"], value) for key, value in shared.items())
    x = whole.clients[2].train
    features = x.x.float()
    for key in ("embedding.0", "embedding.2"):
        features = features @ shared[f"{key}.weight"].T + shared[f"{key}.bias"]
        features = features.relu() if key == "embedding.0" else features
    features = (features @ shared["body.0.weight"].T + shared["body.0.bias"]).relu()
    weight, bias = own["model.head.weight"].clone(), own["model.head.bias"].clone()
    loss = torch.nn.functional.cross_entropy(features @ weight.T + bias, x.y)
    free = torch.nn.Linear(5, 3)
    optimizer = torch.optim.LBFGS(free.parameters(), lr=1, max_iter=500)

    def closure():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(free(features), x.y)
        value.backward()
        return value

    optimizer.step(closure)
    start = torch.nn.functional.cross_entropy(torch.zeros(len(x), 3), x.y)
    assert float(loss) < float(start) and float(loss) >= float(closure().detach()) - 1e-4


@pytest.mark.long
def test_joining_is_worth_it_where_the_others_share_what_helps():
    """Against the initial head on the shared features, which is what a site has that does nothing."""
    whole = blobs((40, 40, 40, 12), test=60)
    run = done("fedrep", without(whole, "c3"), network(), rounds=30)
    west = new_client(run.federation, "west", arrays(whole, "c3"))
    none, trained = (run.join(west, rounds=rounds).facts["metrics"]["of"]["accuracy"]["value"] for rounds in (0, 30))
    assert trained > none + 0.1


@pytest.mark.long
def test_flic_s_embedding_is_aligned_to_the_anchors_of_the_others():
    whole = blobs((30, 30, 30), dims=(4, 5, 6), test=30)
    run = done("flic-class", without(whole, "c2"), rounds=10)
    west = new_client(run.federation, "west", arrays(whole, "c2"))
    site = run.join(west)
    assert site.facts["input_shape"] == [6]  # columns of its own
    assert site.facts["metrics"]["of"]["accuracy"]["value"] > 0.6


def test_without_test_data_a_quarter_of_each_class_is_kept_for_it():
    federation = blobs((12, 12))
    given = {"x": np.zeros((40, 4)), "y": np.arange(40) % 2, "domain": np.zeros(40, int)}
    client = new_client(federation, "west", given)
    assert (len(client.train), len(client.test)) == (30, 10)
    assert torch.bincount(client.test.y).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("c0", {}, "site 'c0' is in the run already"),
        ("west", {"x": np.zeros((8, 4)), "y": np.arange(8)}, "west.*label"),
        ("west", {"x": np.zeros((8, 3)), "y": np.arange(8) % 2}, r"shares 'embedding.*\(3,\)"),
        ("west", {"x": np.zeros((8, 4)), "y": ["ill", "well"] * 4}, "targets are texts; the classes are 0, 1, 2"),
        (
            "west",
            {"x": np.zeros((8, 4)), "y": np.arange(8) % 2, "domain": np.full(8, 7)},
            "ids are from 0 to 1, as there are 2 domains",
        ),
        ("west", {"x": np.zeros((8, 4)), "y": np.arange(8) % 2, "colour": 1}, "unknown key 'colour'"),
    ],
)
def test_a_site_that_does_not_fit_the_others_is_refused(name, given, says):
    run = done("fedavg", blobs((12, 9)))
    if "x" in given and "domain" not in given:
        given = {**given, "domain": np.zeros(8, int)}
    with pytest.raises(PerfedError, match=says) as error:
        run.join(new_client(run.federation, name, given))
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize(("method", "columns"), [("local", "own"), ("fedrep", "common"), ("fedrep", "union")])
def test_a_table_joins_with_preprocessing_of_its_own(method, columns, tmp_path):
    federation = Federation.from_frames(frames(), target="sick", domain="race", columns=columns)
    run = done(method, federation, Model(embedding=mlp((), 3), head=linear(2)), rounds=3)
    frame = frames()["north"].drop(columns="pain").assign(room=range(40, 80)).drop(columns="room")
    if columns == "common":
        frame = frame.assign(pain="mild", taste=["sweet", "sour"] * 20)
    west = new_client_from_frame(run.federation, "west", frame, "west.csv")
    site = run.join(west)
    rows = frame.drop(columns="sick")
    assert site.predict_proba(rows).shape == (40, 2)
    again = perfed.load_site(site.save(tmp_path / "west"))
    np.testing.assert_array_equal(again.predict_proba(rows), site.predict_proba(rows))
    assert ("pain" in site.feature_names_in_) == (columns == "common")
    with pytest.raises(PerfedError, match=r"west\.csv: column 'race' holds no known domain"):
        new_client_from_frame(run.federation, "west", frame.assign(race="z"), "west.csv")
    with pytest.raises(PerfedError, match=r"west\.csv: target: no column 'sick'"):
        new_client_from_frame(run.federation, "west", rows, "west.csv")


def test_methods_without_a_way_in_say_so():
    assert {name for name in method_names() if entry(name).method.joins is None} == CANNOT
    assert make("local-full").joins == "train"
