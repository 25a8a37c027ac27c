"""Distances between distributions in closed form, batched and differentiable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from perfed.errors import PerfedError

# Matrices are padded to one of these sizes, so that few batched decompositions do with little padding.
_SIZES = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)


def singular_value_cutoff(dtype: torch.dtype) -> float:
    """Return the fraction of the largest singular value below which a singular value has no gradient.

    It is 1e-3 in float32 and 1.5e-7 in float64. Singular values are computed as roots of eigenvalues of a Gram matrix,
    whose rounding is a few eps of the largest eigenvalue (measured: at most 5 eps without full rank, up to 2000 rows
    and 500 columns), so that a smaller direction is noise. The gradient's part of a singular value that is t times the
    largest has a relative error near eps / t^2, and leaving the part out has the relative error 1. ``10 sqrt(eps)``
    corresponds to 100 eps in the eigenvalues and an error of 1 %. In float32 that would be 3e-3; 1e-3, which is 8 eps
    in the eigenvalues, keeps everything that can be distinguished from noise.
    """
    return min(1e-3, 10 * math.sqrt(torch.finfo(dtype).eps))


def centred_nuclear_norm(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the nuclear norm of matrices whose rows sum to zero, with its gradient in closed form.

    The square roots of the eigenvalues of the smaller Gram matrix give the norm, and the polar factor the gradient;
    singular values below :func:`singular_value_cutoff` of the largest are left out of the gradient, where they only
    amplify rounding.

    Args:
        x: ``(matrices, rows, k)``; the rows of matrix p beyond ``counts[p]`` are zero.
        counts: the number of real rows of each matrix, in decreasing order.

    Returns:
        ``(matrices,)``.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
        >>> round(float(centred_nuclear_norm(x, [2])), 4)
        1.4142
    """
    value: Tensor = _NuclearNorm.apply(x, tuple(counts))  # type: ignore[no-untyped-call]
    return value


def refuse_second_derivative() -> None:
    """Raise ``PerfedError`` in a backward pass that is itself to be differentiated, which treats the gradient as
    constant.
    """
    if torch.is_grad_enabled():
        raise PerfedError(
            "the distance between Gaussians has no second derivative: with it, hf-maml's variant 'exact' is impossible"
        )


class _NuclearNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        value = x.new_zeros(len(counts))
        polar = torch.zeros_like(x)
        edges = _group_by_size(counts, x.shape[2])
        gram: Tensor | None = None
        for (first, size), (stop, _) in pairwise(edges):
            part = x[first:stop, : min(size, x.shape[1])]
            if size <= 1:
                continue
            if size == 2:
                norm = part.square().sum((1, 2)).sqrt()
                value[first:stop] = norm
                polar[first:stop, :2] = part / norm.clamp_min(torch.finfo(x.dtype).tiny)[:, None, None]
            elif size > x.shape[2]:
                value[first:stop], root = inverse_root(part.transpose(1, 2) @ part, None)
                polar[first:stop, : part.shape[1]] = part @ root
            else:
                if gram is None:
                    small = x[first:]
                    gram, offset = small @ small.transpose(1, 2), first
                inner = gram[first - offset : stop - offset, : part.shape[1], : part.shape[1]]
                real = torch.tensor(counts[first:stop], device=x.device)
                value[first:stop], root = inverse_root(inner, real, centred=True)
                polar[first:stop, : part.shape[1]] = root @ part
        ctx.save_for_backward(polar)
        return value

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        (polar,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0][:, None, None] * polar, None


def _group_by_size(counts: Sequence[int], k: int) -> list[tuple[int, int]]:
    """Return runs of matrices that are treated together, as ``(first matrix, padded size)``, and a closing entry."""
    edges: list[tuple[int, int]] = []
    for index, count in enumerate(counts):
        if count > k:
            size = counts[0]
        elif count <= 2:
            size = count
        else:
            size = next((s for s in _SIZES if s >= count), count)
            size = min(size, k) if size > k else size
        if not edges or edges[-1][1] != size:
            edges.append((index, size))
    return [*edges, (len(counts), 0)]


def inverse_root(gram: Tensor, counts: Tensor | None, centred: bool = False) -> tuple[Tensor, Tensor]:
    """Return the trace and the pseudo-inverse of ``G^(1/2)`` for positive semi-definite G ``(p, s, s)``.

    Args:
        gram: G.
        counts: the number of real rows of each matrix; ``None`` for all. The padding is given a diagonal above all
            eigenvalues, which decouples it.
        centred: whether one eigenvalue is zero because rows sum to zero; it is left out.
    """
    if counts is not None:
        position = torch.arange(gram.shape[1], device=gram.device)
        padding = position >= counts[:, None]
        trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
        gram = gram + torch.diag_embed(padding * (2 * trace + torch.finfo(gram.dtype).tiny))
    values, vectors = torch.linalg.eigh(gram)
    # These values are zero up to rounding, which the square root would amplify.
    values.masked_fill_(values <= 4 * torch.finfo(gram.dtype).eps * values[:, -1:], 0)
    if counts is not None:
        values.masked_fill_(padding, 0)
    if centred:
        values[:, 0] = 0
    roots = values.sqrt_()
    floor = (singular_value_cutoff(gram.dtype) * roots.amax(1, keepdim=True)).clamp_min_(torch.finfo(gram.dtype).tiny)
    inverse = roots.reciprocal().masked_fill_(roots <= floor, 0)
    return roots.sum(1), torch.bmm(vectors * inverse.unsqueeze(1), vectors.transpose(1, 2))


