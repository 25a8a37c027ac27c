"""The registry of methods by name: methods, presets, and METHOD+POLICY."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perfed.errors import PerfedError
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.participation.policy import POLICIES, policy_id, policy_names, qualified_name
from perfed.plugins import BLEND, POOLED, SKLEARN, Registry, bare_name, import_registered, match_name

Differs = Literal["features", "labels", "domains", "speeds", "nothing"]
"""The difference between clients for which a method is designed."""


@dataclass(frozen=True)
class Entry:
    """A registered method or preset.

    Attributes:
        name: the registered name.
        method: the class.
        extensions: classes of the extensions that it always has.
        defaults: settings that differ from the class's defaults.
        summary: one line for ``perfed list methods``.
        base: of a preset, the name of its method; empty for methods.
        policy: of a preset, its participation policy; empty for methods.
        module: name of the module that registered it.
        title: the name that readers see; empty if it is the registered name.
        differs, needs, example: as in :func:`register`.

    Example:
        >>> deadline = entry("FedAvg+deadline")
        >>> deadline.name, deadline.base, deadline.policy, deadline.method.__name__
        ('fedavg+deadline', 'fedavg', 'deadline', 'FedAvg')
    """

    name: str
    method: type[Method]
    extensions: tuple[type[Extension], ...] = ()
    defaults: Mapping[str, Any] | None = None
    summary: str = ""
    base: str = ""
    policy: str = ""
    module: str = ""
    title: str = ""
    differs: Differs | None = None
    needs: str = ""
    example: str = ""


METHODS: Registry[Entry] = Registry("method", lambda entry: entry.module)
"""The methods and presets registered with :func:`register` and :func:`preset`, by name."""


def register(
    name: str,
    *,
    extensions: tuple[type[Extension], ...] = (),
    defaults: Mapping[str, Any] | None = None,
    summary: str = "",
    title: str = "",
    differs: Differs | None = None,
    needs: str = "",
    example: str = "",
) -> Callable[[type[Method]], type[Method]]:
    """Register the method under ``name``; a class decorator that may be applied several times with different settings.

    Args:
        name: the name used on the command line.
        extensions: classes of the extensions that belong to this method; their hyper-parameters become hyper-parameters
            of the method.
        defaults: settings that differ from the class's own defaults.
        summary: one line for ``perfed list methods``; default: the first line of the class's docstring.
        title: the name as its paper prints it, for readers (:func:`perfed.methods.titles.display_name`); default: the
            name.
        differs: the difference between clients for which the method is designed, which is its group in ``perfed list
            methods``; default: domains if the class needs them, labels otherwise.
        needs: the method's requirements on data, model or training, for ``perfed show``.
        example: experiment and settings of the command that ``perfed show`` suggests; default: depends on ``differs``.

    Raises:
        PerfedError: a method of another module has the same name, in upper or lower case. The same module may register
            its method again.

    Example:
        >>> from perfed.methods.fedavg import FedAvg
        >>> @register("my-fedavg", summary="FedAvg with large steps", defaults={"lr": 0.5})
        ... class MyFedAvg(FedAvg):
        ...     pass
        >>> entry("my-fedavg").summary
        'FedAvg with large steps'
    """

    def add(cls: type[Method]) -> type[Method]:
        METHODS.check_free(name, cls.__module__)
        text = summary or (cls.__doc__ or name).strip().splitlines()[0]
        METHODS[name] = Entry(
            name,
            cls,
            extensions,
            defaults,
            text,
            module=cls.__module__,
            title=title,
            differs=differs,
            needs=needs,
            example=example,
        )
        return cls

    return add


def preset(name: str, method: str, policy: str, summary: str, title: str = "", example: str = "") -> None:
    """Register ``method`` with the participation ``policy`` under ``name``.

    Args:
        name: the name used on the command line.
        method: name of a registered method.
        policy: name of a participation policy.
        summary, title, example: as in :func:`register`.

    Example:
        >>> preset("fedavg-in-time", "fedavg", "deadline", "FedAvg with the replies that come in time")
        >>> entry("fedavg-in-time").policy
        'deadline'
    """
    base = entry(method)
    METHODS[name] = replace(
        base, name=name, base=base.name, policy=policy, summary=summary, title=title, example=example
    )


def entry(name: str) -> Entry:
    """Return the method or preset called ``name``, or ``METHOD+POLICY``: a method under a participation policy.

    Names may be written in upper or lower case, and titles instead of names. ``module:NAME`` first imports the module,
    which registers the method NAME; a policy after ``+`` may be written in the same way.

    Raises:
        PerfedError: no method has this name; the message says what is allowed.

    Example:
        >>> [extension.__name__ for extension in entry("fedpac").extensions]
        ['Prototypes']
    """
    if name.startswith((SKLEARN, POOLED)):
        raise PerfedError(
            f"'{name}' is not a method: scikit-learn's models are available only in 'perfed compare', beside methods"
        )
    if name.casefold() == BLEND:
        raise PerfedError(f"'{name}' is not a method: a blend is available only in 'perfed compare', beside methods")
    name_as_written, plus, policy = name.rpartition("+")
    if plus and ":" in policy:  # a policy in a user's file
        policy = policy_id(policy)
        name = f"{import_registered(name_as_written, 'method')}+{bare_name(policy)}"
    else:
        name_as_written, name = name, import_registered(name, "method")
    base, _, policy_name = name.rpartition("+")
    known_name, base_name = _match_registered(name, known_names()), _match_registered(base, method_names())
    METHODS.check_registration(name_as_written, known_name or base_name or name)
    if known_name is not None:
        return METHODS[known_name]
    if base_name is not None and (registered := match_name(policy_name, POLICIES)):
        policy = policy if ":" in policy else qualified_name(registered)
        full_name, summary = f"{base_name}+{policy}", f"{base_name} under the participation policy {policy}"
        return replace(
            METHODS[base_name],
            name=full_name,
            summary=summary,
            base=base_name,
            policy=policy,
            title="",
            example="",
        )
    raise PerfedError(f"unknown method '{name}'; {_suggest_names(name)}")


def method_id(name: str) -> str:
    """Return the name of a method as run files store it: as registered, after the module if ``name`` has one.

    Raises:
        PerfedError: no method has this name.

    Example:
        >>> method_id("FedAvg-FT"), method_id("FedPAC+SRPFL")
        ('fedavg-ft', 'fedpac+srpfl')
    """
    module, colon, _ = name.partition("+")[0].rpartition(":")
    return f"{module}{colon}{entry(name).name}"


def _match_registered(name: str, names: Sequence[str]) -> str | None:
    """Return the one of ``names`` that equals ``name`` in upper or lower case, or whose title does; or ``None``."""
    titles = {METHODS[registered].title.casefold(): registered for registered in names if METHODS[registered].title}
    return match_name(name, names) or titles.get(name.casefold())


def _suggest_names(name: str) -> str:
    """Return a hint for an unknown name: the methods that begin with it, or methods with similar names."""
    base, plus, policy = name.partition("+")
    base = base.casefold()
    if plus and _match_registered(base, method_names()):
        return f"'{policy}' is no policy; allowed: {', '.join(policy_names())}"
    family = [registered for registered in known_names() if registered.startswith(f"{base}-")]
    near = family or difflib.get_close_matches(base, known_names(), n=3)
    return f"did you mean: {', '.join(near)}?" if near else "'perfed list methods' lists all methods"


def method_names() -> list[str]:
    """Return the names of all registered methods, sorted.

    Example:
        >>> "fedavg" in method_names(), "fedrep-srpfl" in method_names()
        (True, False)
    """
    return sorted(name for name, registered in METHODS.items() if not registered.base)


def preset_names() -> list[str]:
    """Return the names of all presets, sorted.

    Example:
        >>> "fedavg" in preset_names(), "fedrep-srpfl" in preset_names()
        (False, True)
    """
    return sorted(name for name, registered in METHODS.items() if registered.base)


def known_names() -> list[str]:
    """Return all names that :func:`entry` accepts without a policy: the methods, then the presets.

    Example:
        >>> {"fedavg", "fedrep-srpfl"} <= set(known_names())
        True
    """
    return [*method_names(), *preset_names()]
