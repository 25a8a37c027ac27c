"""A site's model that is one of scikit-learn's: kept in skops' format, read back without running code, and used."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.client_model.onnx_table import ML, ML_VERSION, OPSET, onnx_package
from perfed.client_model.site_model import SiteModel
from perfed.data.files import optional_package
from perfed.data.reading import reason_of, refuse_unpacked
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError
from perfed.system import write_atomic

ESTIMATOR, SCALE = "model.skops", "scale.json"
TRUSTED = ("sklearn.tree._tree.Tree",)
"""Types beside those that skops trusts by itself which a file may hold: arrays of nodes, which are checked."""


@dataclass(frozen=True, repr=False)
class EstimatorSite(SiteModel):
    """One client's model of scikit-learn's, used like any other site's.

    Attributes:
        estimator: fitted, from ``(samples, features)``.
        scale: what targets were standardised by; ``None`` where they were not.
    """

    estimator: Any = None
    scale: TargetScale | None = None

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Class probabilities ``(samples, C)`` or values of what :meth:`arguments` gives.

        Raises:
            PerfedError: of classes, and the model has no probabilities.
        """
        x, classes = rows_of(arguments[0]), self.facts["classes"]
        if classes is None:
            found = torch.from_numpy(outputs_of(self.estimator, x, None))
            return (found if self.scale is None else self.scale.up(found)).numpy()
        if not self.says_probabilities:
            raise PerfedError(f"site '{self.site}': {self.facts['method']} has no probabilities, which are needed here")
        return np.exp(outputs_of(self.estimator, x, len(classes)))

    @property
    def says_probabilities(self) -> bool:
        """Whether the model has probabilities of classes."""
        return hasattr(self.estimator, "predict_proba")

    def predict(self, x: Any, domain: Any = None) -> NDArray[Any]:
        """The label of every sample, also of a model without probabilities, or its value."""
        if self.facts["classes"] is None or self.says_probabilities:
            return super().predict(x, domain)
        said = outputs_of(self.estimator, rows_of(self.arguments(x, domain)[0]), len(self.facts["classes"]))
        labels: NDArray[Any] = self.classes_[said.argmax(1)]
        return labels

    def network(self) -> Any:
        """The model as ONNX, from ``x`` to ``probabilities`` or ``values``.

        Raises:
            Exception: whatever skl2onnx says of a model that it does not know.
        """
        onnx, helper = onnx_package("onnx"), onnx_package("onnx.helper")
        types = onnx_package("skl2onnx.common.data_types")
        width, classes = int(np.prod(self.facts["input_shape"])), self.facts["classes"]
        options = None if classes is None else {id(self.estimator): {"zipmap": False}}
        made = onnx_package("skl2onnx").convert_sklearn(
            self.estimator,
            initial_types=[("x", types.FloatTensorType([None, width]))],
            options=options,
            target_opset=(versions := {"": OPSET, ML: ML_VERSION}),
        )
        for entry in made.opset_import:
            entry.version = versions.get(entry.domain, entry.version)
        made = onnx_package("onnx.compose").add_prefix(made, "model/", rename_inputs=False)
        graph = made.graph
        said = graph.output[-1].name
        del graph.output[:]
        if classes is None:
            graph.node.append(helper.make_node("Reshape", [said, "one column"], ["unscaled"]))
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1]), "one column"))
            mean, std = (0.0, 1.0) if self.scale is None else (self.scale.mean[0], self.scale.std[0])
            for kind, number, before, after in (("Mul", std, "unscaled", "spread"), ("Add", mean, "spread", "values")):
                graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, np.float32), f"by {kind}"))
                graph.node.append(helper.make_node(kind, [before, f"by {kind}"], [after]))
        else:
            spread = np.zeros((len(self.estimator.classes_), len(classes)), np.float32)
            spread[np.arange(len(spread)), self.estimator.classes_] = 1.0
            graph.initializer.append(onnx.numpy_helper.from_array(spread, "classes held"))
            graph.node.append(helper.make_node("MatMul", [said, "classes held"], ["probabilities"]))
        output = "values" if classes is None else "probabilities"
        width = 1 if classes is None else len(classes)
        graph.output.append(helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, ["batch", width]))
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
        return made

    def write(self, place: Path) -> None:
        """Write the model and its scale into the folder ``place``.

        Raises:
            PerfedError: it holds types that are not scikit-learn's own.
        """
        if not keep_estimator(self.estimator, place / ESTIMATOR):
            raise PerfedError(f"site '{self.site}': {self.facts['method']} holds types that are not scikit-learn's own")
        scale = None if self.scale is None else {"mean": list(self.scale.mean), "std": list(self.scale.std)}
        write_atomic(place / SCALE, json.dumps(scale) + "\n")

    def save(self, folder: Path | str) -> Path:
        """Refuse: the run that made it keeps it.

        Raises:
            PerfedError: always.
        """
        raise PerfedError(
            f"site '{self.site}': models of scikit-learn are kept by their run; write this one with export, as onnx"
        )


