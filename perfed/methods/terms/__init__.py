"""Terms that go inside any method's local training."""

from perfed.methods.terms.prototypes import Prototypes
from perfed.methods.terms.proximal import Proximal
from perfed.methods.terms.server_optimizer import ServerOptimizer

__all__ = ["Prototypes", "Proximal", "ServerOptimizer"]
