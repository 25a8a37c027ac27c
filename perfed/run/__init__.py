"""Runs: the loop, what it leaves behind, and how it goes on."""

from perfed.run.callbacks.progress import Progress
from perfed.run.run import Run

__all__ = ["Progress", "Run"]
