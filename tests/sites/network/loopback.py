"""A server, sites and a run on loopback, driven from a test: the server program does what the test asks it to."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path

import torch
from flower_server import Certificate, register, superexec, superlink
from safetensors.torch import load_file

from perfed.experiment.config import Experiment
from perfed.experiment.start import start
from perfed.sites.flower.node import MessageHandler, serve_messages
from perfed.sites.flower.probe import ServerAddress
from perfed.sites.flower.submission import Submitter

APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "toy"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "perfed"
[tool.flwr.app.components]
serverapp = "toy.server:app"
clientapp = "toy.server:app"
[tool.flwr.app.config]
control = ""
"""
SERVER = """
import json
from multiprocessing.connection import Listener
from perfed.sites.flower.adapter import server_app

def main(transport, config):
    def do(order):
        if order["do"] == "wait":
            return transport.wait_for(order["names"], order["seconds"])
        messages = {site: text.encode("latin-1") for site, text in order["messages"].items()}
        answers = []
        for answer in transport.exchange(messages, order["deadline"]):
            answers.append([answer.site, (answer.body or b"").decode("latin-1"), answer.error, answer.seconds])
            if len(answers) == order["first"]:
                break
        return answers

    print("the server program is here", flush=True)
    with Listener(config["control"]) as control:
        order = {}
        while order.get("do") != "stop":
            with control.accept() as connection:
                order = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps([] if order["do"] == "stop" else do(order)).encode())
    print("the server program is done", flush=True)

app = server_app(main)
"""
RECORDER = """
import sys

def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        to = arguments[1]
        host = to[0] if isinstance(to, tuple) else to
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    with open({file!r}, "a") as file:
        file.write(repr(host) + "\\n")

"""
"""An audit hook, ``note``, that writes down each host that is connected to or asked for."""


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return probing.getsockname()[1]


def write_app(folder: Path) -> Path:
    """The smallest app folder; the server program takes orders at a Unix socket."""
    (folder / "toy").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(APP)
    for name, text in (("__init__", '"""Toy."""\n'), ("server", SERVER)):
        (folder / "toy" / f"{name}.py").write_text(text)
    return folder


class Site:
    """A site in a thread of this process; its handler answers in the place of a station."""

    def __init__(
        self, name: str, folder: Path, server: ServerAddress, handler: Callable[[bytes], bytes], as_name=""
    ) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        self.stop, self.notes, self.apps, self.heard, self.problem = threading.Event(), [], [], [], None
        told = (self.apps.append, self.notes.append, self.heard.append)
        attendant = MessageHandler(as_name or name, str(folder), handler, *told)

        def work() -> None:
            try:
                serve_messages(server, attendant, self.stop)
            except Exception as error:
                self.problem = error

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(15)
        assert not self.thread.is_alive()


def flower_processes(home: Path) -> list[int]:
    """Process ids of those whose environment names this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"FLWR_HOME={home.resolve()}".encode() in environment:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def kill(home: Path, program: bytes) -> None:
    """SIGKILL to Flower's program of this folder, not to its guard."""
    for pid in flower_processes(home):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if program in line and b"guard.py" not in line:
            os.kill(pid, signal.SIGKILL)


class Loopback(ExitStack):
    """SuperLink, SuperExec, sites and a run; everything ends with the context."""

    def __init__(self, folder: Path, certificate: Certificate | None = None) -> None:
        super().__init__()
        self.folder, self.certificate = folder, certificate
        self.address = f"127.0.0.1:{free_port()}"
        self.ca = certificate.ca if certificate else None
        self.link = superlink(folder, self.address, certificate)
        self.callback(lambda: self.link.stop())
        self.callback(superexec(folder, self.address, self.ca).stop)
        self.submitter = Submitter(folder / "home", self.address, self.ca)
        self.control = folder / "control"
        self.sites: dict[str, Site] = {}
        self.run = 0

    def server(self, key: Path | None = None) -> ServerAddress:
        return ServerAddress(self.address, self.ca, key)

    def add(
        self, name: str, handler: Callable[[bytes], bytes], key: Path | None = None, as_name: str = "", folder: str = ""
    ) -> Site:
        site = Site(name, self.folder / (folder or name), self.server(key), handler, as_name)
        self.callback(site.close)
        self.sites[name] = site
        return site

    def register(self, public_key: Path, name: str) -> None:
        register(self.folder / "home", "perfed", public_key, name)

    def start(self, app: Path) -> None:
        self.run = self.submitter.submit(app, {"control": str(self.control)})
        until(self.control.exists, 30)
        self.callback(lambda: [site.stop.set() for site in self.sites.values()])

    def order(self, timeout: float, **order: object):
        with Client(str(self.control)) as connection:
            connection.send_bytes(json.dumps(order).encode())
            assert connection.poll(timeout), f"{order['do']}: no answer"
            return json.loads(connection.recv_bytes())

    def missing(self, names: list[str], seconds: float) -> list[str]:
        return self.order(seconds + 10, do="wait", names=names, seconds=seconds)

    def exchange(self, messages: Mapping[str, str], deadline: float, first: int = 0):
        """Answers by site: text, error, seconds."""
        order = {"do": "exchange", "messages": messages, "deadline": deadline, "first": first}
        return {site: answer for site, *answer in self.order(deadline + 10, **order)}

    def kill_link(self) -> None:
        kill(self.folder / "flwr", b"flower-superlink")
        assert self.link.wait(10) is not None

    def start_link(self) -> None:
        self.link = superlink(self.folder, self.address, self.certificate)


def until(condition: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it took too long"
        time.sleep(0.05)


class Authority:
    """A certificate authority of our own, and what it signs."""

    def __init__(self, folder: Path) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.ca = self.write("ca", self.sign(self.name, self.key.public_key(), 30, None))

    def server(self, name: str, days: int = 30, address: str = "127.0.0.1") -> Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self.write(name, self.sign(subject, key.public_key(), days, address))
        file = self.folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return Certificate(self.ca, certificate, file)

    def sign(self, subject, public, days: int, address: str | None):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=60))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=address is None, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def write(self, name: str, certificate) -> Path:
        from cryptography.hazmat.primitives import serialization

        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def site_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A site's private and public key, as files."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    form = serialization.PrivateFormat.OpenSSH
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    ssh = serialization.Encoding.OpenSSH
    public.write_bytes(key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH))
    return private, public


def same_bits(run: Path, experiment: Experiment, out: Path) -> None:
    """The server's tensors in ``run`` are those after the same run in one process, which is made in ``out``."""
    start(experiment, out=out).execute()
    found, expected = (load_file(max((of / "checkpoint").glob("server-*.safetensors"))) for of in (run, out))
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
