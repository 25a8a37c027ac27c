"""Presets: the stages that an experiment can name by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import nn

from perfed.errors import PerfedError
from perfed.model.chain import Shape, StageFactory


def activation_layer(name: str) -> nn.Module:
    """Return a new activation layer by its name in presets."""
    activations: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "leaky-relu": nn.LeakyReLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "gelu": nn.GELU,
    }
    if name not in activations:
        raise PerfedError(f"unknown activation '{name}'; allowed: {', '.join(activations)}")
    return activations[name]()


def linear(out: int) -> StageFactory:
    """Return a stage of one linear layer with ``out`` outputs; inputs with several axes are flattened first.

    Example:
        >>> linear(3)((8,))
        Linear(in_features=8, out_features=3, bias=True)
    """

    def build(shape: Shape) -> nn.Module:
        layer = nn.Linear(prod(shape), out)
        return layer if len(shape) == 1 else nn.Sequential(nn.Flatten(), layer)

    return build


def logit(out: int = 2) -> StageFactory:
    """Return a stage whose outputs are (0, z) with a linear logit z, so that their cross-entropy is the binary one.

    Raises:
        PerfedError: if there are more than two classes.

    Example:
        >>> logit()((8,))(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    if out > 2:
        raise PerfedError(f"a logit tells two classes apart, and there are {out}; use 'linear'")

    def build(shape: Shape) -> nn.Module:
        flat = [nn.Flatten()] if len(shape) > 1 else []
        return nn.Sequential(*flat, nn.Linear(prod(shape), 1), nn.ConstantPad1d((1, 0), 0.0))

    return build


def mlp(
    hidden: Sequence[int] = (64, 64),
    out: int = 64,
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
    final_activation: bool = False,
) -> StageFactory:
    """Return a stage of fully connected layers.

    Each hidden one is followed by (batch-norm,) an activation (and dropout).

    FLIC's embedding for vectors is ``mlp((64, 64), 64)`` with a linear output (Rakotomamonjy et al. 2024, S3):
    a ReLU there could not reach anchors with negative coordinates. ``dropout=0.5, activation="leaky-relu"``
    is the network of the authors' program for BCI.

    Example:
        >>> [tuple(layer.weight.shape) for layer in mlp((64, 32), 10)((8,)) if isinstance(layer, nn.Linear)]
        [(64, 8), (32, 64), (10, 32)]
    """

    def build(shape: Shape) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
        width = prod(shape)
        for size in hidden:
            norm = [nn.BatchNorm1d(size)] if batch_norm else []
            layers += [nn.Linear(width, size), *norm, activation_layer(activation)]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = size
        layers.append(nn.Linear(width, out))
        if final_activation:
            layers.append(activation_layer(activation))
        return nn.Sequential(*layers)

    return build


def cnn(
    channels: Sequence[int] = (16, 32),
    kernel: int | Sequence[int] = 5,
    out: int = 128,
    *,
    hidden: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    activation: str = "relu",
    batch_norm: bool = False,
    final_activation: bool = True,
) -> StageFactory:
    """Return a stage of convolutions, each with (batch-norm,) an activation and 2x2 max-pooling, then linear layers.

    The last linear layer has ``out`` outputs; ``hidden`` are the sizes of those before it, each followed by an
    activation. ``kernel`` and ``padding`` are one number for all convolutions, or one number for each. FedPAC's
    networks (Xu et al. 2023, appendix B; sizes from the authors' program) are ``cnn((16, 32), 5, 128, padding=(0, 1),
    activation="leaky-relu")`` for 28x28 and ``cnn((16, 32, 64), (5, 5, 3), 128, padding=(0, 1, 1),
    activation="leaky-relu")`` for 32x32x3; SRPFL's for CIFAR-10 (Tziotis et al. 2023, appendix C) is ``cnn((64, 64), 5,
    64, hidden=(120,))``.

    Example:
        >>> cnn((16, 32), 5, 128, padding=(0, 1))((1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 128])
    """
    kernels, paddings = _repeat_setting("kernel", kernel, channels), _repeat_setting("padding", padding, channels)

    def build(shape: Shape) -> nn.Module:
        if len(shape) != 3:
            raise PerfedError(f"a cnn needs images (channels, height, width), got inputs of shape {shape}")
        layers: list[nn.Module] = []
        depth = shape[0]
        for width, size, pad in zip(channels, kernels, paddings, strict=True):
            # A monotone activation preserves the maximum of a window, and has a quarter of the work after pooling.
            activation_and_pool = [activation_layer(activation), nn.MaxPool2d(2)]
            layers += [
                nn.Conv2d(depth, width, size, padding=pad),
                *([nn.BatchNorm2d(width)] if batch_norm else []),
                *(activation_and_pool if activation == "gelu" else reversed(activation_and_pool)),
            ]
            depth = width
        layers.append(nn.Flatten())
        with torch.no_grad():
            size = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
        for width in hidden:
            layers += [nn.Linear(size, width), activation_layer(activation)]
            size = width
        layers.append(nn.Linear(size, out))
        if final_activation:
            layers.append(activation_layer(activation))
        return nn.Sequential(*layers)

    return build


def _repeat_setting(name: str, value: int | Sequence[int], channels: Sequence[int]) -> list[int]:
    values = [value] * len(channels) if isinstance(value, int) else list(value)
    if len(values) != len(channels):
        raise PerfedError(f"cnn: {name} has {len(values)} numbers for {len(channels)} convolutions; one, or one each")
    return values


def digits_cnn(out: int = 64, *, dropout: float = 0.0) -> StageFactory:
    """Return FLIC's embedding for digits: conv 32 and 20 (5x5), each with max-pooling and a sigmoid, then a linear
    layer.

    ``dropout`` acts on whole channels after the second convolution; the authors' program has 0.5 there, which the
    paper does not mention. Source: Rakotomamonjy et al. 2024, S3.2.

    Example:
        >>> digits_cnn(out=64)((1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 64])
    """

    def build(shape: Shape) -> nn.Module:
        if len(shape) != 3:
            raise PerfedError(f"digits-cnn needs images (channels, height, width), got inputs of shape {shape}")
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], 32, 5),
            nn.MaxPool2d(2),
            nn.Sigmoid(),
            nn.Conv2d(32, 20, 5),
            *([nn.Dropout2d(dropout)] if dropout > 0 else []),
            nn.MaxPool2d(2),
            nn.Sigmoid(),
            nn.Flatten(),
        ]
        with torch.no_grad():
            flat = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
        return nn.Sequential(*layers, nn.Linear(flat, out))

    return build


def hidden_layer(out: int = 100) -> StageFactory:
    """Return the shared body of FLIC-HL: a linear layer and a LeakyReLU (100 outputs in the authors' program).

    Example:
        >>> hidden_layer(100)((64,))(torch.zeros(2, 64)).shape
        torch.Size([2, 100])
    """

    def build(shape: Shape) -> nn.Module:
        return nn.Sequential(nn.Linear(prod(shape), out), nn.LeakyReLU())

    return build
