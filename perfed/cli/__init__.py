"""The command line."""

from perfed.cli.commands import app, main

__all__ = ["app", "main"]
