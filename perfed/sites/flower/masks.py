"""Secure aggregation: the work of each member of a secure sum, and the opening of the sum without any single value.

This is the protocol of Bonawitz et al. 2017 (section 4, figure 1), without its signatures of the list of dropped-out
members; instead a sum needs more than half of the members:

1. *keys*: Each member creates two key pairs (X25519), one for sealed messages and one for masks, and a random seed.
   It signs the public keys if the other members know its signing key.
2. *shares*: It splits its seed and the private key of its masks into Shamir shares, and seals one share of each for
   every other member. All members must do so; if one fails, the server starts again at step 1 with the rest.
3. *masked*: It adds to its numbers a mask derived from its seed, and for each other member a mask that both derive
   from their keys; one of the two adds this mask and the other subtracts it.
4. *unmask*: It reveals its shares of the seeds of the members whose numbers have arrived, and of the private mask keys
   of the other members.

The masks between two members cancel. The opener of the sum subtracts the masks of the seeds, and the masks between the
members in the sum and those that have dropped out. No member ever reveals both shares of another member. Numbers are
int64 and are added modulo 2^64.

All derived keys depend on the context of the sum, which covers the server's request and the keys of all members. The
masks of members that were shown different requests or different members therefore do not cancel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, islice
from os import urandom

import numpy as np
from numpy.typing import NDArray

from perfed.errors import PerfedError
from perfed.sites.flower.processes import check_flower

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
except ImportError as error:
    check_flower()
    raise PerfedError(f"the installed flwr lacks a part that secure aggregation needs: {error}") from None

Numbers = NDArray[np.uint64]

_SEED = _KEY = 32  # bytes
_NONCE = 12
_MAX_TRIES = 1000  # sets of shares that are tried for a secret; enough for three wrong shares of eighteen
_SEAL_PURPOSE, _MASK_PURPOSE, _SEED_PURPOSE = b"seal", b"mask", b"own"  # the purposes of derived keys


@dataclass(frozen=True)
class MemberKeys:
    """The public keys of a member, which all other members receive.

    Attributes:
        seal: The public key for messages that are sealed for the member.
        mask: The public key for the masks that the member shares with each other member.
        commitment: The SHA-256 of the member's seed, which shows whether the seed was recovered correctly.
        site: The name of the site.
        signature: The site's signature of :meth:`signed_content`; empty if the sites have no signing keys.
        history: The hash of the requests that led to the state that the site starts from; empty for the initial state.
    """

    seal: bytes
    mask: bytes
    commitment: bytes
    site: str = ""
    signature: bytes = b""
    history: bytes = b""

    def signed_content(self, context: bytes) -> bytes:
        """Return the content that the member signs: the context of the sum, the site, the keys and the history."""
        keys = (self.seal + self.mask + self.commitment).hex()
        return json.dumps([context.hex(), self.site, keys, self.history.hex()]).encode()

    def to_fields(self) -> dict[str, str]:
        """Return the keys as a dictionary of texts, which :meth:`from_fields` converts back.

        An empty history is left out, so that journals without histories have the same fields.
        """
        keys = (self.seal + self.mask + self.commitment).hex()
        history = {"history": self.history.hex()} if self.history else {}
        return {"keys": keys, "site": self.site, "signature": self.signature.hex(), **history}

    @classmethod
    def from_fields(cls, fields: object) -> MemberKeys:
        """Return the keys from a dictionary of texts; the inverse of :meth:`to_fields`.

        Raises:
            PerfedError: The fields are not the keys of a member, or a key is of low order and cannot be used.
        """
        if not isinstance(fields, dict) or not isinstance(fields.get("site"), str):
            raise PerfedError("keys of a member must be a table with the name of its site")
        keys = decode_hex(fields.get("keys"), "keys of a member")
        if len(keys) != 2 * _KEY + 32:
            raise PerfedError(f"keys of a member are {len(keys)} bytes; {2 * _KEY + 32} are needed")
        try:
            for key in (keys[:_KEY], keys[_KEY : 2 * _KEY]):
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:
            raise PerfedError("keys of a member are of low order") from None
        signature = decode_hex(fields.get("signature"), "signature of a member")
        history = decode_hex(fields.get("history", ""), "history of a member")
        return cls(keys[:_KEY], keys[_KEY : 2 * _KEY], keys[2 * _KEY :], fields["site"], signature, history)


def bind_members(context: bytes, keys: Mapping[int, MemberKeys]) -> bytes:
    """Return the context of a sum followed by a hash of the numbers and keys of all members."""
    members = {str(number): keys[number].to_fields() for number in sorted(keys)}
    return context + hashlib.sha256(json.dumps(members, sort_keys=True).encode()).digest()


@dataclass
class Member:
    """One member of one secure sum, whose secrets are in memory only.

    The methods are called in the order of the protocol: :attr:`keys`, :meth:`share_secrets`, :meth:`mask_values` and
    :meth:`reveal_shares`. Each raises a PerfedError and reveals nothing if its arguments violate the protocol.

    Args:
        context: The identity of the sum and its request, on which all derived keys depend.
        needed: The number of members that a sum needs.
        site: The name of the site.
        sign: Returns the site's signature of a content.
        history: The hash of the requests that led to the state that the site starts from.

    Attributes:
        number: The number of the member, from :meth:`share_secrets` on.

    Example:
        >>> members = {number: Member(b"a sum", needed=2) for number in (1, 2, 3)}
        >>> keys = {number: member.keys for number, member in members.items()}
        >>> sealed = {number: member.share_secrets(number, keys) for number, member in members.items()}
        >>> received = {n: {k: sealed[k][n] for k in keys if k != n} for n in keys}
        >>> arrived = {n: members[n].mask_values(np.array([n], np.uint64), received[n]) for n in (1, 2)}
        >>> shares = {number: members[number].reveal_shares([1, 2]) for number in (1, 2)}  # 3 has dropped out
        >>> recovery = recover_secrets(2, keys, arrived, shares)
        >>> unmask_sum(b"a sum", keys, arrived, recovery.secrets).tolist()
        [3]
    """

    context: bytes
    needed: int
    site: str = ""
    sign: Callable[[bytes], bytes] = lambda content: b""
    history: bytes = b""
    number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._seal, self._mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = urandom(_SEED)
        self._members: dict[int, MemberKeys] = {}
        self._local_shares: tuple[bytes, bytes] = (b"", b"")
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # of seed and mask key, by number of the member
        self._has_masked = self._has_revealed = False

    @cached_property
    def keys(self) -> MemberKeys:
        """The public keys of this member with the signature of the site."""
        seal, mask = (key.public_key().public_bytes_raw() for key in (self._seal, self._mask))
        keys = MemberKeys(seal, mask, hashlib.sha256(self._seed).digest(), self.site, history=self.history)
        return replace(keys, signature=self.sign(keys.signed_content(self.context)))

    def share_secrets(self, number: int, keys: Mapping[int, MemberKeys]) -> dict[int, bytes]:
        """Return sealed shares of the seed and of the mask key for each other member, by its number.

        Args:
            number: The number of this member.
            keys: The public keys of all members, by their numbers.

        Raises:
            PerfedError: The secrets were shared before, or the keys violate the protocol.
        """
        if self._members:
            raise PerfedError("this member has already shared its secrets")
        if keys.get(number) != self.keys:
            raise PerfedError(f"the keys of member {number} are not its own")
        if len(keys) < self.needed:
            raise PerfedError(f"{len(keys)} members; a sum needs {self.needed}")
        if len({key for member in keys.values() for key in (member.seal, member.mask)}) < 2 * len(keys):
            raise PerfedError("two members have one key")
        self.number, self._members = number, dict(keys)
        self.context = bind_members(self.context, keys)
        order = sorted(keys)
        secret_shares = [
            create_shares(secret, self.needed, len(order)) for secret in (self._seed, self._mask.private_bytes_raw())
        ]
        pairs = dict(zip(order, zip(*secret_shares, strict=True), strict=True))
        self._local_shares = pairs.pop(number)
        return {receiver: self._seal_shares(receiver, seed + key) for receiver, (seed, key) in pairs.items()}

    def mask_values(self, values: Numbers, sealed: Mapping[int, bytes]) -> Numbers:
        """Return ``values`` with the masks of all members, which look uniform without knowledge of the masks.

        The sealed shares of all other members are needed. Otherwise a server could withhold some of them from one
        member only, and then claim that the members with which this one shares masks have dropped out.

        Args:
            values: The values of this member, uint64, of the same length at all members.
            sealed: The shares that each other member has sealed for this one, by its number.

        Raises:
            PerfedError: Values were masked before, or the shares are not those of the other members.
        """
        if not self._members or self._has_masked:
            raise PerfedError("this member has no shares of the other members, or has already masked its numbers")
        if strange := sealed.keys() - (self._members.keys() - {self.number}):
            raise PerfedError(f"shares of {sorted(strange)}, which are no members")
        if lacking := self._members.keys() - {self.number, *sealed}:
            raise PerfedError(f"shares of {sorted(lacking)} are missing; those of all {len(self._members)} are needed")
        self._shares = {sender: self._unseal_shares(sender, content) for sender, content in sealed.items()}
        self._shares[self.number] = self._local_shares
        self._has_masked = True
        total = values + _generate_mask(_derive_key(self._seed, self.context, _SEED_PURPOSE), len(values))
        for peer in sealed:
            secret = self._mask.exchange(X25519PublicKey.from_public_bytes(self._members[peer].mask))
            total += _derive_pair_mask(self.number, peer, secret, self.context, len(values))
        return total

    def reveal_shares(self, arrived: Collection[int]) -> dict[int, bytes]:
        """Return one share of each member: of its seed if its numbers have arrived, and of its mask key otherwise.

        Args:
            arrived: The numbers of the members whose masked values have arrived.

        Raises:
            PerfedError: Shares were revealed before, or too few members or unknown members have arrived.
        """
        present = set(arrived)
        if self._has_revealed:
            raise PerfedError("this member has already revealed its shares")
        if not present <= self._shares.keys() or len(present) < self.needed:
            raise PerfedError(f"a sum of {sorted(present)}; {self.needed} of {sorted(self._shares)} are needed")
        self._has_revealed = True
        return {member: seed if member in present else key for member, (seed, key) in self._shares.items()}

    def _make_cipher(self, peer: int) -> AESGCM:
        """Return the cipher for messages between this member and another one."""
        secret = self._seal.exchange(X25519PublicKey.from_public_bytes(self._members[peer].seal))
        return AESGCM(_derive_key(secret, self.context, _SEAL_PURPOSE))

    def _seal_shares(self, receiver: int, content: bytes) -> bytes:
        nonce = urandom(_NONCE)
        return nonce + self._make_cipher(receiver).encrypt(nonce, content, b"%d to %d" % (self.number, receiver))

    def _unseal_shares(self, sender: int, content: bytes) -> tuple[bytes, bytes]:
        """Return the shares of the sender's seed and mask key."""
        try:
            direction = b"%d to %d" % (sender, self.number)
            shares = self._make_cipher(sender).decrypt(content[:_NONCE], content[_NONCE:], direction)
        except (InvalidTag, ValueError):
            raise PerfedError(f"the sealed shares of member {sender} were changed") from None
        half = len(shares) // 2
        return shares[:half], shares[half:]


