"""FedAvg and what differs from it by an extension or by where parameters live: FedProx, FedPer, LG-FedAvg."""

from __future__ import annotations

from math import isfinite

import pytest
import torch
from engines import blobs, cohort, difference, every_tensor, make, serve, train
from planes import LINEAR, flat, planes, quadratic

from perfed.experiment.config import validate
from perfed.maths.aggregate import weighted_mean
from perfed.method.exchange import Replies, ServerState
from perfed.methods.build import build_method
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.flic.anchors import Anchors
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear

QUICK = {"batch_size": 4, "local_epochs": 2, "lr": 0.01}


def bytes_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def personal_models(server, **payload):
    """Every client's own model as it is evaluated: id -> parameters."""
    payload = payload or server.initialiser.method.download(server.state)
    found = {}
    for group in server.engine.cohorts(server.engine.federation.ids, payload):
        for row, client in enumerate(group.ids):
            found[client] = {name: tensor[row].clone() for name, tensor in group.model.items()}
    return found


def test_fedprox_without_pull_is_fedavg():
    plain = train(serve(build_method("fedavg", QUICK), blobs()), 3)
    proximal = train(serve(build_method("fedprox", {**QUICK, "mu": 0.0}), blobs()), 3)
    assert difference(proximal, plain) == 0


@pytest.mark.parametrize("engine", ["stacked", "sequential"])
def test_rates_drop_after_their_rounds(engine):
    """Against a loop by hand, and from a snapshot in the middle the same bits."""
    federation = planes((12, 6), first=0.5, more=0.5)
    method = make("fedavg", optimizer="sgd", lr=0.1, lr_drops=(1, 3), lr_factor=0.5, batch_size=100, local_epochs=2)
    server = serve(method, federation, model=LINEAR, engine=engine)
    w = flat(server.state.shared)
    server.prepare()
    for number, lr in enumerate((0.1, 0.05, 0.05, 0.025), 1):
        before = server.snapshot()
        server.round(number)
        local = []
        for client in federation:
            (a, b), own = quadratic(client), w
            for _ in range(2):
                own = own - lr * (a @ own - b)
            local.append(own)
        w = (12 * local[0] + 6 * local[1]) / 18
        torch.testing.assert_close(flat(server.state.shared), w, rtol=1e-12, atol=1e-12)
        whole = every_tensor(server)
        server.restore(before)
        server.round(number)
        assert all(torch.equal(t, whole[name]) for name, t in every_tensor(server).items())


@pytest.mark.parametrize(
    ("name", "settings"), [("fedpac", {"head_lr": 0.4}), ("fedrep", {"lr": {"body": 0.2, "head": 0.3}})]
)
def test_every_rate_of_local_training_drops(name, settings):
    plain, dropped = make(name, **settings), make(name, **settings, lr_drops=(5,), lr_factor=0.25)
    for round_, factor in ((5, 1.0), (6, 0.25)):
        groups = []
        for method in (plain, dropped):
            group = cohort(method, blobs(), round_=round_)
            groups.append({n: g.lr for g in group.optimizer(group.trainable_names(STAGES)).groups for n in g.names})
        assert groups[1] == {name: factor * lr for name, lr in groups[0].items()} and len(set(groups[0].values())) > 1


def test_fedprox_stays_near_the_received_model_and_the_nearer_the_larger_mu():
    moved = []
    for mu in (0.0, 2.0, 20.0):
        method = build_method("fedprox", {"mu": mu, "optimizer": "sgd", "lr": 0.02, "batch_size": 4})
        server = serve(method, blobs())
        start = server.state.shared
        train(server, 1)
        moved.append(sum(float((t - start[name]).square().sum()) for name, t in server.state.shared.items()) ** 0.5)
    assert moved[0] > 1.2 * moved[1] > 1.2 * moved[2] and moved[2] < 0.3 * moved[0]


def test_fedprox_ft_fine_tunes_without_the_proximal_term():
    tuned = [
        personal_models(serve(build_method(name, {**QUICK, **settings}), blobs()))
        for name, settings in (("fedprox-ft", {"mu": 50.0}), ("fedavg-ft", {}))
    ]
    for client, model in tuned[0].items():
        assert all(torch.equal(t, tuned[1][client][name]) for name, t in model.items())


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_with_everything_shared_both_are_fedavg(name):
    everything = {"placement": {"embedding": "shared", "body": "shared", "head": "shared"}}
    one, other = (train(serve(make(n, **everything), blobs(), rate=0.7), 3) for n in (name, "fedavg"))
    assert difference(one, other) == 0


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_a_single_client_trains_all_stages_together_as_in_fedavg(name):
    own = personal_models(train(serve(make(name, placement={"embedding": "shared"}), blobs((9,))), 3))["c0"]
    whole = personal_models(train(serve(make("fedavg"), blobs((9,))), 3))["c0"]
    for parameter, tensor in whole.items():
        torch.testing.assert_close(own[parameter], tensor, rtol=1e-12, atol=1e-12)


SPLITS = {"fedper": (("embedding", "body"), "head"), "lg-fedavg": (("head",), "body")}


