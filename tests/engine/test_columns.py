"""Columns that several clients share by name: means over those who hold them, own weights at home."""

from dataclasses import replace

import pytest
import torch
from engines import make, serve, train

from perfed.data.federation import Federation
from perfed.model.chain import Model
from perfed.model.columns import ColumnLinear, split_first_layer
from perfed.model.presets import linear, mlp
from perfed.testing.federations import make_named_columns
from perfed.testing.runs import RecordingEngine, measure_difference

WEIGHT = "head.weight"


def linear_server(method, federation=None, **options):
    federation = federation or make_named_columns()
    return serve(method, federation, model=Model(head=linear(3)), rounds=2, **options)


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_a_round_moves_a_column_by_the_mean_gradient_of_those_who_hold_it(average):
    federation = make_named_columns()
    method = make("fedavg", optimizer="sgd", lr=0.5, batch_size=99, local_epochs=1, average=average)
    server = linear_server(method, federation)
    server.prepare()
    start = server.state.shared
    gradients, sizes = [], []
    for client in federation:
        own = server.engine.initialiser.client_state(client, server.engine.info)["model"]["head.own"]
        weight = torch.cat([start[WEIGHT], own], 1).requires_grad_()
        loss = torch.nn.functional.cross_entropy(client.train.x @ weight.T + start["head.bias"], client.train.y)
        gradients.append(torch.autograd.grad(loss, weight)[0][:, :4])
        sizes.append(len(client.train) if average == "samples" else 1.0)
    server.round(1)
    for column in range(4):
        who = [i for i, client in enumerate(federation) if client.held[column]]
        assert len(who) == (2 if column == 1 else 3)
        mean = sum(sizes[i] * gradients[i][:, column] for i in who) / sum(sizes[i] for i in who)
        assert torch.allclose(server.state.shared[WEIGHT][:, column], start[WEIGHT][:, column] - 0.5 * mean)


@pytest.mark.parametrize("name", ["fedavg-ft", "fedprox", "ditto", "fedrep", "fedper", "fedbabu", "lg-fedavg", "apfl"])
def test_what_the_server_has_is_the_mean_over_holders_whatever_the_method(name):
    model = Model(body=mlp((5,), 4), head=linear(3))
    federation = make_named_columns()
    method = make(name, weight_decay=0.1, placement={"body": "shared"})
    server = train(serve(method, federation, model=model, rounds=1, runner=RecordingEngine), 1)
    record = [(work, done) for work, done in server.engine.record if work.exchange.round == 1]
    said = {client: done.reply(row) for work, done in record for row, client in enumerate(work.ids)}
    weight = "body.0.weight"
    held = [client for client in federation if client.held[1]]
    plain = "num_samples" not in said[held[0].id]
    sizes = torch.tensor([1.0 if plain else float(len(client.train)) for client in held]).double()
    columns = torch.stack([said[client.id]["shared"][weight][:, 1] for client in held])
    assert torch.allclose(server.state.shared[weight][:, 1], (sizes[:, None] * columns).sum(0) / sizes.sum())
    assert all("body.0.own" not in reply["shared"] for reply in said.values())


def test_a_column_that_no_participant_holds_stays_as_it_was():
    federation = make_named_columns()
    lacking = [replace(client, held=(True, False, True, True)) for client in federation]
    unheld = [
        replace(client, train=replace(client.train, x=client.train.x.index_fill(1, torch.tensor(1), 0.0)))
        for client in lacking
    ]
    server = linear_server(make("fedavg"), Federation(tuple(unheld), 3))
    before = server.state.shared[WEIGHT].clone()
    train(server, 1)
    changed = (server.state.shared[WEIGHT] - before).abs().amax(0)
    assert changed[1] < 1e-12 < changed[[0, 2, 3]].min()


@pytest.mark.parametrize("options", [{"chunk": 1}, {"engine": "sequential"}])
def test_clients_side_by_side_are_as_if_each_was_alone(options):
    runs = [train(linear_server(make("ditto", weight_decay=0.1), **each), 2) for each in ({}, options)]
    assert measure_difference(*runs) < 1e-8


def test_a_first_layer_inside_a_stage_is_found_and_others_stay():
    model = Model(
        body=lambda shape: torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(*shape, 2))), head=linear(3)
    )
    chain = split_first_layer(model, 3).build((5,))
    assert isinstance(chain.get_submodule("body.0.0"), ColumnLinear)
    assert type(chain.get_submodule("head")) is torch.nn.Linear
    assert split_first_layer(model, None) is model
    plain = Model(body=lambda shape: torch.nn.LayerNorm(shape), head=linear(3))
    assert not any(isinstance(module, ColumnLinear) for module in split_first_layer(plain, 3).build((5,)).modules())
