"""A site's end of the connection with a SuperLink, which answers the messages of the server with perfed's own code.

This module replaces Flower's SuperNode, which downloads the submitted app and runs it. Here no app is downloaded, no
port is opened and no process is started: whoever submits a run can only send messages.
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
    raise PerfedError(f"the installed flwr lacks a part that a site needs: {error}") from None

MAX_CONNECT_PAUSE = 30.0
"""The longest time in seconds between two attempts to connect."""
LEASE_PAUSE = 10.0
"""The time in seconds between two attempts while the server still has the connection of a site that was killed."""
MIN_PAUSE, MAX_PAUSE, PAUSE_SHARE = 0.1, 3.0, 0.05
"""The bounds in seconds of the time between two polls for messages; between them it is this share of the time since
the last message."""
HEARTBEAT_SECONDS, HEARTBEATS = 30.0, 2.5
"""The interval in seconds that is announced to Flower, which drops a site after two intervals without a heartbeat, and
the number of heartbeats that are sent in each interval."""
TRANSFER_SECONDS = 120.0
"""The time in seconds after which a message is dropped whose parts are missing at the server."""
_MAX_TRIES = 5  # a server that is restarted during a transfer has forgotten which parts of a reply it has
_STABLE_SECONDS = 60.0  # after a connection that has lasted this long the pause between attempts starts again
_NO_KEY, _NOT_ACTIVATED = 2001, 2004  # Flower's codes


@dataclass(frozen=True)
class MessageHandler:
    """The functions of a site that answer messages and write notes.

    Attributes:
        site: The name of the site.
        location: An identifier of the machine and folder. Two connections with the same name and location belong to
            one site that was restarted.
        answer: Returns the bytes of the reply to the bytes of a message; it is called for one message at a time.
        on_run: Is called once for each run with the hash of its app, as the server reports it.
        note: Is called with each line that a person may want to read.
        on_other_message: Is called with a line for each message that is not passed to ``answer``, and for each reply
            to such a message.
    """

    site: str
    location: str
    answer: Callable[[bytes], bytes]
    on_run: Callable[[str], None]
    note: Callable[[str], None]
    on_other_message: Callable[[str], None] = lambda line: None


def serve_messages(server: ServerAddress, handler: MessageHandler, stop: threading.Event) -> None:
    """Answer the server's messages until ``stop`` is set, and reconnect whenever the server is unreachable.

    A line that equals the line before it is not noted again.

    Raises:
        PerfedError: Another attempt would fail too; see :func:`~perfed.sites.flower.probe.probe_server`.
    """
    wait, note = 1.0, _ChangeNotifier(handler.note)
    while not stop.is_set():
        began, lease_pause = time.monotonic(), 0.0
        try:
            probe_server(server)
            with _Connection(server, handler, note, stop) as connection:
                connection.serve()
        except Unreachable as error:
            note(f"{error}; trying again")
        except PerfedError:
            raise
        except httpx.HTTPStatusError as error:
            code = _read_error_code(error)
            if code == _NO_KEY:
                raise PerfedError(
                    f"server {server.address} authenticates its sites: this site needs its key (--key)"
                ) from None
            if code == _NOT_ACTIVATED:
                note(
                    "the server still has a connection with this site's key: the last one, for up to a minute, or "
                    "that of another 'perfed site' with the key; trying again"
                )
                lease_pause = LEASE_PAUSE
            else:
                note(f"server {server.address} refuses this site ({error.response.status_code}); trying again")
        except (httpx.HTTPError, ValueError) as error:
            note(f"server {server.address} does not respond like a SuperLink: {error}; trying again")
        wait = 1.0 if time.monotonic() - began > _STABLE_SECONDS else min(2 * wait, MAX_CONNECT_PAUSE)
        stop.wait(lease_pause or wait)


class _ChangeNotifier:
    """A function that passes a line on unless it equals the line before."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._last = note, ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            self._last = line
            self._note(line)


class _Stopped(Exception):
    pass


