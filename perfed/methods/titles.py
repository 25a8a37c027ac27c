"""Display names: what readers see instead of the names in files and settings."""

from __future__ import annotations

from collections.abc import Iterable

import perfed.methods.presets  # noqa: F401 - registers methods and presets
from perfed.method.registry import METHODS
from perfed.participation.policy import POLICIES
from perfed.plugins import BLEND, POOLED, SKLEARN

_MODELS = {
    "majority": "most frequent class",
    "mean": "mean",
    "logistic": "logistic regression",
    "ridge": "ridge regression",
    "cox": "Cox model",
    "svc": "SVC",
    "random-forest": "random forest",
    "gradient-boosting": "gradient boosting",
}


def display_name(name: str) -> str:
    """Return the name of a method, or of a model of scikit-learn, as papers print it; an unknown name unchanged.

    Only the name and the registry are used, so that results can be read without the user's module.

    Example:
        >>> display_name("fedavg-ft"), display_name("fedpac+srpfl"), display_name("sklearn:svc"), display_name("mine:x")
        ('FedAvg-FT', 'FedPAC+SRPFL', 'SVC per client', 'mine:x')
    """
    for prefix, suffix in ((SKLEARN, "per client"), (POOLED, "(data brought together)")):
        if name.startswith(prefix):
            model = name.removeprefix(prefix)
            return f"{_MODELS.get(model, model)} {suffix}"
    if name == BLEND:
        return "Blend"
    method, plus, policy = name.rpartition("+")
    if plus and (policy in POLICIES or ":" in policy):
        return f"{display_name(method)}+{_policy_title(policy)}"
    module, _, bare = name.rpartition(":")
    registered = METHODS.get(bare)
    return registered.title or name if registered is not None and module in ("", registered.module) else name


def _policy_title(name: str) -> str:
    """Return the title of a policy; the name if it is not registered."""
    module, _, bare = name.rpartition(":")
    entry = POLICIES.get(bare)
    return entry.title if entry is not None and module in ("", entry.module) else name


def match_display_name(text: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that is written like ``text``, in any case or as display name; or ``None``.

    Example:
        >>> match_display_name("kNN-Per", ["local", "knnper"]), match_display_name("Ditto", ["local"])
        ('knnper', None)
    """
    folded = text.casefold()
    return next((name for name in names if folded in (name.casefold(), display_name(name).casefold())), None)
