from perfed import aggregate, datasets, extensions, method, placement, registry
from perfed.aggregate import weighted_mean
from perfed.client_model.load import load_site
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.engine.metrics import metric
from perfed.engine.ray.where import use_workers
from perfed.errors import PerfedError
from perfed.experiment.config import validate
from perfed.experiment.result import compare
from perfed.experiment.start import resume, start
from perfed.extensions import Extension
from perfed.method import Method, Reply
from perfed.methods.build import build_method
from perfed.model.chain import Model
from perfed.model.presets import cnn, digits_cnn, hidden_layer, linear, mlp
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation
from perfed.placement import PERSONAL, SHARED
from perfed.registry import register
from perfed.run.callback import Callback
from perfed.run.run import Run
from perfed.run.settings import Evaluation

__version__: str

__all__ = [
    "PERSONAL",
    "SHARED",
    "Callback",
    "Client",
    "Clock",
    "Evaluation",
    "Extension",
    "Federation",
    "Method",
    "Model",
    "Participation",
    "PerfedError",
    "Reply",
    "Run",
    "Split",
    "aggregate",
    "build_method",
    "cnn",
    "compare",
    "datasets",
    "digits_cnn",
    "extensions",
    "hidden_layer",
    "linear",
    "load",
    "load_site",
    "method",
    "metric",
    "mlp",
    "placement",
    "register",
    "registry",
    "resume",
    "start",
    "use_workers",
    "validate",
    "weighted_mean",
]
