from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engines import blobs, quick
from torch import nn

from perfed.engine.initial import Initialiser, group_key
from perfed.errors import PerfedError
from perfed.methods.fedavg import FedAvg
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.model.chain import Model, stage_of
from perfed.model.lstm import lstm
from perfed.model.placement import FROZEN, PERSONAL, SHARED, place_parameters
from perfed.model.presets import activation_layer, cnn, digits_cnn, hidden_layer, linear, mlp

# factory, input shape, output shape, number of parameters counted by hand
PRESETS = {
    "linear": (linear(3), (5,), (3,), 5 * 3 + 3),
    "linear on images": (linear(3), (2, 4, 4), (3,), 32 * 3 + 3),
    "mlp of FLIC": (mlp((64, 64), 64), (15,), (64,), 15 * 64 + 64 + 2 * (64 * 64 + 64)),
    "mlp without hidden layers": (mlp((), 7), (5,), (7,), 42),
    "mlp with dropout": (mlp((8,), 4, dropout=0.5, activation="leaky-relu"), (3,), (4,), 32 + 36),
    "mlp on images": (mlp((8,), 4), (1, 2, 3), (4,), 6 * 8 + 8 + 36),
    "cnn": (cnn((16, 32), 5, 128), (1, 28, 28), (128,), (16 * 25 + 16) + (32 * 16 * 25 + 32) + (512 * 128 + 128)),
    "cnn of FedPAC": (
        cnn((16, 32, 64), (5, 5, 3), 128, padding=(0, 1, 1), activation="leaky-relu"),
        (3, 32, 32),
        (128,),
        (16 * 75 + 16) + (32 * 16 * 25 + 32) + (64 * 32 * 9 + 64) + (576 * 128 + 128),
    ),
    "cnn padded": (cnn((4,), 3, 2, padding=1), (3, 8, 8), (2,), (4 * 27 + 4) + (4 * 16 * 2 + 2)),
    "cnn of SRPFL": (
        cnn((64, 64), 5, 64, hidden=(120,)),
        (3, 32, 32),
        (64,),
        (64 * 75 + 64) + (64 * 64 * 25 + 64) + (1600 * 120 + 120) + (120 * 64 + 64),
    ),
    "lstm": (
        lstm(20, 3, width=4, layers=2, fc=(5,)),
        (7,),
        (5,),
        22 * 3 + 2 * 4 * 4 * (3 + 4 + 2) + 2 * 4 * 4 * (8 + 4 + 2) + (8 * 5 + 5),
    ),
    "digits mnist": (digits_cnn(64), (1, 28, 28), (64,), (32 * 25 + 32) + (20 * 32 * 25 + 20) + (320 * 64 + 64)),
    "digits usps": (digits_cnn(64), (1, 16, 16), (64,), (32 * 25 + 32) + (20 * 32 * 25 + 20) + (20 * 64 + 64)),
    "hidden layer": (hidden_layer(100), (64,), (100,), 6500),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_shapes_and_parameters_counted_by_hand(name):
    factory, shape, out, parameters = PRESETS[name]
    chain = Model(head=factory).build(shape)
    assert chain.output_shapes == {"head": out}
    assert chain(torch.zeros(2, *shape)).shape == (2, *out)
    assert sum(p.numel() for p in chain.parameters()) == parameters


def layers(factory, shape):
    return [type(m).__name__ for m in factory(shape).modules() if not list(m.children())]


def test_presets_have_the_layers_their_papers_describe():
    assert layers(mlp((64, 64), 64), (9,)) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]  # linear output
    assert layers(mlp((4,), 4, dropout=0.2, final_activation=True), (9,)) == [
        "Linear",
        "ReLU",
        "Dropout",
        "Linear",
        "ReLU",
    ]
    pooled = ["Conv2d", "MaxPool2d", "Sigmoid", "Conv2d", "MaxPool2d", "Sigmoid", "Flatten", "Linear"]
    assert layers(digits_cnn(64), (1, 16, 16)) == pooled
    assert layers(digits_cnn(64, dropout=0.5), (1, 16, 16)) == [*pooled[:4], "Dropout2d", *pooled[4:]]
    assert layers(hidden_layer(4), (9,)) == ["Linear", "LeakyReLU"]
    assert layers(cnn((4,), 3, 2, final_activation=False), (1, 8, 8))[-1] == "Linear"


