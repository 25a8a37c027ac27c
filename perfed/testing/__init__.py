"""Checks of methods of one's own: what perfed's own methods are tested with, on runs of a fraction of a second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.testing.checks import CHECKS, Make
from perfed.testing.runs import quick

__all__ = ["check_method", "method_checks"]


def check_method(method: type[Method] | Method) -> None:
    """Check that a method keeps what all of perfed relies on; takes a few seconds.

    It must train on awkward federations; give the same results on every engine and for every way of cutting clients
    into chunks; not mix clients; keep nothing outside its declared sets; resume to the same bits; learn.

    Args:
        method: a class, which is tried with at most two epochs of everything, mini-batches of four and a learning
            rate of 0.02; or a method with the settings that it is to be tried with.

    Raises:
        PerfedError: the first check that fails: its name, what it asks for and what was found.

    Example:
        >>> from perfed.method import Method
        >>> class Forgotten(Method):
        ...     pass
        >>> check_method(Forgotten)
        Traceback (most recent call last):
        ...
        perfed.errors.PerfedError: Forgotten fails 'learns' ...: NotImplementedError()
    """
    for check in method_checks(method).values():
        check()


def method_checks(method: type[Method] | Method) -> dict[str, Callable[[], None]]:
    """Return the checks of :func:`check_method` by name, each to be called: for a test of each.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> checks = method_checks(FedAvg)
        >>> checks["clients are not mixed"]()
        >>> # @pytest.mark.parametrize("name", checks) runs checks[name]()
    """
    return {name: partial(_run, name, method) for name in CHECKS}


def _run(name: str, method: type[Method] | Method) -> None:
    kind = method if isinstance(method, type) else type(method)
    check = CHECKS[name]
    try:
        check(_maker(method))
    except Exception as error:
        what = " ".join((getattr(check, "func", check).__doc__ or "").split())
        said = str(error) if isinstance(error, PerfedError) else repr(error)
        raise PerfedError(
            f"{kind.__name__} fails '{name}' ({what.removeprefix('Check that ').rstrip('.')}): {said}"
        ) from error


def _maker(method: type[Method] | Method) -> Make:
    """What makes the method anew, with settings in place of its own."""

    def make(**settings: Any) -> Method:
        if isinstance(method, type):
            made: Method = quick(method, **{"lr": 0.02, **settings})
            return made
        return copy.deepcopy(method).model_copy(update=settings)

    return make
