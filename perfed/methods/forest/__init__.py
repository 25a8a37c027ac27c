"""Forests across sites, and trees that begin where others' score ends."""

from perfed.methods.forest.boost import Boost
from perfed.methods.forest.forest import Forest

__all__ = ["Boost", "Forest"]
