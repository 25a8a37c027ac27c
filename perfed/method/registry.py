"""Methods by name: registered ones, presets, and METHOD+POLICY."""

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
"""What differs between the clients that a method is made for."""


@dataclass(frozen=True)
class Entry:
    """A registered method: a class, the extensions it always has, and settings that differ from the class's defaults.

    A preset also has the name of its method (``base``) and a participation ``policy``. ``module``: where it was
    registered. ``title``: what readers see in place of the name; empty where there is none. ``differs``, ``needs`` and
    ``example`` are as in :func:`register`.

    Example:
        >>> found = entry("FedAvg+deadline")
        >>> found.name, found.base, found.policy, found.method.__name__
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
"""What :func:`register` and :func:`preset` have made known, by name."""


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
    """Class decorator: make the method known under ``name``; may be applied several times with different settings.

    Args:
        name: as used on the command line.
        extensions: extension classes that belong to this method; their hyper-parameters become the method's.
        defaults: settings that differ from the class's own defaults.
        summary: one line for ``perfed list methods``; default: the first line of the class's docstring.
        title: the name as its paper prints it, for readers (:func:`perfed.methods.titles.display_name`); default: the
            name.
        differs: what differs between the clients that the method is made for, the group in ``perfed list methods``;
            default: domains where the class needs them, otherwise labels.
        needs: what the method needs of data, model or training, for ``perfed show``.
        example: experiment, and settings, of the command that ``perfed show`` suggests; default: by what differs.

    Raises:
        PerfedError: the name, in whatever case, is taken by a method of another module; the same module may register
            it again.

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
    """Register ``method`` under the participation ``policy`` as ``name``; the others are as in :func:`register`.

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
    """The registered method or preset called ``name``, or ``METHOD+POLICY``: a method under a participation policy.

    Names may be written in any case, and titles in their place. ``module:NAME`` imports the module first, which
    registers the method NAME; a policy after ``+`` may be written in the same way.

    Raises:
        PerfedError: there is none; says what is allowed.

    Example:
        >>> [extension.__name__ for extension in entry("fedpac").extensions]
        ['Prototypes']
    """
    if name.startswith((SKLEARN, POOLED)):
        raise PerfedError(
            f"'{name}' is no method: scikit-learn's models stand beside methods in 'perfed compare' alone"
        )
    if name.casefold() == BLEND:
        raise PerfedError(f"'{name}' is no method: a blend stands beside methods in 'perfed compare' alone")
    written, plus, policy = name.rpartition("+")
    if plus and ":" in policy:  # a policy in a file of the user's
        policy = policy_id(policy)
        name = f"{import_registered(written, 'method')}+{bare_name(policy)}"
    else:
        written, name = name, import_registered(name, "method")
    base, _, policy_name = name.rpartition("+")
    known, under_policy = _meant(name, known_names()), _meant(base, method_names())
    METHODS.check_registration(written, known or under_policy or name)
    if known is not None:
        return METHODS[known]
    if under_policy is not None and (registered := match_name(policy_name, POLICIES)):
        policy = policy if ":" in policy else qualified_name(registered)
        full_name, summary = f"{under_policy}+{policy}", f"{under_policy} under the participation policy {policy}"
        return replace(
            METHODS[under_policy],
            name=full_name,
            summary=summary,
            base=under_policy,
            policy=policy,
            title="",
            example="",
        )
    raise PerfedError(f"unknown method '{name}'; {_nearest(name)}")


def method_id(name: str) -> str:
    """``name`` as files have it: as it was registered, behind the module where the user has written one.

    Raises:
        PerfedError: as :func:`entry`.

    Example:
        >>> method_id("FedAvg-FT"), method_id("FedPAC+SRPFL")
        ('fedavg-ft', 'fedpac+srpfl')
    """
    module, colon, _ = name.partition("+")[0].rpartition(":")
    return f"{module}{colon}{entry(name).name}"


def _meant(name: str, known: Sequence[str]) -> str | None:
    """The one of the ``known`` names that is meant: itself in any case, or the title of its method."""
    titles = {METHODS[own].title.casefold(): own for own in known if METHODS[own].title}
    return match_name(name, known) or titles.get(name.casefold())


def _nearest(name: str) -> str:
    """What may have been meant by a name that is not known: all methods that begin so, or those written alike."""
    base, plus, policy = name.partition("+")
    base = base.casefold()
    if plus and _meant(base, method_names()):
        return f"'{policy}' is no policy; allowed: {', '.join(policy_names())}"
    family = [known for known in known_names() if known.startswith(f"{base}-")]
    near = family or difflib.get_close_matches(base, known_names(), n=3)
    return f"did you mean: {', '.join(near)}?" if near else "'perfed list methods' names those that there are"


def method_names() -> list[str]:
    """Names of all registered methods, sorted.

    Example:
        >>> "fedavg" in method_names(), "fedrep-srpfl" in method_names()
        (True, False)
    """
    return sorted(name for name, found in METHODS.items() if not found.base)


def preset_names() -> list[str]:
    """Names of all presets, sorted.

    Example:
        >>> "fedavg" in preset_names(), "fedrep-srpfl" in preset_names()
        (False, True)
    """
    return sorted(name for name, found in METHODS.items() if found.base)


def known_names() -> list[str]:
    """Names that :func:`entry` knows: the methods, then the presets.

    Example:
        >>> {"fedavg", "fedrep-srpfl"} <= set(known_names())
        True
    """
    return [*method_names(), *preset_names()]
