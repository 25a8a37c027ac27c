"""Flower's messages as letters, with a grid in memory; what sites reply is made beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from perfed.errors import PerfedError
from perfed.sites.flower import transport as module
from perfed.sites.flower.adapter import FlowerTransport
from perfed.sites.flower.letters import HELLO, make_error_record, make_record, read_body


class Grid:
    """Sites by number; ``reply`` says what comes back for a message, ``None`` for nothing."""

    def __init__(self, names: dict[int, str], reply: Callable[[Message], Message | None]) -> None:
        self.names, self.reply, self.sent, self.full = names, reply, {}, False
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower does where an app runs

    def get_nodes(self):
        since = "2026-11-22T14:00:00"
        return [SimpleNamespace(node_id=n, name=name, last_activated_at=since) for n, name in self.names.items()]

    def push_messages(self, messages):
        if self.full:
            return []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.sent) + 1)
            self.sent[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, numbers):
        replies = [self.reply(self.sent[number]) for number in numbers]
        return [reply for reply in replies if reply is not None]


def by_sites(sites: dict[int, str]) -> Callable[[Message], Message]:
    """What these sites reply: their names, an error, or the text in capitals."""

    def reply(message: Message) -> Message:
        said = json.dumps([sites[message.metadata.dst_node_id], "here"]).encode()
        body = said if message.metadata.message_type == HELLO else read_body(message).upper()
        content = make_error_record("north.csv: no column 'age'") if body == b"BAD" else make_record(body)
        return Message(content, reply_to=message)

    return reply


@pytest.fixture
def open_transport(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.02)
    opened = []

    def opening(grid: Grid) -> FlowerTransport:
        opened.append(FlowerTransport(grid))
        return opened[-1]

    yield opening
    for transport in opened:
        transport.close()


def test_bytes_go_to_the_sites_and_back(open_transport):
    grid = Grid({1: "north", 2: "south"}, by_sites({1: "", 2: ""}))
    transport = open_transport(grid)
    assert transport.list_sites() == ["north", "south"]
    long = bytes(range(97, 123)) * 10_000
    found = {answer.site: answer for answer in transport.exchange({"north": long, "south": b"bad"}, 5)}
    assert found["north"].body == long.upper()
    assert found["south"].error == "site 'south': north.csv: no column 'age'"
    assert all(5 < message.metadata.ttl <= 5 + module.EXTRA_LIFETIME for message in grid.sent.values())
    arrays = [a for m in grid.sent.values() for r in m.content.array_records.values() for a in r.values()]
    assert [array.data for array in arrays] == [long, b"bad"]  # one flat array for each message


def test_without_names_from_keys_each_site_is_asked_once(open_transport):
    grid = Grid({1: "", 2: ""}, by_sites({1: "north", 2: "south"}))
    transport = open_transport(grid)
    assert transport.wait_for(["north", "south"], 5) == []
    assert [answer.body for answer in transport.exchange({"south": b"s"}, 5)] == [b"S"]
    assert [m.metadata.message_type for m in grid.sent.values()] == ["query.hello"] * 2 + ["query.exchange"]
    assert grid.sent["3"].metadata.dst_node_id == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "ValueError: out of memory"),
        (3, "its message expired before it was answered"),
        (4, "its reply is lost"),
        (5, "it is gone: it has stopped talking to the server"),
    ],
)
def test_an_error_reply_says_what_it_means(open_transport, code, words):
    error = Error(code, "ValueError: out of\nmemory")
    transport = open_transport(Grid({1: "north"}, lambda message: Message(error, reply_to=message)))
    (answer,) = transport.exchange({"north": b"n"}, 1)
    assert answer.body is None
    assert answer.error.startswith(f"site 'north': {words}") and "\n" not in answer.error


def test_a_message_that_the_server_does_not_take_is_said(open_transport):
    grid = Grid({1: "north"}, lambda message: None)
    grid.full = True
    with pytest.raises(PerfedError, match="the SuperLink does not accept a message"):
        list(open_transport(grid).exchange({"north": b"n"}, 5))


def test_a_reply_that_is_none_is_an_error_of_its_site(open_transport):
    transport = open_transport(Grid({1: "north"}, lambda message: Message(RecordDict(), reply_to=message)))
    (answer,) = transport.exchange({"north": b"n"}, 5)
    assert (answer.body, answer.error) == (None, "site 'north': a message without a body")


def test_a_site_that_says_no_name_is_not_connected(open_transport):
    transport = open_transport(Grid({1: ""}, lambda message: Message(make_record(b"{}"), reply_to=message)))
    assert transport.wait_for(["north"], 0.2) == ["north"]