def sample_w2(x: Tensor, y: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the squared 2-Wasserstein distance between the Gaussians fitted to two equally large sets of samples.

    The program of FLIC's authors estimates the distance to an anchor in this way, with y sampled from the anchor.

    Args:
        x, y: ``(sets, rows, k)``; rows beyond ``counts`` are ignored. Gradients flow to x and to the mean of y.
        counts: the number of samples in each set, in decreasing order.

    Returns:
        ``(sets,)``.
    """
    cx, mx, sx, n = compute_moments(x, counts)
    cy, my, sy, _ = compute_moments(y, counts)
    cy, sy = cy.detach(), sy.detach()
    # tr (Sx^(1/2) Sy Sx^(1/2))^(1/2) is the nuclear norm of Cx Cy^T / (n - 1), which no pairing of rows changes.
    cross = centred_nuclear_norm(cx @ cy.transpose(1, 2), counts)
    denominator = (n - 1).clamp_min(1)
    return (mx - my).square().sum(1) + (sx + sy - 2 * cross) / denominator


def compute_moments(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return centred rows (zero beyond the counts), means, sums of squares of the centred rows, and the counts."""
    n = torch.tensor(counts, dtype=x.dtype, device=x.device)
    valid = (torch.arange(x.shape[1], device=x.device) < n[:, None]).to(x.dtype)[:, :, None]
    x = x * valid
    mean = x.sum(1) / n[:, None]
    centred = (x - mean[:, None]) * valid
    # Identical rows differ by rounding only, which has no meaningful direction.
    floor = mean.square().sum(1) * n * (4 * torch.finfo(x.dtype).eps) ** 2
    centred = centred * (centred.square().sum((1, 2)) > floor)[:, None, None]
    return centred, mean, centred.square().sum((1, 2)), n


def mean_kernel(x: Tensor, weight: Tensor, gammas: Sequence[float]) -> Tensor:
    """Return ``sum_ij w_i w_j k(x_i, x_j)``, k the sum of the Gaussian kernels ``exp(-gamma |x - y|^2)`` over
    ``gammas``.

    With weights p of one set's samples and -q of another's, both of sum 1, it is the squared maximum mean discrepancy
    between the two (Gretton et al. 2012, "A Kernel Two-Sample Test", eq. 5).

    Args:
        x: ``(sets, rows, k)``.
        weight: ``(sets, rows)``; 0 for padding.
        gammas: for each kernel, one over twice its variance.

    Returns:
        ``(sets,)``.

    Example:
        >>> float(mean_kernel(torch.tensor([[[0.0], [3.0]]]), torch.tensor([[1.0, -1.0]]), [100.0]))  # two points
        2.0
    """
    gaps = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = torch.stack([(-gamma * gaps).exp() for gamma in gammas]).sum(0)
    return torch.einsum("sij,si,sj->s", kernel, weight, weight)


def compute_cka(first: Tensor, second: Tensor) -> Tensor:
    """Return the centred kernel alignment ``<HKH, HLH> / (|HKH| |HLH|)`` of Gram matrices, from 0 to 1.

    It is 0 for a constant Gram matrix.

    Args:
        first, second: K and L, ``(..., m, m)``, of the same m samples.

    Returns:
        ``(...)``.

    Source: Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", section 3.

    Example:
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> float(compute_cka(k, 3 * k))
        1.0
    """
    centred_first, centred_second = _centre_gram(first), _centre_gram(second)
    norms = centred_first.flatten(-2).norm(dim=-1) * centred_second.flatten(-2).norm(dim=-1)
    sizes = first.detach().flatten(-2).norm(dim=-1) * second.detach().flatten(-2).norm(dim=-1)
    # Constant features leave nothing but rounding, whose gradient would be arbitrary.
    floor = torch.finfo(first.dtype).eps * sizes + torch.finfo(first.dtype).tiny ** 0.5
    aligned = (centred_first * centred_second).sum((-2, -1)) / norms.clamp_min(floor)
    return torch.where(norms > floor, aligned, torch.zeros_like(aligned))


def _centre_gram(gram: Tensor) -> Tensor:
    return gram - gram.mean(-1, keepdim=True) - gram.mean(-2, keepdim=True) + gram.mean((-2, -1), keepdim=True)