@dataclass(frozen=True)
class RecoveredSecrets:
    """The secrets that were recovered from the shares of a sum.

    Attributes:
        secrets: The seed of each member whose numbers have arrived, and the private mask key of each other member.
        lacking: The members whose secret could not be recovered from any tried set of shares.
        wrong: The members that gave wrong shares, each with the members whose secrets these are shares of. A member is
            listed only if the other shares prove that its share is wrong.
    """

    secrets: dict[int, bytes]
    lacking: list[int]
    wrong: dict[int, list[int]]


def recover_secrets(
    needed: int, keys: Mapping[int, MemberKeys], arrived: Collection[int], shares: Mapping[int, Mapping[int, bytes]]
) -> RecoveredSecrets:
    """Recover the secrets of all members from revealed shares, some of which may be wrong.

    Args:
        needed: The number of shares that determine a secret.
        keys: The public keys of all members.
        arrived: The numbers of the members whose masked values have arrived.
        shares: The shares that each remaining member has revealed (:meth:`Member.reveal_shares`).

    Raises:
        PerfedError: Fewer than ``needed`` members have revealed shares.
    """
    if len(shares) < needed:
        raise PerfedError(f"{len(shares)} of {len(keys)} gave their shares, and a sum needs {needed}")
    recovery, givers = RecoveredSecrets({}, [], {}), frozenset[int]()
    for member, public in sorted(keys.items()):
        of_member = {giver: giver_shares.get(member, b"") for giver, giver_shares in shares.items()}
        fits = _is_seed_of(public) if member in arrived else _is_mask_key_of(public)
        agreeing = _find_agreeing_givers(of_member, needed, fits, givers)
        if not agreeing:
            recovery.lacking.append(member)
            continue
        recovery.secrets[member] = _combine_shares(of_member, sorted(agreeing[0])[:needed])
        givers = agreeing[0] if len(agreeing) == 1 else frozenset()
        for giver in sorted(shares.keys() - givers) if givers else ():
            recovery.wrong.setdefault(giver, []).append(member)
    return recovery


