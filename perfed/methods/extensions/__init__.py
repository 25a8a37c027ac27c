"""Extensions that can be added to the rounds of any method."""

from perfed.methods.extensions.clip import Clip
from perfed.methods.extensions.prototypes import Prototypes
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.server_optimizer import ServerOptimizer
from perfed.methods.extensions.top_k import TopK

__all__ = ["Clip", "Prototypes", "Proximal", "ServerOptimizer", "TopK"]
