"""Local training in the rounds a client is chosen for, and in all."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, make, serve, train

from perfed.errors import PerfedError
from perfed.participation.settings import Participation

FULL_BATCHES = {"optimizer": "sgd", "lr": 0.05, "batch_size": 100}  # no shuffles keyed by the exchange


@pytest.mark.parametrize("engine", ENGINES)
def test_local_full_trains_everybody_once_a_round_whoever_takes_part(engine):
    federation = blobs((9, 7, 5, 8))
    everybody = train(serve(make("local", **FULL_BATCHES), federation, **ENGINES[engine]), 3)
    some = serve(make("local-full", **FULL_BATCHES), federation, rate=0.5, **ENGINES[engine])
    some.prepare()
    for number in (1, 2, 3):
        record = some.round(number)
        assert len(record.participants) == 2 and record.train_loss > 0
        assert record.bytes_up == record.bytes_down == 0
    for client in federation.ids:
        for name, tensor in everybody.engine.states[client]["model"].items():
            torch.testing.assert_close(some.engine.states[client]["model"][name], tensor)


def test_clients_that_were_never_chosen_are_not_trained_once_more_at_the_end():
    policy = Participation(rate=0.25, last_round="sampled", fit_unused=True)
    server = train(serve(make("local-full"), blobs((9, 7, 5, 8)), participation=policy), 2)
    before = {i: server.engine.states[i]["model"]["head.weight"].clone() for i in server.engine.federation.ids}
    server.settle(list(before), 2)
    assert all(torch.equal(server.engine.states[i]["model"]["head.weight"], t) for i, t in before.items())


@pytest.mark.parametrize("name", ["local", "local-full", "fedhenn", "fedproto"])
def test_nothing_can_be_shared_where_nothing_is_sent(name):
    with pytest.raises(PerfedError, match="no parameters are sent by this method, but placement has shared 'body"):
        serve(make(name, placement={"body": "shared"}), blobs()).prepare()
