"""A site's model that is a mixture of others: used like any other site's, and kept with its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.client_model.estimator import ESTIMATOR, SCALE, EstimatorSite, kept_estimator
from perfed.client_model.facts import read_facts, read_file_checksums
from perfed.client_model.onnx_table import onnx_package
from perfed.client_model.site_model import DOMAIN, FACTS, SiteModel, load_network, write_site
from perfed.data.reading import to_json_values
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError
from perfed.plugins import BLEND

PARTS = "parts"
"""Folder of the models that a mixture is of."""


@dataclass(frozen=True, repr=False)
class BlendSite(SiteModel):
    """One client's mixture of models.

    Attributes:
        parts: the models, which take the same inputs.
        weights: of each, not negative, summing to one.
    """

    parts: tuple[SiteModel, ...] = ()
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, SiteModel], weights: Sequence[float], **about: Any) -> Self:
        """Return the mixture of models by their names; ``about``: what its facts say otherwise than those of the first.

        Raises:
            PerfedError: two of them have other inputs.
        """
        first, *others = parts.values()
        for other in others:
            if (other.facts["input_shape"], other.facts["classes"]) != (
                first.facts["input_shape"],
                first.facts["classes"],
            ):
                raise PerfedError(f"site '{first.site}': the models of a blend have different inputs or classes")
        wide = "float64" if any(part.dtype == torch.float64 for part in parts.values()) else "float32"
        domains = next((part.facts["domains"] for part in parts.values() if part.takes_domain), None)
        named = {name: round(w, 6) for name, w in zip(parts, weights, strict=True)}
        facts = {**first.facts, "method": BLEND, "rounds": 0, "dtype": wide, "domains": domains, "weights": named}
        facts["settings"] = {}
        facts["versions"] = {key: value for part in parts.values() for key, value in part.facts["versions"].items()}
        made = {**facts, **to_json_values(about)}
        return cls(
            None,  # type: ignore[arg-type]
            made,
            first.table,
            tuple(parts.values()),
            tuple(map(float, weights)),
            training_rows=first.training_rows,
        )

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return the mixture of what the parts say: of probabilities, values or log hazards."""
        x, *domain = arguments
        said = [part.outputs(x.to(part.dtype), *(domain if part.takes_domain else ())) for part in self.parts]
        return np.tensordot(np.array(self.weights), np.stack([one.reshape(len(x), -1) for one in said]), 1)

    def write(self, place: Path) -> None:
        """Write each part into ``parts/K`` of the folder ``place``.

        Raises:
            PerfedError: a part cannot be kept.
        """
        for number, part in enumerate(self.parts):
            write_site(part, place / PARTS / str(number))


def load_blend(place: Path, trust: bool = False) -> BlendSite:
    """Return the mixture that :meth:`SiteModel.save` wrote into ``place``; parameters as of :func:`perfed.load_site`.

    Raises:
        PerfedError: as :func:`perfed.load_site`.
    """
    facts = read_facts(place / FACTS)
    folders = sorted((place / PARTS).iterdir(), key=lambda folder: int(folder.name))
    if not trust:
        read_file_checksums(place / FACTS)  # which refuses facts that have changed
    weights = list((facts.get("weights") or {}).values())
    if len(weights) != len(folders):
        raise PerfedError(f"{place / FACTS}: has {len(weights)} weights for {len(folders)} parts")
    parts = {str(number): _kept(folder, trust) for number, folder in enumerate(folders)}
    made = BlendSite.of(parts, weights)
    return replace(made, facts=facts)


def _kept(folder: Path, trust: bool) -> SiteModel:
    if not (folder / ESTIMATOR).exists():
        return load_network(folder, trust)
    facts = read_facts(folder / FACTS)
    try:
        known = json.loads((folder / SCALE).read_text(encoding="utf-8"))
        scale = None if known is None else TargetScale(tuple(known["mean"]), tuple(known["std"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfedError(f"{folder / SCALE}: cannot be read: {error}") from None
    estimator = kept_estimator(folder / ESTIMATOR)
    if estimator.n_features_in_ != int(np.prod(facts["input_shape"])):
        raise PerfedError(f"{folder / ESTIMATOR}: is of {estimator.n_features_in_} inputs")
    return EstimatorSite(None, facts, None, estimator, scale)  # type: ignore[arg-type]


def mixed_network(model: BlendSite, networks: Sequence[Any], output: str) -> Any:
    """Return one ONNX model of those of the parts, each from the blend's inputs, and their mixture as ``output``."""
    onnx, helper, compose = (onnx_package(name) for name in ("onnx", "onnx.helper", "onnx.compose"))
    double = model.dtype == torch.float64
    kind = onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT
    nodes, held, functions, mixed = [], [], [], []
    opsets, inputs = dict[str, int](), dict[str, Any]()
    for number, (network, weight) in enumerate(zip(networks, model.weights, strict=True)):
        prefix = f"part {number}/"
        own = compose.add_prefix(network, prefix)
        for entry in own.opset_import:
            if opsets.setdefault(entry.domain, entry.version) != entry.version:
                raise ValueError(f"parts have versions {opsets[entry.domain]} and {entry.version} of operators")
        for entry in own.graph.input:
            type_ = entry.type.tensor_type.elem_type
            name = DOMAIN if type_ == onnx.TensorProto.INT64 else "x"
            nodes.append(helper.make_node("Cast", [name], [entry.name], to=type_))
            inputs.setdefault(name, helper.make_tensor_value_info(name, type_, None))
            inputs[name].type.tensor_type.shape.CopyFrom(entry.type.tensor_type.shape)
            if type_ != onnx.TensorProto.INT64:
                inputs[name].type.tensor_type.elem_type = kind
        nodes += own.graph.node
        nodes.append(helper.make_node("Cast", [own.graph.output[0].name], [f"{prefix}said"], to=kind))
        nodes.append(helper.make_node("Mul", [f"{prefix}said", f"{prefix}weight"], [f"{prefix}weighed"]))
        by = np.array(weight, np.float64 if double else np.float32)
        held += [*own.graph.initializer, onnx.numpy_helper.from_array(by, f"{prefix}weight")]
        functions += own.functions
        mixed.append(f"{prefix}weighed")
    nodes.append(helper.make_node("Sum", mixed, [output]))
    width = 1 if model.facts["classes"] is None else len(model.facts["classes"])
    result = helper.make_tensor_value_info(output, kind, ["batch", width])
    graph = helper.make_graph(nodes, "blend", list(inputs.values()), [result], held)
    versions = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    ir = max(network.ir_version for network in networks)
    return helper.make_model(graph, opset_imports=versions, functions=functions, ir_version=ir)
