"""Adds the commands ``perfed deploy``, ``perfed submit`` and ``perfed site`` to the command line."""

from perfed.sites.commands import deploy, site

__all__ = ["deploy", "site"]
