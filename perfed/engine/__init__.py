"""Engines decide how a cohort is cut into chunks and where each chunk runs; results do not depend on it."""

from perfed.engine.inprocess import Exchange, InProcessEngine

__all__ = ["Exchange", "InProcessEngine"]
