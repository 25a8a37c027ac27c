"""The signing key of a site (Ed25519), which proves to the other sites whose keys of a secure sum they receive."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from perfed.sites.flower.processes import check_flower
from perfed.system import read_secret

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError:
    check_flower()
    raise

SIGNING_KEY = "signing.key"
"""The name of the file in a site's folder with its private key (32 bytes), which never leaves the site."""
_BYTES = 32


class SigningKey:
    """The private key with which a site signs, and its public key.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     key = SigningKey.in_folder(Path(folder))
        ...     again = SigningKey.in_folder(Path(folder))
        >>> again.public_key == key.public_key, is_signed(key.public_key, key.sign(b"text"), b"text")
        (True, True)
    """

    def __init__(self, private: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(private)

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Read the key of the site in ``folder``; create and store a new key if there is none.

        Raises:
            PerfedError: The file is damaged, or other users may access it.
        """
        return cls(read_secret(folder / SIGNING_KEY, _BYTES, "other users have rights on this private key"))

    @property
    def public_key(self) -> str:
        """The public key as 64 hexadecimal digits, as in ``secure_aggregation.keys``."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, content: bytes) -> bytes:
        """Return the signature of ``content``."""
        return self._private.sign(content)


def is_signed(public: str, signature: bytes, content: bytes) -> bool:
    """Return whether a signature is valid.

    Args:
        public: The public key of the signing site as hexadecimal digits.
        signature: The signature.
        content: The content that was signed.
    """
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
