"""What another process does of a study: one run after the other, as it is told."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import connection as connections
from multiprocessing import parent_process
from typing import Any

import torch

from perfed.data.federation import Federation
from perfed.datasets.catalogue import register_temporarily
from perfed.errors import PerfedError
from perfed.experiment.factory import Key, ProgressEvent, RunFactory, execute
from perfed.plugins import describe_user_error
from perfed.system import TERMINATED, exit_on_sigterm

GRACE = 60.0
"""Seconds that a process has to write its checkpoint after it was told to end."""

Source = Federation | Callable[[int], Federation]
Message = tuple[str, Any]
"""``ready``; ``refused`` and why; ``news``; how a run ended: ``done`` and its summary, ``failed`` and why, ``broke``
and the exception; ``lost`` and how, said of a process that can say nothing more."""


def packed(factory: RunFactory, source: Source | None) -> bytes:
    """Return bytes from which another process makes the runs; ``source``: the federation, where it is in memory.

    Raises:
        PerfedError: they cannot be had.
    """
    try:
        return pickle.dumps((factory, source))
    except Exception as error:  # pickle raises what it likes
        raise PerfedError(
            f"jobs: the federation cannot be sent to other processes ({_first(error)}); a function that makes it must "
            "be at the top of a module"
        ) from None


@contextmanager
def unpacked(parcel: bytes) -> Iterator[RunFactory]:
    """Return the inverse of :func:`packed`, for as long as the runs are made.

    Raises:
        PerfedError: something of the user's own is not known in this process.
    """
    try:
        factory, source = pickle.loads(parcel)
    except Exception as error:  # whatever a user's file does
        raise _unknown(error) from None
    if source is None:
        _check(factory)
        yield factory
        return
    with register_temporarily(source):
        _check(factory)
        yield factory


def _check(factory: RunFactory) -> None:
    try:
        factory.check()
    except PerfedError as error:
        raise _unknown(error) from None


def _unknown(error: Exception) -> PerfedError:
    reason = describe_user_error(error) or _first(error)
    return PerfedError(
        f"jobs: other processes do not know what is defined here alone ({reason}); put it "
        "into a file mine.py and name it mine:NAME"
    )


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def done(factory: RunFactory, key: Key, tell: Callable[[ProgressEvent], None]) -> Message:
    """Make a run ready and execute it; how it ended."""
    try:
        return "done", execute(partial(factory, *key), tell)
    except PerfedError as error:
        return "failed", str(error)
    except Exception as error:
        return "broke", _sendable(error)


def _sendable(error: Exception) -> Exception:
    """The exception with where it arose, which is lost on the way; another one where it cannot be sent."""
    said = "".join(traceback.format_exception(error))
    error.add_note(said)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(said)
    return error


_kept: dict[bytes, tuple[RunFactory, ExitStack]] = {}  # of the last parcel, for further tasks in the same process


def task(parcel: bytes, key: Key, tell: Callable[[ProgressEvent], None], threads: int) -> Message:
    """Do what a process does that gets parcel and key at once, and may get others of the same parcel later."""
    torch.set_num_threads(threads)
    if parcel not in _kept:
        _kept.clear()
        stack = ExitStack()
        try:
            _kept[parcel] = stack.enter_context(unpacked(parcel)), stack
        except PerfedError as error:
            return "refused", str(error)
    return done(_kept[parcel][0], key, tell)


def serve(connection: connections.Connection, threads: int) -> None:
    """Do what a worker process does: read a parcel, then key after key, until SIGTERM or until nobody is there.

    SIGTERM leaves a checkpoint of the last whole round, and so does the end of the process that began this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; who began this process says what comes of it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with exit_on_sigterm(), suppress(EOFError, ConnectionError):
        try:
            with unpacked(connection.recv_bytes()) as factory:
                connection.send(("ready", None))
                while True:
                    connection.send(done(factory, connection.recv(), partial(_tell, connection)))
        except PerfedError as error:
            connection.send(("refused", str(error)))


def _tell(connection: connections.Connection, news: ProgressEvent) -> None:
    try:
        connection.send(("news", news))
    except OSError:  # nobody is there
        raise SystemExit(TERMINATED) from None


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connections.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(TERMINATED)
