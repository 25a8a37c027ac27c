"""FedPAC (Xu et al. 2023)."""

from perfed.methods.fedpac.fedpac import FedPAC

__all__ = ["FedPAC"]