class _Connection:
    """One activation of the site at the server, which ends on exit so that the next activation need not wait."""

    def __init__(
        self, server: ServerAddress, handler: MessageHandler, note: Callable[[str], None], stop: threading.Event
    ) -> None:
        self._server, self._handler, self._note, self._stop = server, handler, note, stop
        if server.key is None:
            private, public = generate_key_pairs()
        else:
            private = load_private_key(server.key)
            public = private.public_key()
        self._key = public_key_to_bytes(public)
        verify: ssl.SSLContext | bool = True if server.ca is None else make_tls_context(server.ca)
        url = f"{'http' if server.ca is None else 'https'}://{server.address}"
        self._client = FleetHttpClient(url, interceptors=[NodeAuthHttpInterceptor(private, public)], verify=verify)
        self._known_runs: set[int] = set()
        self._is_disconnected = False
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
        threading.Thread(target=self._send_heartbeats, name="perfed-heartbeat", daemon=True).start()
        self._note(f"connected to server {self._server.address}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        with suppress(httpx.HTTPError, ValueError):
            if not self._is_disconnected:
                self._client.DeactivateNode(fleet.DeactivateNodeRequest(node_id=self._node.node_id))
                if self._server.key is None:
                    self._client.UnregisterNode(fleet.UnregisterNodeFleetRequest(node_id=self._node.node_id))
        self._client.close()

    def serve(self) -> None:
        """Receive messages and send replies until the site is stopped."""
        last_message = time.monotonic()
        with suppress(_Stopped):
            while not self._stop.wait(min(max(PAUSE_SHARE * (time.monotonic() - last_message), MIN_PAUSE), MAX_PAUSE)):
                response = self._call(self._client.PullMessages, fleet.PullMessagesRequest(node=self._node))
                for proto, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                    self._handle_message(proto.metadata.run_id, tree)
                    last_message = time.monotonic()

    def _send_heartbeats(self) -> None:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._ended.wait(HEARTBEAT_SECONDS / HEARTBEATS):
            with suppress(httpx.HTTPError, ValueError, RuntimeError):  # RuntimeError: the client was closed meanwhile
                self._client.SendNodeHeartbeat(request)

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Return the server's response to a request, and repeat the request as long as the server is unreachable.

        Raises:
            httpx.HTTPStatusError: The server refuses the request.
            PerfedError: The server will never accept this site.
            _Stopped: The site is stopped.
        """
        wait = MIN_PAUSE
        while not self._stop.is_set():
            try:
                response = method(request)
            except httpx.HTTPError as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise
                self._is_disconnected = True
                self._note_unreachable()
                self._stop.wait(wait)
                wait = min(2 * wait, MAX_PAUSE)
                continue
            if self._is_disconnected:
                self._note(f"connected to server {self._server.address}")
            self._is_disconnected = False
            return response
        raise _Stopped

    def _note_unreachable(self) -> None:
        """Note why the server does not answer.

        Raises:
            PerfedError: The server will never accept this site.
        """
        try:
            probe_server(self._server)
            self._note(f"server {self._server.address} does not answer; trying again")
        except Unreachable as error:
            self._note(f"{error}; trying again")

    def _handle_message(self, run: int, tree: ObjectTree) -> None:
        """Answer a message; drop it with a note if it cannot be read or its run has ended."""
        try:
            if run not in self._known_runs:
                response = self._call(self._client.GetRun, GetRunRequest(node=self._node, run_id=run))
                self._handler.on_run(response.run.fab_hash)
                self._known_runs.add(run)
            message = self._pull_message(run, tree)
            began = time.monotonic()
            reply = Message(self._make_reply(message), reply_to=message)
            self._push_reply(run, reply, time.monotonic() - began)
        except (_Stopped, PerfedError):
            raise
        except Exception as error:  # Flower does not document which exceptions malformed data raise
            self._handler.on_other_message(f"a message of the server was dropped: {describe_for_site(error)[:300]}")

    def _pull_message(self, run: int, tree: ObjectTree) -> Message:
        message = pull_and_inflate_object_from_tree(
            tree,
            on_wire.make_pull_object_fn_protobuf(self._retry(self._client.PullObject), self._node, run),
            on_wire.make_confirm_message_received_fn_protobuf(
                self._retry(self._client.ConfirmMessageReceived), self._node, run
            ),
            return_type=Message,
            max_time=TRANSFER_SECONDS,
            initial_backoff=MIN_PAUSE,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # the id is not part of the hashed content
        return message

    def _push_reply(self, run: int, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = fleet.PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        for attempt in range(_MAX_TRIES):
            response = self._call(self._client.PushMessages, request)
            push = self._retry(self._client.PushObject)
            push_object = on_wire.make_push_object_fn_protobuf(push, self._node, run, response.session_id)
            try:
                push_objects(
                    get_all_nested_objects(reply), push_object, object_ids_to_push=set(response.objects_to_push)
                )
                return
            except ObjectPushError:
                if attempt == _MAX_TRIES - 1:
                    raise

    def _retry(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls ``method`` and repeats the call as long as the server is unreachable."""
        return lambda request: self._call(method, request)

    def _make_reply(self, message: Message) -> RecordDict:
        """Return the content of the reply to a message: the answer, or a reason for refusal that reveals no data."""
        kind = message.metadata.message_type
        try:
            if kind == HELLO:
                self._handler.on_other_message("the server has asked for the name of this site and receives it")
                return make_record(json.dumps([self._handler.site, self._handler.location]).encode())
            if kind != EXCHANGE:
                raise Refused(RefusalReason.MESSAGE, f"a message of type {kind!r:.60}; allowed: {EXCHANGE}, {HELLO}")
            with refuse_as(RefusalReason.MESSAGE):
                body = read_body(message)
            return make_record(self._handler.answer(body))
        except Exception as error:  # the server must not see the text of any exception, which may quote rows
            self._handler.note(describe_for_site(error))
            reason = describe_for_server(error)
        self._handler.on_other_message(f"a message is refused, and the server receives: {reason}")
        return make_error_record(reason)


def _read_error_code(error: httpx.HTTPStatusError) -> int | None:
    """Return Flower's code of a refusal; ``None`` if the response has none."""
    with suppress(ValueError, KeyError, TypeError):
        return int(error.response.json()["code"])
    return None
