"""What extensions add to payloads, and what they make of replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import blobs, make, serve
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.executor import Exchange
from perfed.engine.steps.extensions import ExtensionPayloads, ExtensionReplies
from perfed.errors import PerfedError
from perfed.method.exchange import ServerState
from perfed.method.extension import Extension

STATE = ServerState({"scale": torch.tensor(10.0)})
REPLIES = {"a": {"w": torch.tensor([1.0])}, "b": {"w": torch.tensor([2.0])}}


class Scale(Extension):
    """Sends a factor, and multiplies replies by it."""

    name = "scale"

    def payload(self, server: ServerState) -> dict[str, Any]:
        return {"factor": server.scale}

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        if (reply["w"] < 0).any():
            raise PerfedError("it is negative")
        return {"w": reply["w"] * server.scale}


class Shift(Extension):
    """Adds 1 to replies."""

    name = "shift"

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        return {"w": reply["w"] + 1}


@pytest.mark.parametrize("role", ["nothing", "penalties", "all"])
def test_payloads_travel_with_exchanges_in_which_extensions_take_part(role):
    kept: list = []
    step = ExtensionPayloads([Scale(), Shift()], STATE, kept)
    asked = replace(task_of("ab", {"x": torch.zeros(1)}), exchange=Exchange("train", 1, 0, extensions=role))
    task, replies = run_steps([step], [chunk_of(REPLIES)], asked)
    expected = {"x", "extensions"} if role != "nothing" else {"x"}
    assert task.payload.keys() == expected and task.exchange.extensions == role
    if role != "nothing":
        assert task.payload["extensions"] == {"scale": {"factor": STATE.scale}, "shift": {}}
    assert kept == ([replies] if role == "all" else [])


def test_replies_are_restored_in_the_reverse_order_of_the_extensions():
    _, replies = run_steps([ExtensionReplies([Scale(), Shift()], STATE)], [chunk_of(REPLIES)])
    assert replies.w.tolist() == [[(1 + 1) * 10], [(2 + 1) * 10]]
    _, replies = run_steps([ExtensionReplies([Shift(), Scale()], STATE)], [chunk_of(REPLIES)])
    assert replies.w.tolist() == [[1 * 10 + 1], [2 * 10 + 1]]


def test_a_reply_that_an_extension_refuses_is_named():
    with pytest.raises(PerfedError, match="the reply of client 'b': it is negative"):
        run_steps([ExtensionReplies([Scale()], STATE)], [chunk_of({**REPLIES, "b": {"w": torch.tensor([-1.0])}})])


def test_replies_are_restored_before_they_are_folded():
    def add(total, reply):
        return reply["w"] if total is None else total + reply["w"]

    task = task_of("ab", reduce={"w": add})
    _, replies = run_steps([ExtensionReplies([Scale()], STATE)], [chunk_of(REPLIES)], task)
    assert replies.w.tolist() == [10 * (1 + 2)]


def test_extensions_learn_from_the_replies_of_a_round():
    class Remember(Extension):
        name = "remember"

        def client_update(self, cohort, payload):
            return {"twice": 2 * cohort.num_samples}

        def on_replies(self, server, replies, content):
            learned.append(dict(zip(replies.ids, content["twice"].tolist(), strict=True)))

    learned: list[dict[str, float]] = []
    server = serve(make("fedavg", more_extensions=(Remember(),)), blobs((12, 7, 5)))
    server.prepare()
    server.round(1)
    assert learned == [{"c0": 24.0, "c1": 14.0, "c2": 10.0}]
