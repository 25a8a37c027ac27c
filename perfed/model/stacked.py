"""Apply a module to many clients at once: parameters and inputs carry a leading client axis.

For known layers the batched form is written out (one batched matrix product for ``Linear``, one grouped convolution
for ``Conv2d``), because ``torch.func.vmap`` of a module is about half as fast. Any other module goes through ``vmap``.
A single client runs the module's ordinary kernels.

Dropout masks are keyed by client and step (:mod:`perfed.rng`), so that they are the same in every engine.

Gradients come from autograd except for chains of ``Linear`` and ``ReLU`` (:class:`Dense`), where the overhead of
autograd is as long as the arithmetic of small stacks. The same kernels in the same order give the same bits.
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
"""Layers that transform each number separately."""
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
    """The parameters and random keys of one forward pass.

    Attributes:
        params: parameters and buffers by full name, each with a leading client axis of size n.
        keys: int64 ``(n,)``, the random key of each client for this step; needed for training.
        training: whether dropout and batch-norm are in training mode.
    """

    params: Parameters
    keys: Tensor | None = None
    training: bool = False
    _dropouts: int = field(default=0, repr=False)

    def with_prefix(self, prefix: str) -> Parameters:
        """Return the parameters whose names start with ``prefix`` and a dot, by the remainder of their names."""
        start = prefix + "."
        return {name[len(start) :]: t for name, t in self.params.items() if name.startswith(start)}


def apply_module(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    """Return the output of ``module`` with the parameters ``prefix.*`` of ``run`` for inputs ``x`` ``(n, batch, ...)``.

    The output for a client depends only on the parameters and inputs of that client.
    """
    if x.shape[0] == 1:
        return _apply_single(module, prefix, x.squeeze(0), run).unsqueeze(0)
    return _apply_stacked(module, prefix, x, run)


def apply_per_domain(module: nn.Module, prefix: str, x: Tensor, run: Pass, domain: Tensor) -> Tensor:
    """Return the output of ``module`` with parameters ``(n, domains, ...)``, using for each sample those of its domain.

    Args:
        module, prefix, run: as in :func:`apply_module`.
        x: ``(n, batch, ...)``.
        domain: ``(n, batch)`` int64, in ``[0, domains)``.
    """
    module_params = {name: t for name, t in run.params.items() if name.startswith(f"{prefix}.")}
    clients, domains = next(iter(module_params.values())).shape[:2]
    keys = None if run.keys is None else run.keys.repeat_interleave(domains)
    folded = Pass({name: t.flatten(0, 1) for name, t in module_params.items()}, keys, run.training)
    inputs_of_domains = x.unsqueeze(1).expand(clients, domains, *x.shape[1:]).flatten(0, 1)
    out = apply_module(module, prefix, inputs_of_domains, folded)
    out = out.view(clients, domains, *out.shape[1:])
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[:2])
    outputs: Tensor = out[rows[:, None], domain, columns]
    return outputs


def _ordered_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a sequential module, with max-pooling moved before (leaky) ReLU, which quarters its work.

    Both orders give the same outputs and gradients, because the activation preserves the order of its inputs.
    """
    children = list(module.named_children())
    for i in range(len(children) - 1):
        if _keeps_order(children[i][1]) and type(children[i + 1][1]) is nn.MaxPool2d:
            children[i], children[i + 1] = children[i + 1], children[i]
    return children


def _keeps_order(module: nn.Module) -> bool:
    return type(module) is nn.ReLU or (type(module) is nn.LeakyReLU and module.negative_slope > 0)


