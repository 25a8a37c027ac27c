"""Mini-batches of many clients, as indices, a block of steps at a time.

Step s is done for all clients together. The mini-batches of a client do not depend on the other clients: it has its
shuffles, its number of steps and a smaller last batch. Clients are sorted by decreasing number of steps, so that the
clients still active at a step are a prefix. Padded samples have weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng
from perfed.data.client import Split

_BLOCK_BYTES = 8 << 20
_BLOCK_STEPS = 256

IntArray = NDArray[np.int64]

POSITION = "mini-batches"
"""Name of the client's state that counts its mini-batches, ``steps``, if settings count steps instead of epochs."""


@dataclass(frozen=True)
class Samples:
    """Samples of several clients in one tensor.

    Attributes:
        x: ``(total, ...)``; vectors of different lengths are padded with zeros to the longest.
        y: ``(total, ...)``.
        counts: number of samples of each client, in order.
        weight: ``(total,)``, factor of each sample in every loss; ``None`` for 1.
        domain: ``(total,)`` int64 domain ids; ``None`` where domains are unknown.
        batch_size: size of mini-batches; ``"all"`` for one mini-batch per client, ``None`` for the method's setting.
        mark: ``(total,)`` int64, a number for each sample that a loss uses besides the target; ``None`` for no marks.
    """

    x: Tensor
    y: Tensor
    counts: IntArray
    weight: Tensor | None = None
    domain: Tensor | None = None
    batch_size: int | Literal["all"] | None = None
    mark: Tensor | None = None

    @property
    def starts(self) -> IntArray:
        """Return the index of each client's first sample."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(np.int64)

    def take(self, rows: Tensor | slice, counts: IntArray) -> Samples:
        """Return the samples at ``rows``, which belong to clients with ``counts`` samples each."""
        weight = None if self.weight is None else self.weight[rows]
        domain = None if self.domain is None else self.domain[rows]
        mark = None if self.mark is None else self.mark[rows]
        return Samples(self.x[rows], self.y[rows], counts, weight, domain, self.batch_size, mark)

    def select(self, parts: Sequence[IntArray]) -> Samples:
        """Return the samples at ``parts``, one array of positions for each client."""
        index = torch.from_numpy(np.concatenate(parts)).to(self.x.device)
        return self.take(index, np.array([len(part) for part in parts], dtype=np.int64))

    def select_share(self, share: float, keys: Tensor) -> Samples:
        """Return a random ``share`` of each client's samples, rounded up, selected by its key in ``keys``
        ``(clients,)``.
        """
        draws = [rng.random_bits(key, int(count)) for key, count in zip(keys.cpu(), self.counts, strict=True)]
        sizes = np.ceil(share * self.counts - 1e-9).astype(np.int64)
        selected = [
            rng.draw_subset(draw, int(size)).sort().values.numpy() for draw, size in zip(draws, sizes, strict=True)
        ]
        return self.select([start + part for start, part in zip(self.starts, selected, strict=True)])

    def in_batches(self, size: int | Literal["all"] | None) -> Samples:
        """Return the same samples in mini-batches of ``size`` instead of the method's (``None`` for the method's)."""
        return replace(self, batch_size=size)

    @classmethod
    def pack(cls, splits: Sequence[Split], width: int | None = None) -> Samples:
        """Return the concatenated samples of ``splits``, with vectors padded to ``width``."""
        xs = [s.x if width is None else F.pad(s.x, (0, width - s.x.shape[1])) for s in splits]
        x = xs[0] if len(xs) == 1 else torch.cat(xs)
        y = splits[0].y if len(splits) == 1 else torch.cat([s.y for s in splits])
        ids = [s.domain for s in splits if s.domain is not None]
        domain = torch.cat(ids) if len(ids) == len(splits) else None
        counts = np.array([len(s) for s in splits], dtype=np.int64)
        return cls(x, y, counts, domain=domain)


@dataclass(frozen=True)
class Schedule:
    """The samples that each client uses at each step.

    Attributes:
        samples: the data.
        steps: number of steps of each client, not increasing.
        per_epoch: number of steps per epoch of each client.
        order: flat sample indices: for each client its concatenated shuffled epochs.
        base: the start of each client's part of ``order``.
        batch_size: size of the largest mini-batch.
        keys: int64 ``(clients,)``, the random keys of this fit.
        shift: number of mini-batches of the first shuffle that each client used in earlier fits.
    """

    samples: Samples
    steps: IntArray
    per_epoch: IntArray
    order: IntArray
    base: IntArray
    batch_size: int
    keys: Tensor
    shift: IntArray


@dataclass(frozen=True)
class Stream:
    """The positions of clients in endless sequences of mini-batches, shuffle after shuffle.

    Attributes:
        keys: int64 ``(clients,)``, the random keys of the shuffles.
        position: number of mini-batches so far, ``(clients,)``.
    """

    keys: Tensor
    position: IntArray

    def for_clients(self, clients: slice | IntArray) -> Stream:
        """Return the stream of the clients at these positions."""
        return Stream(self.keys[clients], self.position[clients])

    def make_independent(self, number: int) -> Stream:
        """Return another sequence of the same clients, independent of this one and at the same position."""
        return replace(self, keys=rng.key(self.keys, "stream", number))


def continue_streams(state: Mapping[str, Any], steps: Tensor, seed: int, ids: Sequence[str]) -> Stream | None:
    """Return the position of the clients ``ids`` after ``steps`` ``(n,)`` of this exchange.

    It is ``None`` if settings count epochs.
    """
    if POSITION not in state:
        return None
    base = rng.key(seed, POSITION)
    return Stream(rng.key(base, rng.encode_texts(ids)), _count_steps(state, steps).cpu().numpy())


def advance_position(state: Mapping[str, Any], steps: Tensor) -> dict[str, Any]:
    """Return the client's state after an exchange with ``steps`` ``(n,)``."""
    return {**state, POSITION: {"steps": _count_steps(state, steps)}} if POSITION in state else dict(state)


