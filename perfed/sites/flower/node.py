"""A site's end of the connection with a SuperLink: its messages are answered here, by perfed's own code.

This is in the place of Flower's SuperNode, which fetches the app that somebody has submitted and runs it. Here no app
is fetched, nothing listens, and no process is started: whoever submits sends messages and nothing else.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from perfed.errors import PerfedError
from perfed.sites.flower.letters import EXCHANGE, HELLO, make_error_record, make_record, read_body
from perfed.sites.flower.probe import ServerAddress, Unreachable, load_private_key, make_tls_context, probe_server
from perfed.sites.flower.processes import check_flower
from perfed.sites.flower.refusal import RefusalReason, Refused, describe_for_server, describe_for_site, refuse_as

try:
    import httpx
    from flwr.app import Message, RecordDict
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto import fleet_pb2 as fleet
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest
    from flwr.supercore.inflatable import inflatable_protobuf_utils as on_wire
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPushError,
        pull_and_inflate_object_from_tree,
        push_objects,
    )
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    check_flower()
    raise PerfedError(f"the installed flwr lacks what a site needs of it: {error}") from None

MAX_CONNECT_PAUSE = 30.0
"""Seconds between two attempts to connect, at most."""
LEASE_PAUSE = 10.0
"""Seconds between two attempts while the server still holds the connection of a site that was killed."""
MIN_PAUSE, MAX_PAUSE, PAUSE_SHARE = 0.1, 3.0, 0.05
"""Seconds between two looks for a message: this share of the time without one, within these bounds."""
HEARTBEAT_SECONDS, HEARTBEATS = 30.0, 2.5
"""Seconds for which a sign of life counts half (Flower takes a site for gone after two), and signs in that time."""
TRANSFER_SECONDS = 120.0
"""Seconds after which a message whose parts the server does not have is dropped."""
_TRIES = 5  # a server that is started again meanwhile has forgotten which parts of a reply it has
_STEADY = 60.0  # a connection that has lasted for so many seconds has not failed to start
_NO_KEY, _NOT_ACTIVATED = 2001, 2004  # Flower's codes


@dataclass(frozen=True)
class MessageHandler:
    """Who answers at a site.

    Attributes:
        site: its name.
        place: machine and folder: two connections of one name and place are one site started again.
        answer: from the bytes of a message to those of the reply; one message at a time.
        began: is told once of each run the hash of its app, as the server gives it.
        note: gets one line for each thing that a person may want to know.
        heard: gets one line for each message that ``answer`` is not given, and for what is replied to it; a person may
            want to know it too.
    """

    site: str
    place: str
    answer: Callable[[bytes], bytes]
    began: Callable[[str], None]
    note: Callable[[str], None]
    heard: Callable[[str], None] = lambda line: None


def serve_messages(server: ServerAddress, at: MessageHandler, stop: threading.Event) -> None:
    """Answer the server's messages until ``stop``, whatever becomes of the server meanwhile.

    The same line is noted only once in a row.

    Raises:
        PerfedError: what another attempt would not mend: see :func:`~perfed.sites.flower.probe.probe_server`.
    """
    wait, say = 1.0, _Once(at.note)
    while not stop.is_set():
        began, again = time.monotonic(), 0.0
        try:
            probe_server(server)
            with _Connection(server, at, say, stop) as connection:
                connection.work()
        except Unreachable as error:
            say(f"{error}; trying again")
        except PerfedError:
            raise
        except httpx.HTTPStatusError as error:
            code = _code(error)
            if code == _NO_KEY:
                keyless = f"server {server.address} authenticates its sites: this site needs its key (--key)"
                raise PerfedError(keyless) from None
            if code == _NOT_ACTIVATED:
                held = "the server still holds a connection with this site's key: the last one, for up to a minute"
                say(f"{held}, or that of another 'perfed site' with the key; trying again")
                again = LEASE_PAUSE
            else:
                say(f"server {server.address} refuses this site ({error.response.status_code}); trying again")
        except (httpx.HTTPError, ValueError) as error:
            say(f"server {server.address} does not speak as a SuperLink does: {error}; trying again")
        wait = 1.0 if time.monotonic() - began > _STEADY else min(2 * wait, MAX_CONNECT_PAUSE)
        stop.wait(again or wait)


class _Once:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._last = note, ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            self._last = line
            self._note(line)


class _Stopped(Exception):
    pass


class _Connection:
    """One activation of the site at the server; on exit it is given back, so that the next one need not wait."""

    def __init__(
        self, server: ServerAddress, at: MessageHandler, say: Callable[[str], None], stop: threading.Event
    ) -> None:
        self._server, self._at, self._say, self._stop = server, at, say, stop
        if server.key is None:
            private, public = generate_key_pairs()
        else:
            private = load_private_key(server.key)
            public = private.public_key()
        self._key = public_key_to_bytes(public)
        verify: ssl.SSLContext | bool = True if server.ca is None else make_tls_context(server.ca)
        url = f"{'http' if server.ca is None else 'https'}://{server.address}"
        self._client = FleetHttpClient(url, interceptors=[NodeAuthHttpInterceptor(private, public)], verify=verify)
        self._runs: set[int] = set()
        self._away = False
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        try:
            if self._server.key is None:
                self._client.RegisterNode(fleet.RegisterNodeFleetRequest(public_key=self._key))
            request = fleet.ActivateNodeRequest(public_key=self._key, heartbeat_interval=HEARTBEAT_SECONDS)
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        except BaseException:
            self._client.close()
            raise
        threading.Thread(target=self._live, name="perfed-alive", daemon=True).start()
        self._say(f"connected to server {self._server.address}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError, ValueError):
            if not self._away:
                self._client.DeactivateNode(fleet.DeactivateNodeRequest(node_id=self._node.node_id))
                if self._server.key is None:
                    self._client.UnregisterNode(fleet.UnregisterNodeFleetRequest(node_id=self._node.node_id))
        self._client.close()

    def work(self) -> None:
        """Take messages and send replies until the site is stopped."""
        heard = time.monotonic()
        with suppress(_Stopped):
            while not self._stop.wait(min(max(PAUSE_SHARE * (time.monotonic() - heard), MIN_PAUSE), MAX_PAUSE)):
                came = self._call(self._client.PullMessages, fleet.PullMessagesRequest(node=self._node))
                for proto, tree in zip(came.messages_list, came.message_object_trees, strict=True):
                    self._handle(proto.metadata.run_id, tree)
                    heard = time.monotonic()

    def _live(self) -> None:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._ended.wait(HEARTBEAT_SECONDS / HEARTBEATS):
            with suppress(httpx.HTTPError, ValueError, RuntimeError):  # the last one: it was closed meanwhile
                self._client.SendNodeHeartbeat(request)

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """What the server answers, however long it is away; a refusal is raised."""
        wait = MIN_PAUSE
        while not self._stop.is_set():
            try:
                response = method(request)
            except httpx.HTTPError as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise
                self._away = True
                self._look()
                self._stop.wait(wait)
                wait = min(2 * wait, MAX_PAUSE)
                continue
            if self._away:
                self._say(f"connected to server {self._server.address}")
            self._away = False
            return response
        raise _Stopped

    def _look(self) -> None:
        """Say why the server does not answer.

        Raises:
            PerfedError: it never will.
        """
        try:
            probe_server(self._server)
            self._say(f"server {self._server.address} does not answer; trying again")
        except Unreachable as error:
            self._say(f"{error}; trying again")

    def _handle(self, run: int, tree: ObjectTree) -> None:
        """Answer a message; one that cannot be read, or whose run has ended, does no harm."""
        try:
            if run not in self._runs:
                found = self._call(self._client.GetRun, GetRunRequest(node=self._node, run_id=run))
                self._at.began(found.run.fab_hash)
                self._runs.add(run)
            message = self._pull(run, tree)
            began = time.monotonic()
            reply = Message(self._answered(message), reply_to=message)
            self._push(run, reply, time.monotonic() - began)
        except (_Stopped, PerfedError):
            raise
        except Exception as error:  # of Flower's own: what it raises where a server sends nonsense is not told anywhere
            self._at.heard(f"a message of the server was dropped: {describe_for_site(error)[:300]}")

    def _pull(self, run: int, tree: ObjectTree) -> Message:
        message = pull_and_inflate_object_from_tree(
            tree,
            on_wire.make_pull_object_fn_protobuf(self._through(self._client.PullObject), self._node, run),
            on_wire.make_confirm_message_received_fn_protobuf(
                self._through(self._client.ConfirmMessageReceived), self._node, run
            ),
            return_type=Message,
            max_time=TRANSFER_SECONDS,
            initial_backoff=MIN_PAUSE,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # which is not in what it names
        return message

    def _push(self, run: int, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = fleet.PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        for attempt in range(_TRIES):
            taken = self._call(self._client.PushMessages, request)
            push = self._through(self._client.PushObject)
            push_one = on_wire.make_push_object_fn_protobuf(push, self._node, run, taken.session_id)
            try:
                push_objects(get_all_nested_objects(reply), push_one, object_ids_to_push=set(taken.objects_to_push))
                return
            except ObjectPushError:
                if attempt == _TRIES - 1:
                    raise

    def _through(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda request: self._call(method, request)

    def _answered(self, message: Message) -> RecordDict:
        """What is replied to a message: an answer, or one of the sentences that the server may be told."""
        kind = message.metadata.message_type
        try:
            if kind == HELLO:
                self._at.heard("the server has asked for this site's name, and is told it")
                return make_record(json.dumps([self._at.site, self._at.place]).encode())
            if kind != EXCHANGE:
                raise Refused(RefusalReason.MESSAGE, f"a message of type {kind!r:.60}; allowed: {EXCHANGE}, {HELLO}")
            with refuse_as(RefusalReason.MESSAGE):
                body = read_body(message)
            return make_record(self._at.answer(body))
        except Exception as error:  # whatever failed, its words may say something of the rows
            self._at.note(describe_for_site(error))
            said = describe_for_server(error)
        self._at.heard(f"a message is refused, and the server is told: {said}")
        return make_error_record(said)


def _code(error: httpx.HTTPStatusError) -> int | None:
    """Flower's code of a refusal."""
    with suppress(ValueError, KeyError, TypeError):
        return int(error.response.json()["code"])
    return None
