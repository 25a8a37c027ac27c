"""Counter-based randomness: every random number is a hash of its purpose.

A *key* is an int64 tensor of any shape that :func:`key` computes from a seed, a purpose and any number of counters
(round, client, step, ...), which broadcast against each other. The same words give the same key on every device and in
every engine, so that random numbers do not depend on the order in which clients are processed. There is no global
state, and no global generator is seeded.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers: integer products wrap around.
_GAMMA = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


_MASK = (1 << 64) - 1


def _shift_right_logically(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_bits(x: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser of every element."""
    if x.device.type == "cpu" and x.ndim:
        return _mix_numpy(x)
    x = (x ^ _shift_right_logically(x, 30)) * _MIX_1
    x = (x ^ _shift_right_logically(x, 27)) * _MIX_2
    return x ^ _shift_right_logically(x, 31)


def _mix_numpy(x: Tensor) -> Tensor:
    """Return the same by numpy, which has a logical shift and takes a third of the time."""
    z = x.numpy().view(np.uint64)
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(_MIX_1 & _MASK)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2 & _MASK)
    z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64))


def _mix_int(x: int) -> int:
    """Return the same for one unsigned number, many times faster than for tensors without axes."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _to_word(value: int | str | Tensor) -> int | Tensor:
    """Return an unsigned number for a single word, a tensor for many."""
    if isinstance(value, str):
        data = value.encode()
        value = zlib.crc32(data) | (zlib.adler32(data) << 31)
    if isinstance(value, Tensor) and (value.ndim or value.device.type != "cpu"):
        return value.long()
    return int(value) & _MASK


def key(seed: int | Tensor, *words: int | str | Tensor) -> Tensor:
    """Return the int64 key tensor for ``seed`` and ``words`` (integers, strings, int64 tensors that broadcast)."""
    state = _mix_word(_to_word(seed))
    for word in words:
        mixed_word = _mix_word(_to_word(word))
        if isinstance(state, Tensor):
            mixed_word = mixed_word.to(state.device) if isinstance(mixed_word, Tensor) else _to_signed(mixed_word)
        elif isinstance(mixed_word, Tensor):
            state = _to_signed(state)
        state = _mix_word(state ^ mixed_word)
    return state if isinstance(state, Tensor) else torch.tensor(_to_signed(state), dtype=torch.int64)


def encode_texts(texts: Iterable[str]) -> Tensor:
    """Return strings as an int64 tensor of words for :func:`key`, which gives the same keys for both."""
    return torch.tensor([_to_word(text) for text in texts], dtype=torch.int64)


def _mix_word(x: int | Tensor) -> int | Tensor:
    """Add the increment of SplitMix64 and mix."""
    return _mix_bits(x + _GAMMA) if isinstance(x, Tensor) else _mix_int((x + _GAMMA) & _MASK)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """Return ``count`` independent int64 hashes per key, ``(*keys.shape, count)``."""
    counter = torch.arange(1, count + 1, device=keys.device) * _GAMMA
    return _mix_bits(keys.unsqueeze(-1) + counter)


def uniform(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform numbers in [0, 1), ``(*keys.shape, count)``, with 24 random bits in float32 and 53 in float64."""
    digits = 53 if dtype == torch.float64 else 24
    return _shift_right_logically(random_bits(keys, count), 64 - digits).to(dtype) * 2.0**-digits


