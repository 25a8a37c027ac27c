"""Apply a module to many clients at once: parameters and inputs carry a leading client axis.

For known layers the batched form is written out (one batched matrix product for ``Linear``, one grouped convolution
for ``Conv2d``), because ``torch.func.vmap`` of a module is about half as fast. Any other module goes through ``vmap``.
A single client runs the module's ordinary kernels.

Dropout masks are keyed by client and step (:mod:`perfed.rng`), so that they are the same in every engine.

Gradients are autograd's, but for chains of ``Linear`` and ``ReLU`` (:class:`Dense`): there autograd's own work takes as
long as the arithmetic of small stacks. The same kernels in the same order give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed import rng
from perfed.model.chain import BATCH_NORM, Chain, Parameters
from perfed.model.columns import ColumnLinear

ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.ELU,
    nn.SiLU,
    nn.Softplus,
    nn.Identity,
)
"""Layers that work on each number alone."""
_PER_SAMPLE = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.ConstantPad1d,
)
_THRESHOLD_BACKWARD = torch.ops.aten.threshold_backward.default
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_DETERMINISTIC = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.Embedding, nn.Conv1d, nn.Conv2d)


@dataclass
class Pass:
    """One forward pass.

    Attributes:
        params: parameters and buffers by full name, each with a leading client axis of size n.
        keys: int64 ``(n,)``, randomness of this step per client; needed while training.
        training: whether dropout and batch-norm are in training mode.
    """

    params: Parameters
    keys: Tensor | None = None
    training: bool = False
    _dropouts: int = field(default=0, repr=False)

    def below(self, prefix: str) -> Parameters:
        """Parameters whose names start with ``prefix`` and a dot, without that start."""
        start = prefix + "."
        return {name[len(start) :]: t for name, t in self.params.items() if name.startswith(start)}


def apply_module(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    """Apply ``module`` with the parameters ``prefix.*`` of ``run`` to ``x`` ``(n, batch, ...)``.

    Each client's slice depends on that client's parameters and inputs alone.
    """
    if x.shape[0] == 1:
        return _single(module, prefix, x.squeeze(0), run).unsqueeze(0)
    return _stacked(module, prefix, x, run)


def apply_per_domain(module: nn.Module, prefix: str, x: Tensor, run: Pass, domain: Tensor) -> Tensor:
    """Apply ``module`` with parameters ``(n, domains, ...)``: each sample passes those of its own domain.

    Args:
        module, prefix, run: as in :func:`apply_module`.
        x: ``(n, batch, ...)``.
        domain: ``(n, batch)`` int64, in ``[0, domains)``.
    """
    own = {name: t for name, t in run.params.items() if name.startswith(f"{prefix}.")}
    clients, domains = next(iter(own.values())).shape[:2]
    keys = None if run.keys is None else run.keys.repeat_interleave(domains)
    folded = Pass({name: t.flatten(0, 1) for name, t in own.items()}, keys, run.training)
    everywhere = x.unsqueeze(1).expand(clients, domains, *x.shape[1:]).flatten(0, 1)
    out = apply_module(module, prefix, everywhere, folded)
    out = out.view(clients, domains, *out.shape[1:])
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[:2])
    chosen: Tensor = out[rows[:, None], domain, columns]
    return chosen


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequential module in the order of work: max-pooling before (leaky) ReLU, a quarter of its work.

    Both orders give the same outputs and gradients, as the activation keeps the order of its inputs.
    """
    children = list(module.named_children())
    for i in range(len(children) - 1):
        if _keeps_order(children[i][1]) and type(children[i + 1][1]) is nn.MaxPool2d:
            children[i], children[i + 1] = children[i + 1], children[i]
    return children


def _keeps_order(module: nn.Module) -> bool:
    return type(module) is nn.ReLU or (type(module) is nn.LeakyReLU and module.negative_slope > 0)


