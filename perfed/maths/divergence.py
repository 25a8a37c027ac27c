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


def cut(dtype: torch.dtype) -> float:
    """Singular values below this part of the largest have no gradient: 1e-3 in float32, 1.5e-7 in float64.

    They are roots of eigenvalues of a Gram matrix, whose rounding is a few eps of the largest eigenvalue (measured: at
    most 5 eps where the rank is not full, up to 2000 rows and 500 columns); a direction that has no more is noise.
    The gradient's part of a singular value that is t times the largest has an error near eps / t^2 of its size; without
    the part the error is the whole of it. ``10 sqrt(eps)`` is at 100 eps in the eigenvalues, where the error is 1 %. In
    float32 that would be 3e-3; 1e-3, 8 eps in the eigenvalues, keeps all that can be told from noise.
    """
    return min(1e-3, 10 * math.sqrt(torch.finfo(dtype).eps))


def centred_nuclear_norm(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Nuclear norm of matrices whose rows sum to zero, with its gradient in closed form.

    The square roots of the eigenvalues of the smaller Gram matrix give the norm, and the polar factor the gradient;
    singular values below :func:`cut` of the largest are left out of the gradient, where they only amplify rounding.

    Args:
        x: ``(matrices, rows, k)``; the rows of matrix p beyond ``counts[p]`` are zero.
        counts: real rows of each matrix, in decreasing order.

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
    """In a backward pass whose gradient is taken for constant: an error where it is to be differentiated again."""
    if torch.is_grad_enabled():
        raise PerfedError(
            "the distance between Gaussians has no second derivative: with it, hf-maml's variant 'exact' is impossible"
        )


class _NuclearNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        value = x.new_zeros(len(counts))
        polar = torch.zeros_like(x)
        edges = _edges(counts, x.shape[2])
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


def _edges(counts: Sequence[int], k: int) -> list[tuple[int, int]]:
    """Runs of matrices treated together: ``(first matrix, padded size)`` and a closing entry."""
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
    """Trace of G^(1/2), and the pseudo-inverse of G^(1/2), for positive semi-definite G ``(p, s, s)``.

    ``counts`` real rows of each (None: all): the padding is given a diagonal above all eigenvalues, which decouples it.
    ``centred``: one eigenvalue is zero because the rows sum to zero; it is left out.
    """
    if counts is not None:
        position = torch.arange(gram.shape[1], device=gram.device)
        padding = position >= counts[:, None]
        trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
        gram = gram + torch.diag_embed(padding * (2 * trace + torch.finfo(gram.dtype).tiny))
    values, vectors = torch.linalg.eigh(gram)
    # Zero but for rounding: the square root would make it large.
    values.masked_fill_(values <= 4 * torch.finfo(gram.dtype).eps * values[:, -1:], 0)
    if counts is not None:
        values.masked_fill_(padding, 0)
    if centred:
        values[:, 0] = 0
    roots = values.sqrt_()
    floor = (cut(gram.dtype) * roots.amax(1, keepdim=True)).clamp_min_(torch.finfo(gram.dtype).tiny)
    inverse = roots.reciprocal().masked_fill_(roots <= floor, 0)
    return roots.sum(1), torch.bmm(vectors * inverse.unsqueeze(1), vectors.transpose(1, 2))


def sample_w2(x: Tensor, y: Tensor, counts: Sequence[int]) -> Tensor:
    """Squared 2-Wasserstein distance between the Gaussians fitted to two sets of equally many samples.

    FLIC's authors' program estimates the distance to an anchor by it, with y drawn from the anchor.

    Args:
        x, y: ``(sets, rows, k)``; rows beyond ``counts`` are ignored. Gradients flow to x and to the mean of y.
        counts: samples in each set, in decreasing order.

    Returns:
        ``(sets,)``.
    """
    cx, mx, sx, n = moments(x, counts)
    cy, my, sy, _ = moments(y, counts)
    cy, sy = cy.detach(), sy.detach()
    # tr (Sx^(1/2) Sy Sx^(1/2))^(1/2) is the nuclear norm of Cx Cy^T / (n - 1), which no pairing of rows changes.
    cross = centred_nuclear_norm(cx @ cy.transpose(1, 2), counts)
    rest = (n - 1).clamp_min(1)
    return (mx - my).square().sum(1) + (sx + sy - 2 * cross) / rest


def moments(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centred rows (zero beyond the counts), mean, sum of squares of the centred rows, and the counts."""
    n = torch.tensor(counts, dtype=x.dtype, device=x.device)
    valid = (torch.arange(x.shape[1], device=x.device) < n[:, None]).to(x.dtype)[:, :, None]
    x = x * valid
    mean = x.sum(1) / n[:, None]
    centred = (x - mean[:, None]) * valid
    # Of rows that are all alike only rounding is left, which has no direction.
    floor = mean.square().sum(1) * n * (4 * torch.finfo(x.dtype).eps) ** 2
    centred = centred * (centred.square().sum((1, 2)) > floor)[:, None, None]
    return centred, mean, centred.square().sum((1, 2)), n


def mean_kernel(x: Tensor, weight: Tensor, gammas: Sequence[float]) -> Tensor:
    """``sum_ij w_i w_j k(x_i, x_j)``, k the sum of the Gaussian kernels ``exp(-gamma |x - y|^2)`` over ``gammas``.

    With weights p of one set's samples and -q of another's, both of sum 1, it is the squared maximum mean discrepancy
    between the two (Gretton et al. 2012, "A Kernel Two-Sample Test", eq. 5).

    Args:
        x: ``(sets, rows, k)``.
        weight: ``(sets, rows)``; 0 for padding.
        gammas: one over twice the variance of each kernel.

    Returns:
        ``(sets,)``.

    Example:
        >>> float(mean_kernel(torch.tensor([[[0.0], [3.0]]]), torch.tensor([[1.0, -1.0]]), [100.0]))  # two points
        2.0
    """
    gaps = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = torch.stack([(-gamma * gaps).exp() for gamma in gammas]).sum(0)
    return torch.einsum("sij,si,sj->s", kernel, weight, weight)


def cka(first: Tensor, second: Tensor) -> Tensor:
    """Centred kernel alignment ``<HKH, HLH> / (|HKH| |HLH|)`` of Gram matrices, between 0 and 1; 0 for a constant one.

    Args:
        first, second: K and L, ``(..., m, m)``, of the same m samples.

    Returns:
        ``(...)``.

    Source: Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", section 3.

    Example:
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> float(cka(k, 3 * k))
        1.0
    """
    one, other = _centred(first), _centred(second)
    norms = one.flatten(-2).norm(dim=-1) * other.flatten(-2).norm(dim=-1)
    sizes = first.detach().flatten(-2).norm(dim=-1) * second.detach().flatten(-2).norm(dim=-1)
    # Of constant features rounding alone is left, and its gradient would be anything.
    floor = torch.finfo(first.dtype).eps * sizes + torch.finfo(first.dtype).tiny ** 0.5
    aligned = (one * other).sum((-2, -1)) / norms.clamp_min(floor)
    return torch.where(norms > floor, aligned, torch.zeros_like(aligned))


def _centred(gram: Tensor) -> Tensor:
    return gram - gram.mean(-1, keepdim=True) - gram.mean(-2, keepdim=True) + gram.mean((-2, -1), keepdim=True)
