"""A site's model in formats that other programs read: ONNX, torch's ``.pt2``, and parameters alone."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from perfed.errors import PerfedError
from perfed.run.card import card
from perfed.run.directory import write_atomic
from perfed.run.site import DOMAIN, SiteModel, write_program

Format = Literal["onnx", "pt2", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)

_CHECKED = 64  # rows on which an ONNX file must say what perfed says
_INNER = "preprocessed"
_TOLERANCE = 1e-4  # of a probability, or of the largest value


def export(model: SiteModel, file: Path | str, format_: Format) -> dict[str, Any]:
    """Write ``model`` to ``file``, and its card beside it (``NAME.md``).

    * ``onnx``: from inputs, for tables from the raw columns, to ``probabilities`` or ``values``; metadata has the facts
      of the site and the largest difference to perfed's own answers.
    * ``pt2``: from preprocessed inputs (and domain ids) to the same; ``torch.export.load`` reads it.
    * ``safetensors``: the parameters by name, with the facts as metadata; nothing that can be run.

    Returns:
        What was found: ``largest_difference`` for ``onnx``, else nothing.

    Raises:
        PerfedError: another format, packages that are not installed, a model or a preprocessing that cannot be
            converted, or whose answers are not those of perfed; nothing is written then.
    """
    place, found = Path(file), {}
    if format_ not in FORMATS:
        raise PerfedError(f"format '{format_}' is not known; allowed: {', '.join(FORMATS)}")
    facts = json.dumps(model.facts)
    place.parent.mkdir(parents=True, exist_ok=True)
    if format_ == "onnx":
        content, difference = onnx_file(model)
        found = {"largest_difference": difference}
        write_atomic(place, content)
    elif format_ == "pt2":
        write_program(model.program, place, {"site.json": facts})
    else:
        tensors = {name: tensor.contiguous().clone() for name, tensor in model.program.state_dict.items()}
        write_atomic(place, bytes(save(tensors, {"site": facts})))
    write_atomic(place.with_suffix(".md"), card({**model.facts, **found}))
    return found


def onnx_file(model: SiteModel) -> tuple[bytes, float]:
    """An ONNX model and its largest difference to what ``model`` says.

    Raises:
        PerfedError: as :func:`export`.
    """
    network = _network(model)
    whole = network if model.table is None else _joined(_preprocessing(model, network), network)
    difference = _difference(model, whole)
    for key, value in {**model.facts, "largest_difference": difference}.items():
        entry = whole.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    content: bytes = whole.SerializeToString()
    return content, difference


def _needed(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise PerfedError(f"ONNX files need the package '{name}': pip install 'perfed[onnx]'") from None


def _network(model: SiteModel) -> Any:
    """The network, from ``x`` (and ``domain``) to ``probabilities`` or ``values``."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _needed(package)
    first = _INNER if model.table is not None else "x"
    inputs = [first, DOMAIN] if model.takes_domain else [first]
    output = "values" if model.facts["classes"] is None else "probabilities"
    try:
        with _quiet():
            made = torch.onnx.export(
                model.program, dynamo=True, verbose=False, input_names=inputs, output_names=[output]
            )
        assert made is not None
        found = made.model_proto
    except Exception as error:
        reason = _reason(error)
        raise PerfedError(f"site '{model.site}': its model cannot be written as ONNX: {reason}") from error
    for value in (*found.graph.input, *found.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del found.metadata_props[:]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# Tables ------------------------------------------------------------------------------------------------------


def _preprocessing(model: SiteModel, network: Any) -> Any:
    """The site's fitted ``ColumnTransformer``, from raw columns ``(batch, 1)`` to ``x``."""
    skl2onnx, types = _needed("skl2onnx"), _needed("skl2onnx.common.data_types")
    text = _texts(model.table.transformer)
    kinds = {True: types.StringTensorType([None, 1]), False: types.FloatTensorType([None, 1])}
    columns = [(str(name), kinds[str(name) in text]) for name in model.table.columns]
    opsets = {entry.domain: entry.version for entry in network.opset_import if entry.domain == ""}
    try:
        found = skl2onnx.convert_sklearn(
            model.table.transformer, initial_types=columns, target_opset={**opsets, "ai.onnx.ml": 3}
        )
    except Exception as error:
        reason = _reason(error)
        raise PerfedError(f"site '{model.site}': its preprocessing cannot be written as ONNX: {reason}") from error
    said = {value.name: name for value, (name, _) in zip(found.graph.input, columns, strict=True)}
    for value in found.graph.input:  # skl2onnx makes names of variables of them
        value.name = said[value.name]
    for node in found.graph.node:
        node.input[:] = [said.get(name, name) for name in node.input]
    return found


def _reason(error: BaseException) -> str:
    """What was first wrong, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _joined(preprocessing: Any, network: Any) -> Any:
    """Both as one model."""
    onnx, compose = _needed("onnx"), _needed("onnx.compose")
    network = compose.add_prefix(network, "network/", rename_inputs=False, rename_outputs=False)
    preprocessing = compose.add_prefix(preprocessing, "table/", rename_inputs=False)
    (made,), wanted, between = preprocessing.graph.output, network.graph.input[0], "table/numbers"
    to = wanted.type.tensor_type.elem_type
    preprocessing.graph.node.append(onnx.helper.make_node("Cast", [made.name], [between], to=to))
    preprocessing.graph.output[0].CopyFrom(wanted)
    preprocessing.graph.output[0].name = between
    opset = next(entry.version for entry in network.opset_import if entry.domain == "")
    for entry in preprocessing.opset_import:
        if entry.domain == "":  # skl2onnx wrote it for this one, and says the lowest that its operators need
            entry.version = opset
    network.ir_version = preprocessing.ir_version = min(network.ir_version, preprocessing.ir_version)
    return compose.merge_models(preprocessing, network, io_map=[(between, wanted.name)])


def _parts(transformer: Any) -> Iterator[tuple[list[Any], list[str]]]:
    """The steps of each part of a fitted ``ColumnTransformer``, and its columns."""
    for _, part, columns in transformer.transformers_:
        if not isinstance(part, str):  # "drop", "passthrough"
            steps = [step for _, step in part.steps] if hasattr(part, "steps") else [part]
            yield steps, [columns] if isinstance(columns, str) else [str(column) for column in columns]


def _texts(transformer: Any) -> dict[str, list[str]]:
    """Columns that hold texts, with those that training has seen."""
    found: dict[str, list[str]] = {}
    for steps, columns in _parts(transformer):
        for step in steps:
            for name, seen in zip(columns, getattr(step, "categories_", ()), strict=False):
                if np.asarray(seen).dtype.kind in "OU":
                    found[name] = [str(value) for value in seen]
    return found


def _numbers(transformer: Any) -> dict[str, tuple[float, float]]:
    """Columns that are scaled, with the mean and the standard deviation that training has seen."""
    found: dict[str, tuple[float, float]] = {}
    for steps, columns in _parts(transformer):
        for step in steps:
            if hasattr(step, "mean_") and hasattr(step, "scale_"):
                found |= {name: (m, s) for name, m, s in zip(columns, step.mean_, step.scale_, strict=False)}
    return found


# The check ---------------------------------------------------------------------------------------------------


def _difference(model: SiteModel, whole: Any) -> float:
    """Largest difference of the answers of onnxruntime and of perfed, to drawn rows.

    Raises:
        PerfedError: it is more than rounding.
    """
    runtime = _needed("onnxruntime")
    given, arguments = _rows(model)
    session = runtime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {entry.name: given[entry.name] for entry in session.get_inputs()}
    found, expected = session.run(None, feeds)[0], model.outputs(*arguments)
    difference = float(np.abs(found - expected).max())
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise PerfedError(
            f"site '{model.site}': its ONNX model differs from perfed's by {difference:.3g} on {_CHECKED} drawn rows; "
            "nothing was written"
        )
    return difference


def _rows(model: SiteModel) -> tuple[dict[str, NDArray[Any]], tuple[torch.Tensor, ...]]:
    """Rows like those of the site: by name of an ONNX input, and as the network gets them."""
    generator = np.random.default_rng(0)
    domain = generator.integers(0, len(model.facts["domains"]), _CHECKED) if model.takes_domain else None
    if model.table is None:
        ranges = model.facts["data"]["inputs"]
        x = generator.normal(ranges["mean"], ranges["std"], (_CHECKED, *model.facts["input_shape"]))
        x = np.clip(x, ranges["smallest"], ranges["largest"])
        arguments = model.arguments(x.round() if ranges["whole"] else x, domain)
        return dict(zip(("x", DOMAIN), (a.numpy() for a in arguments), strict=False)), arguments
    from pandas import DataFrame

    texts, numbers = _texts(model.table.transformer), _numbers(model.table.transformer)
    names = [str(name) for name in model.table.columns]
    frame = DataFrame(
        {
            name: generator.choice(np.array(texts[name], object), _CHECKED)
            if name in texts
            else generator.normal(*numbers.get(name, (0.0, 1.0)), _CHECKED)
            for name in names
        }
    )
    arguments = model.arguments(frame, domain)
    given = {name: _as_input(frame[name].to_numpy()) for name in frame.columns}
    return {**given, **({DOMAIN: arguments[1].numpy()} if model.takes_domain else {})}, arguments


def _as_input(column: NDArray[Any]) -> NDArray[Any]:
    return column[:, None] if column.dtype.kind in "OU" else column[:, None].astype(np.float32)
