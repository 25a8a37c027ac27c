"""Display names: what readers see in place of the names that files and settings have."""

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
    """The name of a method, or of models of scikit-learn, as papers print it; one that is not known as it is.

    Reads nothing but the name and what is registered, so that results can be read where the user's module is not.

    Example:
        >>> display_name("fedavg-ft"), display_name("fedpac+srpfl"), display_name("sklearn:svc"), display_name("mine:x")
        ('FedAvg-FT', 'FedPAC+SRPFL', 'SVC per client', 'mine:x')
    """
    for prefix, whose in ((SKLEARN, "per client"), (POOLED, "(data brought together)")):
        if name.startswith(prefix):
            model = name.removeprefix(prefix)
            return f"{_MODELS.get(model, model)} {whose}"
    if name == BLEND:
        return "Blend"
    method, plus, policy = name.rpartition("+")
    if plus and (policy in POLICIES or ":" in policy):
        return f"{display_name(method)}+{_policy_title(policy)}"
    module, _, own = name.rpartition(":")
    found = METHODS.get(own)
    return found.title or name if found is not None and module in ("", found.module) else name


def _policy_title(name: str) -> str:
    """Return the title of a policy; one that is not registered as it is written."""
    module, _, bare = name.rpartition(":")
    entry = POLICIES.get(bare)
    return entry.title if entry is not None and module in ("", entry.module) else name


def meant(given: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``given`` is, in any case or as it is printed; ``None``: there is none.

    Example:
        >>> meant("kNN-Per", ["local", "knnper"]), meant("Ditto", ["local"])
        ('knnper', None)
    """
    wanted = given.casefold()
    return next((name for name in names if wanted in (name.casefold(), display_name(name).casefold())), None)