def normal(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers, ``(*keys.shape, count)``, by Box and Muller's transform of 32-bit halves.

    Number j depends only on the key and j, so that a longer result starts with a shorter one.
    """
    half = (count + 1) // 2
    raw = random_bits(keys, half)
    radius = ((_shift_right_logically(raw, 32).to(dtype) + 1.0) * 2.0**-32).clamp_(max=1.0).log_().mul_(-2.0).sqrt_()
    angle = (raw & 0xFFFFFFFF).to(dtype) * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)[..., :count]


def draw_long_normal(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers, ``(*keys.shape, count)``, by a torch generator for each key, for large counts.

    They take a third of the time of :func:`normal`, from whose numbers they differ. They are computed on the CPU, so
    that they are the same on every device of ``keys``. A longer result does not start with a shorter one.
    """
    generator = torch.Generator()
    numbers = torch.empty((keys.numel(), count), dtype=dtype)
    for row, seed in zip(numbers, keys.flatten().tolist(), strict=True):
        generator.manual_seed(seed & _MASK >> 1)
        torch.randn(count, generator=generator, out=row, dtype=dtype)
    return numbers.view(*keys.shape, count).to(keys.device)


@dataclass(frozen=True)
class Noise:
    """A source of standard normal numbers by keys, optionally with a secret without which they cannot be computed.

    Without a secret the numbers are those of :func:`draw_long_normal`. With a secret they are computed from SHAKE-256
    (FIPS 202) of secret, message and key, by Box and Muller's transform of 53 bits each: the keys, all other numbers
    and the values to which the numbers were added reveal nothing about them.

    Attributes:
        secret: 32 bytes; empty if everyone with the keys may compute the numbers.
        message: 32 bytes that identify the request, so that the answers to other requests have other noise.

    Example:
        >>> first, second = Noise(b"a" * 32).draw(key(0), 3), Noise(b"b" * 32).draw(key(0), 3)
        >>> bool((first == Noise(b"a" * 32).draw(key(0), 3)).all()), bool((first == second).any())
        (True, False)
    """

    secret: bytes = field(default=b"", repr=False)
    message: bytes = field(default=b"", repr=False)

    def draw(self, keys: Tensor, count: int, dtype: torch.dtype = torch.float32, *, once: bool = False) -> Tensor:
        """Return numbers ``(*keys.shape, count)``; with ``once`` they do not depend on the message."""
        if not self.secret:
            return draw_long_normal(keys, count, dtype)
        half = (count + 1) // 2
        begin = self.secret + (b"" if once else self.message).rjust(32, b"\0")
        numbers = torch.empty((keys.numel(), count), dtype=dtype)
        for row, key_number in zip(numbers, keys.flatten().tolist(), strict=True):
            stream = hashlib.shake_256(begin + key_number.to_bytes(8, "little", signed=True)).digest(16 * half)
            digits = (np.frombuffer(stream, "<u8").reshape(2, half) >> np.uint64(11)).astype(np.float64)
            radius, angle = np.sqrt(-2 * np.log((digits[0] + 1) * 2.0**-53)), digits[1] * (math.tau * 2.0**-53)
            pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
            row.copy_(torch.from_numpy(pairs))
        return numbers.view(*keys.shape, count).to(keys.device)


def round_to_grid(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values`` rounded to multiples of a power of two between ``scale / 2**17`` and ``scale / 2**16``.

    The last bits of a sum of floating-point numbers reveal the summands (Mironov 2012). Without them, the sum of a
    secret number and noise of deviation ``scale`` reveals no more than the noise allows.

    Args:
        values: float64, without previous rounding.
        scale: positive, broadcasts against ``values``.

    Example:
        >>> round_to_grid(torch.tensor([0.1], dtype=torch.float64), torch.tensor(1.0)).mul(2**16).tolist()
        [6554.0]
    """
    grid = torch.exp2(torch.floor(torch.log2(scale.double())) - 16)
    return torch.round(values / grid) * grid


PLAIN = Noise()
"""Noise without a secret, which everyone with the keys can compute again."""


def draw_permutation(keys: Tensor) -> Tensor:
    """Return a random permutation per row of ``keys`` ``(..., n)``: the order that sorts them."""
    return torch.argsort(keys, dim=-1, stable=True)


def draw_subset(keys: Tensor, count: int) -> Tensor:
    """Return the first ``count`` elements of :func:`draw_permutation` of ``keys`` ``(n,)``, without sorting the
    others.
    """
    if count >= len(keys):
        return draw_permutation(keys)
    threshold = np.partition(keys.numpy(), count - 1)[count - 1] if count > 0 else 0
    smallest = torch.nonzero(keys <= int(threshold)).flatten()
    return smallest[draw_permutation(keys[smallest])][:count]


@contextmanager
def seed_torch(key_: Tensor) -> Iterator[None]:
    """Seed torch's global generator by a key inside the block, for third-party code, and restore its state
    afterwards.
    """
    # torch.manual_seed formats the stack for every missing kind of device, which takes 20 times as long as seeding
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[]):
        seed(int(key_) & 0x7FFFFFFFFFFFFFFF)
        yield
