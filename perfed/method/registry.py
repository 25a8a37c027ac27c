"""Methods by name: registered ones, presets, and METHOD+POLICY."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.method.term import Term
from perfed.participation.settings import POLICIES
from perfed.plugins import POOLED, SKLEARN, check_free, check_own, own_name


@dataclass(frozen=True)
class Entry:
    """A registered method: a class, the terms it always has, and settings that differ from the class's defaults.

    A preset also has the name of its method (``base``) and a participation ``policy``. ``module``: where it was
    registered.

    Example:
        >>> found = entry("fedavg+deadline")
        >>> found.base, found.policy, found.method.__name__
        ('fedavg', 'deadline', 'FedAvg')
    """

    name: str
    method: type[Method]
    terms: tuple[type[Term], ...] = ()
    defaults: Mapping[str, Any] | None = None
    summary: str = ""
    base: str = ""
    policy: str = ""
    module: str = ""


METHODS: dict[str, Entry] = {}
"""What :func:`register` has made known, by name."""

PRESETS: dict[str, Entry] = {}
"""What :func:`preset` has made known, by name."""


def register(
    name: str,
    *,
    terms: tuple[type[Term], ...] = (),
    defaults: Mapping[str, Any] | None = None,
    summary: str = "",
) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make the method known under ``name``; may be applied several times with different settings.

    Args:
        name: as used on the command line.
        terms: term classes that belong to this method; their hyper-parameters become the method's.
        defaults: settings that differ from the class's own defaults.
        summary: one line for ``perfed list methods``; default: the first line of the class's docstring.

    Raises:
        PerfedError: the name is taken by a method of another module; the same module may register it again.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> @register("my-fedavg", summary="FedAvg with large steps", defaults={"lr": 0.5})
        ... class MyFedAvg(FedAvg):
        ...     pass
        >>> entry("my-fedavg").summary
        'FedAvg with large steps'
    """

    def add(cls: type[Method]) -> type[Method]:
        module = cls.__module__
        taken = METHODS.get(name) or PRESETS.get(name)
        check_free("method", name, None if taken is None else taken.module, module)
        text = summary or (cls.__doc__ or name).strip().splitlines()[0]
        METHODS[name] = Entry(name, cls, terms, defaults, text, module=module)
        return cls

    return add


def preset(name: str, method: str, policy: str, summary: str) -> None:
    """Make ``method`` under the participation ``policy`` known as ``name``.

    Example:
        >>> preset("fedavg-in-time", "fedavg", "deadline", "FedAvg with the replies that come in time")
        >>> entry("fedavg-in-time").policy
        'deadline'
    """
    found = entry(method)
    PRESETS[name] = replace(found, name=name, summary=summary, base=method, policy=policy)


def entry(name: str) -> Entry:
    """The registered method or preset called ``name``, or ``METHOD+POLICY``: a method under a participation policy.

    ``module:NAME`` imports the module first, which registers the method NAME.

    Raises:
        PerfedError: there is none; says what is allowed.

    Example:
        >>> [term.__name__ for term in entry("fedpac").terms]
        ['Prototypes']
    """
    if name.startswith((SKLEARN, POOLED)):
        raise PerfedError(
            f"'{name}' is no method: scikit-learn's models stand beside methods in 'perfed compare' alone"
        )
    given, name = name, own_name(name, "method")
    found = METHODS.get(name) or PRESETS.get(name)
    base, _, policy = name.rpartition("+")
    under_policy = found is None and base in METHODS
    modules = {known: item.module for known, item in {**PRESETS, **METHODS}.items()}
    check_own("method", given, base if under_policy else name, modules)
    if found is not None:
        return found
    if under_policy and policy in POLICIES:
        summary = f"{base} under the participation policy {policy}"
        return replace(METHODS[base], name=name, summary=summary, base=base, policy=policy)
    raise PerfedError(f"unknown method '{name}'; {_nearest(name)}")


def _nearest(name: str) -> str:
    """What may have been meant by a name that is not known: all methods that begin so, or those written alike."""
    base, plus, policy = name.partition("+")
    if plus and base in METHODS:
        return f"'{policy}' is no policy; allowed: {', '.join(POLICIES)}"
    family = [known for known in known_names() if known.startswith(f"{base}-")]
    near = family or difflib.get_close_matches(base, known_names(), n=3)
    return f"did you mean: {', '.join(near)}?" if near else "'perfed list methods' names those that there are"


def method_names() -> list[str]:
    """Names of all registered methods, sorted.

    Example:
        >>> "fedavg" in method_names(), "fedrep-srpfl" in method_names()
        (True, False)
    """
    return sorted(METHODS)


def preset_names() -> list[str]:
    """Names of all presets, sorted.

    Example:
        >>> "fedavg" in preset_names(), "fedrep-srpfl" in preset_names()
        (False, True)
    """
    return sorted(PRESETS)


def known_names() -> list[str]:
    """Names that :func:`entry` knows: the methods, then the presets.

    Example:
        >>> {"fedavg", "fedrep-srpfl"} <= set(known_names())
        True
    """
    return [*method_names(), *preset_names()]
