"""Leaderboards that others published: one TOML file each, read by :mod:`perfed.experiment.published`."""
