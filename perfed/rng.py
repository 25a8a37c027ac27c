"""Counter-based randomness: every draw is a hash of what it is for.

A *key* is an int64 tensor of any shape, made by :func:`key` from a seed, a purpose and any number of
counters (round, client, step, ...), which broadcast against each other. The same words give the same key on
every device and in every engine, so that draws do not depend on the order in which clients are processed.
There is no global state and nothing is ever seeded globally.
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


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.ndim:
        return _mix_numpy(x)
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _mix_numpy(x: Tensor) -> Tensor:
    """The same in numpy, which has a logical shift: a third of the time."""
    z = x.numpy().view(np.uint64)
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(_MIX_1 & _MASK)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2 & _MASK)
    z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64))


def _mix_int(x: int) -> int:
    """The same for one number, as unsigned; many times faster than tensors without axes."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _word(value: int | str | Tensor) -> int | Tensor:
    """An unsigned number for a single word, a tensor for many."""
    if isinstance(value, str):
        data = value.encode()
        value = zlib.crc32(data) | (zlib.adler32(data) << 31)
    if isinstance(value, Tensor) and (value.ndim or value.device.type != "cpu"):
        return value.long()
    return int(value) & _MASK


def key(seed: int | Tensor, *words: int | str | Tensor) -> Tensor:
    """Hash ``seed`` and ``words`` (integers, strings, int64 tensors that broadcast) to an int64 key tensor."""
    state = _mixed(_word(seed))
    for word in words:
        other = _mixed(_word(word))
        if isinstance(state, Tensor):
            other = other.to(state.device) if isinstance(other, Tensor) else _signed(other)
        elif isinstance(other, Tensor):
            state = _signed(state)
        state = _mixed(state ^ other)
    return state if isinstance(state, Tensor) else torch.tensor(_signed(state), dtype=torch.int64)


def words(texts: Iterable[str]) -> Tensor:
    """Strings as an int64 tensor of words for :func:`key`, which gives the same keys as the strings themselves."""
    return torch.tensor([_word(text) for text in texts], dtype=torch.int64)


def _mixed(x: int | Tensor) -> int | Tensor:
    return _mix(x + _GAMMA) if isinstance(x, Tensor) else _mix_int((x + _GAMMA) & _MASK)


def bits(keys: Tensor, count: int) -> Tensor:
    """``count`` independent int64 hashes per key: ``(*keys.shape, count)``."""
    counter = torch.arange(1, count + 1, device=keys.device) * _GAMMA
    return _mix(keys.unsqueeze(-1) + counter)


def uniform(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), ``(*keys.shape, count)``; 24 random bits in float32, 53 in float64."""
    digits = 53 if dtype == torch.float64 else 24
    return _shift_right(bits(keys, count), 64 - digits).to(dtype) * 2.0**-digits


def normal(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, ``(*keys.shape, count)``, by Box and Muller's transform of 32-bit halves.

    Number j depends on the key and j alone, so that a longer draw starts with the shorter one.
    """
    half = (count + 1) // 2
    raw = bits(keys, half)
    radius = ((_shift_right(raw, 32).to(dtype) + 1.0) * 2.0**-32).clamp_(max=1.0).log_().mul_(-2.0).sqrt_()
    angle = (raw & 0xFFFFFFFF).to(dtype) * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)[..., :count]


def gaussian(keys: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, ``(*keys.shape, count)``, by a generator of torch's for each key: for long draws.

    A third of the time of :func:`normal`, whose numbers these are not; made on the CPU, so that they are the same
    wherever ``keys`` are. Longer draws do not start with shorter ones.
    """
    generator = torch.Generator()
    found = torch.empty((keys.numel(), count), dtype=dtype)
    for row, seed in zip(found, keys.flatten().tolist(), strict=True):
        generator.manual_seed(seed & _MASK >> 1)
        torch.randn(count, generator=generator, out=row, dtype=dtype)
    return found.view(*keys.shape, count).to(keys.device)


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers by keys: those of :func:`gaussian`, or with a secret such as nobody else can draw.

    With a secret the numbers are made of SHAKE-256 (FIPS 202) of secret, message and key, by Box and Muller's transform
    of 53 bits each: who knows the keys, all other numbers and what they were added to learns nothing of them.

    Attributes:
        secret: 32 bytes; empty: whoever has the keys can draw the same.
        message: 32 bytes that name what is answered, so that the answer to anything else has other noise.

    Example:
        >>> one, other = Noise(b"a" * 32).draw(key(0), 3), Noise(b"b" * 32).draw(key(0), 3)
        >>> bool((one == Noise(b"a" * 32).draw(key(0), 3)).all()), bool((one == other).any())
        (True, False)
    """

    secret: bytes = field(default=b"", repr=False)
    message: bytes = field(default=b"", repr=False)

    def draw(self, keys: Tensor, count: int, dtype: torch.dtype = torch.float32, *, once: bool = False) -> Tensor:
        """Return numbers ``(*keys.shape, count)``; with ``once`` whatever the message is."""
        if not self.secret:
            return gaussian(keys, count, dtype)
        half = (count + 1) // 2
        begin = self.secret + (b"" if once else self.message).rjust(32, b"\0")
        found = torch.empty((keys.numel(), count), dtype=dtype)
        for row, of in zip(found, keys.flatten().tolist(), strict=True):
            stream = hashlib.shake_256(begin + of.to_bytes(8, "little", signed=True)).digest(16 * half)
            digits = (np.frombuffer(stream, "<u8").reshape(2, half) >> np.uint64(11)).astype(np.float64)
            radius, angle = np.sqrt(-2 * np.log((digits[0] + 1) * 2.0**-53)), digits[1] * (math.tau * 2.0**-53)
            both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
            row.copy_(torch.from_numpy(both))
        return found.view(*keys.shape, count).to(keys.device)


def round_to_grid(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values`` rounded to multiples of a power of two between ``scale / 2**17`` and ``scale / 2**16``.

    The last bits of a sum of floating-point numbers tell which numbers were added (Mironov 2012): without them a sum of
    a secret number and noise of deviation ``scale`` says nothing that the noise does not hide.

    Args:
        values: float64, with all their bits.
        scale: positive, broadcasts against ``values``.

    Example:
        >>> round_to_grid(torch.tensor([0.1], dtype=torch.float64), torch.tensor(1.0)).mul(2**16).tolist()
        [6554.0]
    """
    grid = torch.exp2(torch.floor(torch.log2(scale.double())) - 16)
    return torch.round(values / grid) * grid


PLAIN = Noise()
"""Noise that whoever has the keys can draw again."""


def order(keys: Tensor) -> Tensor:
    """A random permutation per row of ``keys`` ``(..., n)``: the order that sorts them."""
    return torch.argsort(keys, dim=-1, stable=True)


def first(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` of :func:`order` of ``keys`` ``(n,)``, without putting the others in order."""
    if count >= len(keys):
        return order(keys)
    highest = np.partition(keys.numpy(), count - 1)[count - 1] if count > 0 else 0
    among = torch.nonzero(keys <= int(highest)).flatten()
    return among[order(keys[among])][:count]


@contextmanager
def torch_seed(key_: Tensor) -> Iterator[None]:
    """Run third-party code that draws from torch's global generator, and leave that generator as it was."""
    # torch.manual_seed writes down the stack for every kind of device that is not there, 20 times what a seed takes
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[]):
        seed(int(key_) & 0x7FFFFFFFFFFFFFFF)
        yield
