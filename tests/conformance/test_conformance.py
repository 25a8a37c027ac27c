"""Every registered method, through every engine, on every awkward federation: tiny, and nothing breaks."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import isfinite

import pytest
import torch
from engines import ENGINES, blobs, difference, make, network_for, serve, train
from torch import nn

from perfed.errors import ClientsDiverged, PerfedError
from perfed.method.registry import entry, method_names
from perfed.methods.extensions.clip import Clip
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.server_optimizer import ServerOptimizer
from perfed.methods.extensions.top_k import TopK
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.testing import checks
from perfed.testing.checks import FEDERATIONS, TWO_ENGINES

pytestmark = pytest.mark.every_method("name")
ANCHORS = Anchors(pretrain_epochs=1, pretrain_batch_size=4)
TREES = {"boost", "forest"}
NOTHING_SHARED = {
    "fedhenn",
    "fedproto",
    "fedproto-g",
    "fedproto-l",
    "flic-class",
    "local",
    "local-full",
    "mixed",
} | TREES
NO_SHARED_MODEL = {"fedamp", "fedem", "fedem-ft", "fedfomo", "hypcluster", "l2gd", "pfedhn"}
WITH_PROXIMAL = {
    f"{name} + proximal": lambda name=name, **s: make(name, more_extensions=(Proximal(),), **s)
    for name in method_names()
    if name not in NOTHING_SHARED
}
METHODS = {
    **{name: lambda name=name, **s: make(name, **s) for name in method_names()},
    **WITH_PROXIMAL,
    "fedavg-ft + personal embedding + anchors": lambda **s: make(
        "fedavg-ft", placement={"embedding": "personal"}, more_extensions=(ANCHORS,), **s
    ),
    "fedrep + personal embedding + anchors + proximal": lambda **s: make(
        "fedrep", placement={"embedding": "personal"}, more_extensions=(ANCHORS, Proximal()), **s
    ),
    "local + anchors": lambda **s: make("local", more_extensions=(ANCHORS,), **s),
}

_NOTHING, _PARTS = "no parameters are sent by this method, but placement has shared", "'per-domain' is for whole stages"
WITHOUT_DOMAIN_HEADS = {
    **dict.fromkeys(["local", "local-full", "mixed", "fedhenn", "fedproto", "fedproto-g", "fedproto-l"], _NOTHING),
    **dict.fromkeys(["fedcp", "feddbe", "gpfl"], _PARTS),
    **dict.fromkeys(TREES, "forest has no network to place"),
}
"""Methods by what they say; GPFL, FedCP and FedDBE put parts of their own into the head."""

# A proximal extension knows parameters and weights of samples, but no data: SRPFL alone takes every method through all
# branches that the extension adds to it, as coverage says; other shapes, domains and sizes are kept beside it.
FOR_PROXIMAL = ("SRPFL", "input dimensions differ", "awkward domains", "a client with one sample")
CASES = [(name, case) for name in METHODS for case in (FOR_PROXIMAL if name in WITH_PROXIMAL else FEDERATIONS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_two_rounds_leave_finite_states_and_metrics(name, case):
    checks.check_training(case, METHODS[name], ENGINES if name == "fedavg" else TWO_ENGINES)


EXTENSIONS = {
    "proximal": (Proximal(mu=3.0), NOTHING_SHARED),
    "server-optimizer": (ServerOptimizer(), NOTHING_SHARED | NO_SHARED_MODEL),
    "prototypes": (Prototypes(alignment=3.0), {"mixed"} | TREES),
    "clip": (Clip(clip_norm=1e-3), {"mixed"} | TREES),
    "top-k": (TopK(keep=0.05), NOTHING_SHARED | NO_SHARED_MODEL | {"pfedhn"}),
}


def own_extensions(name: str) -> set[str]:
    return {extension.name for extension in entry(name).extensions}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "extension"), [(n, t) for n in method_names() for t in EXTENSIONS if t not in own_extensions(n)]
)
def test_an_extension_changes_what_clients_say_or_is_refused_in_one_line(name, extension):
    def metrics(*more_extensions):
        method = make(name, more_extensions=more_extensions)
        return train(serve(method, blobs((8, 6, 5)), model=network_for(method), rounds=4), 3).evaluate("test")

    added, refused = EXTENSIONS[extension]
    if name not in refused:
        assert metrics(added) != metrics()
        return
    with pytest.raises(PerfedError, match=f"extension '{extension}' ") as error:
        metrics(added)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine", TWO_ENGINES)
@pytest.mark.parametrize("name", method_names())
def test_a_head_for_each_domain_is_trained_or_refused_in_one_line(name, engine):
    def metrics() -> dict[str, dict[str, float]]:
        method, federation = make(name, placement={"head": "per-domain"}), FEDERATIONS["awkward domains"][0]()
        model = network_for(method, federation.num_classes)
        server = train(serve(method, federation, model=model, rounds=2, **TWO_ENGINES[engine]), 1)
        server.round(2, measure="test")
        return server.evaluate("test")

    if name in WITHOUT_DOMAIN_HEADS:
        with pytest.raises(PerfedError, match=WITHOUT_DOMAIN_HEADS[name]):
            metrics()
    else:
        assert all(isfinite(value) for values in metrics().values() for value in values.values())


@pytest.mark.parametrize("name", METHODS)
def test_evaluation_changes_no_state(name):
    checks.check_evaluation(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_every_kind_of_aggregation_replaces_the_mean_or_is_refused_in_one_line(name):
    checks.check_aggregation_kinds(METHODS[name])


def normed(shape):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU())


@pytest.mark.parametrize(
    "model",
    [Model(head=linear(3)), Model(body=linear(3)), Model(body=normed, head=linear(3))],
    ids=["head", "body", "batch-norm"],
)
@pytest.mark.parametrize("name", ["apfl", "ditto", "fedamp", "fedhenn", "knnper", "l2gd", "pfedme", "scaffold"])
def test_models_of_other_kinds_end_the_same_in_both_engines(name, model):
    runs = [train(serve(make(name), blobs((8, 7)), model=model, **ENGINES[engine]), 2) for engine in ENGINES]
    assert max(difference(run, runs[0]) for run in runs) <= 1e-8
    for values in runs[0].evaluate("test").values():
        assert isfinite(values["loss"])


@pytest.mark.parametrize("name", METHODS)
def test_training_is_better_than_guessing(name):
    lr = 0.1 if name.startswith(("scaffold", "fedgate")) else 0.02  # plain SGD needs longer steps than Adam
    more = {"eta": 0.1} if name.startswith("pfedme") else {}  # w goes all the way to theta
    checks.check_learning(partial(METHODS[name], lr=lr, **more))


NO_LABELS = dict.fromkeys(("fedpac-cc", "fedrod", "gpfl", "knnper"), "class labels; these targets are")
REFUSED = {  # what methods that are not for a task say; extensions are refused with whatever method they are in
    "regression": NO_LABELS,
    "survival": {**NO_LABELS, **dict.fromkeys(("fedem", "fedem-ft"), "fedem needs a likelihood of each sample")}
    | {"feddar-sa": "second-order aggregation is not implemented for the Cox partial likelihood"},
}


@pytest.mark.parametrize("task", ["regression", "survival"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in WITH_PROXIMAL])  # it knows no targets
def test_other_tasks(name, task):
    """Every method trains for values and for survival, or says in one line that it does not."""
    refused = REFUSED[task].get(name.partition(" + ")[0])
    extensions = {extension.name for extension in METHODS[name]().extensions}
    if "prototypes" in extensions:
        refused = "the prototypes extension needs class labels; these targets are"
    elif "anchors" in extensions and task == "survival":
        refused = "the anchors extension needs values or class labels; these targets are"
    said = checks.check_task(task, METHODS[name])
    assert re.search(refused, said) if refused else not said, said


def test_anchors_need_personal_embeddings():
    with pytest.raises(PerfedError, match=r"anchors .*personal embedding"):
        serve(make("fedavg", more_extensions=(ANCHORS,)), blobs())


BLAMED = [
    "fedavg",
    "fedrep",
    "separate-fedavg",
    "feddar-wa",
    "feddar-sa",
    "hypcluster",
    "l2gd",
    "pfedhn",
    "fedem",
    "apfl",
]


@pytest.mark.parametrize("engine", TWO_ENGINES)
@pytest.mark.parametrize("name", BLAMED)
def test_the_client_whose_data_make_training_diverge_is_named(name, engine):
    federation = blobs((8, 6, 5))
    innocent = federation.clients[:2]
    own = federation.clients[2].train
    guilty = replace(federation.clients[2], train=replace(own, x=1e30 * own.x))
    method = make(name, optimizer="sgd", lr=0.05, batch_size=8, local_epochs=1)  # finite losses, then none
    federation = replace(federation, clients=(*innocent, guilty))
    with pytest.raises(ClientsDiverged) as error:
        train(serve(method, federation, rounds=3, dtype=torch.float32, **TWO_ENGINES[engine]), 3)
    told = str(error.value)
    alone = list(error.value.messages) == [guilty.id]
    assert alone or f"; before, client '{guilty.id}' sent values up to " in told
    assert "\n" not in told
