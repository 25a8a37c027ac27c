"""Secure aggregation: what each member of a sum does, and how the sum is opened without any single value.

The protocol of Bonawitz et al. 2017 (section 4, figure 1). Its signatures of the list of who has dropped out are not
there; instead more than half of the members are needed for a sum:

1. *keys*: every member makes two key pairs (X25519), one to seal messages, one for masks, and a random seed; it signs
   the public keys where the others know its signing key;
2. *shares*: it cuts its seed and its masks' private key into Shamir's shares and seals one of each for every other;
   all must do so, and without one of them the server begins again at 1 with the rest;
3. *masked*: it adds a mask of its seed to its numbers, and one for each other member, which the two of them derive from
   their keys: one of them adds it, the other subtracts it;
4. *unmask*: it gives its shares of the seeds of those whose numbers have arrived, and of the mask keys of the others.

So masks between two members cancel; those of seeds are subtracted by who opens the sum, as are those which somebody who
has dropped out owes the others. Nobody ever gives both shares of one member. Numbers are int64, added modulo 2^64.

All derived keys depend on the context of the sum, which covers the server's request and the keys of all members.
Members that were shown different requests or different members therefore have masks that do not cancel.
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
    raise PerfedError(f"the installed flwr lacks what secure aggregation needs of it: {error}") from None

Numbers = NDArray[np.uint64]

_SEED = _KEY = 32  # bytes
_NONCE = 12
_TRIES = 1000  # sets of shares that are tried for a secret: enough for three wrong shares of eighteen
_SEAL, _MASK, _OWN = b"seal", b"mask", b"own"  # what a derived key is for


@dataclass(frozen=True)
class MemberKeys:
    """What a member makes known to all others.

    Attributes:
        seal: public key for what is sealed for it.
        mask: public key for the masks that it shares with another.
        commitment: SHA-256 of its seed: whoever puts its shares together sees whether they are right.
        site: name of the member.
        history: hash of what led to the state that it starts from; empty for the initial state.
        signature: of :meth:`signed_content` by the site; empty where the sites of a study have no signing keys.
    """

    seal: bytes
    mask: bytes
    commitment: bytes
    site: str = ""
    signature: bytes = b""
    history: bytes = b""

    def signed_content(self, context: bytes) -> bytes:
        """Return what the member signs: the keys, the site's name and the history, in the sum of ``context``."""
        keys = (self.seal + self.mask + self.commitment).hex()
        return json.dumps([context.hex(), self.site, keys, self.history.hex()]).encode()

    def to_fields(self) -> dict[str, str]:
        """Return the keys as texts; :meth:`from_fields` reads them.

        An empty history is left out, so that the fields are those of journals in which keys have no history.
        """
        keys = (self.seal + self.mask + self.commitment).hex()
        history = {"history": self.history.hex()} if self.history else {}
        return {"keys": keys, "site": self.site, "signature": self.signature.hex(), **history}

    @classmethod
    def from_fields(cls, fields: object) -> MemberKeys:
        """Return the keys whose :meth:`to_fields` is ``fields``.

        Raises:
            PerfedError: they are not the keys of a member, or one is of low order: nobody can share a secret with it.
        """
        if not isinstance(fields, dict) or not isinstance(fields.get("site"), str):
            raise PerfedError("keys of a member are a table with the name of its site")
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
    """Return the context of a sum together with a hash of all members, by number, and their keys."""
    members = {str(number): keys[number].to_fields() for number in sorted(keys)}
    return context + hashlib.sha256(json.dumps(members, sort_keys=True).encode()).digest()


