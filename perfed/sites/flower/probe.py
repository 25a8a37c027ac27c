"""A test connection that finds out why a site cannot connect to its server; Flower reports only that it failed."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError
from perfed.sites.flower.processes import check_flower

TIMEOUT = 5.0
"""The time limit in seconds for each step of a probe."""
_NO_SUCH_NODE = 2004  # Flower's error codes of the activation of a SuperNode
_EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 10, 62, 64  # OpenSSL's X509_V_ERR_*


@dataclass(frozen=True)
class ServerAddress:
    """The address of a federation's SuperLink, and the files with which a site connects to it.

    Attributes:
        address: The address as ``host:port``.
        ca: The certificate of the authority that signed the server's certificate; ``None`` for a connection without
            TLS, in a trial on one machine.
        key: The private key of this site (elliptic curve, OpenSSH format); ``None`` if sites are not authenticated.
    """

    address: str
    ca: Path | None = None
    key: Path | None = None

    @property
    def host(self) -> str:
        """The name or IP address of the host."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The number of the port.

        Raises:
            PerfedError: The address has no valid port.
        """
        number = self.address.rpartition(":")[2]
        if not number.isdigit() or not 0 < int(number) < 2**16 or not self.host or "/" in self.host:
            raise PerfedError(f"server '{self.address}': write HOST:PORT, e.g. fl.example.org:8000")
        return int(number)


class Unreachable(PerfedError):
    """The error of a server that does not answer now and may answer later."""


def probe_server(server: ServerAddress) -> None:
    """Check that a site can connect to ``server`` with its authority and key; raise an error if it cannot.

    The key is tested with a request that the server always refuses, so nothing changes at the server.

    Raises:
        Unreachable: The server does not answer; another attempt may succeed.
        PerfedError: Every further attempt would fail: the certificate of the authority is missing or wrong, a
            certificate has expired, the certificate does not contain the server's name, or the server does not know
            the key.
    """
    if server.key is not None and server.ca is None:
        raise PerfedError(f"a site with a key needs TLS: the certificate of server {server.address}'s authority (--ca)")
    connection = _connect(server)
    try:
        if server.key is not None:
            _check_key(connection, server, server.key)
        elif server.ca is None:
            _check_plain_connection(connection, server)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"server {server.address} does not respond like a SuperLink: {_error_text(error)}") from None
    finally:
        connection.close()


def _connect(server: ServerAddress) -> http.client.HTTPConnection:
    """Open a connection to the server; raise the errors of :func:`probe_server` if that fails."""
    host, port = server.host, server.port
    try:
        if server.ca is None:
            plain = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
            plain.connect()
            return plain
        secure = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=make_tls_context(server.ca))
        secure.connect()
        return secure
    except ssl.SSLCertVerificationError as error:
        raise PerfedError(f"server {server.address}: {_describe_certificate_problem(error, server)}") from None
    except ssl.SSLError as error:
        raise PerfedError(f"server {server.address} does not speak TLS: {_error_text(error)}") from None
    except socket.gaierror:
        raise Unreachable(f"server {server.address} is not reachable: the name '{host}' is not known") from None
    except TimeoutError:
        raise Unreachable(f"server {server.address} is not reachable: no answer for {TIMEOUT:.0f} seconds") from None
    except OSError as error:
        raise Unreachable(f"server {server.address} is not reachable: {_error_text(error)}") from None


def make_tls_context(ca: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only servers whose certificate is signed by the authority ``ca``.

    Raises:
        PerfedError: The file is not a certificate.
    """
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise PerfedError(f"{ca}: not the certificate of an authority (PEM): {_error_text(error)}") from None


def _describe_certificate_problem(error: ssl.SSLCertVerificationError, server: ServerAddress) -> str:
    if error.verify_code == _EXPIRED:
        return "its certificate, or its authority's, has expired"
    if error.verify_code in (_WRONG_NAME, _WRONG_ADDRESS):
        return f"its certificate is not for '{server.host}'; use a name that is in it, or have this one added"
    return f"its certificate is not signed by the authority in {server.ca} ({error.verify_message})"


def _check_plain_connection(connection: http.client.HTTPConnection, server: ServerAddress) -> None:
    """Send a request without TLS; raise a PerfedError if the server only accepts TLS."""
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except (http.client.BadStatusLine, ConnectionError):
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((server.host, server.port), TIMEOUT) as raw, unverified.wrap_socket(raw):
            raise PerfedError(
                f"server {server.address} speaks TLS: this site needs the certificate of its authority (--ca)"
            ) from None


def _check_key(connection: http.client.HTTPConnection, server: ServerAddress, key: Path) -> None:
    """Raise a PerfedError if the server does not know the key or refuses its signature."""
    public, headers = _sign_request(key)
    # An ActivateNodeRequest without its interval: the server looks the key up first and then refuses the interval.
    size = len(public)
    body = b"\x0a" + bytes([size & 127 | 128, size >> 7]) + public
    connection.request("POST", "/v1/fleet/activate-node", body, headers)
    reply = connection.getresponse()
    text = reply.read(2**16)
    if reply.status == http.client.UNAUTHORIZED:
        raise PerfedError(
            f"server {server.address} refuses the signature of {key}; do the clocks of both differ by minutes?"
        )
    try:
        code = json.loads(text)["code"]
    except (ValueError, KeyError, TypeError):
        return  # another version of Flower: the site's own connection will show whether it works
    if code == _NO_SUCH_NODE:
        raise PerfedError(f"server {server.address} does not know the key in {key}; has it been registered there?")


def load_private_key(key: Path) -> Any:
    """Return the private key in a file, as an elliptic-curve key of ``cryptography``.

    Raises:
        PerfedError: The file has no key of a kind that Flower accepts.
    """
    check_flower()  # flwr depends on cryptography
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), None)  # the one format that Flower reads
    except OSError as error:
        raise PerfedError(f"{key}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise PerfedError(f"{key}: not a private key of an elliptic curve in OpenSSH's format, without a password")
    return private


def _sign_request(key: Path) -> tuple[bytes, dict[str, str]]:
    """Return the public key of the private key in a file, and the headers that sign a request with it."""
    private = load_private_key(key)
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    public = private.public_key().public_bytes(encoding, form)
    now = datetime.now(UTC).isoformat()
    signature = private.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
    return public, {
        "content-type": "application/protobuf",
        "accept": "application/protobuf",
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": now,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


def _error_text(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
