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
"""Callbacks that ``callbacks`` may name: each a file of this folder, and the class in it."""


def build_required_callbacks(evaluation: Evaluation, snapshots: Snapshots) -> list[Callback]:
    """Return the callbacks that a run's settings ask for, in their order."""
    found: list[Callback] = []
    if evaluation.stop == "validated":
        found.append(BestModels())
    if snapshots.losses:
        found.append(LocalLosses())
    if snapshots.rounds:
        found.append(EmbeddedSamples(wanted=snapshots))
    if evaluation.targets:
        found.append(Targets(targets=evaluation.targets, stop=evaluation.stop == "targets"))
    return found


def build_callbacks(given: Sequence[Callback | str | Mapping[str, Any]]) -> list[Callback]:
    """Return callbacks from what ``callbacks`` in an experiment lists.

    Args:
        given: names (:data:`NAMED`, or ``module:NAME`` of a class of the user's own), tables of a ``name`` and
            settings, or callbacks, which stay as they are.

    Raises:
        PerfedError: an unknown name, a setting that is not allowed, or the same one twice.

    Example:
        >>> build_callbacks(["tensorbord"])
        Traceback (most recent call last):
        perfed.errors.PerfedError: unknown callback 'tensorbord' (did you mean 'tensorboard'?); allowed: ...
    """
    return require_unique_names([_build_callback(item) for item in given])


def _build_callback(given: Callback | str | Mapping[str, Any]) -> Callback:
    table = {"name": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(name := table.get("name"), str):
        if isinstance(given, Callback):
            return given
        raise PerfedError(f"callbacks: each is a name, or a table with a name and settings (given: {given!r})")
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
    """Return the callback called ``name``, in any case; ``module:NAME`` is the class NAME of a module of the user's.

    Raises:
        PerfedError: there is none; says what is allowed.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        known = match_name(name, NAMED)
        if known is None:
            hint = suggest_name(name, NAMED)
            raise PerfedError(f"unknown callback '{name}'{hint}; allowed: {', '.join(NAMED)}, or module:NAME")
        found = getattr(import_module(f"{__name__}.{known}"), NAMED[known])
    else:
        try:
            found = getattr(import_user_module(module), attribute)
        except Exception as error:  # whatever a user's file does
            raise PerfedError(f"callback '{name}': cannot be loaded: {describe_user_error(error) or error}") from None
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise PerfedError(f"callback '{name}' is no class of a callback; write class {attribute}(perfed.Callback)")
    return found
