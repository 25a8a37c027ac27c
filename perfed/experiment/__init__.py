"""Experiments: from TOML and settings to runs, comparisons and searches."""

from perfed.experiment.start import resume, start

__all__ = ["resume", "start"]
