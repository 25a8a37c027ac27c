"""The names that extensions had in version 0.1; :mod:`perfed.extensions` has those of now."""

import warnings

from perfed.extensions import Anchors, Prototypes, Proximal, ServerOptimizer
from perfed.extensions import Extension as Term
from perfed.extensions import extension_class as term_class
from perfed.extensions import extension_names as term_names
from perfed.extensions import register_extension as register_term

__all__ = ["Anchors", "Prototypes", "Proximal", "ServerOptimizer", "Term", "register_term", "term_class", "term_names"]

warnings.warn("terms are called extensions now: import from perfed.extensions", FutureWarning, stacklevel=2)
