"""Extensions; see :mod:`perfed.method.extension` and :mod:`perfed.methods.extensions`."""

from perfed.method.extension import Extension, extension_class, extension_names, register_extension
from perfed.methods.extensions import Clip, Prototypes, Proximal, ServerOptimizer, TopK
from perfed.methods.flic import Anchors

__all__ = [
    "Anchors",
    "Clip",
    "Extension",
    "Prototypes",
    "Proximal",
    "ServerOptimizer",
    "TopK",
    "extension_class",
    "extension_names",
    "register_extension",
]
