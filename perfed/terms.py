"""The names that extensions had in version 0.1; :mod:`perfed.extensions` has those of now."""

import warnings

from perfed.method.extension import Extension as Term
from perfed.method.extension import extension_class as term_class
from perfed.method.extension import extension_names as term_names
from perfed.method.extension import register_extension as register_term
from perfed.methods.extensions import Prototypes, Proximal, ServerOptimizer
from perfed.methods.flic import Anchors

__all__ = ["Anchors", "Prototypes", "Proximal", "ServerOptimizer", "Term", "register_term", "term_class", "term_names"]

warnings.warn("terms are called extensions now: import from perfed.extensions", FutureWarning, stacklevel=2)
