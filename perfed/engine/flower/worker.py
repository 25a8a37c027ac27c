"""A site's worker: one process that lives as long as the site and answers over a Unix socket.

A request is its length in 8 bytes (big-endian) and its bytes; a reply has one byte before that: 0 for an answer,
1 for an error in one line. Each connection carries one request and one reply.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from perfed.errors import PerfedError

_GOOD, _BAD = b"\0", b"\1"
_LENGTH = struct.Struct(">Q")
_PIECE = 1 << 20
_LOOK = 0.2  # seconds between two looks whether to stop
_READ = 60.0  # seconds in which a request or a reply must have passed


def serve(path: str | os.PathLike[str], handler: Callable[[bytes], bytes], stop: threading.Event | None = None) -> None:
    """Answer requests at the Unix socket ``path``, one at a time, until ``stop``.

    An exception of ``handler`` goes to the asker as one line; a program that asks and goes away does no harm.

    Args:
        path: where the socket is made; only this user may connect.
        handler: from the bytes of a request to those of its reply.
        stop: ends the loop within a second of being set; without it only an exception such as Ctrl-C does.

    Raises:
        PerfedError: another worker answers there, or no socket can be made.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        _bind(server, os.fspath(path))
        server.settimeout(_LOOK)
        try:
            while stop is None or not stop.is_set():
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    with connection:
                        _answer(connection, handler)
        finally:
            with suppress(OSError):
                os.unlink(path)


def ask(path: str | os.PathLike[str], data: bytes, timeout: float) -> bytes:
    """The reply of the worker at ``path`` to ``data``.

    Args:
        path: its Unix socket.
        data: the request.
        timeout: seconds for all of it, including the wait while the worker answers others.

    Raises:
        PerfedError: there is no worker, it does not answer in time, it went away, or its handler failed.
    """
    ends = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.settimeout(max(timeout, 0.001))
            client.connect(os.fspath(path))
            _send(client, _LENGTH.pack(len(data)), data, ends)
            kind = _read(client, 1, ends)
            reply = _read(client, _LENGTH.unpack(_read(client, _LENGTH.size, ends))[0], ends)
        except TimeoutError:
            raise PerfedError(f"the worker at {path} has not answered within {timeout:.1f} seconds") from None
        except EOFError:
            raise PerfedError(f"the worker at {path} ended before it answered") from None
        except OSError as error:
            raise PerfedError(f"no worker answers at {path}: {error.strerror or error}") from None
    if kind != _GOOD:
        raise PerfedError(reply.decode(errors="replace"))
    return reply


def _bind(server: socket.socket, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # nobody, or what a worker that was killed has left behind
        except OSError as error:
            raise PerfedError(f"{path}: no socket can be made here: {error.strerror or error}") from None
        else:
            raise PerfedError(f"{path}: another worker answers here already")
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen()
    except OSError as error:
        raise PerfedError(f"{path}: no socket can be made here: {error.strerror or error}") from None


def _answer(connection: socket.socket, handler: Callable[[bytes], bytes]) -> None:
    with suppress(OSError, EOFError):  # whoever asked is gone
        ends = time.monotonic() + _READ
        request = _read(connection, _LENGTH.unpack(_read(connection, _LENGTH.size, ends))[0], ends)
        if _gone(connection):  # it gave up while this one waited for its turn
            return
        kind, reply = _handled(handler, request)
        _send(connection, kind + _LENGTH.pack(len(reply)), reply, time.monotonic() + _READ)


def _gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _handled(handler: Callable[[bytes], bytes], request: bytes) -> tuple[bytes, bytes]:
    try:
        return _GOOD, handler(request)
    except PerfedError as error:
        return _BAD, str(error).encode()
    except Exception as error:
        traceback.print_exc()
        return _BAD, " ".join(f"{type(error).__name__}: {error}".split()).encode()


def _read(connection: socket.socket, size: int, ends: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        _hurry(connection, ends)
        piece = connection.recv(min(size - len(found), _PIECE))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def _send(connection: socket.socket, head: bytes, body: bytes, ends: float) -> None:
    for part in (memoryview(head), memoryview(body)):
        while part:
            _hurry(connection, ends)
            part = part[connection.send(part[:_PIECE]) :]


def _hurry(connection: socket.socket, ends: float) -> None:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
