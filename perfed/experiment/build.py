"""Building of model stages from the settings of an experiment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import SkipValidation

from perfed.errors import PerfedError
from perfed.model import presets as models
from perfed.model.chain import STAGES, Model, Shape, StageFactory, check_factory
from perfed.model.lstm import lstm
from perfed.plugins import describe_user_error, import_user_module
from perfed.settings import Table

KINDS: dict[str, Callable[..., StageFactory]] = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "digits-cnn": models.digits_cnn,
    "hidden-layer": models.hidden_layer,
    "lstm": lstm,
    "linear": models.linear,
    "logit": models.logit,
}
"""Presets of stages by ``kind``."""


_Stage = Annotated[str | dict[str, Any] | None, SkipValidation]  # build_stage validates it


class Stages(Table):
    """The ``[model]`` table of an experiment: the settings from which :func:`build_stage` builds each stage."""

    embedding: _Stage = None
    body: _Stage = None
    head: _Stage = None

    def build(self, num_outputs: int, words: Sequence[str] = ()) -> Model:
        """Return the model; the head has ``num_outputs`` outputs, and ``words`` are as in :func:`build_stage`."""
        return Model(
            **{stage: build_stage(f"model.{stage}", getattr(self, stage), num_outputs, words) for stage in STAGES}
        )


def build_stage(where: str, spec: Any, num_outputs: int, words: Sequence[str] = ()) -> StageFactory | None:
    """Return the factory of a stage from its settings.

    Args:
        where: the key of the stage in error messages, such as ``model.head``.
        spec: ``"none"``, the name of a preset, or a table with ``kind`` and its parameters.
            ``kind = "package.module:function"`` calls the user's function with the input shape and the other values of
            the table; it returns a ``torch.nn.Module``.
        num_outputs: the default of the parameter ``out`` of a head.
        words: the words of the token ids, for presets that have such a parameter.

    Returns:
        The factory; ``None`` for an absent stage.

    Raises:
        PerfedError: the settings are not valid.
    """
    if spec is None or spec == "none":
        return None
    table = {"kind": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise PerfedError(f"{where}: needs a kind, one of: none, {', '.join(KINDS)}, or package.module:function")
    if kind == "none":
        return None
    if ":" in kind:
        return _import_stage(where, kind, table)
    if kind not in KINDS:
        allowed = f"none, {', '.join(KINDS)}, or package.module:function"
        raise PerfedError(f"{where}.kind: unknown '{kind}'; allowed: {allowed}")
    preset = KINDS[kind]
    if where.endswith(".head"):
        table.setdefault("out", num_outputs)
    parameters = dict(inspect.signature(preset).parameters)
    special_arguments = {"words": words} if parameters.pop("words", None) else {}
    for key, value in table.items():
        if key not in parameters:
            raise PerfedError(f"unknown key '{where}.{key}'; allowed: kind, {', '.join(parameters)}")
        default = parameters[key].default
        several = isinstance(value, list) and value and type(default) is int and "Sequence" in str(parameters[key])
        for element in value if several else [value]:
            _check_type(f"{where}.{key}", element, default)
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in table:
            raise PerfedError(f"{where}.{key}: is needed for kind '{kind}', an integer, at least 1")
    return preset(**table, **special_arguments)


def _check_type(where: str, value: Any, default: Any) -> None:
    """Raise an error if a value has another type than the default of the parameter; without a default, an integer."""
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(type(v) is int and v > 0 for v in value)
        expected = "a list of positive integers"
    elif isinstance(default, bool | str):
        fits, expected = type(value) is type(default), "true or false" if isinstance(default, bool) else "text"
    elif isinstance(default, float):
        fits, expected = type(value) in (int, float) and value >= 0, "a number, at least 0"
    else:
        least = 0 if default == 0 else 1
        fits, expected = type(value) is int and value >= least, f"an integer, at least {least}"
    if where.endswith(".dropout"):
        fits, expected = fits and value < 1, "a number, at least 0 and below 1"
    if not fits:
        raise PerfedError(f"{where}: must be {expected} (given: {value!r})")


def _import_stage(where: str, kind: str, options: dict[str, Any]) -> StageFactory:
    module, _, attribute = kind.partition(":")
    try:
        function = getattr(import_user_module(module), attribute)
    except Exception as error:  # a user's module can raise any exception
        raise PerfedError(f"{where}.kind: cannot load '{kind}': {describe_user_error(error) or error}") from None

    def build(shape: Shape) -> torch.nn.Module:
        module = function(shape, **options)
        if not isinstance(module, torch.nn.Module):
            raise PerfedError(f"{where}: '{kind}' returned {type(module).__name__}, not a torch.nn.Module")
        return module

    check_factory(where, function, options)
    return build
