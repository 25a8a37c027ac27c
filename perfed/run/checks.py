"""What is said in one line: a run that is made of something else, and training that diverged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Model


def check_kinds(federation: Any, method: Any, model: Any) -> None:
    """Say in one line which of a run's three parts is something else.

    Raises:
        PerfedError: one of them is.
    """
    kinds = (
        ("federation", federation, Federation, "perfed.Federation.from_arrays(...) makes one"),
        ("method", method, Method, "give its name, such as 'fedavg', or perfed.build_method(name, settings)"),
        ("model", model, Model, "perfed.Model(body=..., head=...) makes one"),
    )
    for what, given, wanted, hint in kinds:
        if not isinstance(given, wanted):
            kind = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise PerfedError(f"{what} is {kind}, not a perfed {wanted.__name__}; {hint}")


@contextmanager
def diverging(where: str) -> Iterator[None]:
    """Say in one line that matrices cannot be factorised: they come from values that overflowed."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).partition(": ")[0]
        raise PerfedError(
            f"{where}: training diverged: {reason} failed on values that are no longer finite; lower the learning rate"
        ) from None
