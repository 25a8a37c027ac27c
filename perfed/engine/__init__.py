"""Engines decide how a cohort is cut into chunks and where each chunk runs; results do not depend on it."""

from perfed.engine.engine import Engine, InProcessEngine
from perfed.engine.host import Exchange

__all__ = ["Engine", "Exchange", "InProcessEngine"]