@pytest.mark.parametrize("name", SPLITS)
def test_what_is_personal_differs_between_clients_and_never_travels(name):
    shared, personal = SPLITS[name]
    server = serve(make(name), blobs())
    start = server.state.shared
    assert {parameter.split(".")[0] for parameter in start} == set(shared)
    server.prepare()
    record = server.round(1)
    size = bytes_of(start.values())
    assert record.bytes_down == 3 * size and record.bytes_up == 3 * (size + 8)  # and the numbers of samples
    assert all(not torch.equal(t, start[parameter]) for parameter, t in server.state.shared.items())
    models = personal_models(server)
    for parameter in models["c0"]:
        same = torch.equal(models["c0"][parameter], models["c1"][parameter])
        assert same == parameter.startswith(shared), parameter
        if parameter.startswith(personal):
            assert torch.equal(server.engine.states["c0"]["model"][parameter], models["c0"][parameter])


def test_lg_fedavg_takes_clients_whose_inputs_differ():
    server = train(serve(make("lg-fedavg"), blobs((9, 7, 5), dims=(3, 6))), 2)
    assert set(server.evaluate("test")) == {"c0", "c1", "c2"}


@pytest.mark.parametrize("name", ["fedprox", "fedper", "lg-fedavg"])
def test_a_model_of_a_head_alone(name):
    server = train(serve(make(name), blobs(), model=Model(head=linear(3))), 2)
    assert set(server.evaluate("test")) == {"c0", "c1", "c2"}
    assert bool(server.state.shared) == (name != "fedper")


def test_lg_fedavg_may_share_the_last_two_layers_of_the_other_methods_network():
    table = {
        "rounds": 1,
        "method": "lg-fedavg",
        "data": {"name": "digits-views"},
        "model": {"body": {"kind": "mlp", "hidden": [7, 6], "out": 5, "final_activation": True}, "head": "linear"},
        "methods": {
            "lg-fedavg": {
                "model": {
                    "body": {"kind": "mlp", "hidden": [7], "out": 6, "final_activation": True},
                    "head": {"kind": "mlp", "hidden": [5]},
                }
            }
        },
    }
    own, other = (validate({**table, "method": name}).build_model(3).build((4,)) for name in ("lg-fedavg", "fedrep"))
    layers = [[type(m).__name__ for m in chain.modules() if not list(m.children())] for chain in (own, other)]
    assert layers[0] == layers[1] == ["Linear", "ReLU"] * 3 + ["Linear"]
    assert [t.shape for t in own.parameters()] == [t.shape for t in other.parameters()]
    server = serve(build_method("lg-fedavg", QUICK), blobs(), model=validate(table).build_model(3))
    server.prepare()
    record = server.round(1)
    last_two = {"head.0.weight": (5, 6), "head.0.bias": (5,), "head.2.weight": (3, 5), "head.2.bias": (3,)}
    assert {name: tuple(t.shape) for name, t in server.state.shared.items()} == last_two
    size = 8 * (5 * 6 + 5 + 3 * 5 + 3)
    assert record.bytes_down == 3 * size and record.bytes_up == 3 * (size + 8)  # and the numbers of samples
    models = personal_models(server)
    for parameter, tensor in models["c0"].items():
        assert torch.equal(tensor, models["c1"][parameter]) == (parameter in last_two)
    assert set(server.engine.states["c0"]["model"]) == set(models["c0"]) - set(last_two)


class TwoReplies:
    """Clients of 12 and 3 samples whose models are 0 and 1."""

    round = 1

    def train(self, program, **payload):
        content = {"shared": {"w": torch.tensor([0.0, 1.0])}, "num_samples": torch.tensor([12.0, 3.0])}
        return Replies(["a", "b"], content, torch.zeros(2))

    def mean(self, stacked, weights=None, *, current):
        return weighted_mean(stacked, weights)


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedprox", "fedrep", "lg-fedavg"])
def test_the_mean_is_weighted_by_samples_or_uniform(name):
    for settings, mean in (({}, 0.2), ({"average": "samples"}, 0.2), ({"average": "uniform"}, 0.5)):
        server = ServerState({"shared": {"w": torch.tensor(0.0)}})
        build_method(name, settings).round(server, TwoReplies())
        assert float(server.shared["w"]) == pytest.approx(mean)


FAMILY = ["fedprox", "fedprox-ft", "fedper", "lg-fedavg", "fedbabu", "fedrod", "knnper"]


@pytest.mark.parametrize("name", FAMILY)
def test_terms_join_in_behind_personal_embeddings(name):
    extensions = (Anchors(pretrain_epochs=1, pretrain_batch_size=4), Prototypes())
    method = make(name, more_extensions=extensions, placement={"embedding": "personal"})
    server = serve(method, blobs((9, 6, 1), dims=(3, 7)), rate=0.7)
    server.prepare()
    anchors = server.state.anchors["mean"].clone()
    for number in (1, 2):
        server.round(number, measure="test")
    assert not torch.equal(server.state.anchors["mean"], anchors) and bool(server.state.centroids["known"].all())
    assert all(isfinite(values["loss"]) for values in server.evaluate("test").values())
