"""Clipped gradients of rows without storing the gradient of each row: norms and sums by layer, in one backward pass.

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
"""Squared norm of a layer's inputs above which a row is treated as not finite.

The square of its gradient at the outputs may underflow to zero, and the computed norm of their product would then be
much too small.
"""
_Pass = tuple[str, Tensor, Tensor]
"""The name of a trained linear layer, its inputs ``(clients, batch, in)`` and outputs."""


def sum_clipped_by_layer(loss: Loss, step: Step, params: Parameters, clip: float) -> tuple[Tensor, Parameters] | None:
    """Return losses ``(clients,)`` and sums of the rows' clipped gradients, each times the row's weight.

    A row whose loss or gradient is not finite, or whose inputs of a layer are extremely large, contributes zero: it
    must neither make training fail nor add more than ``clip``.

    Args:
        loss: the loss of the mini-batch.
        step: the mini-batch.
        params: the trained parameters, ``(clients, ...)`` by name.
        clip: the largest norm of a row's gradient, over all parameters together.

    Returns:
        ``None`` if the loss is not the plain mean, or the stages from the first trained one on have other than linear
        and element-wise layers.
    """
    layers = _list_simple_layers(step.chain, step.start) if loss is mean_loss and step.x.ndim == 3 else None
    if layers is None or not set(params) <= {f"{name}.{kind}" for name, _ in layers for kind in ("weight", "bias")}:
        return None
    values = {name: tensor.detach() for name, tensor in {**step.params, **params}.items()}
    outputs, passes = _run_layers(layers, values, params, step.x)
    row_losses = step.losses(outputs)
    grads = torch.autograd.grad(row_losses.sum(), [output for _, _, output in passes])
    squares, overflowed = torch.zeros_like(row_losses), ~torch.isfinite(row_losses)
    for (name, x, _), g in zip(passes, grads, strict=True):
        inputs = x.square().sum(2) if f"{name}.weight" in params else torch.zeros_like(row_losses)
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
    losses = (row_losses.detach().masked_fill(overflowed, 0) * step.weight).sum(1)
    return losses, {name: sums[name] for name in params}


def _list_simple_layers(chain: Chain, start: int) -> list[tuple[str, nn.Module]] | None:
    """Return all layers from stage index ``start`` on if they are linear or element-wise, otherwise ``None``."""
    layers: list[tuple[str, nn.Module]] = []
    for stage in chain.stages[start:]:
        module = chain.get_submodule(stage)
        children = module.named_children() if type(module) is nn.Sequential else [("", module)]
        layers += [(f"{stage}.{name}" if name else stage, layer) for name, layer in children]
    plain = all(type(layer) is nn.Linear or isinstance(layer, ELEMENTWISE) for _, layer in layers)
    return layers if plain else None


def _run_layers(
    layers: Sequence[tuple[str, nn.Module]], values: Parameters, trained: Parameters, x: Tensor
) -> tuple[Tensor, list[_Pass]]:
    passes: list[_Pass] = []
    for name, layer in layers:
        if type(layer) is not nn.Linear:
            x = layer(x)
            continue
        inputs, weight = x, values[f"{name}.weight"].transpose(1, 2)
        bias = values.get(f"{name}.bias")
        x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
        if f"{name}.weight" in trained or f"{name}.bias" in trained:
            x = x if x.requires_grad else x.requires_grad_(True)
            passes.append((name, inputs.detach(), x))
    return x, passes
