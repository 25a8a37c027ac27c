"""Methods by name; see :mod:`perfed.method.registry`."""

from perfed.method.registry import Entry, entry, known_names, method_names, preset, preset_names, register

__all__ = ["Entry", "entry", "known_names", "method_names", "preset", "preset_names", "register"]
