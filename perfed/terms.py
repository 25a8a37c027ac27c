"""Terms; see :mod:`perfed.method.term` and :mod:`perfed.methods.terms`."""

from perfed.method.term import Term, register_term, term_class, term_names
from perfed.methods.flic import Anchors
from perfed.methods.terms import Prototypes, Proximal, ServerOptimizer

__all__ = ["Anchors", "Prototypes", "Proximal", "ServerOptimizer", "Term", "register_term", "term_class", "term_names"]
