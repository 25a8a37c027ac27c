"""Values that are not finite: found wherever they are, before the server uses a reply."""

from __future__ import annotations

import math

import pytest
import torch
from exchanges import chunk_of, run_steps, task_of

from perfed.engine.executor import ChunkResult
from perfed.engine.steps.divergence_check import DivergenceCheck
from perfed.errors import ClientsDiverged


def reply_with(value: float) -> dict:
    return {"w": torch.tensor([0.5, value]), "inside": {"n": torch.tensor([3])}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("client", ["a", "b", "c"])
def test_the_client_and_its_entry_are_named(value, client):
    replies = {i: reply_with(value if i == client else 1.0) for i in "abc"}
    with pytest.raises(ClientsDiverged, match=rf"'{client}' holds values that are not finite \(entry 'w'\)") as error:
        run_steps([DivergenceCheck()], [chunk_of(replies)])
    assert [*error.value.messages] == [client]


def test_all_clients_of_all_chunks_are_named():
    chunks = [chunk_of({"b": reply_with(math.nan)}), chunk_of({"a": reply_with(1.0)})]
    trained = ChunkResult((), {}, (), torch.empty(0), diverged={"c": "its loss is nan"})
    with pytest.raises(ClientsDiverged) as error:
        run_steps([DivergenceCheck()], [*chunks, trained], task_of("abc"))
    assert [*error.value.messages] == ["b", "c"]


@pytest.mark.parametrize("folded", [True, False])
def test_entries_that_are_made_client_by_client_are_looked_at(folded):
    content = {"h": lambda row: torch.tensor([1.0, math.nan if row else 1.0])}
    task = task_of("ab", reduce={"h": lambda total, reply: reply["h"]} if folded else {})
    with pytest.raises(ClientsDiverged, match="'b' holds values"):
        run_steps([DivergenceCheck()], [ChunkResult(("a", "b"), content, [{}, {}], torch.zeros(2))], task)


def test_finite_replies_pass_unchanged():
    replies = {i: reply_with(1e30) for i in "ab"}
    _, result = run_steps([DivergenceCheck()], [chunk_of(replies)])
    assert torch.equal(result.w, torch.stack([reply["w"] for reply in replies.values()]))


@pytest.mark.parametrize(("large", "is_named"), [(999.0, False), (1001.0, True)])
def test_the_error_names_a_client_whose_reply_was_much_larger_before(large, is_named):
    check = DivergenceCheck()
    run_steps([check], [chunk_of({"a": reply_with(1.0), "b": reply_with(-large)})])
    with pytest.raises(ClientsDiverged) as error:
        run_steps([check], [chunk_of({"a": reply_with(math.nan)})])
    assert ("before, client 'b' sent values up to" in str(error.value)) == is_named
