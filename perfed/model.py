"""Models as chains of stages, ``embedding -> body -> head``, and the presets for each stage.

A stage is a factory: called with the shape of one input (no batch axis) it returns any ``torch.nn.Module``.
A stage may be absent. Where a stage's parameters live is the method's business (:mod:`perfed.placement`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perfed.errors import PerfedError

Shape = tuple[int, ...]
StageFactory = Callable[[Shape], nn.Module]
Parameters = dict[str, Tensor]

STAGES = ("embedding", "body", "head")
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Chain(nn.Module):
    """The built stages of one client's model; parameter names start with the stage: ``head.weight``.

    Attributes:
        stages: names of the stages present, in order.
        output_shapes: stage name -> shape of its output for one sample.
    """

    def __init__(self, modules: Mapping[str, nn.Module], input_shape: Shape) -> None:
        super().__init__()
        self.stages = tuple(modules)
        self.input_shape = input_shape
        self.output_shapes: dict[str, Shape] = {}
        for name, module in modules.items():
            self.add_module(name, module)
        for module in self.modules():
            if isinstance(module, BATCH_NORM):
                module.register_forward_pre_hook(_single_values_by_running_statistics)

    def forward(self, x: Tensor) -> Tensor:
        """All stages in order; ``x`` is ``(batch, *input_shape)``."""
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x

    def before(self, stage: str) -> tuple[str, ...]:
        """The stages before ``stage``; all of them if the chain does not have it."""
        return self.stages[: self.stages.index(stage)] if stage in self.stages else self.stages

    def tensors(self) -> Parameters:
        """Parameters and buffers by name."""
        found: Parameters = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tensor.detach() for name, tensor in found.items()}


class Model:
    """A chain of stage factories.

    Args:
        embedding: maps a client's own input to the space that clients share; ``None`` if there is none.
        body: the representation on top of it; ``None`` for no body.
        head: the classifier or regressor.

    Raises:
        PerfedError: no stage, or one that is not a function of the shape of one input.

    Example:
        >>> model = Model(embedding=mlp(hidden=(8,), out=4), head=linear(3))
        >>> model.build((5,)).output_shapes
        {'embedding': (4,), 'head': (3,)}
    """

    def __init__(
        self,
        *,
        embedding: StageFactory | None = None,
        body: StageFactory | None = None,
        head: StageFactory | None = None,
    ) -> None:
        given = {"embedding": embedding, "body": body, "head": head}
        self.factories = {name: factory for name, factory in given.items() if factory is not None}
        if not self.factories:
            raise PerfedError("a model needs at least one stage out of embedding, body, head")
        for name, factory in self.factories.items():
            check_factory(f"model.{name}", factory)

    def build(self, input_shape: Shape) -> Chain:
        """Build every stage for inputs of ``input_shape``; initial values come from torch's generator.

        Raises:
            PerfedError: a stage does not accept the shape it gets; names the stage and the shape.
        """
        modules: dict[str, nn.Module] = {}
        shapes: dict[str, Shape] = {}
        shape = input_shape
        for name, factory in self.factories.items():
            try:
                module = factory(shape)
                if not isinstance(module, nn.Module):
                    raise PerfedError(
                        f"model.{name}: its function returned {type(module).__name__}, not a torch.nn.Module"
                    )
                _check_parameters(module, name)
                was_training = module.training
                with torch.no_grad():
                    shape = tuple(module.eval()(torch.zeros((1, *shape))).shape[1:])
                module.train(was_training)
            except PerfedError:
                raise
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise PerfedError(f"model.{name} does not accept inputs of shape {shape}: {text}") from error
            modules[name] = module
            shapes[name] = shape
        chain = Chain(modules, input_shape)
        chain.output_shapes = shapes
        return chain


def check_factory(where: str, factory: Any, options: Mapping[str, Any] | None = None) -> None:
    """Whether a stage can be built by calling ``factory`` with the shape of one input (and ``options``).

    A module is refused: whether its values are to be kept, or drawn anew for each client and seed, only the user knows.

    Raises:
        PerfedError: it cannot; says what to write.
    """
    if isinstance(factory, nn.Module):
        raise PerfedError(
            f"{where} is a module ({type(factory).__name__}), not a function that builds one from the shape of an "
            "input; write lambda shape: ... with its constructor for new initial values, or lambda shape: "
            "copy.deepcopy(module) to start everybody from its own"
        )
    example = "a function of the shape of one input is needed, such as lambda shape: torch.nn.Linear(shape[0], 8)"
    if not callable(factory):
        raise PerfedError(f"{where} is a {type(factory).__name__}; {example}")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind((), **(options or {}))
    except TypeError as error:
        called = f"{getattr(factory, '__name__', type(factory).__name__)}{signature}"
        raise PerfedError(f"{where}: {called} does not take what it is given ({error}); {example}") from None


def _check_parameters(module: nn.Module, stage: str) -> None:
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise PerfedError(f"model.{stage} has lazy layers; give their sizes, the stage is told the shape of its input")
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name:
            raise PerfedError(
                f"model.{stage}: '{first}' and '{name}' are one parameter (tied weights); give each its own"
            )


def _single_values_by_running_statistics(module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Batch-norm in training of one value per channel: by the running statistics, which stay as they are.

    One value has no variance, and torch refuses it; a client's last mini-batch, or all its data, may be one sample.
    Layers are put into training mode anew for every mini-batch (:func:`perfed.layers.apply_module`).
    """
    if inputs[0].numel() == inputs[0].shape[1]:
        module.eval()