def _apply_single(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    if type(module) is nn.Sequential:
        for name, child in _ordered_layers(module):
            x = _apply_single(child, f"{prefix}.{name}", x, run)
        return x
    if isinstance(module, _DROPOUT):
        return _apply_dropout(module, prefix, x.unsqueeze(0), run).squeeze(0)
    if type(module) is nn.Linear:
        return F.linear(x, run.params[f"{prefix}.weight"].squeeze(0), _squeezed_bias(prefix, run))
    if type(module) is ColumnLinear:
        return F.linear(x, _column_weights(prefix, run).squeeze(0), _squeezed_bias(prefix, run))
    if type(module) is nn.Conv2d and module.padding_mode == "zeros":
        weight = run.params[f"{prefix}.weight"].squeeze(0)
        x = _to_channels_last(x)
        return F.conv2d(
            x, weight, _squeezed_bias(prefix, run), module.stride, module.padding, module.dilation, module.groups
        )
    if isinstance(module, ELEMENTWISE + _PER_SAMPLE) or type(module) is nn.Flatten:
        return module(x)  # type: ignore[no-any-return]
    module.train(run.training)
    params = {name: tensor.squeeze(0) for name, tensor in run.with_prefix(prefix).items()}
    if not run.training or run.keys is None or isinstance(module, BATCH_NORM + _DETERMINISTIC):
        return torch.func.functional_call(module, params, (x,))  # type: ignore[no-any-return]
    run._dropouts += 1
    with rng.seed_torch(rng.key(run.keys[0], "module", prefix, run._dropouts)), _use_keyed_dropout(module, prefix, run):
        return torch.func.functional_call(module, params, (x,))  # type: ignore[no-any-return]


@contextmanager
def _use_keyed_dropout(module: nn.Module, prefix: str, run: Pass) -> Iterator[None]:
    """Replace the masks of dropout layers inside another module by keyed masks, which are the same on every device."""

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        return lambda layer, inputs, _: _apply_dropout(layer, f"{prefix}.{name}", inputs[0].unsqueeze(0), run).squeeze(
            0
        )

    dropouts = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Dropout]
    hooks = [layer.eval().register_forward_hook(make_hook(name)) for name, layer in dropouts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _to_channels_last(x: Tensor) -> Tensor:
    """Return ``x`` in channels_last format, in which convolutions and pooling on CPUs are fastest."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    # A tensor with one channel has both layouts at once, and torch would choose the other one.
    return x.reshape(x.shape[0], *x.shape[2:], 1).permute(0, 3, 1, 2)


def _apply_stacked(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
    if type(module) is nn.Sequential:
        for name, child in _ordered_layers(module):
            x = _apply_stacked(child, f"{prefix}.{name}", x, run)
        return x
    if isinstance(module, ELEMENTWISE):
        return module(x)  # type: ignore[no-any-return]
    if isinstance(module, _DROPOUT):
        return _apply_dropout(module, prefix, x, run)
    if type(module) is nn.Linear and x.ndim == 3:
        return _apply_stacked_linear(run.params[f"{prefix}.weight"], prefix, x, run)
    if type(module) is ColumnLinear and x.ndim == 3:
        return _apply_stacked_linear(_column_weights(prefix, run), prefix, x, run)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros":
        return _apply_stacked_conv2d(module, prefix, x, run)
    if isinstance(module, _PER_SAMPLE):
        return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return x.flatten(2)
    module.train(run.training)

    def call(params: Parameters, client_x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (client_x,))  # type: ignore[no-any-return]

    mapped: Callable[[Parameters, Tensor], Tensor] = torch.func.vmap(call)
    return mapped(run.with_prefix(prefix), x)


def _squeezed_bias(prefix: str, run: Pass) -> Tensor | None:
    bias = run.params.get(f"{prefix}.bias")
    return None if bias is None else bias.squeeze(0)


def _column_weights(prefix: str, run: Pass) -> Tensor:
    """Return the weights of all columns ``(n, out, inputs)``, shared ones first."""
    return torch.cat([run.params[f"{prefix}.weight"], run.params[f"{prefix}.own"]], -1)


def _apply_stacked_linear(weight: Tensor, prefix: str, x: Tensor, run: Pass) -> Tensor:
    out: Tensor = _StackedLinear.apply(x, weight, run.params.get(f"{prefix}.bias"))  # type: ignore[no-untyped-call]
    return out


class _StackedLinear(torch.autograd.Function):
    """The function ``x W^T + b`` per client; autograd's gradient of W is a transposed view, which would cost a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _batched_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)  # they have 16 bits under autocast
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if need_x else None,
            torch.bmm(grad.transpose(1, 2), x) if need_weight else None,
            grad.sum(1) if need_bias else None,
        )


def _batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


@dataclass(frozen=True)
class _Layer:
    """The names of the parameters of a linear layer, and whether a ReLU follows it."""

    weight: str
    bias: str
    relu: bool = False