def test_a_chain_applies_its_stages_in_order_and_names_parameters_by_stage():
    chain = Model(embedding=mlp((6,), 3), body=hidden_layer(5), head=linear(2)).build((4,))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(chain(x), chain.head(chain.body(chain.embedding(x))))
    assert chain.stages == ("embedding", "body", "head")
    assert chain.output_shapes == {"embedding": (3,), "body": (5,), "head": (2,)}
    assert {stage_of(name) for name in chain.tensors()} == set(chain.stages)
    assert set(chain.tensors()) == {name for name, _ in chain.named_parameters()}


def test_stages_may_be_absent_and_any_module_may_be_one():
    assert Model(head=linear(2)).build((4,)).stages == ("head",)
    odd = Model(embedding=lambda shape: nn.Sequential(nn.Unflatten(1, (1, *shape)), nn.Conv1d(1, 2, 3)), head=linear(2))
    assert odd.build((8,)).output_shapes == {"embedding": (2, 6), "head": (2,)}


def test_buffers_count_as_tensors():
    chain = Model(embedding=lambda s: nn.BatchNorm1d(s[0]), head=linear(2)).build((3,))
    assert {"embedding.running_mean", "embedding.num_batches_tracked"} <= set(chain.tensors())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Model(), "at least one stage"),
        (lambda: Model(embedding=cnn(), head=linear(2)).build((5,)), r"a cnn needs images .*\(5,\)"),
        (lambda: cnn((4, 8), (5, 3, 3)), "kernel has 3 numbers for 2 convolutions"),
        (lambda: Model(embedding=digits_cnn()).build((5,)), r"digits-cnn needs images .*\(5,\)"),
        (lambda: Model(embedding=cnn()).build((1, 6, 6)), r"model.embedding does not accept .*\(1, 6, 6\)"),
        (lambda: Model(head=lambda s: nn.Linear(9, 2)).build((5,)), r"model.head does not accept .*\(5,\)"),
        (lambda: mlp((3,), 2, activation="cosine")((4,)), "unknown activation 'cosine'; allowed: relu,"),
    ],
)
def test_models_that_cannot_work_are_refused_in_one_line(build, message):
    with pytest.raises(PerfedError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


# Placement ---------------------------------------------------------------------------------------------------

DEFAULTS = {"embedding": PERSONAL, "body": SHARED, "head": PERSONAL}


def normed():
    body = lambda shape: nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))  # noqa: E731
    return Model(embedding=mlp((6,), 3), body=body, head=linear(2)).build((5,))


def named(places, place_):
    return {name for name, found in places.items() if found == place_}


def test_stages_decide_where_no_rule_does():
    places = place_parameters(normed(), DEFAULTS, {})
    assert set(places) == set(normed().tensors())
    assert all(places[name] == DEFAULTS[stage_of(name)] for name in places)


def test_module_types_win_over_stages_and_patterns_over_both():
    rules = {"body": FROZEN, "BatchNorm": PERSONAL, "body.1.running_*": SHARED, "head": SHARED}
    places = place_parameters(normed(), DEFAULTS, rules)
    assert named(places, FROZEN) == {"body.0.weight", "body.0.bias", "body.3.weight", "body.3.bias"}
    assert named(places, SHARED) == {"body.1.running_mean", "body.1.running_var", "head.weight", "head.bias"}
    assert places["body.1.weight"] == places["body.1.num_batches_tracked"] == PERSONAL
    assert place_parameters(normed(), DEFAULTS, dict(reversed(rules.items()))) == places  # the order does not matter


def test_the_longest_pattern_wins():
    for rules in ({"*.bias": FROZEN, "body.*.bias": SHARED}, {"body.*.bias": SHARED, "*.bias": FROZEN}):
        places = place_parameters(normed(), DEFAULTS, rules)
        assert places["body.3.bias"] == SHARED and places["head.bias"] == places["embedding.0.bias"] == FROZEN


