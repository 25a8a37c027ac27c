"""Training with differential privacy of rows: gradients clipped row by row, and noisy statistics of rows.

Every gradient of local training is computed by :meth:`PrivateTraining.compute_gradients`, also that of personal
parameters: parameters fitted without noise on the same rows would carry a row into the gradients of all others.
Neighbouring data sets differ in one row of one client, which contributes nothing in one of them; the number of rows of
a client is the same in both.
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
from perfed.training.per_layer import sum_clipped_by_layer
from perfed.training.step import Loss, Step

_ROWS_BYTES = 16 << 20
_POISSON_STEPS = 64


class ReleaseCounter:
    """A counter of the releases of one client in one exchange: Gaussian mechanisms of its rows with independent noise.

    A fit counts as often as the row that is in most of its gradients, so that a pass over the rows counts once for any
    number of mini-batches. The releases of several fits are added.

    Attributes:
        counts: names of the released numbers of rows, whose noise a run draws only once.

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
        """Return the number of releases so far, without those of :attr:`counts`."""
        return self._finished + int(self._gradients_by_row.max(initial=0))

    def add(self) -> None:
        """Count one release that may contain every row."""
        self._finished += 1

    def begin_fit(self, rows: int) -> None:
        """Start counting a fit on ``rows`` rows, after adding the releases of the previous fit."""
        self._finished = self.releases
        self._gradients_by_row = np.zeros(rows, dtype=np.int64)

    def add_batch(self, rows: IntArray) -> None:
        """Count a gradient that is a sum over ``rows``, each of which occurs once."""
        self._gradients_by_row[rows] += 1


