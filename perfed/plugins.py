"""Methods and data sets in files of the user's own."""

from __future__ import annotations

import importlib

from perfed.errors import PerfedError

SKLEARN = "sklearn:"
"""Names that begin so are of scikit-learn models (:mod:`perfed.baselines`), of no module of the user's."""


def bare_name(name: str) -> str:
    """NAME of ``module:NAME``; any other name as it is."""
    return name.rpartition(":")[2]


def own_name(name: str, what: str) -> str:
    """NAME of ``module:NAME``, after importing the module, which registers it; any other name as it is.

    Raises:
        PerfedError: the module cannot be imported; starts with ``what``.
    """
    module, colon, own = name.partition(":")
    if not colon:
        return name
    if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise PerfedError(f"{what} '{name}': '{module}' is no module's name; a file mine.py is 'mine'")
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's file does
        raise PerfedError(f"{what} '{name}': cannot import '{module}': {error}") from None
    return own