def test_a_rule_for_nothing_is_an_error_unless_it_names_a_stage():
    with pytest.raises(PerfedError, match=r"placement.body.9.* matches no parameter; parameters are: embedding.0"):
        place_parameters(normed(), DEFAULTS, {"body.9.*": SHARED})
    with pytest.raises(PerfedError, match=r"placement.LayerNorm matches no parameter"):
        place_parameters(normed(), DEFAULTS, {"LayerNorm": SHARED})
    headless = Model(embedding=mlp((6,), 3)).build((5,))
    assert set(place_parameters(headless, DEFAULTS, {"head": SHARED}).values()) == {PERSONAL}


# Initial values ----------------------------------------------------------------------------------------------


def initialiser_of(method=HetFedRep, seed=0):
    return Initialiser(
        quick(method), Model(embedding=mlp((6,), 3), body=hidden_layer(5), head=linear(3)), seed, torch.float64
    )


def test_embeddings_start_differently_at_every_client_and_all_else_the_same():
    federation, initialiser = blobs((4, 4, 4)), initialiser_of()
    models = [initialiser.client_model(client) for client in federation]
    assert all({stage_of(n) for n in m} == {"embedding", "head"} for m in models)
    assert torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert not torch.equal(models[0]["embedding.0.weight"], models[1]["embedding.0.weight"])
    again = initialiser_of().client_model(federation.clients[2])
    assert all(torch.equal(again[name], models[2][name]) for name in again)
    other = initialiser_of(seed=1).client_model(federation.clients[0])
    assert not torch.equal(other["head.weight"], models[0]["head.weight"])


def test_the_server_starts_with_the_shared_parameters():
    state = initialiser_of().server_state(blobs((4, 4)))
    assert {stage_of(name) for name in state.shared} == {"body"}
    assert {stage_of(name) for name in initialiser_of(FedAvg).server_state(blobs((4, 4))).shared} == {
        "embedding",
        "body",
        "head",
    }


def test_shared_parameters_must_have_one_shape():
    with pytest.raises(PerfedError, match=r"shares 'embedding.0.weight'.*'c0'.*'c1'") as error:
        initialiser_of(FedAvg).server_state(blobs((4, 4), dims=(3, 5)))
    assert "\n" not in str(error.value)


def test_vectors_of_different_lengths_share_a_stack_and_images_do_not():
    model = Model(embedding=mlp((6,), 3), head=linear(2))
    assert group_key(model.build((4,))) == group_key(model.build((9,)))
    wider = Model(embedding=mlp((7,), 3), head=linear(2))
    assert group_key(model.build((4,))) != group_key(wider.build((4,)))
    images = Model(embedding=cnn((2,), 3, 4), head=linear(2))
    assert group_key(images.build((1, 8, 8))) != group_key(images.build((1, 9, 9)))
    slope = Model(embedding=lambda s: nn.Sequential(nn.Linear(s[0], 3), nn.LeakyReLU(0.5)), head=linear(2))
    other = Model(embedding=lambda s: nn.Sequential(nn.Linear(s[0], 3), nn.LeakyReLU(0.1)), head=linear(2))
    assert group_key(slope.build((4,))) != group_key(other.build((4,)))


@pytest.mark.parametrize("activation", ["relu", "leaky-relu", "sigmoid", "tanh", "gelu"])
def test_a_cnn_activates_before_it_pools_whatever_the_order_of_its_layers(activation):
    module = cnn((3, 4), 3, 5, activation=activation)((2, 14, 14)).double()
    x = torch.randn(6, 2, 14, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    convolutions = [layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]
    (last,) = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    z = x
    for convolution in convolutions:
        z = F.max_pool2d(activation_layer(activation)(convolution(z)), 2)
    z = activation_layer(activation)(last(z.flatten(1)))
    torch.testing.assert_close(module(x), z, rtol=0, atol=0)
    parameters = list(module.parameters())
    for mine, plain in zip(
        *(torch.autograd.grad(out.square().sum(), parameters) for out in (module(x), z)), strict=True
    ):
        torch.testing.assert_close(mine, plain)
