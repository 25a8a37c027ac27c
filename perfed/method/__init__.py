"""Methods: their base class, extensions, the exchanges of a round, and the registry of methods by name."""

from perfed.method.declared import FederationInfo, Home, ParameterSet
from perfed.method.exchange import Clients, Each, Fold, Replies, Reply, ServerState, each
from perfed.method.method import Method

__all__ = [
    "Clients",
    "Each",
    "FederationInfo",
    "Fold",
    "Home",
    "Method",
    "ParameterSet",
    "Replies",
    "Reply",
    "ServerState",
    "each",
]
