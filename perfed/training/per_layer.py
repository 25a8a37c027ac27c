"""Clipped gradients of rows without a gradient for each row: norms and sums layer by layer, in one backward pass.

For a linear layer the gradient of row b is the outer product ``g_b a_b^T`` of the gradient at its output and its input:
its squared norm is ``|g_b|^2 |a_b|^2``, and a weighted sum over rows is one matrix product (Goodfellow 2015; Bu et al.
2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perfed.model.chain import Chain, Parameters
from perfed.model.stacked import ELEMENTWISE
from perfed.training.step import Loss, Step, mean_loss

_LARGEST = 1e30
"""Squared norm of a layer's inputs from which on a row counts as not finite: the square of its gradient at the outputs
may be zero by underflow, and the product of both would then be much longer than it seems."""
_Pass = tuple[str, Tensor, Tensor]
"""Name of a trained linear layer, its inputs ``(clients, batch, in)`` and outputs."""


def clipped_by_layers(loss: Loss, step: Step, params: Parameters, clip: float) -> tuple[Tensor, Parameters] | None:
    """Return losses ``(clients,)`` and sums of the rows' clipped gradients, each times the row's weight; or nothing.

    Args:
        loss: of the mini-batch.
        step: the mini-batch.
        params: that are trained, ``(clients, ...)`` by name.
        clip: largest norm of a row's gradient, over all of them together.

    A row whose loss or gradient is not finite, or a layer's inputs as good as, contributes zero: it must not decide
    whether training fails, nor add more than ``clip``.

    Returns:
        Nothing where the loss is not the plain mean, or the stages from the first trained one on are not made of linear
        and element-wise layers alone.
    """
    layers = _layers(step.chain, step.start) if loss is mean_loss and step.x.ndim == 3 else None
    if layers is None or not set(params) <= {f"{name}.{kind}" for name, _ in layers for kind in ("weight", "bias")}:
        return None
    values = {name: tensor.detach() for name, tensor in {**step.params, **params}.items()}
    outputs, passes = _forward(layers, values, params, step.x)
    each = step.losses(outputs)
    grads = torch.autograd.grad(each.sum(), [output for _, _, output in passes])
    squares, overflowed = torch.zeros_like(each), ~torch.isfinite(each)
    for (name, x, _), g in zip(passes, grads, strict=True):
        inputs = x.square().sum(2) if f"{name}.weight" in params else torch.zeros_like(each)
        overflowed |= inputs > _LARGEST
        squares.addcmul_(g.square().sum(2), inputs.add_(1) if f"{name}.bias" in params else inputs)
    overflowed |= ~torch.isfinite(squares)
    factor = ((clip / squares.sqrt()).clamp(max=1) * step.weight).unsqueeze(2)
    sums: Parameters = {}
    for (name, x, _), g in zip(passes, grads, strict=True):
        scaled = (g * factor).masked_fill_(overflowed.unsqueeze(2), 0)
        if f"{name}.weight" in params:
            finite = x.masked_fill(overflowed.unsqueeze(2), 0)
            sums[f"{name}.weight"] = torch.bmm(scaled.transpose(1, 2), finite)
        if f"{name}.bias" in params:
            sums[f"{name}.bias"] = scaled.sum(1)
    losses = (each.detach().masked_fill(overflowed, 0) * step.weight).sum(1)
    return losses, {name: sums[name] for name in params}


def _layers(chain: Chain, start: int) -> list[tuple[str, nn.Module]] | None:
    """All layers from stage number ``start`` on, where these are linear or element-wise."""
    found: list[tuple[str, nn.Module]] = []
    for stage in chain.stages[start:]:
        module = chain.get_submodule(stage)
        inside = module.named_children() if type(module) is nn.Sequential else [("", module)]
        found += [(f"{stage}.{name}" if name else stage, layer) for name, layer in inside]
    plain = all(type(layer) is nn.Linear or isinstance(layer, ELEMENTWISE) for _, layer in found)
    return found if plain else None


def _forward(
    layers: Sequence[tuple[str, nn.Module]], values: Parameters, trained: Parameters, x: Tensor
) -> tuple[Tensor, list[_Pass]]:
    passes: list[_Pass] = []
    for name, layer in layers:
        if type(layer) is not nn.Linear:
            x = layer(x)
            continue
        before, weight = x, values[f"{name}.weight"].transpose(1, 2)
        bias = values.get(f"{name}.bias")
        x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
        if f"{name}.weight" in trained or f"{name}.bias" in trained:
            x = x if x.requires_grad else x.requires_grad_(True)
            passes.append((name, before.detach(), x))
    return x, passes
