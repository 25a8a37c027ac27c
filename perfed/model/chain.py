"""Models as chains of stages, ``embedding -> body -> head``.

A stage is defined by a factory that takes the shape of one input (without the batch axis) and returns a
``torch.nn.Module``. A stage may be absent. The method decides where the parameters of a stage live
(:mod:`perfed.model.placement`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perfed.errors import PerfedError

Shape = tuple[int, ...]


StageFactory = Callable[[Shape], nn.Module]


Parameters = dict[str, Tensor]


EMBEDDING = "embedding"
STAGES = (EMBEDDING, "body", "head")


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
                module.register_forward_pre_hook(_use_running_statistics_for_single_values)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all stages in order for ``x`` ``(batch, *input_shape)``."""
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x

    def stages_before(self, stage: str) -> tuple[str, ...]:
        """Return the names of the stages before ``stage``, or of all stages if the chain does not have it."""
        return self.stages[: self.stages.index(stage)] if stage in self.stages else self.stages

    def tensors(self) -> Parameters:
        """Return parameters and buffers by name, detached."""
        tensors: Parameters = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tensor.detach() for name, tensor in tensors.items()}


class Model:
    """A chain of stage factories.

    Args:
        embedding: maps a client's input to the space that clients share; ``None`` for no embedding.
        body: computes the representation; ``None`` for no body.
        head: the classifier or regressor.

    Raises:
        PerfedError: if there is no stage, or a stage is not a function of the shape of one input.

    Example:
        >>> from perfed.model.presets import linear, mlp
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
        factories = {"embedding": embedding, "body": body, "head": head}
        self.factories = {name: factory for name, factory in factories.items() if factory is not None}
        if not self.factories:
            raise PerfedError("a model needs at least one stage out of embedding, body, head")
        for name, factory in self.factories.items():
            check_factory(f"model.{name}", factory)

    def replace_head(self, make: Callable[[nn.Module, Shape], nn.Module], why: str) -> Model:
        """Return a model with the same stages except for the head, which is ``make(head, shape of the head's input)``.

        Raises:
            PerfedError: if there is no head; the message starts with ``why``.

        Example:
            >>> from perfed.model.presets import linear
            >>> model = Model(head=linear(3)).replace_head(lambda head, shape: nn.Sequential(nn.ReLU(), head), "")
            >>> model.build((5,)).get_submodule("head.1")
            Linear(in_features=5, out_features=3, bias=True)
        """
        if "head" not in self.factories:
            raise PerfedError(f"{why}, and this model has no stage 'head'")
        head = self.factories["head"]
        return Model(**{**self.factories, "head": lambda shape: make(head(shape), shape)})

    def insert_before_head(self, make: Callable[[Shape, int], nn.Module], why: str) -> Model:
        """Return a model with an additional layer before the head: the layer is ``head.0`` and the head ``head.1``.

        Args:
            make: returns the layer, given the shape of the head's input and the number of its outputs.
            why: the start of the error message.

        Raises:
            PerfedError: if there is no head.

        Example:
            >>> from perfed.model.presets import linear
            >>> model = Model(head=linear(3)).insert_before_head(lambda shape, outputs: nn.ReLU(), "")
            >>> model.build((5,)).get_submodule("head.0")
            ReLU()
        """

        def with_layer(head: nn.Module, shape: Shape) -> nn.Module:
            with torch.no_grad():
                outputs = head.eval()(torch.zeros(1, *shape)).shape[1]
            return nn.Sequential(make(shape, outputs), head.train())

        return self.replace_head(with_layer, why)

    def build(self, input_shape: Shape) -> Chain:
        """Return the chain for inputs of ``input_shape``; initial values are drawn from torch's global generator.

        Raises:
            PerfedError: if a stage does not accept the shape of its input; the message names the stage and the shape.
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
    """Check that ``factory`` can be called with the shape of one input (and ``options``) to build a stage.

    A module is refused, because only the user knows whether its values are to be used or to be initialised for each
    client and seed.

    Raises:
        PerfedError: if it cannot be called in this way; the message says what to write.
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
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind((), **(options or {}))
    except TypeError as error:
        called = f"{getattr(factory, '__name__', type(factory).__name__)}{signature}"
        raise PerfedError(f"{where}: {called} does not take what it is given ({error}); {example}") from None


def _check_parameters(module: nn.Module, stage: str) -> None:
    """Raise ``PerfedError`` if a stage has lazy layers or two names for one parameter."""
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise PerfedError(f"model.{stage} has lazy layers; give their sizes, the stage is told the shape of its input")
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name:
            raise PerfedError(
                f"model.{stage}: '{first}' and '{name}' are one parameter (tied weights); give each its own"
            )


def _use_running_statistics_for_single_values(module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Switch batch-norm to its running statistics for an input with a single value per channel.

    A single value has no variance, and torch raises an error, but a client's last mini-batch or all its data may be one
    sample. Layers are put back into training mode for every mini-batch (:func:`perfed.model.stacked.apply_module`).
    """
    if inputs[0].numel() == inputs[0].shape[1]:
        module.eval()


def stage_of(name: str) -> str:
    """Return the stage of the parameter ``name``, which may have the form ``set/name``."""
    return name.rpartition("/")[2].split(".", 1)[0]
