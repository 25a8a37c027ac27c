"""Ways to take a step of a small CNN, and what each makes of the machine: why perfed's is the one it is.

``python benchmarks/convolutions.py [--batches 10,50] [--repeats 10] [--json FILE]`` times forward pass, backward pass
and a step of SGD for the MNIST CNN 16-32 (5 x 5), 128, on one thread: the least processor time of turns that
alternate between the ways. Beside it are GFLOP/s and GB/s with their shares of a matrix product and of a copy here
(:func:`limits.counted` says what is counted), the largest difference of the gradients from perfed's, and at the end
the operations that perfed's way spends its time on: no fusion of a part gains more than the part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from pathlib import Path

import limits
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from perfed.model.presets import cnn, linear
from perfed.model.stacked import Pass, apply_module

Loss = Callable[[Tensor, Tensor], Tensor]
PARTS = {
    "convolution_backward": "gradients of the convolutions",
    "mkldnn_convolution": "convolutions",
    "max_pool2d": "pooling and its gradient",
    "relu": "activations and their gradient",
    "threshold": "activations and their gradient",
    "mm": "linear layers and their gradient",
}
"""Operations whose names contain this, by what they are; the first that fits."""


class Product(nn.Conv2d):
    """The same convolution as a product of all windows, copied out of the images, with the weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``(batch, channels, height, width)``, in channels_last."""
        return self.of_windows(self.windows(input))

    def windows(self, x: Tensor) -> Tensor:
        """Return ``(batch, height, width, inputs of a window)``."""
        assert not isinstance(self.padding, str)
        up, side, size = *self.padding, self.kernel_size
        found = F.pad(x, (side, side, up, up)).unfold(2, size[0], 1).unfold(3, size[1], 1)
        return found.permute(0, 2, 3, 1, 4, 5).flatten(3)

    def of_windows(self, windows: Tensor) -> Tensor:
        """Return the layer's outputs of windows that were copied before."""
        return F.linear(windows, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class Cached(Product):
    """A first layer whose inputs are windows: those of all images were copied out once, before training."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``(batch, channels, height, width)``, in channels_last."""
        return self.of_windows(input)


class Maxima(nn.Module):
    """2 x 2 max-pooling as the larger of two rows, then of two columns; equal numbers share the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Return half the height and width."""
        x = torch.maximum(x[:, :, ::2], x[:, :, 1::2])
        return torch.maximum(x[..., ::2], x[..., 1::2])


def network(convolutions: tuple[type[nn.Conv2d], type[nn.Conv2d]], order: tuple[type[nn.Module], ...]) -> nn.Sequential:
    """Return the CNN with these layers, and what follows each, in the same first weights."""
    torch.manual_seed(0)
    body = cnn((16, 32), 5, 128, padding=2)((1, 28, 28))
    made = [*body.children(), linear(10)((128,))]
    layers: list[nn.Module] = []
    for layer in made:
        if isinstance(layer, nn.Conv2d):
            kind = convolutions[len(layers) > 0]
            layers.append(kind(layer.in_channels, layer.out_channels, 5, padding=2))
            layers[-1].load_state_dict(layer.state_dict())
            layers += [nn.MaxPool2d(2) if each is nn.MaxPool2d else each() for each in order]
        elif isinstance(layer, (nn.Linear, nn.Flatten)):
            layers += [layer, nn.ReLU()] if getattr(layer, "out_features", 10) != 10 else [layer]
    return nn.Sequential(*layers)


def channels_last(x: Tensor) -> Tensor:
    """Return images of one channel in the layout that torch then goes on in."""
    return x.reshape(len(x), 28, 28, 1).permute(0, 3, 1, 2)


def autocast(net: nn.Module, x: Tensor) -> Tensor:
    """Return outputs by bfloat16 where torch deems that safe, from float32 weights."""
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)  # type: ignore[no-any-return]


def native(net: nn.Module, x: Tensor) -> Tensor:
    """Return outputs without oneDNN; the gradients are then taken without it too."""
    with torch.backends.mkldnn.flags(enabled=False):
        return net(x)  # type: ignore[no-any-return]


