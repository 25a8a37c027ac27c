"""Means over clients; see :mod:`perfed.maths.aggregate`."""

from perfed.maths.aggregate import Average, client_mean, masked_mean, weighted_mean

__all__ = ["Average", "client_mean", "masked_mean", "weighted_mean"]
