"""FLIC (Rakotomamonjy et al. 2024)."""

from perfed.methods.flic.anchors import Anchors
from perfed.methods.flic.flic import FLICHL, FLICClass

__all__ = ["FLICHL", "Anchors", "FLICClass"]
