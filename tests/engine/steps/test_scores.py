"""Metrics and predictions of the models right after an exchange."""

from __future__ import annotations

import numpy as np
import torch
from exchanges import chunk_of, run_steps

from perfed.engine.evaluate import Outputs
from perfed.engine.steps.scores import ModelOutputs, ModelScores

REPLY = {"w": torch.zeros(1)}


def outputs_of(client: str) -> Outputs:
    return Outputs(np.array([client]), None, np.zeros(1), np.zeros((1, 2)))


def test_metrics_are_those_of_the_latest_exchange():
    metrics: dict = {}
    step = ModelScores("test", metrics)
    for value in (0.5, 0.75):
        chunks = [chunk_of({i: REPLY}, metrics={i: {"accuracy": value}}) for i in "ab"]
        task, _ = run_steps([step], chunks)
        assert task.exchange.measure == "test" and not task.keep_outputs
        assert metrics == {"a": {"accuracy": value}, "b": {"accuracy": value}}
    run_steps([step], [])
    assert metrics == {}


def test_predictions_are_those_of_the_latest_exchange():
    outputs: list[Outputs] = []
    step = ModelOutputs(outputs)
    for clients in ("ab", "c"):
        task, _ = run_steps([step], [chunk_of({i: REPLY}, outputs=[outputs_of(i)]) for i in clients])
        assert task.keep_outputs
        assert [part.client.tolist() for part in outputs] == [[i] for i in clients]
