"""Runs: the loop, what it leaves behind, and how it goes on."""

from perfed.run.run import Progress, Run

__all__ = ["Progress", "Run"]
