"""FedBN, and batch-norm where a mini-batch is one sample."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from engines import blobs, cohort, difference, every_tensor, make, network, quick, serve, train
from torch import nn

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.build import build_stage
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.model.chain import STAGES, Model
from perfed.model.presets import cnn, linear, mlp

NORMED = network(batch_norm=True)


def test_batch_norm_stays_at_home_and_the_rest_is_averaged():
    server = train(serve(make("fedbn"), blobs()), 2)
    assert not any(name.startswith("embedding.1.") for name in server.state.shared)
    assert {"embedding.0.weight", "embedding.3.weight", "head.bias"} <= set(server.state.shared)
    own = [server.engine.states[f"c{i}"]["model"] for i in range(3)]
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert all(set(state) == {f"embedding.1.{name}" for name in names} for state in own)
    for name in ("weight", "running_mean", "running_var"):
        assert not torch.allclose(own[0][f"embedding.1.{name}"], own[1][f"embedding.1.{name}"])
    # Two epochs a round, two rounds, mini-batches of four of 12 and 7 samples.
    assert [int(state["embedding.1.num_batches_tracked"]) for state in own[:2]] == [12, 8]


@pytest.mark.long
def test_it_is_fedavg_with_the_rule_and_fedavg_once_batch_norm_is_shared():
    fedbn = train(serve(make("fedbn"), blobs(), model=NORMED), 2)
    ruled = train(serve(make("fedavg", placement={"BatchNorm": "personal"}), blobs(), model=NORMED), 2)
    assert difference(fedbn, ruled) == 0
    shared = train(serve(make("fedbn", placement={"BatchNorm": "shared"}), blobs(), model=NORMED), 2)
    plain = train(serve(make("fedavg"), blobs(), model=NORMED), 2)
    assert difference(shared, plain) == 0
    both = fedbn.state.shared.keys() & plain.state.shared.keys()
    assert all(not torch.allclose(fedbn.state.shared[name], plain.state.shared[name]) for name in both)


def test_a_model_without_batch_norm_is_refused_in_one_line():
    with pytest.raises(PerfedError, match=r"fedbn .* the model has none; .*batch_norm=true") as error:
        serve(make("fedbn"), blobs(), model=network())
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_clients_that_differ_in_the_scale_of_their_inputs_gain_by_it():
    """The idea of FedBN: feature shift between clients is taken out by their own statistics."""
    base = blobs((40, 40, 40), test=60, seed=2)
    clients = []
    for i, client in enumerate(base):
        splits = {n: replace(s, x=s.x * 10.0 ** (i - 1) + 10 * i) for n in ("train", "test") if (s := client.split(n))}
        clients.append(replace(client, **splits))
    federation = replace(base, clients=tuple(clients))
    model = Model(embedding=lambda s: nn.BatchNorm1d(s[0]), body=mlp((8,), 5), head=linear(3))
    settings = {"local_epochs": 4, "lr": 0.02, "batch_size": 10}
    scores = {}
    for name in ("fedavg", "fedbn"):
        found = train(serve(make(name, **settings), federation, model=model), 10).evaluate("test")
        scores[name] = sum(values["accuracy"] for values in found.values()) / 3
    assert scores["fedbn"] > scores["fedavg"] + 0.1


# A single sample ---------------------------------------------------------------------------------------------


def test_a_last_mini_batch_of_one_sample_uses_the_running_statistics_and_leaves_them():
    """Nine samples in mini-batches of four: the third step is the plain loop's step in evaluation mode."""
    group = cohort(quick(Local, optimizer="sgd", lr=0.1), blobs((9,)), model=NORMED)
    module = NORMED.build((4,)).double()
    module.load_state_dict({name: t[0] for name, t in group.model.items()})
    seen = []

    def watch(step):
        seen.append(step.block.index[step.at, 0][step.block.valid[step.at, 0]])
        return step.weight.new_zeros(step.weight.shape[0])

    data = group.clients[0].train
    group.penalties = [watch]
    group.fit(STAGES, epochs=1)
    assert [len(index) for index in seen] == [4, 4, 1]
    for index in seen:
        module.train(len(index) > 1)
        loss = nn.functional.cross_entropy(module(data.x[index]), data.y[index])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= 0.1 * g
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(group.model[name][0], tensor)
    assert int(group.model["embedding.1.num_batches_tracked"]) == 2


class Block(nn.Module):
    """Batch-norm inside a module of the user's own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 3, 4), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize(("size", "moved"), [(4, 1), (5, 2)])
def test_images_count_every_pixel_also_inside_other_modules(size, moved):
    """A single image with several pixels per channel has a variance; 1 x 1 has not."""
    x = torch.randn(3, 1, size, size, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_arrays([{"x_train": x, "y_train": torch.tensor([0, 1, 0])}])
    model = Model(body=lambda shape: Block(shape[0]), head=linear(2))
    server = train(serve(quick(FedAvg, batch_size=2, local_epochs=1), federation, model=model), 1)
    assert int(server.state.shared["body.norm.num_batches_tracked"]) == moved
    assert all(torch.isfinite(t.double()).all() for t in every_tensor(server).values())


def test_a_chain_with_batch_norm_can_be_copied_and_pickled():
    chain = NORMED.build((4,))
    x = torch.randn(1, 4)
    expected = chain.eval()(x)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        torch.testing.assert_close(other.train()(x), expected)


# Presets -----------------------------------------------------------------------------------------------------


def layers(factory, shape):
    return [type(m).__name__ for m in factory(shape)]


def test_presets_put_it_before_the_activation_of_every_hidden_layer():
    spec = {"kind": "mlp", "hidden": [5, 4], "out": 3, "batch_norm": True, "dropout": 0.5}
    hidden = ["Linear", "BatchNorm1d", "ReLU", "Dropout"]
    assert layers(build_stage("model.body", spec, 2), (7,)) == [*hidden, *hidden, "Linear"]
    spec = {"kind": "cnn", "channels": [2, 3], "kernel": 3, "out": 4, "batch_norm": True}
    convolution = ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"]
    factory = build_stage("model.body", spec, 2)
    assert layers(factory, (1, 12, 12)) == [*convolution, *convolution, "Flatten", "Linear", "ReLU"]
    fresh = factory((1, 12, 12))
    assert int(fresh[1].num_batches_tracked) == 0 and fresh.training  # finding the sizes left no trace
    assert "BatchNorm2d" not in layers(cnn((2,), 3, 4), (1, 8, 8)) and "BatchNorm1d" not in layers(mlp((5,), 3), (7,))


def test_stages_per_domain_cannot_have_it():
    with pytest.raises(PerfedError, match=r"'embedding\.1' is batch-norm, which cannot be per-domain"):
        serve(make("separate-fedavg"), blobs(), model=NORMED)
    assert train(serve(make("fedavg-multi-head"), blobs(), model=NORMED), 1).state.shared["head.bias"].shape == (2, 3)
