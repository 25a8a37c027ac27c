"""The contents of Flower's messages between server and site: their types, and the records with bytes or an error."""

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
"""The types of messages: a message of perfed for the site, and the question for the name and location of the site."""
_BODY, _ERROR = "body", "error"


def make_record(body: bytes) -> RecordDict:
    """Return the content of a message with these bytes, in a single array because each array costs Flower 10 ms."""
    return RecordDict({_BODY: ArrayRecord({_BODY: Array("uint8", (len(body),), "bytes", body)})})


def make_error_record(line: str) -> RecordDict:
    """Return the content of a message with an error."""
    return RecordDict({_ERROR: ConfigRecord({_ERROR: line})})


def read_body(message: Message) -> bytes:
    """Return the bytes in a message.

    Raises:
        PerfedError: The message has no bytes.
    """
    try:
        return bytes(message.content.array_records[_BODY][_BODY].data)
    except (KeyError, ValueError):
        raise PerfedError("a message without a body") from None


def read_error(message: Message) -> str | None:
    """Return the error in the reply of a site; ``None`` if the reply has no error."""
    record = message.content.config_records.get(_ERROR)
    return None if record is None else str(record.get(_ERROR))
