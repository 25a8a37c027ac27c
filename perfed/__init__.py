"""perfed: personalised federated learning for clients that differ.

The pieces a user needs first: :class:`Federation` (who the clients are), :class:`Model` with stage presets,
:func:`build_method` (a method by name) and :class:`Run` (training and evaluation). Writing a method needs
:mod:`perfed.method`.
"""

from perfed.building import build_method
from perfed.clock import Clock
from perfed.config import Evaluation, validate
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment import resume, start
from perfed.federation import Client, Federation, Split
from perfed.model import Model, cnn, digits_cnn, hidden_layer, linear, mlp
from perfed.participation import Participation
from perfed.run import Run

__all__ = [
    "Client",
    "Clock",
    "Evaluation",
    "Federation",
    "Model",
    "Participation",
    "PerfedError",
    "Run",
    "Split",
    "build_method",
    "cnn",
    "digits_cnn",
    "hidden_layer",
    "linear",
    "load",
    "mlp",
    "resume",
    "start",
    "validate",
]