@dataclass
class Member:
    """One client in one sum, from its keys to the shares that it gives; no value of it is on disk.

    Args:
        context: names the sum and the request; derived keys are of this sum only.
        needed: how many members a sum needs.
        site: name of the member.
        sign: makes the site's signature.
        history: hash of what led to the state that the member starts from.

    Raises:
        PerfedError: what comes is not of the protocol, or would make a sum of too few; nothing is given away then.

    Example:
        >>> members = {number: Member(b"a sum", needed=2) for number in (1, 2, 3)}
        >>> keys = {number: member.keys for number, member in members.items()}
        >>> sealed = {number: member.share_secrets(number, keys) for number, member in members.items()}
        >>> for_one = {n: {k: sealed[k][n] for k in keys if k != n} for n in keys}
        >>> arrived = {n: members[n].mask_values(np.array([n], np.uint64), for_one[n]) for n in (1, 2)}
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
        self._all: dict[int, MemberKeys] = {}
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._given: dict[int, tuple[bytes, bytes]] = {}
        self._arrived = self._opened = False

    @cached_property
    def keys(self) -> MemberKeys:
        """The keys that the others need, signed."""
        seal, mask = (key.public_key().public_bytes_raw() for key in (self._seal, self._mask))
        keys = MemberKeys(seal, mask, hashlib.sha256(self._seed).digest(), self.site, history=self.history)
        return replace(keys, signature=self.sign(keys.signed_content(self.context)))

    def share_secrets(self, number: int, keys: Mapping[int, MemberKeys]) -> dict[int, bytes]:
        """A sealed share of seed and mask key for each other member.

        Args:
            number: this member's, as in ``keys``.
            keys: of all members, by their numbers.
        """
        if self._all:
            raise PerfedError("this member has cut its secrets already")
        if keys.get(number) != self.keys:
            raise PerfedError(f"the keys of member {number} are not its own")
        if len(keys) < self.needed:
            raise PerfedError(f"{len(keys)} members; a sum needs {self.needed}")
        if len({key for member in keys.values() for key in (member.seal, member.mask)}) < 2 * len(keys):
            raise PerfedError("two members have one key")
        self.number, self._all = number, dict(keys)
        self.context = bind_members(self.context, keys)
        order = sorted(keys)
        cut = [
            create_shares(secret, self.needed, len(order)) for secret in (self._seed, self._mask.private_bytes_raw())
        ]
        pairs = dict(zip(order, zip(*cut, strict=True), strict=True))
        self._own = pairs.pop(number)
        return {other: self._sealed(other, seed + key) for other, (seed, key) in pairs.items()}

    def mask_values(self, values: Numbers, sealed: Mapping[int, bytes]) -> Numbers:
        """Return ``values`` under the masks of all members; uniform for who does not know these.

        A sum needs the sealed shares of all its members. If a server could withhold some from one member only, the
        masks of this one would be with the rest, and the rest could be said to have dropped out.

        Args:
            values: uint64, of the same length at all members.
            sealed: what each other member has sealed for this one.
        """
        if not self._all or self._arrived:
            raise PerfedError("this member has no shares of the others, or has given its numbers already")
        if strange := sealed.keys() - (self._all.keys() - {self.number}):
            raise PerfedError(f"shares of {sorted(strange)}, which are no members")
        if lacking := self._all.keys() - {self.number, *sealed}:
            raise PerfedError(f"shares of {sorted(lacking)} are missing; those of all {len(self._all)} are needed")
        self._given = {other: self._unsealed(other, content) for other, content in sealed.items()}
        self._given[self.number] = self._own
        self._arrived = True
        total = values + _stream(_derived(self._seed, self.context, _OWN), len(values))
        for other in sealed:
            secret = self._mask.exchange(X25519PublicKey.from_public_bytes(self._all[other].mask))
            total += _between(self.number, other, secret, self.context, len(values))
        return total

    def reveal_shares(self, arrived: Collection[int]) -> dict[int, bytes]:
        """Return a share of each member: of its seed where its numbers have ``arrived``, else of its mask key.

        It is given once.
        """
        asked = set(arrived)
        if self._opened:
            raise PerfedError("this member has opened a sum already")
        if not asked <= self._given.keys() or len(asked) < self.needed:
            raise PerfedError(f"a sum of {sorted(asked)}; {self.needed} of {sorted(self._given)} are needed")
        self._opened = True
        return {other: seed if other in asked else key for other, (seed, key) in self._given.items()}

    def _box(self, other: int) -> AESGCM:
        secret = self._seal.exchange(X25519PublicKey.from_public_bytes(self._all[other].seal))
        return AESGCM(_derived(secret, self.context, _SEAL))

    def _sealed(self, other: int, content: bytes) -> bytes:
        nonce = urandom(_NONCE)
        return nonce + self._box(other).encrypt(nonce, content, b"%d to %d" % (self.number, other))

    def _unsealed(self, other: int, content: bytes) -> tuple[bytes, bytes]:
        try:
            who = b"%d to %d" % (other, self.number)
            plain = self._box(other).decrypt(content[:_NONCE], content[_NONCE:], who)
        except (InvalidTag, ValueError):
            raise PerfedError(f"what member {other} has sealed was changed") from None
        half = len(plain) // 2
        return plain[:half], plain[half:]


@dataclass(frozen=True)
class RecoveredSecrets:
    """What the shares of a sum give.

    Attributes:
        secrets: seed of each member whose numbers have arrived, and mask key of each other one.
        lacking: members whose secret no tried set of shares gives.
        wrong: members that gave a wrong share, each with the members whose share it is; where the others' shares do not
            say for certain whose are wrong, nobody.
    """

    secrets: dict[int, bytes]
    lacking: list[int]
    wrong: dict[int, list[int]]


def recover_secrets(
    needed: int, keys: Mapping[int, MemberKeys], arrived: Collection[int], shares: Mapping[int, Mapping[int, bytes]]
) -> RecoveredSecrets:
    """Return the members' secrets, where some members may have given wrong shares.

    Args:
        needed: how many shares give a secret.
        keys: of all members.
        arrived: members whose masked numbers have arrived.
        shares: what each member that still answers has given (:meth:`Member.reveal_shares`).

    Raises:
        PerfedError: fewer than ``needed`` have given shares.
    """
    if len(shares) < needed:
        raise PerfedError(f"{len(shares)} of {len(keys)} gave their shares, and a sum needs {needed}")
    recovery, givers = RecoveredSecrets({}, [], {}), frozenset[int]()
    for member, public in sorted(keys.items()):
        of_member = {giver: given_shares.get(member, b"") for giver, given_shares in shares.items()}
        fits = _is_seed_of(public) if member in arrived else _is_mask_key_of(public)
        agreeing = _agreeing_givers(of_member, needed, fits, givers)
        if not agreeing:
            recovery.lacking.append(member)
            continue
        recovery.secrets[member] = _combine_shares(of_member, sorted(agreeing[0])[:needed])
        givers = agreeing[0] if len(agreeing) == 1 else frozenset()
        for giver in sorted(shares.keys() - givers) if givers else ():
            recovery.wrong.setdefault(giver, []).append(member)
    return recovery


def _agreeing_givers(
    shares: Mapping[int, bytes], needed: int, fits: Callable[[bytes], bool], first: Collection[int]
) -> list[frozenset[int]]:
    """Return the largest sets of givers whose shares are of one polynomial with the secret that ``fits``.

    There is more than one where it cannot be told whose shares are wrong, and none where no secret fits. Where the
    shares of the set ``first`` fit, which was the only one for another secret, no other set is tried.
    """
    best: list[frozenset[int]] = []
    for givers in chain([tuple(sorted(first))[:needed]], islice(combinations(sorted(shares), needed), _TRIES)):
        if any(agreeing.issuperset(givers) for agreeing in best) or not fits(_combine_shares(shares, givers)):
            continue
        others = {giver for giver in shares.keys() - set(givers) if fits(_combine_shares(shares, (*givers[1:], giver)))}
        agreeing = frozenset({*givers, *others})
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
    """Return the sum of what the members in ``arrived`` have put in, modulo 2^64.

    Args:
        context: as of :class:`Member`.
        keys: of all members.
        arrived: masked numbers, by member.
        secrets: of each member (:func:`recover_secrets`).
    """
    context = bind_members(context, keys)
    length = len(next(iter(arrived.values())))
    total = sum(arrived.values(), np.zeros(length, np.uint64))
    for member, secret in secrets.items():
        if member in arrived:
            total -= _stream(_derived(secret, context, _OWN), length)
        else:
            key = X25519PrivateKey.from_private_bytes(secret)
            total += _owed(member, key, keys, arrived, context, length)
    return total


def _is_seed_of(keys: MemberKeys) -> Callable[[bytes], bool]:
    return lambda secret: hashlib.sha256(secret).digest() == keys.commitment


def _is_mask_key_of(keys: MemberKeys) -> Callable[[bytes], bool]:
    def fits(secret: bytes) -> bool:
        if len(secret) != _KEY:
            return False
        return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == keys.mask

    return fits


def _owed(
    member: int,
    key: X25519PrivateKey,
    keys: Mapping[int, MemberKeys],
    arrived: Iterable[int],
    context: bytes,
    length: int,
) -> Numbers:
    """The masks that ``member``, who has dropped out, would have added; they cancel what the others have added."""
    total = np.zeros(length, np.uint64)
    for other in arrived:
        secret = key.exchange(X25519PublicKey.from_public_bytes(keys[other].mask))
        total += _between(member, other, secret, context, length)
    return total


def decode_hex(text: object, what: str) -> bytes:
    """Bytes of a hexadecimal text that came over a wire.

    Raises:
        PerfedError: it is none; says ``what`` it should be.
    """
    try:
        if not isinstance(text, str):
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise PerfedError(f"{what} are a hexadecimal text") from None


def _combine_shares(shares: Mapping[int, bytes], givers: Iterable[int]) -> bytes:
    """Return the secret that the shares of ``givers`` give; empty where they are no shares of one secret."""
    chosen = [shares.get(giver, b"") for giver in givers]
    try:
        if len({len(share) for share in chosen}) > 1 or len(chosen[0]) < 20:
            return b""
        secret: bytes = combine_shares(chosen)
    except (ValueError, IndexError, TypeError):
        return b""
    return secret if len(secret) == _SEED else b""


def _between(member: int, other: int, secret: bytes, context: bytes, length: int) -> Numbers:
    """What ``member`` adds for ``other``: the lower number adds the mask, the higher one subtracts it."""
    mask = _stream(_derived(secret, context, _MASK), length)
    return mask if member < other else -mask


def _derived(secret: bytes, context: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose in one sum."""
    return HKDF(SHA256(), 32, salt=None, info=purpose + b"\x00" + context).derive(secret)


def _stream(key: bytes, length: int) -> Numbers:
    """``length`` numbers that look uniform to who does not have ``key``: AES-256 in counter mode."""
    cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)) + cipher.finalize(), np.uint64)
