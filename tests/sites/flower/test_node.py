"""A site answers whatever a server sends and however it behaves; the server is in memory, its messages are Flower's."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

import httpx
from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from perfed.errors import PerfedError
from perfed.sites.flower import node
from perfed.sites.flower.letters import EXCHANGE, HELLO, make_record, read_body, read_error
from perfed.sites.flower.node import MessageHandler, serve_messages
from perfed.sites.flower.probe import ServerAddress, Unreachable
from perfed.sites.flower.refusal import RefusalReason


def refused(status: int, code: int = 0) -> httpx.HTTPStatusError:
    response = httpx.Response(status, json={"code": code, "detail": "no"})
    return httpx.HTTPStatusError("no", request=httpx.Request("POST", "http://x"), response=response)


class Link:
    """A SuperLink with one site; every call may be told to fail first.

    Attributes:
        faults: by method, what its next calls raise.
        forgets: how many parts of replies are not taken, as by a server that was started again.
        logged: lines for the site's log.
    """

    def __init__(self) -> None:
        self.waiting, self.objects, self.replies = [], {}, {}
        self.faults: dict[str, list[Exception]] = {}
        self.forgets, self.calls, self.logged = 0, Counter(), []
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower does where an app runs

    def post(self, content: RecordDict, kind: str = EXCHANGE) -> str:
        message = Message(content, 7, kind, ttl=60)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        proto = message_to_proto(message)
        proto.ClearField("content")
        self.waiting.append((proto, get_object_tree(message)))
        return message.object_id

    def reply(self, letter: str) -> Message:
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            for content in self.replies.get(letter, ()):
                with_parts = dict(self.objects)
                if all(tree in with_parts for tree in ids(content)):
                    return inflate_object_from_contents(content.object_id, with_parts)
            time.sleep(0.005)
        raise AssertionError("no reply")

    def ActivateNode(self, request):
        return fleet_pb2.ActivateNodeResponse(node_id=7)

    def GetRun(self, request):
        return run_pb2.GetRunResponse(run=run_pb2.Run(run_id=request.run_id, fab_hash="abc"))

    def PullMessages(self, request):
        proto, tree = self.waiting.pop(0) if self.waiting else (None, None)
        some = proto is not None
        return fleet_pb2.PullMessagesResponse(messages_list=[proto] * some, message_object_trees=[tree] * some)

    def PullObject(self, request):
        found = self.objects.get(request.object_id)
        return message_pb2.PullObjectResponse(
            object_found=found is not None, object_available=True, object_content=found or b""
        )

    def PushMessages(self, request):
        (proto,), (tree,) = request.messages_list, request.message_object_trees
        self.replies.setdefault(proto.metadata.reply_to_message_id, []).append(tree)
        return fleet_pb2.PushMessagesResponse(objects_to_push=ids(tree), session_id="s")

    def PushObject(self, request):
        if self.forgets:
            self.forgets -= 1
            return message_pb2.PushObjectResponse(stored=False)
        self.objects[request.object_id] = request.object_content
        return message_pb2.PushObjectResponse(stored=True)

    def other(self, request):
        return heartbeat_pb2.SendNodeHeartbeatResponse(success=True)


def ids(tree) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in ids(child))]


class Client:
    """In the place of Flower's, of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def close(self) -> None:
        pass

    def __getattr__(self, name: str):
        def call(request):
            self._link.calls[name] += 1
            if self._link.faults.get(name):
                raise self._link.faults[name].pop(0)
            return getattr(self._link, name, self._link.other)(request)

        return call


@pytest.fixture
def link(monkeypatch):
    made = Link()
    monkeypatch.setattr(node, "FleetHttpClient", lambda *_, **__: Client(made))
    monkeypatch.setattr(node, "probe_server", lambda server: None)
    monkeypatch.setattr(node, "MIN_PAUSE", 0.01)
    monkeypatch.setattr(node, "MAX_PAUSE", 0.02)
    monkeypatch.setattr(node, "LEASE_PAUSE", 0.05)
    monkeypatch.setattr(node, "MAX_CONNECT_PAUSE", 0.05)
    return made


def handle(body: bytes) -> bytes:
    if body == b"bad":
        raise PerfedError("north.csv: no column 'age'")
    if body == b"break":
        raise TypeError("patient 17")
    return body.upper()


@contextmanager
def site(link: Link):
    """Its notes and the hashes of apps, while it is there; what it writes into its log is the link's ``logged``."""
    notes, apps, stop = [], [], threading.Event()
    at = MessageHandler("north", "here", handle, apps.append, notes.append, link.logged.append)
    thread = threading.Thread(target=serve_messages, args=(ServerAddress("127.0.0.1:1"), at, stop))
    thread.start()
    try:
        yield notes, apps
    finally:
        stop.set()
        thread.join(5)
        assert not thread.is_alive()


CONNECTED = "connected to server 127.0.0.1:1"


