"""Terms that go inside any method's local training."""

from perfed.methods.terms.prototypes import Prototypes
from perfed.methods.terms.proximal import Proximal

__all__ = ["Prototypes", "Proximal"]
