"""Estimators of scikit-learn as predictors: saved in the format of skops, which is read without running code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.client_model.onnx_table import ML, ML_VERSION, OPSET, onnx_package
from perfed.data.files import optional_package
from perfed.data.reading import reason_of, refuse_unpacked
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError
from perfed.system import write_atomic

ESTIMATOR, SCALE = "model.skops", "scale.json"
TRUSTED = ("sklearn.tree._tree.Tree",)
"""Types that a file may contain besides those that skops trusts by default: arrays of nodes, which are checked."""


@dataclass(frozen=True)
class Estimator:
    """A predictor that is an estimator of scikit-learn.

    Attributes:
        estimator: the fitted estimator, from ``(samples, features)``.
        num_classes: C; ``None`` for values.
        scale: the scale by which targets were standardised; ``None`` where they were not.
    """

    estimator: Any
    num_classes: int | None
    scale: TargetScale | None

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs for classes are probabilities."""
        return hasattr(self.estimator, "predict_proba")

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return class probabilities or scores ``(samples, C)``, or values in the unit of the data."""
        outputs = outputs_of(self.estimator, rows_of(arguments[0]), self.num_classes)
        if self.num_classes is not None:
            return np.exp(outputs) if self.has_probabilities else outputs
        return outputs if self.scale is None else self.scale.up(torch.from_numpy(outputs)).numpy()

    def to_onnx(self, output: str) -> Any:
        """Return the estimator as an ONNX model from ``x`` to ``output``.

        Raises:
            Exception: whatever skl2onnx raises for an estimator that it does not know.
        """
        onnx, helper = onnx_package("onnx"), onnx_package("onnx.helper")
        types = onnx_package("skl2onnx.common.data_types")
        model = onnx_package("skl2onnx").convert_sklearn(
            self.estimator,
            initial_types=[("x", types.FloatTensorType([None, self.estimator.n_features_in_]))],
            options=None if self.num_classes is None else {id(self.estimator): {"zipmap": False}},
            target_opset=(versions := {"": OPSET, ML: ML_VERSION}),
        )
        for entry in model.opset_import:
            entry.version = versions.get(entry.domain, entry.version)
        model = onnx_package("onnx.compose").add_prefix(model, "model/", rename_inputs=False)
        graph = model.graph
        raw_output = graph.output[-1].name
        del graph.output[:]
        if self.num_classes is None:
            graph.node.append(helper.make_node("Reshape", [raw_output, "one column"], ["unscaled"]))
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1]), "one column"))
            mean, std = (0.0, 1.0) if self.scale is None else (self.scale.mean[0], self.scale.std[0])
            for kind, number, before, after in (("Mul", std, "unscaled", "spread"), ("Add", mean, "spread", output)):
                graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, np.float32), f"by {kind}"))
                graph.node.append(helper.make_node(kind, [before, f"by {kind}"], [after]))
        else:
            spread = np.zeros((len(self.estimator.classes_), self.num_classes), np.float32)
            spread[np.arange(len(spread)), self.estimator.classes_] = 1.0
            graph.initializer.append(onnx.numpy_helper.from_array(spread, "classes held"))
            graph.node.append(helper.make_node("MatMul", [raw_output, "classes held"], [output]))
        shape = ["batch", self.num_classes or 1]
        graph.output.append(helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, shape))
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
        return model

    def save(self, folder: Path) -> list[str]:
        """Write ``model.skops`` and ``scale.json``.

        Raises:
            PerfedError: the estimator has types that are not of scikit-learn.
        """
        if not save_estimator(self.estimator, folder / ESTIMATOR):
            raise PerfedError(f"{folder}: the model holds types that are not scikit-learn's own")
        scale = None if self.scale is None else {"mean": list(self.scale.mean), "std": list(self.scale.std)}
        write_atomic(folder / SCALE, json.dumps(scale) + "\n")
        return [ESTIMATOR, SCALE]


def load_estimator(folder: Path, facts: Mapping[str, Any]) -> Estimator:
    """Return the estimator that :meth:`Estimator.save` wrote into ``folder``, for a model with these facts.

    Raises:
        PerfedError: it is damaged, or has another number of inputs.
    """
    try:
        content = json.loads((folder / SCALE).read_text(encoding="utf-8"))
        scale = None if content is None else TargetScale(tuple(content["mean"]), tuple(content["std"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfedError(f"{folder / SCALE}: cannot be read: {error}") from None
    estimator = read_estimator(folder / ESTIMATOR)
    if estimator.n_features_in_ != int(np.prod(facts["input_shape"])):
        raise PerfedError(f"{folder / ESTIMATOR}: is of {estimator.n_features_in_} inputs")
    return Estimator(estimator, None if facts["classes"] is None else len(facts["classes"]), scale)


def rows_of(x: Tensor) -> NDArray[Any]:
    """Return ``x`` as an array ``(samples, features)`` for scikit-learn."""
    return x.flatten(1).numpy()


def outputs_of(model: Any, x: NDArray[Any], num_classes: int | None) -> NDArray[np.float64]:
    """Return the outputs of a fitted estimator for ``x``.

    Returns:
        Values ``(samples,)`` if ``num_classes`` is ``None``. Otherwise ``(samples, C)``: log probabilities if the
        estimator has probabilities (``-inf`` for classes that it does not know), else scores whose largest belongs to
        the predicted class: for two classes the decision function if there is one, otherwise 1 for that class.
    """
    if num_classes is None:
        return np.asarray(model.predict(x), dtype=np.float64)
    if hasattr(model, "predict_proba"):
        logs = np.full((len(x), num_classes), -np.inf)
        logs[:, model.classes_] = np.log(np.maximum(model.predict_proba(x), np.finfo(np.float64).tiny))
        return logs
    scores = np.zeros((len(x), num_classes))
    if num_classes == 2 and len(model.classes_) == 2 and hasattr(model, "decision_function"):
        scores[:, 1] = model.decision_function(x)
    else:
        scores[np.arange(len(x)), model.predict(x)] = 1.0
    return scores


# Files ---------------------------------------------------------------------------------------------------------


def save_estimator(model: Any, file: Path) -> bool:
    """Write a fitted model to ``file`` if it has only types of scikit-learn; return whether it was written."""
    skops = optional_package("skops.io", "keeping models of scikit-learn", extra="tables")
    try:
        content = skops.dumps(model, compression=zipfile.ZIP_DEFLATED)
        if not set(skops.get_untrusted_types(data=content)) <= set(TRUSTED):
            return False
    except Exception:  # code of types that skops does not know may raise anything
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, content)
    return True


def read_estimator(file: Path) -> Any:
    """Return the model that :func:`save_estimator` wrote; no code in the file is run.

    Raises:
        PerfedError: it is damaged, or holds types that are not scikit-learn's.
    """
    skops = optional_package("skops.io", "reading models of scikit-learn", extra="tables")
    try:
        refuse_unpacked(file)
        model = skops.loads(file.read_bytes(), trusted=list(TRUSTED))
        _check_trees(model)
    except PerfedError:
        raise
    except Exception as error:  # zipfile, zlib, skops and scikit-learn each raise their own errors
        raise PerfedError(f"{file}: is damaged, or no model of scikit-learn ({reason_of(error)})") from None
    if not hasattr(model, "predict"):
        raise PerfedError(f"{file}: is damaged, or no model of scikit-learn (it does not predict)")
    return model


def _check_trees(model: Any) -> None:
    """Raise ``ValueError`` if a tree refers to a missing node or column, which compiled code does not check."""
    for member in np.ravel(getattr(model, "estimators_", [])):
        tree = member.tree_
        nodes, children = tree.node_count, np.stack([tree.children_left, tree.children_right])
        inner = children[0] >= 0
        behind = (children > np.arange(nodes)) & (children < nodes)
        has_feature = (tree.feature >= 0) & (tree.feature < model.n_features_in_)
        if not (len(inner) == nodes and ((children < 0).all(0) | (behind.all(0) & has_feature)).all()):
            raise ValueError("a tree leads to a node that it does not have")
