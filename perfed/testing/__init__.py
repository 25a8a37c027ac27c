"""Checks for methods that users write, which all methods of perfed pass, in runs of a fraction of a second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.registry import METHODS, Entry, entry
from perfed.testing.checks import CHECKS, Make
from perfed.testing.runs import make_quick_entry

__all__ = ["check_method", "method_checks"]


def check_method(method: type[Method] | Method | str) -> None:
    """Check that a method has the properties that perfed relies on; takes a few seconds.

    The method must train on awkward federations, give the same results on every engine and for every division of the
    clients into chunks, keep clients apart, store nothing outside its declared sets, resume with the same bits, and
    learn.

    Args:
        method: a class or the name of a registered method, or a method. A registered method is checked with the
            extensions and defaults of its registration, a class with those of its first name; it has at most two
            epochs, mini-batches of four samples and, unless its defaults set another, a learning rate of 0.02. A
            method is checked with its settings and extensions.

    Raises:
        PerfedError: the argument is no method; a class has several names, the first of them with extensions; or a
            check fails: the message has the check's name, what it requires and the result.

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


def method_checks(method: type[Method] | Method | str) -> dict[str, Callable[[], None]]:
    """Return the checks of :func:`check_method` by name, each to be called: for a test of each.

    Raises:
        PerfedError: the argument is no method, or a class with several names (see :func:`check_method`).

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> checks = method_checks(FedAvg)
        >>> checks["clients are not mixed"]()
        >>> # @pytest.mark.parametrize("name", checks) runs checks[name]()
    """
    label, make = _label_and_maker(method)
    return {name: partial(_run, name, label, make) for name in CHECKS}


def _run(name: str, label: str, make: Make) -> None:
    check = CHECKS[name]
    try:
        check(make)
    except Exception as error:
        summary = " ".join((getattr(check, "func", check).__doc__ or "").partition("\n\n")[0].split())
        requirement = summary.removeprefix("Check that ").rstrip(".")
        reason = str(error) if isinstance(error, PerfedError) else repr(error)
        raise PerfedError(f"{label} fails '{name}' ({requirement}): {reason}") from error


def _label_and_maker(method: object) -> tuple[str, Make]:
    """Return the name of the method for messages, and a function that builds it with changed settings."""
    if isinstance(method, str):
        registered = entry(method)
        return registered.name, partial(_build, registered)
    if isinstance(method, type) and issubclass(method, Method):
        return method.__name__, partial(_build, _entry_of(method))
    if isinstance(method, Method):
        return type(method).__name__, lambda **settings: copy.deepcopy(method).model_copy(update=settings)
    raise PerfedError(
        "check_method takes the class of a method, a method with its settings and extensions, or the name of a "
        f"registered one (given: {type(method).__name__}); extensions are checked in a method, such as "
        "FedAvg(extensions=(MyExtension(),))"
    )


def _entry_of(method: type[Method]) -> Entry:
    """Return the first entry with which a class is registered, or a new one if it is not registered.

    Raises:
        PerfedError: the first of several entries has extensions; the class does not tell which one to check.
    """
    entries = [registered for registered in METHODS.values() if registered.method is method and not registered.base]
    if len(entries) > 1 and entries[0].extensions:
        names = ", ".join(registered.name for registered in entries)
        raise PerfedError(f"{method.__name__} is registered as {names}, with extensions; check one of these names")
    return next(iter(entries), Entry("", method))


def _build(registered: Entry, **settings: Any) -> Method:
    rate = {} if "lr" in (registered.defaults or {}) else {"lr": 0.02}
    return make_quick_entry(registered, **{**rate, **settings})