def stage_of(name: str) -> str:
    """The stage that the parameter ``name`` (of another set: ``set/name``) belongs to."""
    return name.rpartition("/")[2].split(".", 1)[0]


# Presets -----------------------------------------------------------------------------------------------------


def activation_layer(name: str) -> nn.Module:
    """The activation that presets call ``name``."""
    known: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "leaky-relu": nn.LeakyReLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "gelu": nn.GELU,
    }
    if name not in known:
        raise PerfedError(f"unknown activation '{name}'; allowed: {', '.join(known)}")
    return known[name]()


def linear(out: int) -> StageFactory:
    """One linear layer to ``out`` outputs; inputs with several axes are flattened first."""

    def build(shape: Shape) -> nn.Module:
        layer = nn.Linear(prod(shape), out)
        return layer if len(shape) == 1 else nn.Sequential(nn.Flatten(), layer)

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
    """Fully connected layers with (batch-norm,) an activation (and dropout) after each hidden one.

    FLIC's embedding for vectors is ``mlp((64, 64), 64)`` with a linear output (Rakotomamonjy et al. 2024, S3):
    a ReLU there could not reach anchors with negative coordinates. ``dropout=0.5, activation="leaky-relu"``
    is the network of the authors' program for BCI.
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
    """Convolutions, each followed by (batch-norm,) an activation and 2x2 max-pooling, then linear layers to ``out``.

    ``hidden`` are sizes of linear layers before the last, each followed by an activation. ``kernel`` and ``padding``
    are for all convolutions, or one number each. FedPAC's networks (Xu et al. 2023, appendix B; sizes from the authors'
    program) are ``cnn((16, 32), 5, 128, padding=(0, 1), activation="leaky-relu")`` for 28x28 and
    ``cnn((16, 32, 64), (5, 5, 3), 128, padding=(0, 1, 1), activation="leaky-relu")`` for 32x32x3; SRPFL's for CIFAR-10
    (Tziotis et al. 2023, appendix C) is ``cnn((64, 64), 5, 64, hidden=(120,))``.
    """
    kernels, paddings = _one_each("kernel", kernel, channels), _one_each("padding", padding, channels)

    def build(shape: Shape) -> nn.Module:
        if len(shape) != 3:
            raise PerfedError(f"a cnn needs images (channels, height, width), got inputs of shape {shape}")
        layers: list[nn.Module] = []
        depth = shape[0]
        for width, size, pad in zip(channels, kernels, paddings, strict=True):
            # The largest of a window stays the largest under a rising activation, which then has a quarter of the work.
            after = [activation_layer(activation), nn.MaxPool2d(2)]
            layers += [
                nn.Conv2d(depth, width, size, padding=pad),
                *([nn.BatchNorm2d(width)] if batch_norm else []),
                *(after if activation == "gelu" else reversed(after)),
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


def _one_each(name: str, value: int | Sequence[int], channels: Sequence[int]) -> list[int]:
    values = [value] * len(channels) if isinstance(value, int) else list(value)
    if len(values) != len(channels):
        raise PerfedError(f"cnn: {name} has {len(values)} numbers for {len(channels)} convolutions; one, or one each")
    return values


def digits_cnn(out: int = 64, *, dropout: float = 0.0) -> StageFactory:
    """FLIC's embedding for digits: conv 32 and 20 (5x5), each max-pooled and through a sigmoid, then linear.

    ``dropout`` acts on whole channels after the second convolution; the authors' program has 0.5 there, which the
    paper does not mention. Source: Rakotomamonjy et al. 2024, S3.2.
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
    """FLIC-HL's shared body: one linear layer and a LeakyReLU (100 outputs in the authors' program)."""

    def build(shape: Shape) -> nn.Module:
        return nn.Sequential(nn.Linear(prod(shape), out), nn.LeakyReLU())

    return build