def rows_of(x: Tensor) -> NDArray[Any]:
    """Return one row of features per sample, ``(samples, features)``, as scikit-learn wants them."""
    return x.flatten(1).numpy()


def outputs_of(model: Any, x: NDArray[Any], num_classes: int | None) -> NDArray[np.float64]:
    """Return ``(samples, C)`` logarithms of probabilities where the model has them (``-inf``: a class that it does not
    know), else numbers whose largest is what it predicts, for two classes by how much; or values.
    """
    if num_classes is None:
        return np.asarray(model.predict(x), dtype=np.float64)
    if hasattr(model, "predict_proba"):
        found = np.full((len(x), num_classes), -np.inf)
        found[:, model.classes_] = np.log(np.maximum(model.predict_proba(x), np.finfo(np.float64).tiny))
        return found
    found = np.zeros((len(x), num_classes))
    if num_classes == 2 and len(model.classes_) == 2 and hasattr(model, "decision_function"):
        found[:, 1] = model.decision_function(x)
    else:
        found[np.arange(len(x)), model.predict(x)] = 1.0
    return found


# Files ---------------------------------------------------------------------------------------------------------


def keep_estimator(model: Any, file: Path) -> bool:
    """Write a fitted model to ``file``; whether it could be: it is made of scikit-learn's own types alone."""
    skops = optional_package("skops.io", "keeping models of scikit-learn", extra="tables")
    try:
        content = skops.dumps(model, compression=zipfile.ZIP_DEFLATED)
        if not set(skops.get_untrusted_types(data=content)) <= set(TRUSTED):
            return False
    except Exception:  # types that skops does not know: whatever their code raises
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, content)
    return True


def kept_estimator(file: Path) -> Any:
    """The model that :func:`keep_estimator` wrote; no code in the file is run.

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
    except Exception as error:  # zipfile, zlib, skops and scikit-learn raise each their own
        raise PerfedError(f"{file}: is damaged, or no model of scikit-learn ({reason_of(error)})") from None
    if not hasattr(model, "predict"):
        raise PerfedError(f"{file}: is damaged, or no model of scikit-learn (it does not predict)")
    return model


def _check_trees(model: Any) -> None:
    """Trees lead from node to node of their own, on columns that are there: compiled code does not look."""
    for single in np.ravel(getattr(model, "estimators_", [])):
        tree = single.tree_
        nodes, children = tree.node_count, np.stack([tree.children_left, tree.children_right])
        inner = children[0] >= 0
        behind = (children > np.arange(nodes)) & (children < nodes)
        known = (tree.feature >= 0) & (tree.feature < model.n_features_in_)
        if not (len(inner) == nodes and ((children < 0).all(0) | (behind.all(0) & known)).all()):
            raise ValueError("a tree leads to a node that it does not have")
