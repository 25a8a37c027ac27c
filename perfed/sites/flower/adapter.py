"""The server's end of Flower: its grid as a post office, and the app that is submitted.

An app folder has a module with one line: ``app = server_app(main)``. Sites load nothing of it.

Raises:
    PerfedError: when this module is imported without a Flower that it is made for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from perfed.errors import PerfedError
from perfed.sites.flower.letters import EXCHANGE, HELLO, make_record, read_body, read_error
from perfed.sites.flower.processes import check_flower
from perfed.sites.flower.transport import Connection, QueueTransport, ReceivedMessage, Transport

try:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid, ServerApp
except ImportError:
    check_flower()
    raise

ASK = 30.0
"""Seconds that a site without an authenticated name has to say which one it is."""

_MEANING = {
    3: "its message expired before it was answered",
    4: "its reply is lost",
    5: "it is gone: it has stopped talking to the server",
}
_AGAIN = (3, 4, 5)  # the site may come back and answer


class FlowerTransport(QueueTransport):
    """The sites of a run, as a :class:`~perfed.sites.flower.transport.Transport`.

    A site is known by the name that its key was registered under. Where the server does not authenticate SuperNodes
    (a trial on one machine), each is asked for its name, which takes seconds: ``wait_for`` them.

    Args:
        grid: of a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(_GridQueue(grid))


class _GridQueue:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._said: dict[int, tuple[str, str]] = {}  # SuperNode -> site and place, as it said itself
        self._hellos: dict[str, int] = {}  # unanswered hello -> SuperNode
        self._asked: dict[int, float] = {}  # when a SuperNode was asked last

    def connections(self) -> list[Connection]:
        found, unknown = [], []
        for info in self._grid.get_nodes():
            if info.name:
                found.append(Connection(info.node_id, info.name, since=info.last_activated_at))
            elif info.node_id in self._said:
                site, place = self._said[info.node_id]
                found.append(Connection(info.node_id, site, place, info.last_activated_at))
            else:
                unknown.append(info.node_id)
        self._greet(unknown)
        return found

    def _greet(self, unknown: Sequence[int]) -> None:
        for reply in self._grid.pull_messages(list(self._hellos)) if self._hellos else ():
            node = self._hellos.pop(reply.metadata.reply_to_message_id, None)
            if node is not None and not reply.has_error():
                with suppress(PerfedError, ValueError, TypeError):  # else it is asked again
                    site, place = json.loads(read_body(reply))
                    self._said[node] = (str(site), str(place))
        now = time.monotonic()
        for node in unknown:
            if node not in self._said and now - self._asked.get(node, -ASK) >= ASK:
                self._asked[node] = now
                self._hellos[self._push(_message(b"", node, HELLO, ASK))] = node

    def send(self, node: int, body: bytes, seconds: float) -> str:
        return self._push(_message(body, node, EXCHANGE, seconds))

    def _push(self, message: Message) -> str:
        numbers = [number for number in self._grid.push_messages([message]) if number]
        if not numbers:
            raise PerfedError("the SuperLink does not take a message, which may be too large for it")
        return str(numbers[0])

    def collect_replies(self, message_ids: Sequence[str]) -> list[ReceivedMessage]:
        return [_delivery(reply) for reply in self._grid.pull_messages(list(letters))]


def _message(body: bytes, node: int, kind: str, seconds: float) -> Message:
    return Message(make_record(body), node, kind, ttl=seconds)


def _delivery(reply: Message) -> ReceivedMessage:
    letter = reply.metadata.reply_to_message_id
    if reply.has_error():
        said = " ".join((reply.error.reason or f"error {reply.error.code}").split())
        return ReceivedMessage(letter, None, _MEANING.get(reply.error.code, said), again=reply.error.code in _AGAIN)
    try:
        error = read_error(reply)
        return ReceivedMessage(letter, read_body(reply)) if error is None else ReceivedMessage(letter, None, error)
    except PerfedError as nonsense:
        return ReceivedMessage(letter, None, str(nonsense))


def server_app(main: Callable[[Transport, dict[str, object]], None]) -> ServerApp:
    """The ServerApp that runs ``main`` with the sites' transport and the run's configuration."""
    app = ServerApp()

    def run(grid: Grid, context: Context) -> None:
        transport = FlowerTransport(grid)
        try:
            main(transport, dict(context.run_config))
        finally:
            transport.close()

    app.main()(run)
    return app


def hash_bundle(files: Mapping[str, str]) -> str:
    """SHA-256 of the bundle that Flower makes of an app's files, by their paths in its folder."""
    from flwr.cli.build import build_fab_from_files

    return hashlib.sha256(build_fab_from_files({name: text.encode() for name, text in files.items()})[0]).hexdigest()
