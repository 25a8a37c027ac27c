"""Training under differential privacy of the rows: gradients clipped row by row, and noisy statistics of them.

Every gradient of local training goes through :meth:`PrivateTraining.gradients`, also that of personal parameters: what
is fitted without noise on the same rows would carry a row into the gradients of all others. Neighbours are data sets
that differ in one row of one client, which counts nothing in one of them; how many rows a client has is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from perfed import rng
from perfed.errors import PerfedError
from perfed.model.chain import BATCH_NORM, Chain, Parameters
from perfed.training.batches import Block, IntArray, Samples
from perfed.training.per_layer import clipped_by_layers
from perfed.training.step import Loss, Step

_ROWS_BYTES = 16 << 20
_POISSON_STEPS = 64


class ReleaseCounter:
    """Counts what one exchange of a client releases: Gaussian mechanisms of its rows, each with noise of its own.

    A fit counts as often as the row that is in most of its gradients, so that a pass over the rows counts once however
    many mini-batches it has. Fits of one exchange add up.

    Attributes:
        counts: names of the numbers of rows that were released with noise that a run draws once.

    Example:
        >>> counter = ReleaseCounter()
        >>> counter.begin_fit(3)
        >>> for batch in ([0, 1], [2], [1, 2]):
        ...     counter.add_batch(np.array(batch))
        >>> counter.add()
        >>> counter.releases
        3
    """

    def __init__(self) -> None:
        self.counts: set[str] = set()
        self._finished = 0
        self._gradients_by_row: IntArray = np.zeros(0, dtype=np.int64)

    @property
    def releases(self) -> int:
        """The number of releases so far, without those of :attr:`counts`."""
        return self._finished + int(self._gradients_by_row.max(initial=0))

    def add(self) -> None:
        """Count one release that every row may be in."""
        self._finished += 1

    def begin_fit(self, rows: int) -> None:
        """Add up the fits so far, and begin one on so many rows."""
        self._finished = self.releases
        self._gradients_by_row = np.zeros(rows, dtype=np.int64)

    def add_batch(self, rows: IntArray) -> None:
        """Count a gradient that is a sum over ``rows``, each of which is in it once."""
        self._gradients_by_row[rows] += 1


@dataclass(frozen=True)
class PrivateTraining:
    """How the rows of clients are kept private in local training (DP-SGD; Abadi et al. 2016, Algorithm 1).

    Attributes:
        clip: C, largest norm of what one row adds to a gradient.
        noise: z; the sum of the clipped gradients of a step gets noise of standard deviation ``z C``.
        rows: R, largest norm of a row in sums of rows.
        poisson: whether a row is in each mini-batch by a coin of its own, instead of in one of each pass.
        source: of the noise; with a secret where others know the seed of the run.
        noises: z of clients by their number of rows; those that are not named have ``noise``.
        each: z of the clients of a cohort, ``(n,)``, in its order.
        counter: counts the releases of a single client; ``None``: nobody counts them.
    """

    clip: float
    noise: float
    rows: float = 1.0
    poisson: bool = False
    source: rng.Noise = rng.PLAIN
    noises: Mapping[int, float] = field(default_factory=dict)
    each: Tensor | None = None
    counter: ReleaseCounter | None = None

    def at(self, counts: Tensor, source: rng.Noise, counter: ReleaseCounter | None = None) -> PrivateTraining:
        """Return the same for a cohort whose clients have so many rows, ``counts`` ``(n,)``."""
        each = torch.tensor([self.noises.get(int(n), self.noise) for n in counts]) if self.noises else None
        return replace(self, source=source, each=each, counter=counter)

    def _noise_of(self, like: Tensor, of: IntArray | None = None) -> Tensor | float:
        """The z of each client, as wide as ``like`` ``(clients, ...)``; ``of``: their positions in the cohort."""
        if self.each is None:
            return self.noise
        each = self.each if of is None else self.each[torch.from_numpy(of)]
        return each.to(like).view(-1, *[1] * (like.ndim - 1))

    def gradients(self, loss: Loss, step: Step, params: Parameters, count: int) -> tuple[Tensor, Parameters]:
        """Return losses ``(clients,)`` and the noisy means of the rows' clipped gradients at ``params``.

        ``w (sum_b g_b min(1, C / |g_b|) + z C N(0, 1))``, w = 1 / size of a whole mini-batch, also in a smaller last
        one, whose mean would have more noise; the norm is over all trained parameters together, and g_b the gradient
        of the loss of row b alone, which counts as zero where it is not finite. Noise depends on the randomness of the
        step, and on ``count``, the number of the gradient within it.

        Raises:
            PerfedError: a layer or a loss that is not of rows one by one.
        """
        if self.counter is not None:
            valid = step.block.valid[step.at]
            self.counter.add_batch(step.block.index[step.at].cpu().numpy()[valid])
        found = clipped_by_layers(loss, step, params, self.clip)
        losses, sums = self._by_rows(loss, step, params) if found is None else found
        sizes = [tensor[0].numel() for tensor in sums.values()]
        key = rng.key(step.keys, "privacy", 0, count)
        weight = step.weight.amax(1)
        unit = weight if step.block.unit is None else step.block.unit[step.at]
        less = torch.where(weight > 0, unit / weight, 1)  # a smaller last mini-batch takes a smaller step
        scale = self._noise_of(unit, step.rows) * self.clip * unit  # also where a mini-batch is empty
        noise = self.source.draw(key, sum(sizes), self._noise_dtype(step.weight)).split(sizes, 1)

        def add_noise(tensor: Tensor, drawn: Tensor) -> Tensor:
            shape = (-1, *[1] * (tensor.ndim - 1))
            return self._add(tensor * less.view(shape), drawn.view(tensor.shape), scale.view(shape))

        noisy = {name: add_noise(sums[name], values) for name, values in zip(sums, noise, strict=True)}
        return losses, noisy

    def _by_rows(self, loss: Loss, step: Step, params: Parameters) -> tuple[Tensor, Parameters]:
        """Losses and sums of clipped gradients, of any loss: each row is a mini-batch of its own."""
        numbers = sum(tensor[0].numel() for tensor in step.params.values()) * step.weight.element_size()
        rows = max(1, _ROWS_BYTES // (numbers * step.weight.shape[0]))
        losses = step.weight.new_zeros(step.weight.shape[0])
        sums = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        for first in range(0, step.width, rows):
            of = slice(first, min(first + rows, step.width))
            found, grads = _row_gradients(loss, step, params, of)
            squares = sum((g.flatten(2).square().sum(2) for g in grads.values()), torch.zeros_like(found))
            overflowed = ~(torch.isfinite(squares) & torch.isfinite(found))
            factor = ((self.clip / squares.sqrt()).clamp(max=1) * step.weight[:, of]).masked_fill(overflowed, 0)
            losses = losses + (found.masked_fill(overflowed, 0) * step.weight[:, of]).sum(1)
            for name, g in grads.items():
                finite = g.flatten(2).masked_fill(overflowed.unsqueeze(2), 0)
                sums[name] += torch.bmm(factor.unsqueeze(1), finite).view_as(sums[name])
        return losses, sums

    def noisy_counts(self, counts: Tensor, seed: int, ids: Sequence[str], what: str) -> Tensor:
        """Return ``counts`` ``(n, ...)`` of rows, one of which a row is in, with noise that a run draws once.

        Asked again, the answer is the same, so that a run spends for it once.
        """
        if self.counter is not None:
            self.counter.counts.add(what)
        keys = rng.key(seed, "privacy", 0, what, rng.words(ids))
        noise = self._noise(counts, keys, once=True)
        return self._add(counts, noise, self._noise_of(counts)).clamp_min(0)

    def noisy_sums(self, rows: Tensor, place: Tensor, places: int, keys: Tensor) -> Tensor:
        """Return noisy sums of ``rows`` ``(total, k)`` by ``place`` ``(total,)``, with noise ``z R``.

        Each row is clipped to the norm R; a row whose norm is not finite is left out.

        Args:
            rows: of all clients.
            place: of each row among the clients' places.
            places: of each client.
            keys: int64 ``(clients,)``; each call needs others.

        Returns:
            ``(clients, places, k)``; a row is in one of the sums.
        """
        if self.counter is not None:
            self.counter.add()
        norms = rows.norm(dim=1, keepdim=True)
        cut = rows * (self.rows / norms.clamp_min(1e-12)).clamp(max=1)
        cut = cut.masked_fill(~torch.isfinite(norms), 0)
        sums = rows.new_zeros(len(keys) * places, rows.shape[1]).index_add_(0, place, cut).view(len(keys), places, -1)
        noise = self._noise(sums, rng.key(keys, "privacy", 0))
        return self._add(sums, noise, self._noise_of(sums) * self.rows)

    def _noise(self, like: Tensor, keys: Tensor, *, once: bool = False) -> Tensor:
        noise = self.source.draw(keys.to(like.device), like[0].numel(), self._noise_dtype(like), once=once)
        return noise.view(like.shape)

    def _noise_dtype(self, like: Tensor) -> torch.dtype:
        """Return the type of the noise: with a secret all bits of what is drawn."""
        return torch.float64 if self.source.secret else like.dtype

    def _add(self, values: Tensor, noise: Tensor, scale: Tensor | float) -> Tensor:
        """Return ``values + scale * noise``; where the noise has a secret, without the bits that would undo it."""
        if not self.source.secret:
            return values + scale * noise
        scale = torch.as_tensor(scale, dtype=torch.float64, device=values.device)
        return rng.round_to_grid(values.double() + scale * noise, scale).to(values.dtype)

    def blocks(self, samples: Samples, keys: Tensor, batch_size: int, steps: IntArray) -> Iterator[Block]:
        """Return mini-batches in which each row is with probability ``batch_size / n``, or 1 where that is more.

        The weight of a row is one over the expected size. Clients come sorted by decreasing ``steps``.
        """
        first = 0
        while first < int(steps.max(initial=0)):
            active = int((steps > first).sum())
            stop = min(int(steps[active - 1]), first + _POISSON_STEPS)
            yield _poisson_block(samples, rng.key(keys[:active], "poisson", 0), batch_size, first, stop)
            first = stop


def _poisson_block(samples: Samples, keys: Tensor, batch_size: int, first: int, stop: int) -> Block:
    counts = samples.counts[: len(keys)]
    each = rng.key(keys.unsqueeze(0), torch.arange(first, stop, device=keys.device).unsqueeze(1))
    draws = rng.uniform(each, int(counts.max()), torch.float64).cpu().numpy()
    share = np.minimum(1, batch_size / counts)
    drawn = (draws < share[:, None]) & (np.arange(draws.shape[2]) < counts[:, None])
    width = max(1, int(drawn.sum(2).max()))
    order = np.argsort(~drawn, axis=2, kind="stable")[:, :, :width]
    valid = np.take_along_axis(drawn, order, 2)
    index = torch.from_numpy(samples.starts[: len(keys), None] + np.where(valid, order, 0)).to(samples.x.device)
    unit = torch.from_numpy(np.broadcast_to(1 / (share * counts), each.shape).copy()).to(samples.x)
    weight = torch.from_numpy(valid).to(samples.x) * unit.unsqueeze(2)
    flat = index.flatten()
    x = samples.x.index_select(0, flat).view(*index.shape, *samples.x.shape[1:])
    y = samples.y.index_select(0, flat).view(*index.shape, *samples.y.shape[1:])
    return Block(first, x, y, index, valid, weight, rng.key(each, "step"), unit)


def _row_gradients(loss: Loss, step: Step, params: Parameters, of: slice) -> tuple[Tensor, Parameters]:
    """Loss ``(clients, rows)`` and gradients ``(clients, rows, ...)`` of the rows ``of``, each alone."""
    rows = of.stop - of.start
    clients = step.weight.shape[0]

    def apart(tensor: Tensor) -> Tensor:
        return tensor.detach().unsqueeze(1).expand(clients, rows, *tensor.shape[1:]).flatten(0, 1)

    leaves = {name: apart(tensor).requires_grad_(True) for name, tensor in params.items()}
    fixed = {name: apart(tensor) for name, tensor in step.params.items() if name not in params}
    losses = loss(_alone(step, fixed | leaves, of))
    ones = torch.ones_like(losses)
    grads = torch.autograd.grad(losses, list(leaves.values()), ones, materialize_grads=True)
    back = {name: g.view(clients, rows, *g.shape[1:]) for name, g in zip(leaves, grads, strict=True)}
    return losses.detach().view(clients, rows), back


def _alone(step: Step, params: Parameters, of: slice) -> Step:
    """The rows ``of`` of each client's mini-batch as clients of their own, with a mini-batch of one."""
    block, at, rows = step.block, step.at, of.stop - of.start
    position = torch.arange(of.start, of.stop, device=step.x.device)
    one = partial(_as_clients, of=of)
    alone = Block(
        block.first_step + at,
        one(step.x),
        one(step.y),
        one(block.index[at]),
        np.ones((1, len(step.rows) * rows, 1), dtype=np.bool_),
        torch.ones_like(one(step.weight)),
        rng.key(step.keys.unsqueeze(1), "row", position).flatten().unsqueeze(0),
    )
    own = np.repeat(step.rows, rows)
    return replace(step, block=alone, at=0, width=1, params=params, rows=own, augment=None, _outputs={})


