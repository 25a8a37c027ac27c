"""perfed: personalised federated learning for clients that differ.

The pieces a user needs first: :class:`Federation` (who the clients are), :class:`Model` with stage presets,
:func:`build_method` (a method by name) and :class:`Run` (training and evaluation). Writing a method needs
:mod:`perfed.method.method`.
"""

from perfed.data.federation import Client, Federation, Split
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment.build import build_method
from perfed.experiment.config import validate
from perfed.experiment.start import resume, start
from perfed.model.chain import Model
from perfed.model.presets import cnn, digits_cnn, hidden_layer, linear, mlp
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.run.run import Run
from perfed.run.settings import Evaluation

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
