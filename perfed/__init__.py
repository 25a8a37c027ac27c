"""perfed: personalised federated learning for clients that differ.

The pieces a user needs first: :class:`Federation` (who the clients are), :class:`Model` with stage presets,
:func:`build_method` (a method by name) and :class:`Run` (training and evaluation). A method of one's own is a subclass
of :class:`Method` under :func:`register`. Each is imported when it is asked for, so that ``import perfed`` is quick;
``__init__.pyi`` gives their types.
"""

import os
from importlib import import_module
from importlib.util import find_spec

# Idle OpenMP threads sleep instead of spinning, which slows down every other thread on a busy machine. The library of
# OpenMP reads the variable when torch is first imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

_HOMES = {
    "Callback": "perfed.run.callback",
    "Client": "perfed.data.client",
    "Clock": "perfed.participation.clock",
    "Evaluation": "perfed.run.settings",
    "Extension": "perfed.extensions",
    "Federation": "perfed.data.federation",
    "Method": "perfed.method",
    "Model": "perfed.model.chain",
    "PERSONAL": "perfed.placement",
    "Participation": "perfed.participation.settings",
    "PerfedError": "perfed.errors",
    "Reply": "perfed.method",
    "Run": "perfed.run.run",
    "SHARED": "perfed.placement",
    "Split": "perfed.data.client",
    "build_method": "perfed.methods.build",
    "cnn": "perfed.model.presets",
    "compare": "perfed.experiment.result",
    "digits_cnn": "perfed.model.presets",
    "hidden_layer": "perfed.model.presets",
    "linear": "perfed.model.presets",
    "load": "perfed.datasets",
    "load_site": "perfed.client_model.load",
    "metric": "perfed.engine.metrics",
    "mlp": "perfed.model.presets",
    "register": "perfed.registry",
    "resume": "perfed.experiment.start",
    "start": "perfed.experiment.start",
    "use_workers": "perfed.engine.ray.where",
    "validate": "perfed.experiment.config",
    "weighted_mean": "perfed.aggregate",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """A name of the face, or a module such as ``perfed.datasets`` (PEP 562)."""
    if name == "__version__":
        found: object = import_module("perfed.system").installed_version()
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    elif find_spec(f"{__name__}.{name}") is not None:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *_HOMES, "aggregate", "datasets", "extensions", "method", "placement", "registry"})
