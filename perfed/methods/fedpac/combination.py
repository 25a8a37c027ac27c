"""The weights with which FedPAC combines the clients' heads: feature statistics, matrices D, and one QP per client.

Names follow the paper (Xu, Tong, Huang, ICLR 2023): ``P(y)`` class shares, ``mu`` class means, ``h = P(y) mu``, ``V``
the variance term, ``Lambda`` the second moment of the features, ``alpha`` the weights. All computations are in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfed.errors import PerfedError
from perfed.maths.simplex import FloatArray, QPFailed, simplex_qp

# V is at least this fraction of E|f|^2, because without variance the weights of equal clients would be undetermined.
FLOOR = 1e-10
# Number of rows that are converted to float64 at a time.
ROWS = 16384


class Statistics(NamedTuple):
    """The feature statistics that FedPAC's clients report, float64.

    Attributes:
        priors: ``(m, C)``, shares P(y) of the classes.
        means: ``(m, C, d)``, ``h(i, y) = P_i(y) mu_iy``.
        variances: ``(m,)``, ``V_i``, not divided by the number of samples.
        second_moments: ``(m, d, d)``, ``E_i[f f^T]``, or None if not requested.
    """

    priors: Tensor
    means: Tensor
    variances: Tensor
    second_moments: Tensor | None


class Combination(NamedTuple):
    """The weights of the heads in the combined head of each client.

    Attributes:
        weights: ``(m, m)``; row i has ``alpha_i*``, the weights of client i's combined head.
        failed: ``(m,)`` boolean, clients whose problem was not solved; their rows are those of the identity.
    """

    weights: Tensor
    failed: Tensor


def client_statistics(
    features: Tensor,
    labels: Tensor,
    clients: Tensor,
    num_clients: int,
    num_classes: int,
    *,
    second_moments: bool = False,
) -> Statistics:
    """Return class shares, weighted class means and variance term of every client, from the samples of all clients.

    ``V = sum_y P(y) tr E[f f^T | y] - |P(y) mu_y|^2`` is computed as ``sum_y P(y) E[|f - mu_y|^2 | y] + P(y) (1 - P(y))
    |mu_y|^2``, which equals it but avoids cancellation: constant features of one class give exactly zero.

    Args:
        features: ``(total, d)``, of any floating type.
        labels: ``(total,)`` integers in ``[0, num_classes)``.
        clients: ``(total,)`` integers in ``[0, num_clients)``, the client of each sample, in any order.
        num_clients: m.
        num_classes: C.
        second_moments: whether to compute second moments, which only :func:`combination_weights_general` needs.

    Returns:
        Statistics, which are zero for absent classes and clients without samples.

    Raises:
        PerfedError: shapes do not agree, or labels or clients are out of range.

    Source: Xu, Tong, Huang 2023, Eq. 34 (h), Eq. 44 (V, from Eq. 35), Eq. 36-39 (empirical versions).

    Example:
        >>> f = torch.tensor([[1.0], [3.0], [2.0], [2.0]])
        >>> statistics = client_statistics(f, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]), 2, 2)
        >>> statistics.means.squeeze(2).tolist(), statistics.variances.tolist()
        ([[2.0, 0.0], [1.0, 1.0]], [1.0, 2.0])
    """
    _check_samples(features, labels, clients, num_clients, num_classes)
    cells = clients.long() * num_classes + labels.long()
    counts = torch.bincount(cells, minlength=num_clients * num_classes)
    sums = features.new_zeros(len(counts), features.shape[1], dtype=torch.float64)
    for x, cell in zip(torch.split(features, ROWS), torch.split(cells, ROWS), strict=True):
        sums.index_add_(0, cell, x.double())
    class_means = sums / counts.clamp_min(1)[:, None]
    spread = sums.new_zeros(len(counts))
    for x, cell in zip(torch.split(features, ROWS), torch.split(cells, ROWS), strict=True):
        spread.index_add_(0, cell, (x.double() - class_means[cell]).square().sum(1))
    counts = counts.view(num_clients, num_classes)
    sizes = counts.sum(1).clamp_min(1).double()
    priors = counts / sizes[:, None]
    between = priors * (1 - priors) * class_means.square().sum(1).view_as(priors)
    return Statistics(
        priors=priors,
        means=priors[:, :, None] * class_means.view(num_clients, num_classes, -1),
        variances=spread.view_as(priors).sum(1) / sizes + between.sum(1),
        second_moments=_compute_second_moments(features, clients, sizes) if second_moments else None,
    )


def _compute_second_moments(features: Tensor, clients: Tensor, sizes: Tensor) -> Tensor:
    rows = torch.argsort(clients, stable=True)
    counts = torch.bincount(clients, minlength=len(sizes)).tolist()
    products = [x.T @ x for x in (features[part].double() for part in torch.split(rows, counts))]
    return torch.stack(products) / sizes[:, None, None]


def _check_samples(features: Tensor, labels: Tensor, clients: Tensor, num_clients: int, num_classes: int) -> None:
    if features.ndim != 2:
        raise PerfedError(f"features must be of shape (samples, d), not {tuple(features.shape)}")
    for name, index, size in (("labels", labels, num_classes), ("clients", clients, num_clients)):
        if index.shape != features.shape[:1]:
            raise PerfedError(f"{name} must be of shape ({len(features)},), not {tuple(index.shape)}")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise PerfedError(f"{name} must be in [0, {size}), but range from {int(index.min())} to {int(index.max())}")


def combination_weights(means: Tensor, variances: Tensor, counts: Tensor, *, cut: float = 0.0) -> Combination:
    """Return the optimal weights of all heads for every client, with the identity as second moment of the features.

    Row i minimises ``sum_j a_j^2 V_j / n_j + sum_jj' a_j a_j' D_jj'`` over the simplex, with ``D_jj' = sum_y <h(i,y) -
    h(j,y), h(i,y) - h(j',y)> = G_ii - G_ij - G_ij' + G_jj'`` for the Gram matrix G of the h, which is computed once for
    all clients, after subtracting the mean of h over clients. V is at least 1e-10 (V + |h|^2).

    A client whose statistics are not finite, or that has no samples, has failed, and has weight 0 for the others.

    Args:
        means: ``(m, C, d)``, ``h(i, y) = P_i(y) mu_iy``.
        variances: ``(m,)``, V, not divided by n.
        counts: ``(m,)``, numbers of samples n.
        cut: weights below it become zero, and the remaining ones are scaled to sum to one (the official code: 1e-3);
            the largest weight of a row is never cut.

    Returns:
        Weights and the mask of failed clients, on the device of ``means``.

    Raises:
        PerfedError: shapes do not agree, a count is negative, or the cut is outside [0, 1).

    Source: Xu, Tong, Huang 2023, Eq. 11 with Eq. 43-46 (appendix A.5).

    Example:
        >>> h = torch.tensor([[[1.0]], [[1.0]], [[9.0]]])
        >>> combination = combination_weights(h, torch.ones(3), torch.tensor([300, 100, 100]))
        >>> combination.weights[0].numpy().round(3).tolist()
        [0.75, 0.25, 0.0]
    """
    _check_arguments(means, counts, cut, variances=(variances, means.shape[:1]))
    h, v, n = (x.detach().double().cpu() for x in (means.flatten(1), variances, counts))
    usable = h.isfinite().all(1) & v.isfinite() & n.isfinite() & (n > 0)
    gram = centred_gram(h[usable]).numpy()
    noise = (_apply_floor(v, h.square().sum(1)) / n)[usable].numpy()
    rows = [_solve_row(_compute_differences(gram, i), noise) for i in range(len(gram))]
    return _collect_rows(rows, usable, cut, means.device)


def combination_weights_general(
    means: Tensor,
    second_moments: Tensor,
    counts: Tensor,
    *,
    covariances: Tensor | None = None,
    ridge: float = 1e-3,
    cut: float = 0.0,
) -> Combination:
    """Return the weights with inner products by the inverse second moment of the target client's features.

    This is the paper's general form, from which :func:`combination_weights` follows with the identity. For the row of
    client i, with ``Lambda = E_i[f f^T]`` (the paper assumes E[f] = 0, so this is the covariance):

    * Eq. 33: ``D_jj' = tr(Lambda^-1 sum_y (h(i,y) - h(j,y)) (h(i,y) - h(j',y))^T)``;
    * Eq. 35: ``V_j = sum_y P_j(y) tr(Lambda^-1 E_j[f f^T | y]) - P_j(y)^2 |Lambda^-1/2 mu_jy|^2``, which is
      ``tr(Lambda^-1 E_j[f f^T]) - sum_y |Lambda^-1/2 h(j,y)|^2``: so that clients need not send a matrix per class.

    Lambda is singular if features are constantly zero or a client has fewer than d samples; ``ridge tr(Lambda) / d`` is
    added to its diagonal. Cost: ``m^2 C d (m + d)``, m times that of :func:`combination_weights`.

    Args:
        means: ``(m, C, d)``, h.
        second_moments: ``(m, d, d)``, ``E_j[f f^T]`` of every client.
        counts: ``(m,)``.
        covariances: ``(m, d, d)``, Lambda of every target; None: ``second_moments``. The identity gives
            :func:`combination_weights`.
        ridge: at least 0.
        cut: as in :func:`combination_weights`.

    Returns:
        As :func:`combination_weights`. A client whose Lambda with its ridge is not positive definite has failed too,
        but other clients can still use its head.

    Raises:
        PerfedError: shapes do not agree, a count or the ridge is negative, or the cut is outside [0, 1).

    Source: Xu, Tong, Huang 2023, Theorem 1, appendix A.2, Eq. 33 and 35, with the estimates of A.3, Eq. 36-39.
    """
    square = (len(means), means.shape[-1], means.shape[-1])
    targets = second_moments if covariances is None else covariances
    _check_arguments(means, counts, cut, second_moments=(second_moments, square), covariances=(targets, square))
    if not ridge >= 0:
        raise PerfedError(f"ridge must be at least 0, not {ridge}")
    h, moments, targets, n = (x.detach().double().cpu() for x in (means, second_moments, targets, counts))
    usable = h.flatten(1).isfinite().all(1) & moments.flatten(1).isfinite().all(1) & n.isfinite() & (n > 0)
    h, moments, n = h[usable], moments[usable], n[usable]
    rows = [_solve_general_row(h, moments, n, i, target, ridge) for i, target in enumerate(targets[usable])]
    return _collect_rows(rows, usable, cut, means.device)


def _solve_general_row(
    h: Tensor, moments: Tensor, n: Tensor, i: int, target: Tensor, ridge: float
) -> FloatArray | None:
    d = h.shape[2]
    loading = ridge * target.diagonal().sum() / d * torch.eye(d, dtype=torch.float64)
    factor, info = torch.linalg.cholesky_ex(target + loading)
    if int(info) or not factor.isfinite().all():
        return None

    def whiten(x: Tensor) -> Tensor:
        y: Tensor = torch.linalg.solve_triangular(factor, x.reshape(-1, d).T, upper=False)
        return y.T.reshape(len(x), -1)

    differences = whiten(h - h[i])
    inverse = torch.cholesky_inverse(factor)
    size = whiten(h).square().sum(1)
    v = _apply_floor(moments.flatten(1) @ inverse.flatten() - size, size)
    return _solve_row((differences @ differences.T).numpy(), (v / n).numpy())


def centred_gram(h: Tensor) -> Tensor:
    """Return the Gram matrix ``(m, m)`` of the rows of ``(m, k)`` after subtracting their mean.

    D does not depend on the mean.
    """
    centred = h - h.mean(0)
    gram: Tensor = centred @ centred.T
    return gram


def _compute_differences(gram: FloatArray, i: int) -> FloatArray:
    """Return D of client i."""
    differences: FloatArray = gram[i, i] - gram[i][:, None] - gram[i] + gram
    return differences


def _apply_floor(v: Tensor, size: Tensor) -> Tensor:
    # V + |h|^2 = E|f|^2 sets the scale; the second bound is for a client whose features are all zero.
    return v.maximum(FLOOR * (v.clamp_min(0) + size)).clamp_min(1e-100)


def _solve_row(differences: FloatArray, noise: FloatArray) -> FloatArray | None:
    """Return the weights for one client from its D and V / n; None if the problem is not solved."""
    try:
        return simplex_qp(differences + np.diag(noise))
    except QPFailed:
        return None


def _collect_rows(rows: list[FloatArray | None], usable: Tensor, cut: float, device: torch.device) -> Combination:
    """Return the combination of all clients from the rows of the usable ones."""
    weights = torch.eye(len(usable), dtype=torch.float64)
    failed = ~usable
    columns = usable.nonzero().squeeze(1)
    for client, row in zip(columns.tolist(), rows, strict=True):
        if row is None:
            failed[client] = True
            continue
        cut_row = np.where(row < min(cut, row.max()), 0.0, row)
        weights[client] = 0.0
        weights[client, columns] = torch.from_numpy(cut_row / cut_row.sum())
    return Combination(weights.to(device), failed.to(device))


def _check_arguments(means: Tensor, counts: Tensor, cut: float, **arrays: tuple[Tensor, Any]) -> None:
    if means.ndim != 3 or not len(means):
        raise PerfedError(f"means must be of shape (clients, classes, d), not {tuple(means.shape)}")
    for name, (x, shape) in {"counts": (counts, means.shape[:1]), **arrays}.items():
        if x.shape != shape:
            raise PerfedError(f"{name} must be of shape {tuple(shape)}, not {tuple(x.shape)}")
    if (counts < 0).any():
        raise PerfedError("counts must not be negative")
    if not 0 <= cut < 1:
        raise PerfedError(f"cut must be in [0, 1), not {cut}")
