"""The server's end of Flower: a message queue over Flower's grid, and the app that is submitted.

The folder of an app has a module with one line, ``app = server_app(main)``. Sites do not load this module.

Raises:
    PerfedError: Flower is not installed or has an unsupported version when this module is imported.
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

HELLO_SECONDS = 30.0
"""The time in seconds that a SuperNode without an authenticated name has to reply with its name."""

_ERROR_TEXTS = {
    3: "its message expired before it was answered",
    4: "its reply is lost",
    5: "it is gone: it has stopped talking to the server",
}
_RETRY_CODES = (3, 4, 5)  # the site may connect again and answer


class FlowerTransport(QueueTransport):
    """The :class:`~perfed.sites.flower.transport.Transport` of a run over Flower.

    The name of a site is the name under which its key was registered. If the server does not authenticate SuperNodes
    (a trial on one machine), each SuperNode is asked for its name. This takes seconds, so call ``wait_for`` first.

    Args:
        grid: The grid of a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(_GridQueue(grid))


class _GridQueue:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._identities: dict[int, tuple[str, str]] = {}  # SuperNode -> the site and location that it has replied
        self._hellos: dict[str, int] = {}  # unanswered hello -> SuperNode
        self._hello_times: dict[int, float] = {}  # SuperNode -> time of the last hello to it

    def connections(self) -> list[Connection]:
        connections, unnamed = [], []
        for info in self._grid.get_nodes():
            if info.name:
                connections.append(Connection(info.node_id, info.name, activated=info.last_activated_at))
            elif info.node_id in self._identities:
                site, location = self._identities[info.node_id]
                connections.append(Connection(info.node_id, site, location, info.last_activated_at))
            else:
                unnamed.append(info.node_id)
        self._exchange_hellos(unnamed)
        return connections

    def _exchange_hellos(self, unnamed: Sequence[int]) -> None:
        """Store the names in replies to hellos, and send a hello to each SuperNode that is still ``unnamed``."""
        for reply in self._grid.pull_messages(list(self._hellos)) if self._hellos else ():
            node = self._hellos.pop(reply.metadata.reply_to_message_id, None)
            if node is not None and not reply.has_error():
                with suppress(PerfedError, ValueError, TypeError):  # an unreadable reply: the node is asked again
                    site, location = json.loads(read_body(reply))
                    self._identities[node] = (str(site), str(location))
        now = time.monotonic()
        for node in unnamed:
            last = self._hello_times.get(node, -HELLO_SECONDS)
            if node not in self._identities and now - last >= HELLO_SECONDS:
                self._hello_times[node] = now
                self._hellos[self._push_message(_make_message(b"", node, HELLO, HELLO_SECONDS))] = node

    def send(self, node: int, body: bytes, seconds: float) -> str:
        return self._push_message(_make_message(body, node, EXCHANGE, seconds))

    def _push_message(self, message: Message) -> str:
        """Push a message to the grid and return its id.

        Raises:
            PerfedError: The SuperLink refuses the message.
        """
        message_ids = [message_id for message_id in self._grid.push_messages([message]) if message_id]
        if not message_ids:
            raise PerfedError("the SuperLink does not accept a message; the message may be too large for it")
        return str(message_ids[0])

    def collect_replies(self, message_ids: Sequence[str]) -> list[ReceivedMessage]:
        return [_convert_reply(reply) for reply in self._grid.pull_messages(list(message_ids))]


def _make_message(body: bytes, node: int, kind: str, seconds: float) -> Message:
    return Message(make_record(body), node, kind, ttl=seconds)


def _convert_reply(reply: Message) -> ReceivedMessage:
    message_id = reply.metadata.reply_to_message_id
    if reply.has_error():
        code = reply.error.code
        reason = " ".join((reply.error.reason or f"error {code}").split())
        return ReceivedMessage(message_id, None, _ERROR_TEXTS.get(code, reason), may_retry=code in _RETRY_CODES)
    try:
        error = read_error(reply)
        return ReceivedMessage(message_id, read_body(reply) if error is None else None, error or "")
    except PerfedError as unreadable:
        return ReceivedMessage(message_id, None, str(unreadable))


def server_app(main: Callable[[Transport, dict[str, object]], None]) -> ServerApp:
    """Return a ServerApp that calls ``main`` with the transport to the sites and the configuration of the run."""
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
    """Return the SHA-256 of the bundle that Flower builds from the files of an app.

    Args:
        files: The text of each file, by its path in the folder of the app.
    """
    from flwr.cli.build import build_fab_from_files

    return hashlib.sha256(build_fab_from_files({name: text.encode() for name, text in files.items()})[0]).hexdigest()