@dataclass(frozen=True)
class Dense:
    """A chain of linear layers, some of them followed by a ReLU, with its gradients written out.

    Attributes:
        layers: the layers in order.
        flat: whether inputs are flattened first.
    """

    layers: tuple[_Layer, ...]
    flat: bool

    @classmethod
    def from_chain(cls, chain: Chain, start: int) -> Dense | None:
        """Return the stages of ``chain`` from index ``start`` on, or ``None`` if they have other layers."""
        stages = chain.stages[start:]
        shape = chain.output_shapes[chain.stages[start - 1]] if start else chain.input_shape
        layers: list[_Layer] = []
        flat = False
        named_layers = (chain.get_submodule(s).named_modules(prefix=s, remove_duplicate=False) for s in stages)
        for name, layer in itertools.chain.from_iterable(named_layers):
            if type(layer) is nn.Linear:
                layers.append(_Layer(f"{name}.weight", f"{name}.bias"))
            elif type(layer) is nn.ReLU and layers:
                layers[-1] = replace(layers[-1], relu=True)
            elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
                flat = flat or not layers
            elif type(layer) is not nn.Sequential:
                return None
        return cls(tuple(layers), flat) if layers and (flat or len(shape) == 1) else None

    def compute_outputs(self, params: Parameters, x: Tensor) -> list[Tensor]:
        """Return the inputs of each layer ``(n, batch, ...)`` and the output of the last, bit-identical to
        :func:`apply_module`.
        """
        activations = [x.flatten(2) if self.flat else x]
        for layer in self.layers:
            x, weight, bias = activations[-1], params[layer.weight], params.get(layer.bias)
            if x.shape[0] == 1:
                out = F.linear(x[0], weight[0], None if bias is None else bias[0]).unsqueeze(0)
            else:
                out = _batched_linear(x, weight, bias)
            activations.append(out.relu_() if layer.relu else out)
        return activations

    def compute_gradients(
        self, params: Parameters, outputs: Sequence[Tensor], grad: Tensor, names: Container[str]
    ) -> Parameters:
        """Return the gradients by some parameters, bit-identical to those of autograd.

        Args:
            params: the parameters by name.
            outputs: the result of :meth:`compute_outputs`.
            grad: the gradient by the last element of ``outputs``.
            names: the parameters for which gradients are computed.
        """
        gradients: Parameters = {}
        trained = [i for i, layer in enumerate(self.layers) if layer.weight in names or layer.bias in names]
        lowest = min(trained, default=len(self.layers))
        for i in range(len(self.layers) - 1, lowest - 1, -1):
            layer, x = self.layers[i], outputs[i]
            if layer.relu:
                grad = _THRESHOLD_BACKWARD(grad, outputs[i + 1], 0)
            if layer.weight in names:
                gradients[layer.weight] = _batched_product(grad.transpose(1, 2), x)
            if layer.bias in names:
                gradients[layer.bias] = grad.sum(1)
            if i > lowest:
                grad = _batched_product(grad, params[layer.weight])
        return gradients


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b`` per client; a single client uses the kernel that autograd uses."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def _apply_stacked_conv2d(module: nn.Conv2d, prefix: str, x: Tensor, run: Pass) -> Tensor:
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


def _apply_dropout(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor:
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


def is_thread_safe(module: nn.Module) -> bool:
    """Return whether several threads may apply ``module``: a pass neither changes it nor uses global random numbers."""
    if type(module) is nn.Sequential:
        return all(is_thread_safe(child) for child in module.children())
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"
    return type(module) in (*ELEMENTWISE, *_PER_SAMPLE, *_DROPOUT, nn.Linear, ColumnLinear, nn.Flatten)


def why_not_stackable(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> tuple[str, str] | None:
    """Return the layer of ``module`` that must run one client at a time and the reason, or ``None`` if all can be
    stacked.

    The layer is described by its name, which starts with ``name``, and its type.
    """
    for kinds, why in ((BATCH_NORM, "batch-norm in training"), ((nn.RNNBase,), "recurrent layers")):
        for below, layer in module.named_modules(prefix=name):
            if isinstance(layer, kinds):
                return _describe_layer(below, layer), why
    tensors = {f"{name}.{below}": torch.stack([t.detach()] * 2) for below, t in module.named_parameters()}
    tensors.update({f"{name}.{below}": torch.stack([t.detach()] * 2) for below, t in module.named_buffers()})
    run = Pass(tensors, torch.zeros(2, dtype=torch.int64), training=True)
    x = torch.zeros((2, 2, *input_shape), dtype=next(iter(tensors.values())).dtype if tensors else None)
    result = _try_apply_stacked(module, name, x, run)
    return None if isinstance(result, Tensor) else result


def _try_apply_stacked(module: nn.Module, prefix: str, x: Tensor, run: Pass) -> Tensor | tuple[str, str]:
    """Return the output, or the layer that cannot be stacked and the reason."""
    if type(module) is nn.Sequential:
        for name, child in _ordered_layers(module):
            result = _try_apply_stacked(child, f"{prefix}.{name}", x, run)
            if not isinstance(result, Tensor):
                return result
            x = result
        return x
    try:
        return _apply_stacked(module, prefix, x, run)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _describe_layer(prefix, module), f"cannot be batched over clients: {text[:120]}"


def _describe_layer(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"
