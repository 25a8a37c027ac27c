"""A private certificate authority, the server's certificate, and a key for every site (extra ``perfed[flower]``).

Private keys are readable only by their owner, and an existing key is never overwritten.
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
"""The number of days for which a certificate authority is valid."""
_SKEW = datetime.timedelta(hours=1)  # the amount by which a site's clock may be behind


def check_installed() -> None:
    """Check that keys can be made on this machine.

    Raises:
        PerfedError: cryptography is not installed.
    """
    try:
        import cryptography.x509  # noqa: F401
    except ImportError:
        raise PerfedError(f"TLS needs cryptography: {extra_command('flower')}") from None


def make_authority(key_file: Path, certificate_file: Path, name: str) -> None:
    """Write the key and the certificate of a certificate authority that is used only for one deployment."""
    from cryptography import x509

    key = _new_key(key_file)
    authority_name = _make_name(f"perfed {name}")
    builder = _start_certificate(authority_name, authority_name, key.public_key(), CA_DAYS)
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(**usage), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    _write_new(certificate_file, _to_pem(_sign_certificate(builder, key)), 0o644)


def make_server_key(key_file: Path) -> None:
    """Write a new private key for the server."""
    _new_key(key_file)


def certify_server(authority: tuple[Path, Path], key_file: Path, file: Path, names: Sequence[str], days: int) -> str:
    """Write a certificate of the server's key, and replace the one in ``file`` if there is one.

    Args:
        authority: the files of the authority's key and certificate.
        key_file: the file of the server's private key.
        file: the file of the new certificate.
        names: the names and addresses by which clients reach the server.
        days: the number of days for which the certificate is valid.

    Returns:
        the last day on which the certificate is valid.

    Raises:
        PerfedError: the authority expires before that day, or its files or the server's key are missing.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca_key, key = _read_key(authority[0]), _read_key(key_file)
    ca = x509.load_pem_x509_certificate(_read(authority[1]))
    builder = _start_certificate(_make_name(names[0]), ca.subject, key.public_key(), days)
    last = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    if last > ca.not_valid_after_utc:
        raise PerfedError(f"--days {days}: the authority itself ends on {ca.not_valid_after_utc:%Y-%m-%d}; give fewer")
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_make_alternative_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    write_atomic(file, _to_pem(_sign_certificate(builder, ca_key)))
    return f"{last:%Y-%m-%d}"


def make_site_key(key_file: Path, public_file: Path, name: str) -> None:
    """Write a new P-384 key pair for a site in the formats of OpenSSH, which Flower reads."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = _new_key(key_file, ssh=True)
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_new(public_file, public + f" {name}\n".encode(), 0o644)


def check_private(file: Path, option: str) -> None:
    """Check that no other user can read or write a private key; on Windows nothing is checked.

    Raises:
        PerfedError: others can; the message names ``option``, the file, and the command that corrects its rights.
    """
    if is_exposed(file):
        remedy = f"'chmod 600 {file}' mends that"
        raise PerfedError(f"{option} {file}: others can read or write this private key; {remedy}")


def hash_certificate(file: Path) -> str:
    """Return the SHA-256 of a certificate in the form that ``openssl x509 -fingerprint -sha256`` prints."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    fingerprint: bytes = x509.load_pem_x509_certificate(_read(file)).fingerprint(SHA256())
    return fingerprint.hex(":").upper()


def hash_public_key(public_file: Path) -> str:
    """Return the SHA-256 of a public key in the form that ``ssh-keygen -l`` prints."""
    blob = base64.b64decode(_read(public_file).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def signature(key_file: Path, content: bytes) -> tuple[str, str]:
    """Sign ``content`` with a site's private key.

    Returns:
        the signature in base64, and the public key in the format of OpenSSH.

    Raises:
        PerfedError: cryptography is not installed, or the file is not a site's private key.
    """
    check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    try:
        key: Any = load_ssh_private_key(_read(key_file), None)
        signature_bytes: bytes = key.sign(content, ec.ECDSA(SHA256()))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PerfedError(f"{key_file}: cannot be read as a site's private key: {error}") from None
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return base64.b64encode(signature_bytes).decode(), public.decode()


def is_signature_valid(public_file: Path, signature: str, content: bytes) -> bool:
    """Return whether ``signature`` is a signature of ``content`` by the private key that belongs to ``public_file``.

    Args:
        public_file: the file of a site's public key.
        signature: the signature in base64.
        content: the signed bytes.

    Raises:
        PerfedError: cryptography is not installed, or the file is not a site's public key.
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
        key.verify(base64.b64decode(signature), content, ec.ECDSA(SHA256()))
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
    """Write a file that must not exist yet; its access rights never exceed ``mode``."""
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


def _make_name(name: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])


def _make_alternative_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _make_key_usage(**flags: bool) -> Any:
    """Return the extension that permits the uses in ``flags`` and no others."""
    from cryptography import x509

    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: flags.get(name, False) for name in names})


def _start_certificate(subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    """Return the builder of a certificate that is valid from now on for ``days`` days."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _sign_certificate(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives.hashes import SHA384

    return builder.sign(key, SHA384())


def _to_pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    text: bytes = certificate.public_bytes(Encoding.PEM)
    return text
