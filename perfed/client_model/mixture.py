"""Mixtures as predictors: the weighted mean of the outputs of several models of one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.client_model.onnx_table import onnx_package
from perfed.client_model.site_model import DOMAIN, SiteModel
from perfed.data.reading import to_json_values
from perfed.errors import PerfedError
from perfed.plugins import BLEND

PARTS = "parts"
"""The folder with the models of a mixture."""


@dataclass(frozen=True)
class Mixture:
    """A predictor that is a mixture of other models.

    Attributes:
        parts: the models, which take the same inputs.
        weights: the weight of each model; they are not negative, and sum to one.

    Raises:
        PerfedError: two models have different inputs or classes.
    """

    parts: tuple[SiteModel, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        kinds = [(part.facts["input_shape"], part.facts["classes"]) for part in self.parts]
        if any(kind != kinds[0] for kind in kinds):
            raise PerfedError(f"site '{self.parts[0].site}': the models of a blend have different inputs or classes")

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs for classes are probabilities."""
        return all(part.has_probabilities for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs: that of the most precise part."""
        return torch.float64 if any(part.dtype == torch.float64 for part in self.parts) else torch.float32

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return the weighted mean of the outputs of the parts: probabilities, values or log hazards."""
        x, *domain = arguments
        outputs = [part.outputs(x.to(part.dtype), *(domain if part.takes_domain else ())) for part in self.parts]
        return np.tensordot(np.array(self.weights), np.stack([rows.reshape(len(x), -1) for rows in outputs]), 1)

    def to_onnx(self, output: str) -> Any:
        """Return one ONNX model that contains those of the parts; ``output`` is the weighted mean of their outputs."""
        onnx, helper, compose = (onnx_package(name) for name in ("onnx", "onnx.helper", "onnx.compose"))
        double = self.dtype == torch.float64
        kind = onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT
        networks = [part.predictor.to_onnx(output) for part in self.parts]
        nodes, constants, functions, weighted = [], [], [], []
        opsets, inputs = dict[str, int](), dict[str, Any]()
        for number, (network, weight) in enumerate(zip(networks, self.weights, strict=True)):
            prefix = f"part {number}/"
            part = compose.add_prefix(network, prefix)
            for entry in part.opset_import:
                if opsets.setdefault(entry.domain, entry.version) != entry.version:
                    raise ValueError(f"parts have versions {opsets[entry.domain]} and {entry.version} of operators")
            for entry in part.graph.input:
                type_ = entry.type.tensor_type.elem_type
                name = DOMAIN if type_ == onnx.TensorProto.INT64 else "x"
                nodes.append(helper.make_node("Cast", [name], [entry.name], to=type_))
                inputs.setdefault(name, helper.make_tensor_value_info(name, type_, None))
                inputs[name].type.tensor_type.shape.CopyFrom(entry.type.tensor_type.shape)
                if type_ != onnx.TensorProto.INT64:
                    inputs[name].type.tensor_type.elem_type = kind
            nodes += part.graph.node
            nodes.append(helper.make_node("Cast", [part.graph.output[0].name], [f"{prefix}said"], to=kind))
            nodes.append(helper.make_node("Mul", [f"{prefix}said", f"{prefix}weight"], [f"{prefix}weighed"]))
            weight_array = np.array(weight, np.float64 if double else np.float32)
            constants += [*part.graph.initializer, onnx.numpy_helper.from_array(weight_array, f"{prefix}weight")]
            functions += part.functions
            weighted.append(f"{prefix}weighed")
        nodes.append(helper.make_node("Sum", weighted, [output]))
        width = 1 if self.parts[0].facts["classes"] is None else len(self.parts[0].facts["classes"])
        result = helper.make_tensor_value_info(output, kind, ["batch", width])
        graph = helper.make_graph(nodes, "blend", list(inputs.values()), [result], constants)
        versions = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        ir = max(network.ir_version for network in networks)
        return helper.make_model(graph, opset_imports=versions, functions=functions, ir_version=ir)

    def save(self, folder: Path) -> list[str]:
        """Write each part, with its facts and checksums, into the subfolder ``parts/K``; return no files."""
        for number, part in enumerate(self.parts):
            part.save(folder / PARTS / str(number))
        return []


def mix_models(parts: Mapping[str, SiteModel], weights: Sequence[float], **facts: Any) -> SiteModel:
    """Return the mixture of models of one client.

    Args:
        parts: the models by name.
        weights: the weight of each.
        facts: the facts in which the mixture differs from the first model.

    Raises:
        PerfedError: two models have different inputs or classes.
    """
    first, predictor = next(iter(parts.values())), Mixture((*parts.values(),), (*map(float, weights),))
    changed = {
        "method": BLEND,
        "rounds": 0,
        "dtype": str(predictor.dtype).removeprefix("torch."),
        "domains": next((part.facts["domains"] for part in parts.values() if part.takes_domain), None),
        "weights": {name: round(weight, 6) for name, weight in zip(parts, weights, strict=True)},
        "settings": {},
        "versions": {key: value for part in parts.values() for key, value in part.facts["versions"].items()},
        **to_json_values(facts),
    }
    return SiteModel({**first.facts, **changed}, predictor, first.table, training_rows=first.training_rows)
