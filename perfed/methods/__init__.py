"""Every method, one file per paper or family; importing this package registers them all."""

from perfed.methods import fedavg, fedproto, fedrep, flic, local

__all__ = ["fedavg", "fedproto", "fedrep", "flic", "local"]
