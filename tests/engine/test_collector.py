"""Replies of one exchange: stacked by id, and folded one client at a time."""

from __future__ import annotations

import weakref
from itertools import permutations

import pytest
import torch

from perfed.engine.collector import ReplyCollector
from perfed.engine.executor import ChunkResult
from perfed.errors import PerfedError


def result_of(client: str, value: float) -> ChunkResult:
    content = {"w": torch.tensor([[value]]), "h": lambda row: torch.tensor([value])}
    return ChunkResult((client,), content, ({},), torch.tensor([value]))


def append(total, reply):
    return [*(total or []), float(reply["h"])]


@pytest.mark.parametrize("order", [*permutations("abc")])
def test_replies_are_stacked_and_folded_by_id_whatever_the_order_in_which_they_come(order):
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    collector = ReplyCollector("bca", {"h": append})
    for client in order:
        collector.add(result_of(client, values[client]))
    replies = collector.stack()
    assert replies.ids == ["a", "b", "c"] and replies.h == [1.0, 2.0, 3.0]
    assert replies.w.tolist() == [[1.0], [2.0], [3.0]] and replies.train_loss.tolist() == [1.0, 2.0, 3.0]


def test_a_folded_reply_is_gone_before_the_next_one_is_made():
    alive: list[weakref.ref] = []

    def make(row: int):
        assert not [ref for ref in alive if ref() is not None]
        tensor = torch.ones(3)
        alive.append(weakref.ref(tensor))
        return tensor

    collector = ReplyCollector("abcd", {"h": lambda total, reply: (total or 0.0) + float(reply["h"].sum())})
    collector.add(ChunkResult(("c", "d"), {"h": make}, ({}, {}), torch.zeros(2)))
    assert not alive
    collector.add(ChunkResult(("a", "b"), {"h": make}, ({}, {}), torch.zeros(2)))
    assert len(alive) == 4 and collector.stack().h == 12.0


def test_clients_that_have_not_replied_are_left_out():
    collector = ReplyCollector("abc", {"h": append})
    collector.add(result_of("b", 2.0))
    assert collector.stack().ids == ["b"]
    assert ReplyCollector("abc", {}).stack().ids == []


def test_a_reply_without_the_entry_to_fold_is_refused():
    collector = ReplyCollector("a", {"x": append})
    with pytest.raises(PerfedError, match="the replies hold no 'x' to fold; they hold: w, h"):
        collector.add(result_of("a", 1.0))