def _find_agreeing_givers(
    shares: Mapping[int, bytes], needed: int, fits: Callable[[bytes], bool], first: Collection[int]
) -> list[frozenset[int]]:
    """Return the largest sets of members whose shares lie on one polynomial with the right secret.

    There is more than one set if the shares do not prove which of them are wrong, and none if no secret fits.

    Args:
        shares: The share of the secret from each member.
        needed: The number of shares that determine the secret.
        fits: Returns whether a secret is the right one.
        first: The only such set of another secret, which is tried first; if it fits, no other set is tried.
    """
    best: list[frozenset[int]] = []
    for givers in chain([tuple(sorted(first))[:needed]], islice(combinations(sorted(shares), needed), _MAX_TRIES)):
        if any(agreeing.issuperset(givers) for agreeing in best) or not fits(_combine_shares(shares, givers)):
            continue
        further = {
            giver for giver in shares.keys() - set(givers) if fits(_combine_shares(shares, (*givers[1:], giver)))
        }
        agreeing = frozenset({*givers, *further})
        if not best or len(agreeing) > len(best[0]):
            best = [agreeing]
        elif len(agreeing) == len(best[0]):
            best.append(agreeing)
        if first and len(best) == 1 and first == agreeing:
            break
        if 2 * len(agreeing) >= len(shares) + needed:  # two polynomials have fewer than ``needed`` shares in common
            break
    return best