def test_messages_are_answered_and_the_connection_is_given_back(link):
    with site(link) as (notes, apps):
        long = bytes(range(97, 123)) * 10_000
        first, second, bad = (
            link.post(make_record(long)),
            link.post(make_record(b""), HELLO),
            link.post(make_record(b"bad")),
        )
        assert read_body(link.reply(first)) == long.upper()
        assert json.loads(read_body(link.reply(second))) == ["north", "here"]
        assert read_error(link.reply(bad)) == RefusalReason.FAILED
    assert notes == [CONNECTED, "north.csv: no column 'age'"] and apps == ["abc"]  # a run's app is told once
    assert link.calls["DeactivateNode"] == 1
    assert link.calls["GetFab"] == 0  # what was submitted is not even fetched


@pytest.mark.parametrize(
    ("content", "kind", "why", "said"),
    [
        (
            make_record(b"n"),
            "train",
            "a message of type 'train'; allowed: query.exchange, query.hello",
            RefusalReason.MESSAGE,
        ),
        (RecordDict(), EXCHANGE, "a message without a body", RefusalReason.MESSAGE),
        (make_record(b"break"), EXCHANGE, "TypeError: patient 17", RefusalReason.FAILED),
    ],
)
def test_what_is_no_message_of_perfed_is_refused_with_a_fixed_sentence(link, content, kind, why, said):
    """Why, the site's terminal says; the log has what the server was told."""
    with site(link) as (notes, _):
        assert read_error(link.reply(link.post(content, kind))) == said
        assert read_body(link.reply(link.post(make_record(b"next")))) == b"NEXT"
    assert notes == [CONNECTED, why]
    assert link.logged == [f"a message is refused, and the server receives: {said}"]


METHODS = ["PullMessages", "GetRun", "PullObject", "ConfirmMessageReceived", "PushMessages", "PushObject"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", [httpx.ConnectError("gone"), refused(502), httpx.ReadTimeout("slow")])
def test_a_server_that_is_away_gets_the_reply_when_it_is_back(link, method, fault):
    link.faults[method] = [fault]
    with site(link) as (notes, _):
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    away = "server 127.0.0.1:1 does not answer; trying again"
    assert notes == [CONNECTED, away, CONNECTED] and link.calls["ActivateNode"] == 1


def test_parts_of_a_reply_that_a_server_has_forgotten_are_sent_again(link):
    link.forgets = 2
    with site(link):
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    assert link.calls["PushMessages"] > 1


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_message_of_a_run_that_has_ended_does_not_keep_the_site(link, method):
    link.faults[method] = [refused(403)]
    with site(link):
        link.post(make_record(b"lost"))
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    (dropped,) = link.logged
    assert dropped.startswith("a message of the server was dropped: HTTPStatusError")


@pytest.mark.parametrize("content", [b"", b"Message\x00", b"\x80\x04."])
def test_nonsense_in_the_place_of_a_message_does_not_keep_the_site(link, content):
    with site(link) as (notes, _):
        letter = link.post(make_record(b"lost"))
        link.objects[letter] = content
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    assert notes == [CONNECTED] and link.logged[0].startswith("a message of the server was dropped")


def test_a_server_that_no_longer_knows_the_site_is_connected_to_anew(link):
    link.faults["PullMessages"] = [refused(401)]
    with site(link) as (notes, _):
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    assert link.calls["ActivateNode"] == 2 and "refuses this site (401); trying again" in notes[1]


def test_a_connection_that_is_still_held_is_waited_for(link):
    link.faults["ActivateNode"] = [refused(412, 2004)] * 3
    with site(link) as (notes, _):
        assert read_body(link.reply(link.post(make_record(b"n")))) == b"N"
    assert len(notes) == 2 and notes[0].startswith("the server still has a connection with this site's key")


def test_a_server_that_will_never_take_the_site_ends_it(link, monkeypatch):
    link.faults["RegisterNode"] = [refused(412, 2001)]
    with pytest.raises(PerfedError, match="authenticates its sites: this site needs its key"):
        serve_messages(
            ServerAddress("127.0.0.1:1"), MessageHandler("north", "here", handle, print, print), threading.Event()
        )
    notes = []

    def probe(server):
        raise Unreachable("nobody there") if not notes else PerfedError("does not know the key")

    monkeypatch.setattr(node, "probe_server", probe)
    with pytest.raises(PerfedError, match="does not know the key"):
        serve_messages(
            ServerAddress("127.0.0.1:1"),
            MessageHandler("north", "here", handle, print, notes.append),
            threading.Event(),
        )
    assert notes == ["nobody there; trying again"]


def test_a_site_that_works_for_long_goes_on_giving_signs_of_life(link, monkeypatch):
    monkeypatch.setattr(node, "HEARTBEAT_SECONDS", 0.05)
    with site(link):
        until = time.monotonic() + 5
        while link.calls["SendNodeHeartbeat"] < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert link.calls["SendNodeHeartbeat"] >= 3
