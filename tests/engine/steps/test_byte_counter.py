"""Bytes of payloads and replies: compared with the sum over clients and entries."""

from __future__ import annotations

import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.executor import ChunkResult
from perfed.engine.record import RoundRecord
from perfed.engine.steps.byte_counter import ByteCounter
from perfed.method.exchange import each

REPLIES = {"a": {"w": torch.ones(3, dtype=torch.float64), "n": {"m": torch.ones(2, dtype=torch.int64)}}}
REPLIES["b"] = REPLIES["a"]


def test_bytes_are_those_of_every_entry_of_every_client():
    record = RoundRecord([], 0.0)
    payload = {"shared": torch.ones(5, dtype=torch.float32), "row": each({"a": torch.ones(1), "b": torch.ones(7)})}
    run_steps([ByteCounter(record, invited=2)], [chunk_of(REPLIES)], task_of("ab", payload))
    assert record.bytes_up == 2 * (3 * 8 + 2 * 8)
    assert record.bytes_down == 2 * 5 * 4 + (1 + 7) * 4


def test_only_the_first_exchange_goes_to_all_invited_clients():
    record = RoundRecord([], 0.0)
    counter, task = ByteCounter(record, invited=6), task_of("ab", {"shared": torch.ones(10, dtype=torch.float32)})
    run_steps([counter], [chunk_of(REPLIES)], task)
    assert record.bytes_down == 6 * 40
    record.exchanges = 1
    run_steps([counter], [chunk_of(REPLIES)], task)
    assert record.bytes_down == 6 * 40 + 2 * 40


def test_padding_and_entries_that_are_made_client_by_client_count_as_they_are_sent():
    record, shapes = RoundRecord([], 0.0), [{"w": torch.Size([2])}, {"w": torch.Size([4])}]
    content = {"w": torch.ones(2, 4, dtype=torch.float32), "h": lambda row: torch.ones(row + 1, dtype=torch.float64)}
    run_steps([ByteCounter(record, invited=2)], [ChunkResult(("a", "b"), content, shapes, torch.zeros(2))])
    assert record.bytes_up == (2 + 4) * 4 + (1 + 2) * 8
