"""The proxy of a deployment, by a real nginx: what somebody without a key cannot do to the SuperLink and the sites."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from deployments import deployed

pytest.importorskip("cryptography", reason="needs the extra flower")

MAIN = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
{user}
events {{ worker_connections 128; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/perfed.conf;
}}
"""
CHUNK = 5 * 2**20
"""Bytes of one of Flower's objects, at most."""


def program() -> str:
    """The proxy; without it a test is skipped, or fails where ``PERFED_REQUIRE_NGINX`` is 1."""
    found = shutil.which("nginx", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
    if found is None:
        missing = "needs nginx on the PATH (Debian: apt install nginx-light)"
        if os.environ.get("PERFED_REQUIRE_NGINX") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Proxy:
    """A deployment's proxy on the loopback address, before something that stands for the SuperLink.

    ``got`` are paths and SHA-256 of the requests that it has passed on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self._upstream = folder, free_port(), free_port()
        self.got: list[tuple[str, str]] = []
        ports = ("--port", self.port, "--superlink-port", self._upstream)
        self.deployment = deployed(folder, "--tls", *ports)
        self.said = (self.deployment / "server/nginx.conf").read_text()

    def configured(self, *replaced: tuple[str, str]) -> list[str]:
        """The command of nginx, with other numbers than the deployment's."""
        text = self.said
        for before, after in (("listen ", "listen 127.0.0.1:"), *replaced):
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (self.folder / "perfed.conf").write_text(text)
        user = "user root;" if os.geteuid() == 0 else ""
        (self.folder / "nginx.conf").write_text(MAIN.format(folder=self.folder, user=user))
        return [program(), "-e", "stderr", "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")]

    @contextmanager
    def running(self, *replaced: tuple[str, str]) -> Iterator[None]:
        got = self.got
        got.clear()

        class Superlink(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                got.append((self.path, hashlib.sha256(body).hexdigest()))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        tls = self.deployment / "server/tls"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.crt", tls / "server.key")
        server = ThreadingHTTPServer(("127.0.0.1", self._upstream), Superlink)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        proxy = subprocess.Popen(self.configured(*replaced))
        try:
            ends = time.monotonic() + 10
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                    break
                assert proxy.poll() is None and time.monotonic() < ends
                time.sleep(0.02)
            yield
        finally:
            proxy.terminate()
            proxy.wait(10)
            server.shutdown()
            server.server_close()

    def connection(self, source: str = "127.0.0.1") -> http.client.HTTPSConnection:
        """A connection as a site's from the address ``source``."""
        context = ssl.create_default_context(cafile=self.deployment / "sites/north/ca.crt")
        here = (source, 0)
        made = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, source_address=here, context=context)
        made.connect()
        return made

    def answer(self, body: bytes = b"", source: str = "127.0.0.1") -> int:
        """Status of the answer to a whole request."""
        connection = self.connection(source)
        try:
            connection.request("POST", "/v1/fleet/pull-messages", body)
            return connection.getresponse().status
        finally:
            connection.close()

    def begun(self, length: int, source: str = "127.0.0.1") -> http.client.HTTPSConnection:
        """A connection with a request of ``length`` bytes, of which one was sent."""
        connection = self.connection(source)
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader("content-length", str(length))
        connection.endheaders(b"x")
        return connection


@pytest.fixture(scope="module")
def proxy(tmp_path_factory) -> Proxy:
    program()
    return Proxy(tmp_path_factory.mktemp("proxy"))


def limit(proxy: Proxy, zone: str) -> int:
    """How many requests may be under way."""
    found = re.search(rf"limit_conn {zone} (\d+);", proxy.said)
    assert found is not None
    return int(found[1])


def test_nginx_takes_the_file_as_it_is_written(proxy):
    done = subprocess.run([*proxy.configured(), "-t"], capture_output=True, text=True)
    assert done.returncode == 0 and "syntax is ok" in done.stderr and "warn" not in done.stderr, done.stderr