def perfed_outputs(net: nn.Module, x: Tensor) -> Tensor:
    """Return outputs as a client program of perfed computes them."""
    params = {f"net.{name}": tensor[None] for name, tensor in net.named_parameters()}
    return apply_module(net, "net", x[None], Pass(params)).squeeze(0)


def ways(x: Tensor) -> dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Tensor]]:
    """Return by name a network, how it is applied, and its inputs; perfed's way first."""
    conv, pool, relu = nn.Conv2d, nn.MaxPool2d, nn.ReLU
    last, call = channels_last(x), nn.Module.__call__
    plain = partial(network, order=(pool, relu))
    bf16 = plain((conv, conv)).to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    first = Cached(1, 16, 5, padding=2)
    return {
        "perfed": (plain((conv, conv)), perfed_outputs, x),
        "the same calls without perfed": (plain((conv, conv)), call, last),
        "images channel by channel": (plain((conv, conv)), call, x),
        "ReLU before pooling": (network((conv, conv), (relu, pool)), call, last),
        "pooling as maxima": (network((conv, conv), (Maxima, relu)), call, last),
        "without oneDNN": (plain((conv, conv)), native, last),
        "first layer as a product": (plain((Product, conv)), call, x),
        "the same, windows kept": (plain((Cached, conv)), call, first.windows(x)),
        "both layers as products": (plain((Product, Product)), call, x),
        "bf16 by autocast": (plain((conv, conv)), autocast, last),
        "bf16 weights": (bf16, call, last.bfloat16()),
    }


def steps(batch: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Return by name what takes one step and gives its gradients."""
    x, y = torch.rand(batch, 1, 28, 28), torch.arange(batch) % 10

    def step(net: nn.Module, apply: Callable[[nn.Module, Tensor], Tensor], inputs: Tensor) -> list[Tensor]:
        params: list[Tensor] = list(net.parameters())
        grads = torch.autograd.grad(F.cross_entropy(apply(net, inputs).float(), y), params)
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-1e-6)
        return [g.float() for g in grads]

    return {name: partial(step, *way) for name, way in ways(x).items()}


def apart(found: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference of two gradients, over the size of the first."""
    return max(starmap(lambda a, b: float((a - b).norm() / a.norm()), zip(found, other, strict=True)))


def spent(step: Callable[[], object]) -> dict[str, float]:
    """Return the share of the processor's time of each part of a step, the largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(20):
            step()
    parts: dict[str, float] = {}
    for event in seen.key_averages():
        part = next((told for name, told in PARTS.items() if name in event.key.lower()), "all else")
        parts[part] = parts.get(part, 0.0) + event.self_cpu_time_total
    whole = sum(parts.values())
    return dict(sorted(((part, time_ / whole) for part, time_ in parts.items()), key=lambda pair: -pair[1]))


def main() -> None:
    """Print a table for each size of mini-batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="10,50", help="sizes of mini-batches, with commas")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here, kept = limits.measure(time.process_time), []
    kinds = torch.backends.cpu.get_cpu_capability()
    print(f"one thread, {kinds}: {here.gflops:.0f} GFLOP/s, {here.gbytes:.1f} GB/s")
    for batch in map(int, arguments.batches.split(",")):
        every = steps(batch)
        first = {name: each() for name, each in every.items()}
        seconds = limits.in_turns(every, arguments.repeats)
        print(f"\nbatch {batch}")
        for name, each in every.items():
            far, share = apart(first["perfed"], first[name]), here.share(*limits.counted(each), seconds[name])
            ratio = seconds[name] / seconds["perfed"]
            print(f"{name:30} {1e3 * seconds[name]:7.2f} ms, {ratio:5.2f} x, {share}, gradients {far:.0e}", flush=True)
            kept.append({"batch": batch, "way": name, "ms": 1e3 * seconds[name], "share": share, "apart": far})
        print("perfed's time: " + ", ".join(f"{part} {of:.0%}" for part, of in spent(every["perfed"]).items()))
    if arguments.json:
        command = " ".join(["python", *sys.argv])
        arguments.json.write_text(json.dumps({"command": command, "limits": here._asdict(), "rows": kept}, indent=1))


if __name__ == "__main__":
    main()
