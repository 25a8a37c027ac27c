"""A worker outlives whoever asks it, and nobody waits for it longer than they said."""

from __future__ import annotations

import socket
import stat
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from perfed.engine.flower.worker import ask, serve
from perfed.errors import PerfedError


def handle(request: bytes) -> bytes:
    word, _, number = request.partition(b" ")
    if word == b"sleep":
        time.sleep(float(number))
    if word == b"refuse":
        raise PerfedError("table.csv: no such column")
    if word == b"break":
        raise ZeroDivisionError("two\nlines")
    return request[::-1]


@pytest.fixture
def path():
    with TemporaryDirectory() as folder:  # pytest's are too long for a socket
        stop = threading.Event()
        thread = threading.Thread(target=serve, args=(f"{folder}/w", handle, stop))
        thread.start()
        while True:
            try:
                ask(f"{folder}/w", b"", 5)
                break
            except PerfedError:
                time.sleep(0.01)
        yield f"{folder}/w"
        stop.set()
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, 5_000_001])
def test_bytes_come_back(path, size):
    data = bytes(range(256)) * (size // 256 + 1)
    assert ask(path, data[:size], 20) == data[:size][::-1]


def test_only_this_user_may_ask(path):
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("request_", "line"),
    [(b"refuse", "table.csv: no such column"), (b"break", "ZeroDivisionError: two lines")],
)
def test_an_exception_of_the_handler_is_one_line(path, request_, line):
    with pytest.raises(PerfedError) as error:
        ask(path, request_, 5)
    assert str(error.value) == line
    assert ask(path, b"ab", 5) == b"ba"


def test_whoever_asks_has_a_deadline_and_is_not_served_after_it(path):
    began = time.monotonic()
    slow = threading.Thread(target=ask, args=(path, b"sleep 0.5", 5))
    slow.start()
    time.sleep(0.1)
    with pytest.raises(PerfedError, match=r"has not answered within 0\.1 seconds"):
        ask(path, b"sleep 60", 0.1)  # it waited behind the slow one
    assert ask(path, b"ab", 5) == b"ba"
    slow.join()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0\0\0\0\0\0\0\7abc", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_client_that_goes_away_does_no_harm(path, part):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(part)
    assert ask(path, b"ab", 5) == b"ba"


def test_a_second_worker_at_the_same_place_is_refused(path):
    with pytest.raises(PerfedError, match="another worker answers here already"):
        serve(path, handle)
    assert ask(path, b"ab", 5) == b"ba"


def test_what_a_killed_worker_left_behind_is_no_hindrance():
    with TemporaryDirectory() as folder:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{folder}/w")
        with pytest.raises(PerfedError, match=r"no worker answers at .*/w: Connection refused"):
            ask(f"{folder}/w", b"", 1)
        stop = threading.Event()
        stop.set()
        serve(f"{folder}/w", handle, stop)


def test_no_worker_and_no_place_for_a_socket():
    with pytest.raises(PerfedError, match="no worker answers at /nowhere/w: No such file"):
        ask("/nowhere/w", b"", 1)
    with pytest.raises(PerfedError, match="no socket can be made here: AF_UNIX path too long"):
        serve("/" + "w" * 200, handle)