def _as_clients(tensor: Tensor, of: slice) -> Tensor:
    """``(clients, batch, ...)`` as one step of clients with one row each, ``(1, clients * rows, 1, ...)``."""
    return tensor[:, of].flatten(0, 1).unsqueeze(0).unsqueeze(2)


def check_rows_apart(chain: Chain, samples: Samples, task: str, per_domain: frozenset[str], balanced: bool) -> None:
    """Refuse what makes a gradient depend on several rows at once.

    Raises:
        PerfedError: batch-norm, recurrent layers, survival, parameters per domain, weights of samples or balanced
            classes.
    """
    kinds = {type(layer) for layer in chain.modules()}
    refused = {
        "batch-norm, whose statistics are of many rows": any(issubclass(kind, BATCH_NORM) for kind in kinds),
        "recurrent layers, which do not give the gradient of a row": any(issubclass(k, nn.RNNBase) for k in kinds),
        "the loss of survival, whose risk sets are of many rows": task == "survival",
        "parameters per domain, whose steps say which domains there are": bool(per_domain),
        "weights of samples": samples.weight is not None,
        "class_weights = 'balanced', which counts all rows": balanced,
    }
    for what, found in refused.items():
        if found:
            raise PerfedError(f"privacy.unit = 'sample' clips the gradient of each row alone, and refuses {what}")