@pytest.mark.long
def test_what_a_site_sends_passes_unchanged_and_what_is_larger_does_not(proxy):
    with proxy.running():
        chunk = os.urandom(CHUNK + 1000)
        assert proxy.answer(chunk) == 200
        assert proxy.got == [("/v1/fleet/pull-messages", hashlib.sha256(chunk).hexdigest())]
        connection = proxy.begun(120_000_000)
        assert connection.getresponse().status == 413  # after one byte
        connection.close()
        connection = proxy.connection()
        pieces = (b"x" * 2**20 for _ in range(120))
        with suppress(OSError):  # the rest is not read
            connection.request("POST", "/v1/fleet/push-object", pieces, encode_chunked=True)
        with suppress(OSError):
            assert connection.getresponse().status == 413
        connection.close()
        assert len(proxy.got) == 1


@pytest.mark.long
def test_requests_that_never_end_shut_nobody_else_out(proxy):
    """63 of them did, with 128 connections; none of them reaches the SuperLink."""
    with proxy.running(("client_body_timeout 10s", "client_body_timeout 60s")), ExitStack() as held:
        for _ in range(63):
            held.callback(proxy.begun(1000).close)
        time.sleep(0.2)
        assert limit(proxy, "perfed_address") < 63
        assert proxy.answer() == 503 and proxy.got == []
        assert proxy.answer(source="127.0.0.2") == 200 and len(proxy.got) == 1


def test_all_addresses_together_have_a_limit(proxy):
    one, all_ = limit(proxy, "perfed_address"), limit(proxy, "perfed_all")
    assert all_ >= 4 * one
    fewer = (f"limit_conn perfed_all {all_};", "limit_conn perfed_all 8;")
    with proxy.running(fewer), ExitStack() as held:
        for number in range(8):
            held.callback(proxy.begun(1000, f"127.0.0.{2 + number}").close)
        time.sleep(0.2)
        assert proxy.answer() == 503


def test_a_site_that_is_refused_for_the_number_tries_again(proxy):
    """As Flower's client does after 503; it gives up after 429."""
    retry = pytest.importorskip("flwr.supercore.retry.http_retry", reason="needs the extra flower")
    httpx = pytest.importorskip("httpx")
    answers = [503, 503, 200]

    def ask() -> int:
        response = httpx.Response(answers.pop(0), request=httpx.Request("POST", "https://a"))
        return int(response.raise_for_status().status_code)

    invoker = retry.make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None
    assert invoker.invoke(ask) == 200 and not answers
    assert "limit_conn_status" not in proxy.said and "limit_req_status" not in proxy.said  # nginx's own is 503


@pytest.mark.long
def test_a_site_never_meets_the_rate(proxy):
    with proxy.running(), ThreadPoolExecutor(8) as sites:
        assert set(sites.map(lambda number: proxy.answer(), range(150))) == {200}


@pytest.mark.long
def test_requests_in_a_hurry_wait(proxy):
    with proxy.running(("rate=100r/s", "rate=20r/s")):
        connection, began = proxy.connection(), time.monotonic()
        for _ in range(20):
            connection.request("POST", "/v1/fleet/pull-messages", b"")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        connection.close()
        assert time.monotonic() - began > 0.9


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it within five seconds."""
    connection.settimeout(5)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "begin"),
    [
        ("client_header_timeout", lambda proxy: socket.create_connection(("127.0.0.1", proxy.port))),
        ("client_header_timeout", lambda proxy: hasty(proxy, b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: a\r\n")),
        ("client_body_timeout", lambda proxy: hasty(proxy, b"", 1000)),
        ("keepalive_timeout", lambda proxy: answered(proxy)),
    ],
    ids=["no handshake", "headers", "body", "idle"],
)
def test_who_does_not_go_on_is_cut_off(proxy, setting, begin: Callable[[Proxy], socket.socket]):
    (seconds,) = re.findall(rf"{setting} (\d+)s;", proxy.said)
    assert int(seconds) <= 30
    with proxy.running((f"{setting} {seconds}s", f"{setting} 1s")):
        connection = begin(proxy)
        began = time.monotonic()
        assert ended(connection) and time.monotonic() - began > 0.5
        connection.close()


def hasty(proxy: Proxy, sent: bytes, length: int = 0) -> socket.socket:
    """The socket of a request whose end does not come."""
    connection = proxy.begun(length) if length else proxy.connection()
    assert connection.sock is not None
    connection.sock.sendall(sent)
    return connection.sock


def answered(proxy: Proxy) -> socket.socket:
    """The socket of a connection whose request was answered."""
    connection = proxy.connection()
    connection.request("POST", "/v1/fleet/pull-messages", b"")
    assert connection.getresponse().read() == b"" and connection.sock is not None
    return connection.sock
