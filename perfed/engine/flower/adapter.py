"""The one module that imports flwr: its grid as a post office, and the two apps of a deployment.

An app folder has two modules with one line each: ``app = server_app(main)`` and ``app = client_app()``. Flower starts
a process for each message, so the client app imports nothing but what passes bytes on to the site's worker.

Raises:
    PerfedError: when this module is imported without a Flower that it is made for.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence

from perfed.engine.flower.office import Delivery, Node
from perfed.engine.flower.post import PostTransport
from perfed.engine.flower.transport import Transport
from perfed.engine.flower.version import check_flower
from perfed.engine.flower.worker import ask
from perfed.errors import PerfedError

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError:
    check_flower()
    raise
check_flower()

SITE, WORKER = "site", "worker"
"""Keys of a SuperNode's ``--node-config``: the site's name and the path of its worker's socket."""

HELLO = 30.0
"""Seconds that a SuperNode without an authenticated name has to say which site it is."""

_EXCHANGE, _HELLO = "query.exchange", "query.hello"
_BODY, _ERROR = "body", "error"
_MEANING = {
    1: "its Flower app could not be loaded; is the same version of perfed installed there?",
    3: "its message expired before it was answered",
    4: "its reply is lost",
    5: "it is gone: its SuperNode has stopped talking to the server",
    7: "its SuperNode does not trust the app",
    8: "what handled its message was killed",
}
_AGAIN = (3, 4, 5, 8)  # the site may come back and answer


class FlowerTransport(PostTransport):
    """The sites of a run, as a :class:`~perfed.engine.flower.transport.Transport`.

    A site is known by the name that its key was registered under. Where the server does not authenticate SuperNodes
    (a trial on one machine), each is asked for the name in its node config, which takes seconds: ``wait_for`` them.

    Args:
        grid: of a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(_GridOffice(grid))


class _GridOffice:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._said: dict[int, tuple[str, str]] = {}  # SuperNode -> site and place, as it said itself
        self._hellos: dict[str, int] = {}  # unanswered hello -> SuperNode
        self._asked: dict[int, float] = {}  # when a SuperNode was asked last

    def nodes(self) -> list[Node]:
        found, unknown = [], []
        for info in self._grid.get_nodes():
            if info.name:
                found.append(Node(info.node_id, info.name, since=info.last_activated_at))
            elif info.node_id in self._said:
                site, place = self._said[info.node_id]
                found.append(Node(info.node_id, site, place, info.last_activated_at))
            else:
                unknown.append(info.node_id)
        self._greet(unknown)
        return found

    def _greet(self, unknown: Sequence[int]) -> None:
        for reply in self._grid.pull_messages(list(self._hellos)) if self._hellos else ():
            node = self._hellos.pop(reply.metadata.reply_to_message_id, None)
            if node is not None and not reply.has_error():
                site, place = json.loads(_bytes(reply))
                self._said[node] = (site, place)
        now = time.monotonic()
        for node in unknown:
            if node not in self._said and now - self._asked.get(node, -HELLO) >= HELLO:
                self._asked[node] = now
                self._hellos[self._push(_message(b"", node, _HELLO, HELLO))] = node

    def send(self, node: int, body: bytes, seconds: float) -> str:
        return self._push(_message(body, node, _EXCHANGE, seconds))

    def _push(self, message: Message) -> str:
        numbers = [number for number in self._grid.push_messages([message]) if number]
        if not numbers:
            raise PerfedError("the SuperLink does not take a message, which may be too large for it")
        return str(numbers[0])

    def collect(self, letters: Sequence[str]) -> list[Delivery]:
        return [_delivery(reply) for reply in self._grid.pull_messages(list(letters))]


def _record(body: bytes) -> RecordDict:
    # One object on the wire whatever is in it: each array would cost Flower 10 ms.
    return RecordDict({_BODY: ArrayRecord({_BODY: Array("uint8", (len(body),), "bytes", body)})})


def _bytes(message: Message) -> bytes:
    return bytes(message.content.array_records[_BODY][_BODY].data)


def _message(body: bytes, node: int, kind: str, seconds: float) -> Message:
    return Message(_record(body), node, kind, ttl=seconds)


def _delivery(reply: Message) -> Delivery:
    letter = reply.metadata.reply_to_message_id
    if reply.has_error():
        said = " ".join((reply.error.reason or f"error {reply.error.code}").split())
        return Delivery(letter, None, _MEANING.get(reply.error.code, said), again=reply.error.code in _AGAIN)
    if _ERROR in reply.content.config_records:
        return Delivery(letter, None, str(reply.content.config_records[_ERROR][_ERROR]))
    return Delivery(letter, _bytes(reply))


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


def client_app() -> ClientApp:
    """The ClientApp that passes each message on to the site's worker, and its reply or its error back."""
    app = ClientApp()

    def exchange(message: Message, context: Context) -> Message:
        try:
            worker = _of_node(context.node_config, WORKER)
            content = _record(ask(worker, _bytes(message), message.metadata.ttl))
        except PerfedError as error:
            content = RecordDict({_ERROR: ConfigRecord({_ERROR: str(error)})})
        return Message(content, reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        place = f"{platform.node()}:{_of_node(context.node_config, WORKER)}"
        return Message(_record(json.dumps([_of_node(context.node_config, SITE), place]).encode()), reply_to=message)

    app.query("exchange")(exchange)
    app.query("hello")(hello)
    return app


def _of_node(config: Mapping[str, object], key: str) -> str:
    if key not in config:
        raise PerfedError(f"the SuperNode's --node-config has no '{key}'")
    return str(config[key])
