"""FedBABU: nobody touches the head before fine-tuning."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, make, serve, train

from perfed.errors import PerfedError


def models(server):
    """Every client's own model as it is evaluated: id -> parameters."""
    found = {}
    for group in server.engine.cohorts(server.engine.federation.ids, server.initialiser.method.download(server.state)):
        for row, client in enumerate(group.ids):
            found[client] = {name: tensor[row].clone() for name, tensor in group.model.items()}
    return found


def is_head(name: str) -> bool:
    return name.startswith("head.")


@pytest.mark.parametrize("engine", ENGINES)
def test_before_fine_tuning_all_clients_have_the_same_head_in_every_round_and_the_body_moves(engine):
    server = serve(make("fedbabu", finetune_epochs=0), blobs(), rate=0.7, **ENGINES[engine])
    initial = server.initialiser.draw_initial((4,), ("embedding", "body", "head"))
    server.prepare()
    for number in (1, 2, 3):
        before = server.state.shared
        server.round(number)
        for model in models(server).values():
            assert all(torch.equal(t, initial[name]) for name, t in model.items() if is_head(name))
        assert all(not torch.equal(t, before[name]) for name, t in server.state.shared.items())


def test_the_head_never_travels_and_is_nobodys_state():
    server = serve(make("fedbabu"), blobs())
    server.prepare()
    record = server.round(1)
    body = sum(t.numel() * 8 for name, t in server.initialiser.draw_initial((4,), ("embedding", "body")).items())
    assert record.bytes_down == 3 * body and record.bytes_up == 3 * (body + 8)
    assert not any(is_head(name) for name in server.state.shared)
    assert all(not state["model"] for state in server.engine.states.values())


def test_the_head_depends_on_the_seed():
    one, other = (models(serve(make("fedbabu", finetune_epochs=0), blobs(), seed=seed))["c0"] for seed in (0, 1))
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.long
def test_training_moves_the_body_to_suit_the_head_it_never_trains():
    method = make("fedbabu", finetune_epochs=0, local_epochs=3, lr=0.02)
    server = serve(method, blobs((30, 30), test=20), seed=1)
    before = server.evaluate("train")
    after = train(server, 12).evaluate("train")
    assert all(after[client]["loss"] < 0.6 * before[client]["loss"] for client in before)


@pytest.mark.parametrize("engine", ENGINES)
def test_fine_tuning_the_whole_model_or_the_head_only(engine):
    for finetune in ("model", "head"):
        server = train(serve(make("fedbabu", finetune=finetune), blobs(), **ENGINES[engine]), 1)
        head = server.initialiser.draw_initial((4,), ("head",))
        own = models(server)
        for model in own.values():
            for name, tensor in model.items():
                kept = head[name] if is_head(name) else server.state.shared[name]
                assert torch.equal(tensor, kept) == (finetune == "head" and not is_head(name)), (finetune, name)
        assert not torch.equal(own["c0"]["head.weight"], own["c1"]["head.weight"])


def test_fine_tuning_leaves_alone_what_the_user_froze_below_the_head():
    server = train(serve(make("fedbabu", placement={"body": "frozen"}), blobs()), 1)
    frozen = server.initialiser.draw_initial((4,), ("body",))
    for model in models(server).values():
        assert all(torch.equal(model[name], tensor) for name, tensor in frozen.items())


def test_fine_tuning_has_only_two_forms():
    with pytest.raises((PerfedError, ValueError), match="finetune"):
        make("fedbabu", finetune="body")
