"""Tables of experiments before they are checked: one on top of another, and names as perfed writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfed.datasets import dataset_id
from perfed.errors import PerfedError
from perfed.method.extension import extension_id
from perfed.method.registry import method_id
from perfed.participation.settings import policy_name


def merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tables ``base`` with those of ``over`` on top, key by key; ``data`` and stages with a ``kind`` as a whole."""
    result = dict(base)
    for key, value in over.items():
        whole = key == "data" or (isinstance(value, dict) and "kind" in value)
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and not whole
        result[key] = merged(base[key], value) if both else value
    return result


def canonical(table: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment ``table`` with the names of its methods, extensions, data set and policy as perfed writes them.

    Tables of a method under two spellings become one, of which what comes later wins. What is not known stays as it
    is: validation says so.

    Example:
        >>> canonical({"method": "FedPAC", "methods": {"FedPAC": {"lr": 0.1}}, "data": {"name": "Digits"}})
        {'method': 'fedpac', 'methods': {'fedpac': {'lr': 0.1}}, 'data': {'name': 'digits'}}
    """
    result = dict(table)
    if "method" in result:
        result["method"] = _known(method_id, result["method"])
    for section, key, known in (("data", "name", dataset_id), ("participation", "policy", policy_name)):
        if isinstance(found := result.get(section), Mapping) and key in found:
            result[section] = {**found, key: _known(known, found[key])}
    if isinstance(methods := result.get("methods"), Mapping):
        own: dict[str, Any] = {}
        for name, settings in methods.items():
            own = merged(own, {_known(method_id, name): _with_extensions(settings)})
        result["methods"] = own
    return result


def _with_extensions(settings: Any) -> Any:
    """A method's table; its extensions as perfed writes them, also those of a file that calls them terms."""
    if isinstance(settings, Mapping) and "terms" in settings and "extensions" not in settings:
        settings = {"extensions" if key == "terms" else key: value for key, value in settings.items()}
    if not isinstance(settings, Mapping) or not isinstance(extensions := settings.get("extensions"), list):
        return settings
    return {**settings, "extensions": [_known(extension_id, name) for name in extensions]}


def _known(known: Callable[[str], str], name: Any) -> Any:
    try:
        return known(name) if isinstance(name, str) else name
    except PerfedError:
        return name
