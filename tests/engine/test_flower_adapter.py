"""Flower's messages as letters, with a grid in memory and the apps called directly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'perfed[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from perfed.engine.flower import post
from perfed.engine.flower.adapter import FlowerTransport, client_app
from perfed.engine.flower.worker import serve
from perfed.errors import PerfedError


class Grid:
    """SuperNodes by number; ``reply`` says what comes back for a message, ``None`` for nothing."""

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


def by_app(folder: str, sites: dict[int, str]) -> Callable[[Message], Message]:
    """What the client apps of these sites reply, each with the one worker in ``folder``."""
    app = client_app()

    def reply(message: Message) -> Message:
        node = message.metadata.dst_node_id
        config = {"site": sites[node], "worker": f"{folder}/w"}
        return app(message, Context(1, node, config, RecordDict(), {}))

    return reply


@pytest.fixture
def folder():
    def handle(request: bytes) -> bytes:
        if request == b"bad":
            raise PerfedError("north.csv: no column 'age'")
        return request.upper()

    with TemporaryDirectory() as name:
        stop = threading.Event()
        thread = threading.Thread(target=serve, args=(f"{name}/w", handle, stop))
        thread.start()
        while not Path(name, "w").exists():
            time.sleep(0.01)
        yield name
        stop.set()
        thread.join(5)


@pytest.fixture
def open_transport(monkeypatch):
    monkeypatch.setattr(post, "POLL", 0.005)
    monkeypatch.setattr(post, "REFRESH", 0.02)
    opened = []

    def opening(grid: Grid) -> FlowerTransport:
        opened.append(FlowerTransport(grid))
        return opened[-1]

    yield opening
    for transport in opened:
        transport.close()


def test_bytes_go_through_the_client_app_to_the_worker_and_back(folder, open_transport):
    grid = Grid({1: "north", 2: "south"}, by_app(folder, {1: "", 2: ""}))
    transport = open_transport(grid)
    assert transport.sites() == ["north", "south"]
    long = bytes(range(97, 123)) * 10_000
    found = {answer.site: answer for answer in transport.exchange({"north": long, "south": b"bad"}, 5)}
    assert found["north"].body == long.upper()
    assert found["south"].error == "site 'south': north.csv: no column 'age'"
    assert all(5 < message.metadata.ttl <= 5 + post.LATE for message in grid.sent.values())
    arrays = [a for m in grid.sent.values() for r in m.content.array_records.values() for a in r.values()]
    assert [array.data for array in arrays] == [long, b"bad"]  # one flat array for each message


def test_without_names_from_keys_each_site_is_asked_once(folder, open_transport):
    grid = Grid({1: "", 2: ""}, by_app(folder, {1: "north", 2: "south"}))
    transport = open_transport(grid)
    assert transport.wait_for(["north", "south"], 5) == []
    assert [answer.body for answer in transport.exchange({"south": b"s"}, 5)] == [b"S"]
    assert [m.metadata.message_type for m in grid.sent.values()] == ["query.hello"] * 2 + ["query.exchange"]
    assert grid.sent["3"].metadata.dst_node_id == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "its Flower app could not be loaded"),
        (2, "ValueError: out of memory"),
        (3, "its message expired before it was answered"),
        (4, "its reply is lost"),
        (5, "it is gone: its SuperNode has stopped talking to the server"),
        (7, "its SuperNode does not trust the app"),
        (8, "what handled its message was killed"),
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
    with pytest.raises(PerfedError, match="the SuperLink does not take a message"):
        list(open_transport(grid).exchange({"north": b"n"}, 5))


def test_a_client_app_without_a_worker_says_so(open_transport):
    transport = open_transport(Grid({1: "north"}, by_app("/nowhere", {1: "north"})))
    (answer,) = transport.exchange({"north": b"n"}, 5)
    assert answer.error == "site 'north': no worker answers at /nowhere/w: No such file or directory"
