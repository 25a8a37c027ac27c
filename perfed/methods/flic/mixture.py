"""FLIC with several Gaussians per class: assigning the samples of a class to the modes of its anchor.

The distance is that of mixtures of Gaussians, ``min_w sum w_ij W2^2(N_i, M_j)`` over couplings w of the proportions of
the samples' components N_i and of the anchor's modes M_j (Chen, Georgiou, Tannenbaum 2018, which FLIC's remark 2 cites;
Delon, Desolneux 2020, proposition 4). Component j is the Gaussian fitted to the samples of mode j, and its proportion
is their share. The anchor's proportions are free: the anchor determines where modes lie, and not how many samples of a
client belong to each, since a client may have none. If all modes have the same covariance, the optimal coupling then
assigns every component to its own mode, because the centre of samples that are nearest to a mode is nearest to it too,
and the distance is ``sum_j (n_j / n) W2^2(N_j, M_j)``. Learnt covariances may differ between the modes of a class; the
same sum is then the cost of this coupling, an upper bound of the distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_ITERATIONS = 100


def find_nearest_modes(modes: Tensor, z: Tensor) -> Tensor:
    """Return, for every sample, the mode with the nearest mean.

    Args:
        modes: means of the candidate modes of each sample, ``(samples, K, k)``.
        z: ``(samples, k)``.

    Returns:
        ``(samples,)`` int64.
    """
    return (z.unsqueeze(1) - modes).square().sum(2).argmin(1)


def cluster_samples(modes: Tensor, z: Tensor) -> Tensor:
    """Return, for every sample of one class, the mode to align it with before any alignment.

    Samples are then far from all modes, and nearly all of them would be nearest to the same one. Lloyd's algorithm
    therefore clusters them. It starts at the modes' means, shifted and scaled to the samples' centre and spread, and a
    cluster belongs to the mode at which it started. If all samples are equal, they belong to the mode nearest to them.

    Args:
        modes: means, ``(K, k)``.
        z: ``(samples, k)``.

    Returns:
        ``(samples,)`` int64.

    Source: Lloyd 1982, "Least squares quantization in PCM".

    Example:
        >>> modes, z = torch.tensor([[90.0], [91.0]]), torch.tensor([[0.0], [5.0], [0.1]])
        >>> cluster_samples(modes, z).tolist()
        [0, 1, 0]
    """
    centre, middle = z.mean(0), modes.mean(0)
    spread, size = (z - centre).square().sum(1).mean(), (modes - middle).square().sum(1).mean()
    if spread <= (torch.finfo(z.dtype).eps * centre.abs().max()) ** 2 or size == 0:
        return find_nearest_modes(modes.expand(len(z), -1, -1), z)
    means = centre + (modes - middle) * (spread / size).sqrt()
    assignment = find_nearest_modes(means.expand(len(z), -1, -1), z)
    for _ in range(_MOST_ITERATIONS):
        sums = torch.zeros_like(means).index_add_(0, assignment, z)
        counts = assignment.bincount(minlength=len(means)).unsqueeze(1)
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
        previous, assignment = assignment, find_nearest_modes(means.expand(len(z), -1, -1), z)
        if torch.equal(assignment, previous):
            break
    return assignment
