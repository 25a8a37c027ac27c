"""How a server and a site of perfed use Flower's messages: their types, and one flat array of bytes in each."""

from __future__ import annotations

from perfed.errors import PerfedError
from perfed.sites.flower.processes import check_flower

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError:
    check_flower()
    raise
check_flower()

EXCHANGE, HELLO = "query.exchange", "query.hello"
"""Types of messages: what a site works on, and the question for its name and place."""
_BODY, _ERROR = "body", "error"


def make_record(body: bytes) -> RecordDict:
    """Bytes as a message's content: one object on the wire, for each array would cost Flower 10 ms."""
    return RecordDict({_BODY: ArrayRecord({_BODY: Array("uint8", (len(body),), "bytes", body)})})


def make_error_record(line: str) -> RecordDict:
    """An error as a message's content."""
    return RecordDict({_ERROR: ConfigRecord({_ERROR: line})})


def read_body(message: Message) -> bytes:
    """The bytes in a message.

    Raises:
        PerfedError: it has none.
    """
    try:
        return bytes(message.content.array_records[_BODY][_BODY].data)
    except (KeyError, ValueError):
        raise PerfedError("a message without a body") from None


def read_error(message: Message) -> str | None:
    """The error that a site has replied with; ``None``: it is none."""
    found = message.content.config_records.get(_ERROR)
    return None if found is None else str(found.get(_ERROR))
