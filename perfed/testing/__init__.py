"""Checks of methods of one's own: what perfed's own methods are tested with, on runs of a fraction of a second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.registry import METHODS, Entry, entry
from perfed.testing.checks import CHECKS, Make
from perfed.testing.runs import quick_entry

__all__ = ["check_method", "method_checks"]


def check_method(method: type[Method] | Method | str) -> None:
    """Check that a method keeps what all of perfed relies on; takes a few seconds.

    It must train on awkward federations; give the same results on every engine and for every way of cutting clients
    into chunks; not mix clients; keep nothing outside its declared sets; resume to the same bits; learn.

    Args:
        method: a class or the name of a registered method, which is tried with the extensions and defaults that it is
            registered with, at most two epochs of everything, mini-batches of four and, unless its defaults have
            another, a learning rate of 0.02; or a method with its extensions and the settings that it is to be tried
            with.

    Raises:
        PerfedError: no method, or a class that is registered under several names and always with extensions; or the
            first check that fails: its name, what it asks for and what was found.

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
        PerfedError: no method, or several, as there.

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
        what = " ".join((getattr(check, "func", check).__doc__ or "").split())
        said = str(error) if isinstance(error, PerfedError) else repr(error)
        raise PerfedError(f"{label} fails '{name}' ({what.removeprefix('Check that ').rstrip('.')}): {said}") from error


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
    """Return the entry with which a class is registered, preferably the one without extensions."""
    registered = [known for known in METHODS.values() if known.method is method and not known.base]
    plain = [known for known in registered if not known.extensions]
    if len(registered) > 1 and not plain:
        names = ", ".join(known.name for known in registered)
        raise PerfedError(f"{method.__name__} is registered as {names}, each with extensions; check one of these names")
    return next(iter(plain or registered), Entry("", method))


def _build(registered: Entry, **settings: Any) -> Method:
    rate = {} if "lr" in (registered.defaults or {}) else {"lr": 0.02}
    return quick_entry(registered, **{**rate, **settings})
