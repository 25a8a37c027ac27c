"""Callbacks that come with perfed, one file each, and callbacks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from perfed.errors import PerfedError, suggest_name, summarise_validation_error
from perfed.plugins import describe_user_error, import_user_module, match_name
from perfed.run.callback import Callback, require_unique_names
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.losses import LocalLosses
from perfed.run.callbacks.snapshots import EmbeddedSamples
from perfed.run.callbacks.targets import Targets
from perfed.run.settings import Evaluation, Snapshots

NAMED = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB"}
"""The names that ``callbacks`` accepts: the module in this folder, and the class in it."""


def build_required_callbacks(evaluation: Evaluation, snapshots: Snapshots) -> list[Callback]:
    """Return the callbacks that the settings of a run need, in the order of their calls."""
    callbacks: list[Callback] = []
    if evaluation.stop == "validated":
        callbacks.append(BestModels())
    if snapshots.losses:
        callbacks.append(LocalLosses())
    if snapshots.rounds:
        callbacks.append(EmbeddedSamples(settings=snapshots))
    if evaluation.targets:
        callbacks.append(Targets(targets=evaluation.targets, stop=evaluation.stop == "targets"))
    return callbacks


def build_callbacks(items: Sequence[Callback | str | Mapping[str, Any]]) -> list[Callback]:
    """Return the callbacks of an experiment.

    Args:
        items: names (:data:`NAMED`, or ``module:NAME`` of a class in a user's module), tables with a ``name`` and
            settings, or callbacks, which are returned unchanged.

    Raises:
        PerfedError: if a name or a setting is unknown, a value is not allowed, or a name occurs twice.

    Example:
        >>> build_callbacks(["tensorbord"])
        Traceback (most recent call last):
        perfed.errors.PerfedError: unknown callback 'tensorbord' (did you mean 'tensorboard'?); allowed: ...
    """
    return require_unique_names([_build_callback(item) for item in items])


def _build_callback(item: Callback | str | Mapping[str, Any]) -> Callback:
    table = {"name": item} if isinstance(item, str) else item
    if not isinstance(table, Mapping) or not isinstance(name := table.get("name"), str):
        if isinstance(item, Callback):
            return item
        raise PerfedError(f"callbacks: each is a name, or a table with a name and settings (given: {item!r})")
    cls = find_callback_class(name)
    settings = {key: value for key, value in table.items() if key != "name"}
    if unknown := settings.keys() - cls.model_fields:
        allowed = ", ".join(cls.model_fields) or "it has none"
        raise PerfedError(f"unknown key 'callbacks.{name}.{min(unknown)}'; allowed: {allowed}")
    try:
        return cls.model_validate(settings)
    except ValidationError as error:
        raise summarise_validation_error(error, f"callbacks.{name}") from None


def find_callback_class(name: str) -> type[Callback]:
    """Return the class of the callback with this name, ignoring case, or of the class NAME for ``module:NAME``.

    Raises:
        PerfedError: if there is no such class; lists the allowed names.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        module_name = match_name(name, NAMED)
        if module_name is None:
            hint = suggest_name(name, NAMED)
            raise PerfedError(f"unknown callback '{name}'{hint}; allowed: {', '.join(NAMED)}, or module:NAME")
        cls = getattr(import_module(f"{__name__}.{module_name}"), NAMED[module_name])
    else:
        try:
            cls = getattr(import_user_module(module), attribute)
        except Exception as error:  # whatever a user's file does
            raise PerfedError(f"callback '{name}': cannot be loaded: {describe_user_error(error) or error}") from None
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise PerfedError(f"callback '{name}' is not a class of a callback; write class {attribute}(perfed.Callback)")
    return cls