@dataclass(frozen=True)
class PrivateTraining:
    """Settings and state of differentially private training of rows (DP-SGD; Abadi et al. 2016, Algorithm 1).

    Attributes:
        clip: C, the largest norm of the contribution of a row to a gradient.
        noise: z; the sum of the clipped gradients of a step gets noise of standard deviation ``z C``.
        rows: R, the largest norm of a row in sums of rows.
        poisson: whether mini-batches are Poisson samples, instead of a partition of the rows in each pass.
        source: the source of the noise; with a secret if others know the seed of the run.
        noises: z of clients by their number of rows; all others have ``noise``.
        client_noise: z of the clients of a cohort, ``(n,)``, in its order.
        counter: counts the releases of a single client; ``None`` without counting.
    """

    clip: float
    noise: float
    rows: float = 1.0
    poisson: bool = False
    source: rng.Noise = rng.PLAIN
    noises: Mapping[int, float] = field(default_factory=dict)
    client_noise: Tensor | None = None
    counter: ReleaseCounter | None = None

    def for_cohort(self, counts: Tensor, source: rng.Noise, counter: ReleaseCounter | None = None) -> PrivateTraining:
        """Return the settings for a cohort whose clients have ``counts`` ``(n,)`` rows."""
        client_noise = torch.tensor([self.noises.get(int(n), self.noise) for n in counts]) if self.noises else None
        return replace(self, source=source, client_noise=client_noise, counter=counter)

    def _broadcast_noise(self, like: Tensor, positions: IntArray | None = None) -> Tensor | float:
        """Return z of each client, or of those at ``positions``, with as many axes as ``like`` ``(clients, ...)``."""
        if self.client_noise is None:
            return self.noise
        client_noise = self.client_noise if positions is None else self.client_noise[torch.from_numpy(positions)]
        return client_noise.to(like).view(-1, *[1] * (like.ndim - 1))

    def compute_gradients(self, loss: Loss, step: Step, params: Parameters, count: int) -> tuple[Tensor, Parameters]:
        """Return losses ``(clients,)`` and the noisy means of the rows' clipped gradients by ``params``.

        The mean is ``w (sum_b g_b min(1, C / |g_b|) + z C N(0, 1))`` with w = 1 / size of a full mini-batch, also for a
        smaller last one, whose mean would otherwise have more noise. The norm is over all trained parameters together,
        and g_b is the gradient of the loss of row b, which counts as zero if it is not finite. Noise depends on the
        random key of the step and on ``count``, the index of the gradient within the step.

        Raises:
            PerfedError: if a layer or a loss does not treat rows separately.
        """
        if self.counter is not None:
            valid = step.block.valid[step.at]
            self.counter.add_batch(step.block.index[step.at].cpu().numpy()[valid])
        clipped = sum_clipped_by_layer(loss, step, params, self.clip)
        losses, sums = self._sum_clipped_by_row(loss, step, params) if clipped is None else clipped
        sizes = [tensor[0].numel() for tensor in sums.values()]
        key = rng.key(step.keys, "privacy", 0, count)
        weight = step.weight.amax(1)
        unit = weight if step.block.unit is None else step.block.unit[step.at]
        step_scale = torch.where(weight > 0, unit / weight, 1)  # a smaller last mini-batch takes a smaller step
        scale = self._broadcast_noise(unit, step.rows) * self.clip * unit  # also for an empty mini-batch
        noise = self.source.draw(key, sum(sizes), self._noise_dtype(step.weight)).split(sizes, 1)

        def add_noise(tensor: Tensor, noise_values: Tensor) -> Tensor:
            shape = (-1, *[1] * (tensor.ndim - 1))
            return self._add_noise(tensor * step_scale.view(shape), noise_values.view(tensor.shape), scale.view(shape))

        noisy = {name: add_noise(sums[name], values) for name, values in zip(sums, noise, strict=True)}
        return losses, noisy

    def _sum_clipped_by_row(self, loss: Loss, step: Step, params: Parameters) -> tuple[Tensor, Parameters]:
        """Return losses and sums of clipped gradients for any loss, with each row as a separate mini-batch."""
        numbers = sum(tensor[0].numel() for tensor in step.params.values()) * step.weight.element_size()
        rows = max(1, _ROWS_BYTES // (numbers * step.weight.shape[0]))
        losses = step.weight.new_zeros(step.weight.shape[0])
        sums = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        for first in range(0, step.width, rows):
            chunk = slice(first, min(first + rows, step.width))
            row_losses, grads = _compute_row_gradients(loss, step, params, chunk)
            squares = sum((g.flatten(2).square().sum(2) for g in grads.values()), torch.zeros_like(row_losses))
            overflowed = ~(torch.isfinite(squares) & torch.isfinite(row_losses))
            factor = ((self.clip / squares.sqrt()).clamp(max=1) * step.weight[:, chunk]).masked_fill(overflowed, 0)
            losses = losses + (row_losses.masked_fill(overflowed, 0) * step.weight[:, chunk]).sum(1)
            for name, g in grads.items():
                finite = g.flatten(2).masked_fill(overflowed.unsqueeze(2), 0)
                sums[name] += torch.bmm(factor.unsqueeze(1), finite).view_as(sums[name])
        return losses, sums

    def noisy_counts(self, counts: Tensor, seed: int, ids: Sequence[str], purpose: str) -> Tensor:
        """Return ``counts`` ``(n, ...)`` of rows, each in one count, plus noise that a run draws once.

        Later calls return the same values, so that a run spends privacy for them once.
        """
        if self.counter is not None:
            self.counter.counts.add(purpose)
        keys = rng.key(seed, "privacy", 0, purpose, rng.encode_texts(ids))
        noise = self._draw_noise(counts, keys, once=True)
        return self._add_noise(counts, noise, self._broadcast_noise(counts)).clamp_min(0)

    def noisy_sums(self, rows: Tensor, place: Tensor, places: int, keys: Tensor) -> Tensor:
        """Return noisy sums of ``rows`` ``(total, k)`` by ``place`` ``(total,)``, with noise ``z R``.

        Each row is clipped to the norm R; a row whose norm is not finite is left out.

        Args:
            rows: the rows of all clients.
            place: the position of each row's sum among the sums of all clients.
            places: the number of sums of each client.
            keys: int64 ``(clients,)``, different in each call.

        Returns:
            ``(clients, places, k)``; a row is in one of the sums.
        """
        if self.counter is not None:
            self.counter.add()
        norms = rows.norm(dim=1, keepdim=True)
        clipped = rows * (self.rows / norms.clamp_min(1e-12)).clamp(max=1)
        clipped = clipped.masked_fill(~torch.isfinite(norms), 0)
        sums = (
            rows.new_zeros(len(keys) * places, rows.shape[1]).index_add_(0, place, clipped).view(len(keys), places, -1)
        )
        noise = self._draw_noise(sums, rng.key(keys, "privacy", 0))
        return self._add_noise(sums, noise, self._broadcast_noise(sums) * self.rows)

    def _draw_noise(self, like: Tensor, keys: Tensor, *, once: bool = False) -> Tensor:
        noise = self.source.draw(keys.to(like.device), like[0].numel(), self._noise_dtype(like), once=once)
        return noise.view(like.shape)

    def _noise_dtype(self, like: Tensor) -> torch.dtype:
        """Return the type of the noise: float64 with a secret, to keep all bits of the noise."""
        return torch.float64 if self.source.secret else like.dtype

    def _add_noise(self, values: Tensor, noise: Tensor, scale: Tensor | float) -> Tensor:
        """Return ``values + scale * noise``; with a secret, rounded so that low bits do not reveal the values."""
        if not self.source.secret:
            return values + scale * noise
        scale = torch.as_tensor(scale, dtype=torch.float64, device=values.device)
        return rng.round_to_grid(values.double() + scale * noise, scale).to(values.dtype)

    def iterate_blocks(self, samples: Samples, keys: Tensor, batch_size: int, steps: IntArray) -> Iterator[Block]:
        """Yield mini-batches that contain each row with probability ``batch_size / n``, or 1 if that is greater.

        The weight of a row is one over the expected size. Clients are sorted by decreasing ``steps``.
        """
        first = 0
        while first < int(steps.max(initial=0)):
            active = int((steps > first).sum())
            stop = min(int(steps[active - 1]), first + _POISSON_STEPS)
            yield _build_poisson_block(samples, rng.key(keys[:active], "poisson", 0), batch_size, first, stop)
            first = stop


def _build_poisson_block(samples: Samples, keys: Tensor, batch_size: int, first: int, stop: int) -> Block:
    counts = samples.counts[: len(keys)]
    step_keys = rng.key(keys.unsqueeze(0), torch.arange(first, stop, device=keys.device).unsqueeze(1))
    draws = rng.uniform(step_keys, int(counts.max()), torch.float64).cpu().numpy()
    share = np.minimum(1, batch_size / counts)
    selected = (draws < share[:, None]) & (np.arange(draws.shape[2]) < counts[:, None])
    width = max(1, int(selected.sum(2).max()))
    order = np.argsort(~selected, axis=2, kind="stable")[:, :, :width]
    valid = np.take_along_axis(selected, order, 2)
    index = torch.from_numpy(samples.starts[: len(keys), None] + np.where(valid, order, 0)).to(samples.x.device)
    unit = torch.from_numpy(np.broadcast_to(1 / (share * counts), step_keys.shape).copy()).to(samples.x)
    weight = torch.from_numpy(valid).to(samples.x) * unit.unsqueeze(2)
    flat = index.flatten()
    x = samples.x.index_select(0, flat).view(*index.shape, *samples.x.shape[1:])
    y = samples.y.index_select(0, flat).view(*index.shape, *samples.y.shape[1:])
    return Block(first, x, y, index, valid, weight, rng.key(step_keys, "step"), unit)


def _compute_row_gradients(loss: Loss, step: Step, params: Parameters, chunk: slice) -> tuple[Tensor, Parameters]:
    """Return the loss ``(clients, rows)`` and gradients ``(clients, rows, ...)`` of each of the rows ``chunk``."""
    rows = chunk.stop - chunk.start
    clients = step.weight.shape[0]

    def repeat_for_rows(tensor: Tensor) -> Tensor:
        return tensor.detach().unsqueeze(1).expand(clients, rows, *tensor.shape[1:]).flatten(0, 1)

    leaves = {name: repeat_for_rows(tensor).requires_grad_(True) for name, tensor in params.items()}
    fixed = {name: repeat_for_rows(tensor) for name, tensor in step.params.items() if name not in params}
    losses = loss(_split_rows(step, fixed | leaves, chunk))
    ones = torch.ones_like(losses)
    grads = torch.autograd.grad(losses, list(leaves.values()), ones, materialize_grads=True)
    row_gradients = {name: g.view(clients, rows, *g.shape[1:]) for name, g in zip(leaves, grads, strict=True)}
    return losses.detach().view(clients, rows), row_gradients


def _split_rows(step: Step, params: Parameters, chunk: slice) -> Step:
    """Return a step in which the rows ``chunk`` of each client's mini-batch are separate clients with one row each."""
    block, index, rows = step.block, step.at, chunk.stop - chunk.start
    position = torch.arange(chunk.start, chunk.stop, device=step.x.device)
    to_clients = partial(_rows_to_clients, chunk=chunk)
    row_block = Block(
        block.first_step + index,
        to_clients(step.x),
        to_clients(step.y),
        to_clients(block.index[index]),
        np.ones((1, len(step.rows) * rows, 1), dtype=np.bool_),
        torch.ones_like(to_clients(step.weight)),
        rng.key(step.keys.unsqueeze(1), "row", position).flatten().unsqueeze(0),
    )
    client_rows = np.repeat(step.rows, rows)
    return replace(step, block=row_block, at=0, width=1, params=params, rows=client_rows, augment=None, _outputs={})


def _rows_to_clients(tensor: Tensor, chunk: slice) -> Tensor:
    """Return ``(clients, batch, ...)`` as one step of clients with one row each, ``(1, clients * rows, 1, ...)``."""
    return tensor[:, chunk].flatten(0, 1).unsqueeze(0).unsqueeze(2)


def check_rows_are_separate(
    chain: Chain, samples: Samples, task: str, per_domain: frozenset[str], balanced: bool
) -> None:
    """Check that the gradient of a row does not depend on other rows.

    Raises:
        PerfedError: for batch-norm, recurrent layers, survival, parameters per domain, weights of samples or balanced
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
    for reason, is_refused in refused.items():
        if is_refused:
            raise PerfedError(f"privacy.unit = 'sample' clips the gradient of each row alone, and refuses {reason}")
