"""FedDAR (Zhong et al. 2023)."""

from perfed.methods.feddar.feddar import FedDAR

__all__ = ["FedDAR"]
