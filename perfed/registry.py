"""Methods by name; see :mod:`perfed.method.registry`. Importing it makes perfed's own methods known."""

import perfed.methods.presets  # noqa: F401 - registers methods and presets
from perfed.method.registry import Entry, entry, known_names, method_names, preset, preset_names, register

__all__ = ["Entry", "entry", "known_names", "method_names", "preset", "preset_names", "register"]
