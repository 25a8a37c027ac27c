"""A private certificate authority, the server's certificate, and a key for every site (extra ``perfed[flower]``).

Private keys are readable by their owner alone, and no key is written over.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfed.errors import PerfedError
from perfed.system import extra_command, is_exposed, write_atomic

CA_DAYS = 3650
"""How long a certificate authority is valid."""
_SKEW = datetime.timedelta(hours=1)  # by which a site's clock may be behind


def check_installed() -> None:
    """Whether keys can be made here.

    Raises:
        PerfedError: cryptography is not installed.
    """
    try:
        import cryptography.x509  # noqa: F401
    except ImportError:
        raise PerfedError(f"TLS needs cryptography: {extra_command('flower')}") from None


def make_authority(key_file: Path, certificate_file: Path, name: str) -> None:
    """A certificate authority for this deployment alone: its key, and the certificate that sites are given."""
    from cryptography import x509

    key = _new_key(key_file)
    builder = _builder(_named(f"perfed {name}"), _named(f"perfed {name}"), key.public_key(), CA_DAYS)
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(**usage), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    _write_new(certificate_file, _pem(_signed(builder, key)), 0o644)


def make_server_key(key_file: Path) -> None:
    """The server's private key."""
    _new_key(key_file)


def certify_server(authority: tuple[Path, Path], key_file: Path, file: Path, names: Sequence[str], days: int) -> str:
    """A certificate of the server's key for ``names`` (names and addresses), in place of one that may be in ``file``.

    Args:
        authority: key and certificate of the authority.
        key_file: the server's private key.
        file: to write.
        names: by which clients reach the server.
        days: how long it is valid.

    Returns:
        its last day.

    Raises:
        PerfedError: the authority ends before, or its files or the server's key are not there.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca_key, key = _read_key(authority[0]), _read_key(key_file)
    ca = x509.load_pem_x509_certificate(_read(authority[1]))
    builder = _builder(_named(names[0]), ca.subject, key.public_key(), days)
    last = _now() + datetime.timedelta(days=days)
    if last > ca.not_valid_after_utc:
        raise PerfedError(f"--days {days}: the authority itself ends on {ca.not_valid_after_utc:%Y-%m-%d}; give fewer")
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    write_atomic(file, _pem(_signed(builder, ca_key)))
    return f"{last:%Y-%m-%d}"


def make_site_key(key_file: Path, public_file: Path, name: str) -> None:
    """A site's key, P-384, in the formats of OpenSSH, which Flower takes."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = _new_key(key_file, ssh=True)
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_new(public_file, public + f" {name}\n".encode(), 0o644)


def check_private(file: Path, option: str) -> None:
    """Refuse a private key that other users have rights on; on Windows files do not say so.

    Raises:
        PerfedError: names ``option``, the file, and the command that mends it.
    """
    if is_exposed(file):
        mended = f"'chmod 600 {file}' mends that"
        raise PerfedError(f"{option} {file}: others can read or write this private key; {mended}")


def hash_certificate(file: Path) -> str:
    """SHA-256 of a certificate as ``openssl x509 -fingerprint -sha256`` says it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    found: bytes = x509.load_pem_x509_certificate(_read(file)).fingerprint(SHA256())
    return found.hex(":").upper()


def hash_public_key(public_file: Path) -> str:
    """SHA-256 of a public key as ``ssh-keygen -l`` says it."""
    blob = base64.b64decode(_read(public_file).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def signature(key_file: Path, content: bytes) -> tuple[str, str]:
    """A site's signature of ``content``, and its public key, as texts.

    Raises:
        PerfedError: cryptography is not installed, or the file is no private key of a site.
    """
    check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    try:
        key: Any = load_ssh_private_key(_read(key_file), None)
        signed: bytes = key.sign(content, ec.ECDSA(SHA256()))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PerfedError(f"{key_file}: cannot be read as a site's private key: {error}") from None
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return base64.b64encode(signed).decode(), public.decode()


def is_signature_valid(public_file: Path, signed: str, content: bytes) -> bool:
    """Whether ``signed`` is the signature of ``content`` with the key whose public half is in ``public_file``.

    Raises:
        PerfedError: cryptography is not installed, or the file is no public key of a site.
    """
    check_installed()
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(_read(public_file))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PerfedError(f"{public_file}: cannot be read as a site's public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise PerfedError(f"{public_file}: a site's public key is of an elliptic curve, and this one is not")
    try:
        key.verify(base64.b64decode(signed), content, ec.ECDSA(SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _new_key(file: Path, *, ssh: bool = False) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP384R1())
    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    _write_new(file, key.private_bytes(Encoding.PEM, form, NoEncryption()), 0o600)
    return key


def _write_new(file: Path, content: bytes, mode: int) -> None:
    """Write a file that must not be there yet; it never has more rights than ``mode``."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as opened:
        opened.write(content)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PerfedError(f"{file}: cannot be read: {error.strerror}") from None


def _read_key(file: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not file.exists():
        raise PerfedError(f"{file} is not there; bring it back for this command (it may lie elsewhere between times)")
    try:
        return load_pem_private_key(_read(file), None)
    except (ValueError, TypeError) as error:
        raise PerfedError(f"{file}: cannot be read as a private key: {error}") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _named(name: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])


def _alternative(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(**given: bool) -> Any:
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    others = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: given.get(name, False) for name in (*names, *others)})


def _builder(subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    from cryptography import x509

    now = _now()
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives.hashes import SHA384

    return builder.sign(key, SHA384())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    text: bytes = certificate.public_bytes(Encoding.PEM)
    return text
