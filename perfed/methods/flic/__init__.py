"""FLIC (Rakotomamonjy et al. 2024)."""

from perfed.methods.flic.flic import EMBEDDING, Anchors

__all__ = ["EMBEDDING", "Anchors"]