def _single(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    if type(module) is nn.Sequential:
        for name, child in _children(module):
            x = _single(child, f"{prefix}.{name}", x, run)
        return x
    if isinstance(module, _DROPOUT):
        return _dropout(module, prefix, x.unsqueeze(0), run).squeeze(0)
    if type(module) is nn.Linear:
        return F.linear(x, run.params[f"{prefix}.weight"].squeeze(0), _bias(prefix, run))
    if type(module) is ColumnLinear:
        return F.linear(x, _columns(prefix, run).squeeze(0), _bias(prefix, run))
    if type(module) is nn.Conv2d and module.padding_mode == "zeros":
        weight = run.params[f"{prefix}.weight"].squeeze(0)
        x = _channels_last(x)
        return F.conv2d(x, weight, _bias(prefix, run), module.stride, module.padding, module.dilation, module.groups)
    if isinstance(module, ELEMENTWISE + _PER_SAMPLE) or type(module) is nn.Flatten:
        return module(x)  # type: ignore[no-any-return]
    module.train(run.training)
    own = {name: tensor.squeeze(0) for name, tensor in run.below(prefix).items()}
    if not run.training or run.keys is None or isinstance(module, BATCH_NORM + _DETERMINISTIC):
        return torch.func.functional_call(module, own, (x,))  # type: ignore[no-any-return]
    run._dropouts += 1
    with rng.torch_seed(rng.key(run.keys[0], "module", prefix, run._dropouts)), _keyed_dropouts(module, prefix, run):
        return torch.func.functional_call(module, own, (x,))  # type: ignore[no-any-return]


@contextmanager
def _keyed_dropouts(module: nn.Module, prefix: str, run: Pass) -> Iterator[None]:
    """Masks of the dropout layers inside another module are keyed like all others, the same on every device."""

    def keyed(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        return lambda layer, inputs, _: _dropout(layer, f"{prefix}.{name}", inputs[0].unsqueeze(0), run).squeeze(0)

    inside = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Dropout]
    hooks = [layer.eval().register_forward_hook(keyed(name)) for name, layer in inside]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _channels_last(x: Tensor) -> Tensor:
    """``x`` in channels_last, which convolutions and pooling on CPUs are fastest with."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    # One channel is in both layouts at once, and torch would go on in the other one.
    return x.reshape(x.shape[0], *x.shape[2:], 1).permute(0, 3, 1, 2)


def _stacked(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    if type(module) is nn.Sequential:
        for name, child in _children(module):
            x = _stacked(child, f"{prefix}.{name}", x, run)
        return x
    if isinstance(module, ELEMENTWISE):
        return module(x)  # type: ignore[no-any-return]
    if isinstance(module, _DROPOUT):
        return _dropout(module, prefix, x, run)
    if type(module) is nn.Linear and x.ndim == 3:
        return _stacked_linear(run.params[f"{prefix}.weight"], prefix, x, run)
    if type(module) is ColumnLinear and x.ndim == 3:
        return _stacked_linear(_columns(prefix, run), prefix, x, run)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros":
        return _stacked_conv2d(module, prefix, x, run)
    if isinstance(module, _PER_SAMPLE):
        return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return x.flatten(2)
    module.train(run.training)

    def call(params: Parameters, one: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (one,))  # type: ignore[no-any-return]

    mapped: Callable[[Parameters, Tensor], Tensor] = torch.func.vmap(call)
    return mapped(run.below(prefix), x)


def _bias(prefix: str, run: Pass) -> Tensor | None:
    bias = run.params.get(f"{prefix}.bias")
    return None if bias is None else bias.squeeze(0)


def _columns(prefix: str, run: Pass) -> Tensor:
    """Weights of all columns ``(n, out, inputs)``, shared ones first."""
    return torch.cat([run.params[f"{prefix}.weight"], run.params[f"{prefix}.own"]], -1)


def _stacked_linear(weight: Tensor, prefix: str, x: Tensor, run: Pass) -> Tensor:
    out: Tensor = _StackedLinear.apply(x, weight, run.params.get(f"{prefix}.bias"))  # type: ignore[no-untyped-call]
    return out


class _StackedLinear(torch.autograd.Function):
    """``x W^T + b`` per client; autograd's own gradient of W is a transposed view, which costs a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)  # of 16 bits under autocast
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if need_x else None,
            torch.bmm(grad.transpose(1, 2), x) if need_weight else None,
            grad.sum(1) if need_bias else None,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


@dataclass(frozen=True)
class _Layer:
    """A linear layer by the names of its parameters, and whether a ReLU follows."""

    weight: str
    bias: str
    relu: bool = False


@dataclass(frozen=True)
class Dense:
    """A chain of linear layers, some of them followed by a ReLU, with its gradients written out.

    Attributes:
        layers: in order.
        flat: whether inputs are flattened first.
    """

    layers: tuple[_Layer, ...]
    flat: bool

    @classmethod
    def of(cls, chain: Chain, start: int) -> Dense | None:
        """The stages of ``chain`` from number ``start`` on; ``None`` where they have other layers."""
        stages = chain.stages[start:]
        shape = chain.output_shapes[chain.stages[start - 1]] if start else chain.input_shape
        layers: list[_Layer] = []
        flat = False
        inside = (chain.get_submodule(s).named_modules(prefix=s, remove_duplicate=False) for s in stages)
        for name, layer in itertools.chain.from_iterable(inside):
            if type(layer) is nn.Linear:
                layers.append(_Layer(f"{name}.weight", f"{name}.bias"))
            elif type(layer) is nn.ReLU and layers:
                layers[-1] = replace(layers[-1], relu=True)
            elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
                flat = flat or not layers
            elif type(layer) is not nn.Sequential:
                return None
        return cls(tuple(layers), flat) if layers and (flat or len(shape) == 1) else None

    def outputs(self, params: Parameters, x: Tensor) -> list[Tensor]:
        """Inputs of each layer ``(n, batch, ...)``, then the output of the last: the bits of :func:`apply_module`."""
        found = [x.flatten(2) if self.flat else x]
        for layer in self.layers:
            x, weight, bias = found[-1], params[layer.weight], params.get(layer.bias)
            if x.shape[0] == 1:
                out = F.linear(x[0], weight[0], None if bias is None else bias[0]).unsqueeze(0)
            else:
                out = _linear(x, weight, bias)
            found.append(out.relu_() if layer.relu else out)
        return found

    def gradients(
        self, params: Parameters, outputs: Sequence[Tensor], grad: Tensor, wanted: Container[str]
    ) -> Parameters:
        """Gradients by the ``wanted`` parameters, with that by the last of :meth:`outputs`: autograd's bits."""
        found: Parameters = {}
        trained = [i for i, layer in enumerate(self.layers) if layer.weight in wanted or layer.bias in wanted]
        lowest = min(trained, default=len(self.layers))
        for i in range(len(self.layers) - 1, lowest - 1, -1):
            layer, x = self.layers[i], outputs[i]
            if layer.relu:
                grad = _THRESHOLD_BACKWARD(grad, outputs[i + 1], 0)
            if layer.weight in wanted:
                found[layer.weight] = _product(grad.transpose(1, 2), x)
            if layer.bias in wanted:
                found[layer.bias] = grad.sum(1)
            if i > lowest:
                grad = _product(grad, params[layer.weight])
        return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` per client, of one alone by the kernel that autograd takes."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def _stacked_conv2d(module: nn.Conv2d, prefix: str, x: Tensor, run: Pass) -> Tensor:
    clients = x.shape[0]
    weight = run.params[f"{prefix}.weight"].flatten(0, 1)
    bias = run.params.get(f"{prefix}.bias")
    grouped = x.transpose(0, 1).flatten(1, 2)
    out = F.conv2d(
        grouped,
        weight,
        None if bias is None else bias.flatten(),
        module.stride,
        module.padding,
        module.dilation,
        module.groups * clients,
    )
    return out.view(out.shape[0], clients, module.out_channels, *out.shape[2:]).transpose(0, 1)


def _dropout(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    p = float(getattr(module, "p"))  # noqa: B009 - declared on a private base class
    if not run.training or p == 0.0:
        return x
    if run.keys is None:
        raise RuntimeError("dropout in training needs the keys of the step")
    run._dropouts += 1
    keys = rng.key(run.keys, "dropout", prefix, run._dropouts)
    shape = x.shape[1:] if isinstance(module, nn.Dropout) else x.shape[1:3]
    count = 1
    for size in shape:
        count *= size
    keep = (rng.uniform(keys, count, x.dtype) >= p).view(x.shape[0], *shape)
    keep = keep.view(*keep.shape, *([1] * (x.ndim - keep.ndim)))
    return x * keep * (1.0 / (1.0 - p))


def shareable(module: nn.Module) -> bool:
    """Whether several threads may apply ``module``: a pass neither changes it nor draws global random numbers."""
    if type(module) is nn.Sequential:
        return all(shareable(child) for child in module.children())
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"
    return type(module) in (*ELEMENTWISE, *_PER_SAMPLE, *_DROPOUT, nn.Linear, ColumnLinear, nn.Flatten)


def why_not_stackable(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> tuple[str, str] | None:
    """The layer of ``module`` that must run one client at a time, and why; ``None`` if there is none.

    The layer is given by its name, which starts with ``name``, and its type.
    """
    for kinds, why in ((BATCH_NORM, "batch-norm in training"), ((nn.RNNBase,), "recurrent layers")):
        for below, layer in module.named_modules(prefix=name):
            if isinstance(layer, kinds):
                return _titled(below, layer), why
    tensors = {f"{name}.{below}": torch.stack([t.detach()] * 2) for below, t in module.named_parameters()}
    tensors.update({f"{name}.{below}": torch.stack([t.detach()] * 2) for below, t in module.named_buffers()})
    run = Pass(tensors, torch.zeros(2, dtype=torch.int64), training=True)
    x = torch.zeros((2, 2, *input_shape), dtype=next(iter(tensors.values())).dtype if tensors else None)
    found = _try_stacked(module, name, x, run)
    return None if isinstance(found, Tensor) else found


def _try_stacked(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor | tuple[str, str]:
    """The output, or the layer that cannot be stacked and why."""
    if type(module) is nn.Sequential:
        for name, child in _children(module):
            found = _try_stacked(child, f"{prefix}.{name}", x, run)
            if not isinstance(found, Tensor):
                return found
            x = found
        return x
    try:
        return _stacked(module, prefix, x, run)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _titled(prefix, module), f"cannot be batched over clients: {text[:120]}"


def _titled(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"
