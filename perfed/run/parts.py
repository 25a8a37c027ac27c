"""What a run is made of: federation, method and model."""

from __future__ import annotations

from typing import Any

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