def _count_steps(state: Mapping[str, Any], steps: Tensor) -> Tensor:
    before: Tensor = state[POSITION]["steps"]
    return before + steps.to(before)


def count_steps(
    counts: IntArray,
    batch_size: int,
    epochs: int | IntArray | None = None,
    steps: int | None = None,
    epoch_steps: int | None = None,
) -> IntArray:
    """Return the number of mini-batch steps of each client; a client without samples has none.

    Args:
        counts: number of samples of each client.
        batch_size: size of the mini-batches.
        epochs: number of epochs, for all clients or one for each; if ``None``, ``steps`` is used.
        steps: number of steps, the same for all clients.
        epoch_steps: number of steps of an epoch; ``None`` for one pass over the client's samples.
    """
    if epochs is not None:
        return epochs * (-(-counts // batch_size) if epoch_steps is None else np.where(counts > 0, epoch_steps, 0))
    return np.where(counts > 0, steps or 0, 0)


def plan_batches(
    samples: Samples,
    keys: Tensor,
    *,
    batch_size: int,
    steps: IntArray,
    stream: Stream | None = None,
) -> Schedule:
    """Return the mini-batches of one fit with ``steps`` steps, one number per client.

    Each epoch is a new shuffle keyed by (client key, epoch, sample) and therefore the same in every grouping of
    clients. With ``stream``, each client continues its sequence of shuffles.
    """
    counts = samples.counts
    per_epoch = -(-counts // batch_size)
    completed_epochs, shift = np.divmod(np.zeros_like(counts) if stream is None else stream.position, per_epoch.clip(1))
    passes = np.where(steps > 0, -(-(shift + steps) // per_epoch.clip(1)), 0)
    sizes = counts * passes
    base = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    client = np.repeat(np.arange(len(counts)), sizes)
    within = np.arange(int(sizes.sum())) - base[client]
    epoch, sample = within // counts[client], within % counts[client]
    shuffles = (keys if stream is None else stream.keys).cpu()[torch.from_numpy(client)]
    hashes = rng.key(shuffles, torch.from_numpy(completed_epochs[client] + epoch), torch.from_numpy(sample)).numpy()
    first_segment = np.concatenate([[0], np.cumsum(passes)[:-1]])
    segment = first_segment[client] + epoch
    width = 62 - int(segment[-1]).bit_length() if len(segment) else 62
    rank = (segment << width) | (hashes.view(np.uint64) >> np.uint64(64 - width)).astype(np.int64)
    shuffled = np.argsort(rank, kind="stable")
    return Schedule(
        samples, steps, per_epoch, samples.starts[client[shuffled]] + sample[shuffled], base, batch_size, keys, shift
    )


@dataclass
class Block:
    """Mini-batches of consecutive steps in which the active clients do not change.

    Attributes:
        x, y: ``(steps, clients, width, ...)``.
        index: ``(steps, clients, width)`` flat sample indices.
        valid: the same shape, False for padding (numpy, on the host).
        weight: the same shape, 1 / batch size (times the sample's weight) for samples and 0 for padding.
        keys: ``(steps, clients)`` int64 random keys.
        unit: ``(steps, clients)``, 1 / size of a full mini-batch, also for a smaller last one; ``None``: as in
            ``weight``.
    """

    first_step: int
    x: Tensor
    y: Tensor
    index: Tensor
    valid: NDArray[np.bool_]
    weight: Tensor
    keys: Tensor
    unit: Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def clients(self) -> int:
        """Return the number of active clients."""
        return self.x.shape[1]

    def widths(self) -> list[int]:
        """Return the size of the largest mini-batch of each step; 1 if all are empty."""
        return [max(1, int(w)) for w in self.valid.sum(2).max(1)]

    def compute_once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return ``make()``, computed once for the block, such as values that a loss needs for all its steps."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def iterate_blocks(plan: Schedule) -> Iterator[Block]:
    """Yield the mini-batches of ``plan`` in order."""
    samples = plan.samples
    last = int(plan.steps[0])
    width = min(plan.batch_size, int(samples.counts.max()))
    step = 0
    while step < last:
        active = int((plan.steps > step).sum())
        row = prod(samples.x.shape[1:]) * samples.x.element_size() + 8
        room = max(1, _BLOCK_BYTES // max(1, active * width * row))
        stop = min(last, int(plan.steps[active - 1]), step + min(room, _BLOCK_STEPS))
        yield _build_block(plan, step, stop, active)
        step = stop


def _build_block(plan: Schedule, first: int, stop: int, active: int) -> Block:
    samples = plan.samples
    steps = np.arange(first, stop)[:, None] + plan.shift[:active]
    per_epoch, counts = plan.per_epoch[:active], samples.counts[:active]
    begin = (steps % per_epoch) * plan.batch_size
    size = np.minimum(plan.batch_size, counts - begin)
    start = plan.base[:active] + (steps // per_epoch) * counts + begin
    position = np.arange(int(size.max()))
    valid = position < size[:, :, None]
    where = np.where(valid, start[:, :, None] + position, start[:, :, None])
    device = samples.x.device
    index = torch.from_numpy(plan.order[where]).to(device)
    dtype = samples.x.dtype
    weight = torch.from_numpy(valid / size[:, :, None]).to(device=device, dtype=dtype)
    flat = index.flatten()
    if samples.weight is not None:
        weight = weight * samples.weight.to(dtype)[index]
    x = samples.x.index_select(0, flat).view(*index.shape, *samples.x.shape[1:])
    y = samples.y.index_select(0, flat).view(*index.shape, *samples.y.shape[1:])
    keys = rng.key(plan.keys[:active].to(device), torch.arange(first, stop, device=device).unsqueeze(1))
    unit = torch.from_numpy(1 / np.minimum(plan.batch_size, counts)).to(weight).expand(stop - first, -1)
    return Block(first, x, y, index, valid, weight, keys, unit)