def unmask_sum(
    context: bytes, keys: Mapping[int, MemberKeys], arrived: Mapping[int, Numbers], secrets: Mapping[int, bytes]
) -> Numbers:
    """Return the sum of the values of the members in ``arrived``, modulo 2^64.

    Args:
        context: The context of the sum, as in :class:`Member`.
        keys: The public keys of all members.
        arrived: The masked values, by member.
        secrets: The secret of each member (:func:`recover_secrets`).
    """
    context = bind_members(context, keys)
    length = len(next(iter(arrived.values())))
    total = sum(arrived.values(), np.zeros(length, np.uint64))
    for member, secret in secrets.items():
        if member in arrived:
            total -= _generate_mask(_derive_key(secret, context, _SEED_PURPOSE), length)
        else:
            key = X25519PrivateKey.from_private_bytes(secret)
            total += _derive_missing_masks(member, key, keys, arrived, context, length)
    return total


def _is_seed_of(keys: MemberKeys) -> Callable[[bytes], bool]:
    return lambda secret: hashlib.sha256(secret).digest() == keys.commitment


def _is_mask_key_of(keys: MemberKeys) -> Callable[[bytes], bool]:
    def fits(secret: bytes) -> bool:
        if len(secret) != _KEY:
            return False
        return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == keys.mask

    return fits


def _derive_missing_masks(
    member: int,
    key: X25519PrivateKey,
    keys: Mapping[int, MemberKeys],
    arrived: Iterable[int],
    context: bytes,
    length: int,
) -> Numbers:
    """Return the masks of a member that has dropped out, which cancel the corresponding masks of the other members."""
    total = np.zeros(length, np.uint64)
    for peer in arrived:
        secret = key.exchange(X25519PublicKey.from_public_bytes(keys[peer].mask))
        total += _derive_pair_mask(member, peer, secret, context, length)
    return total


def decode_hex(text: object, name: str) -> bytes:
    """Return the bytes of a received hexadecimal text.

    Args:
        text: The received value.
        name: The name of the value, in the plural, for the error.

    Raises:
        PerfedError: The value is not a hexadecimal text.
    """
    try:
        if not isinstance(text, str):
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise PerfedError(f"{name} must be a hexadecimal text") from None


def _combine_shares(shares: Mapping[int, bytes], givers: Iterable[int]) -> bytes:
    """Return the secret from the shares of ``givers``; empty if they are not shares of one secret."""
    selected = [shares.get(giver, b"") for giver in givers]
    try:
        if len({len(share) for share in selected}) > 1 or len(selected[0]) < 20:
            return b""
        secret: bytes = combine_shares(selected)
    except (ValueError, IndexError, TypeError):
        return b""
    return secret if len(secret) == _SEED else b""


def _derive_pair_mask(member: int, peer: int, secret: bytes, context: bytes, length: int) -> Numbers:
    """Return the mask that ``member`` adds for ``peer``; its sign is negative for the higher of the two numbers."""
    mask = _generate_mask(_derive_key(secret, context, _MASK_PURPOSE), length)
    return mask if member < peer else -mask


def _derive_key(secret: bytes, context: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose in one sum."""
    return HKDF(SHA256(), 32, salt=None, info=purpose + b"\x00" + context).derive(secret)


def _generate_mask(key: bytes, length: int) -> Numbers:
    """Return ``length`` pseudorandom numbers from a key, by AES-256 in counter mode."""
    cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)) + cipher.finalize(), np.uint64)
