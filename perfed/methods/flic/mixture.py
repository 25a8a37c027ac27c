"""FLIC with several Gaussians per class: which of a class's samples belong to which mode of its anchor.

The distance is that of mixtures of Gaussians, ``min_w sum w_ij W2^2(N_i, M_j)`` over couplings w of the proportions of
the samples' components N_i and of the anchor's modes M_j (Chen, Georgiou, Tannenbaum 2018, which FLIC's remark 2 names;
Delon, Desolneux 2020, proposition 4). Component j is the Gaussian fitted to the samples of mode j, and its proportion
their share. The anchor's proportions are free: it says where modes lie, and not how many samples of a client each has,
since a client may have none of a mode. Where modes have the same covariance, the best coupling then leaves every
component at its own mode, for the centre of samples that are nearest to a mode is nearest to it too: the distance is
``sum_j (n_j / n) W2^2(N_j, M_j)``. Learnt covariances may differ between the modes of a class: the same sum is then
what this coupling costs, an upper bound of the distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_ITERATIONS = 100


def nearest(modes: Tensor, z: Tensor) -> Tensor:
    """For every sample the mode whose mean is nearest.

    Args:
        modes: means of the modes that each sample may belong to, ``(samples, K, k)``.
        z: ``(samples, k)``.

    Returns:
        ``(samples,)`` int64.
    """
    return (z.unsqueeze(1) - modes).square().sum(2).argmin(1)


def clustered(modes: Tensor, z: Tensor) -> Tensor:
    """For every sample of one class the mode that it is to be aligned with, before there is any alignment.

    Samples then lie far from all modes, and nearly all of them would be nearest to the same one. Lloyd's algorithm
    divides them, from the modes' means moved and scaled to the samples' centre and spread; a cluster belongs to the
    mode that it began at. Samples that are all alike go to the mode nearest to them.

    Args:
        modes: means, ``(K, k)``.
        z: ``(samples, k)``.

    Returns:
        ``(samples,)`` int64.

    Source: Lloyd 1982, "Least squares quantization in PCM".

    Example:
        >>> modes, z = torch.tensor([[90.0], [91.0]]), torch.tensor([[0.0], [5.0], [0.1]])
        >>> clustered(modes, z).tolist()
        [0, 1, 0]
    """
    centre, middle = z.mean(0), modes.mean(0)
    spread, size = (z - centre).square().sum(1).mean(), (modes - middle).square().sum(1).mean()
    if spread <= (torch.finfo(z.dtype).eps * centre.abs().max()) ** 2 or size == 0:
        return nearest(modes.expand(len(z), -1, -1), z)
    means = centre + (modes - middle) * (spread / size).sqrt()
    found = nearest(means.expand(len(z), -1, -1), z)
    for _ in range(_MOST_ITERATIONS):
        sums = torch.zeros_like(means).index_add_(0, found, z)
        counts = found.bincount(minlength=len(means)).unsqueeze(1)
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
        last, found = found, nearest(means.expand(len(z), -1, -1), z)
        if torch.equal(found, last):
            break
    return found
