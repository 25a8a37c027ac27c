"""The work of a worker process: it executes runs of a study one after the other, as the main process assigns them."""

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
"""Seconds that a process has for writing its checkpoint after it was asked to end."""

Source = Federation | Callable[[int], Federation]
Message = tuple[str, Any]
"""The kind and content of a message from a worker.

``ready`` has no content, ``refused`` the reason, ``news`` a progress event. Three kinds report the end of a run:
``done`` with its summary, ``failed`` with the reason, and ``broke`` with the exception. ``lost`` with a reason reports
a process that has ended and cannot send messages.
"""


def pack_factory(factory: RunFactory, source: Source | None) -> bytes:
    """Return bytes from which another process can build the runs.

    Args:
        factory: builds the runs.
        source: the federation, if it is in memory.

    Raises:
        PerfedError: the federation cannot be pickled.
    """
    try:
        return pickle.dumps((factory, source))
    except Exception as error:  # pickle can raise any exception
        raise PerfedError(
            f"jobs: the federation cannot be sent to other processes ({_first_line(error)}); a function that makes it "
            "must be at the top of a module"
        ) from None


@contextmanager
def unpack_factory(parcel: bytes) -> Iterator[RunFactory]:
    """Return the factory of :func:`pack_factory`; a federation in memory is registered inside the ``with`` block.

    Raises:
        PerfedError: this process cannot import something that the user has defined.
    """
    try:
        factory, source = pickle.loads(parcel)
    except Exception as error:  # a user's module can raise any exception
        raise _describe_missing(error) from None
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
        raise _describe_missing(error) from None


def _describe_missing(error: Exception) -> PerfedError:
    """Return an error for a definition of the user that other processes cannot import."""
    reason = describe_user_error(error) or _first_line(error)
    return PerfedError(
        f"jobs: other processes cannot import what is defined only in this process ({reason}); put it "
        "into a file mine.py and name it mine:NAME"
    )


def _first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its class if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def execute_run(factory: RunFactory, key: Key, tell: Callable[[ProgressEvent], None]) -> Message:
    """Build and execute a run, and return the message that reports its end."""
    try:
        return "done", execute(partial(factory, *key), tell)
    except PerfedError as error:
        return "failed", str(error)
    except Exception as error:
        return "broke", _with_traceback(error)


def _with_traceback(error: Exception) -> Exception:
    """Return an exception that can be sent to another process, with its traceback as a note.

    An exception that cannot be pickled is replaced by a ``RuntimeError`` whose message is the traceback.
    """
    formatted = "".join(traceback.format_exception(error))
    error.add_note(formatted)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(formatted)
    return error


_last_factory: dict[bytes, tuple[RunFactory, ExitStack]] = {}  # for further tasks with the same parcel


def execute_task(parcel: bytes, key: Key, tell: Callable[[ProgressEvent], None], threads: int) -> Message:
    """Execute the run ``key`` and return the message that reports its end.

    The unpacked factory remains in memory, because the same process may execute further runs of the same parcel.
    """
    torch.set_num_threads(threads)
    if parcel not in _last_factory:
        _last_factory.clear()
        stack = ExitStack()
        try:
            _last_factory[parcel] = stack.enter_context(unpack_factory(parcel)), stack
        except PerfedError as error:
            return "refused", str(error)
    return execute_run(_last_factory[parcel][0], key, tell)


def serve(connection: connections.Connection, threads: int) -> None:
    """Run a worker process: receive a parcel, then keys one after the other, and execute their runs.

    The process ends at SIGTERM, or when its parent process has ended. In both cases the run that is being executed
    writes a checkpoint of its last complete round.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent process handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with exit_on_sigterm(), suppress(EOFError, ConnectionError):
        try:
            with unpack_factory(connection.recv_bytes()) as factory:
                connection.send(("ready", None))
                while True:
                    connection.send(execute_run(factory, connection.recv(), partial(_send_progress, connection)))
        except PerfedError as error:
            connection.send(("refused", str(error)))


def _send_progress(connection: connections.Connection, event: ProgressEvent) -> None:
    try:
        connection.send(("news", event))
    except OSError:  # the parent process has ended
        raise SystemExit(TERMINATED) from None


def _end_with_parent() -> None:
    """Wait until the parent process has ended, then end this process, after a grace period by force."""
    parent = parent_process()
    assert parent is not None
    connections.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(TERMINATED)
