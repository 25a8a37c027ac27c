"""A run has the steps that its settings ask for, and no other; all steps are asked in order."""

from __future__ import annotations

import pytest
import torch
from engines import blobs, make, serve
from exchanges import chunk_of, run_steps

from perfed.engine.clients import RoundClients
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.engine.steps.byte_counter import ByteCounter
from perfed.engine.steps.divergence_check import DivergenceCheck
from perfed.engine.steps.extensions import ExtensionPayloads, ExtensionReplies
from perfed.engine.steps.loss_curves import LossCurves
from perfed.engine.steps.named_columns import NamedColumns
from perfed.engine.steps.scores import ModelOutputs, ModelScores
from perfed.engine.steps.secure_sums import SecureSums
from perfed.engine.steps.step import ExchangeStep
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.top_k import TopK
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.testing.federations import make_named_columns

PLAIN = [ByteCounter, DivergenceCheck]


def steps_of(server, watched=(), **options) -> list[type[ExchangeStep]]:
    server.initialiser.watched = frozenset(watched)
    clients = RoundClients(server.engine, server.state, server.federation.ids, 1, "round", **options)
    return [type(step) for step in clients.steps]


def server_of(*extensions, **options):
    return serve(make("fedavg", more_extensions=extensions), blobs(), **options)


def test_a_run_without_features_has_the_plain_steps_only():
    assert steps_of(server_of()) == PLAIN


@pytest.mark.parametrize(
    ("feature", "build"),
    [
        ([ExtensionPayloads], lambda: steps_of(server_of(Proximal()))),
        ([ExtensionPayloads, ExtensionReplies], lambda: steps_of(server_of(TopK()))),
        ([SecureSums], lambda: steps_of(server_of(secure=SecureAggregation()))),
        ([NamedColumns], lambda: steps_of(serve(make("fedavg"), make_named_columns(), model=Model(head=linear(3))))),
        ([ModelScores], lambda: steps_of(server_of(), split="test")),
        ([ModelScores, ModelOutputs], lambda: steps_of(server_of(), split="test", keep_outputs=True)),
        ([LossCurves], lambda: steps_of(server_of(), watched=["c0"])),
    ],
)
def test_each_feature_is_a_step_of_its_own(feature, build):
    steps = build()
    assert sorted(step.__name__ for step in steps) == sorted(step.__name__ for step in [*PLAIN, *feature])


def test_a_task_passes_the_steps_in_order_and_replies_in_the_reverse_order():
    class Note(ExchangeStep):
        def __init__(self, name: str) -> None:
            self.name = name

        def send(self, task):
            calls.append(f"send {self.name}")
            return task

        def receive(self, result):
            calls.append(f"receive {self.name}")
            return result.map_replies(lambda client, reply: calls.append(f"read {self.name} {client}") or reply)

        def collect(self, replies):
            calls.append(f"collect {self.name}")
            return replies

    calls: list[str] = []
    reply = {"w": torch.zeros(1)}
    run_steps([Note("outer"), Note("inner")], [chunk_of({"a": reply, "b": reply})])
    reads = [f"read {name} {client}" for client in "ab" for name in ("inner", "outer")]
    hooks = ["send outer", "send inner", "receive inner", "receive outer"]
    assert calls == [*hooks, *reads, "collect inner", "collect outer"]


def test_evaluations_have_neither_extensions_nor_bytes():
    server = server_of(TopK())
    assert [type(step) for step in server.engine.evaluation_steps] == [DivergenceCheck]
