"""Federations of real sites: their transport over Flower, what a deployment consists of, and the commands for both.

Nothing outside this package imports it; :mod:`perfed.plugins` finds its commands.
"""
