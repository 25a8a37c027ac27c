"""Models: chains of named stages, presets, and where parameters live."""

from perfed.model.chain import BATCH_NORM, STAGES, Chain, Model, Parameters, Shape, StageFactory, stage_of
from perfed.model.presets import activation_layer, cnn, digits_cnn, hidden_layer, linear, mlp

__all__ = [
    "BATCH_NORM",
    "STAGES",
    "Chain",
    "Model",
    "Parameters",
    "Shape",
    "StageFactory",
    "activation_layer",
    "cnn",
    "digits_cnn",
    "hidden_layer",
    "linear",
    "mlp",
    "stage_of",
]
