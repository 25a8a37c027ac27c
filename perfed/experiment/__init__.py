"""Experiments: from TOML and settings to runs, comparisons and searches."""
