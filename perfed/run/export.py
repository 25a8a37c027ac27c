"""A site's model in formats that other programs read: ONNX, torch's ``.pt2``, and parameters alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from perfed.data.reading import reason_of
from perfed.data.tables.problems import pandas
from perfed.data.tables.site import TablePreprocessor
from perfed.errors import PerfedError
from perfed.run.blend_site import BlendSite, mixed_network
from perfed.run.card import card
from perfed.run.estimator_site import EstimatorSite
from perfed.run.onnx_table import example_columns, joined, onnx_package
from perfed.run.site import DOMAIN, SiteModel, quiet, write_program
from perfed.system import write_atomic

Format = Literal["onnx", "pt2", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)

_CHECKED = 64  # rows on which an ONNX file must say what perfed says
_TOLERANCE = 1e-4  # of a probability, or of the largest value


def export(model: SiteModel, file: Path | str, format_: Format) -> dict[str, Any]:
    """Write ``model`` to ``file``, and its card beside it (``NAME.md``).

    * ``onnx``: from inputs, for tables from their columns, to ``probabilities`` or ``values``; metadata has the facts
      of the site and the largest difference to perfed's own answers.
    * ``pt2``: from preprocessed inputs (and domain ids) to the same; ``torch.export.load`` reads it.
    * ``safetensors``: the parameters by name, with the facts as metadata; nothing that can be run.

    Returns:
        What was found: ``largest_difference`` for ``onnx``, else nothing.

    Raises:
        PerfedError: another format, packages that are not installed, a model or a preprocessing that cannot be
            converted, or whose answers are not those of perfed; nothing is written then.
    """
    if format_ not in FORMATS:
        raise PerfedError(f"format '{format_}' is not known; allowed: {', '.join(FORMATS)}")
    if isinstance(model, EstimatorSite | BlendSite) and format_ != "onnx":
        raise PerfedError(f"{model.facts['method']} has no network of torch's; allowed: --format onnx")
    place, found, facts = Path(file), {}, json.dumps(model.facts)
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
    """Return an ONNX model and its largest difference to what ``model`` says.

    Raises:
        PerfedError: as :func:`export`.
    """
    for package in ("onnx", "onnxscript", "onnxruntime", *(() if model.table is None else ("skl2onnx",))):
        onnx_package(package)
    try:
        with quiet("torch.onnx"):
            whole = _network(model)
            whole = whole if model.table is None else joined(model.table, whole)
    except Exception as error:
        raise PerfedError(f"site '{model.site}': its model cannot be written as ONNX: {reason_of(error)}") from error
    difference = _difference(model, whole)
    for key, value in {**model.facts, "largest_difference": difference}.items():
        entry = whole.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    content: bytes = whole.SerializeToString()
    return content, difference


def _network(model: SiteModel) -> Any:
    """The network, from ``x`` (and ``domain``) to ``probabilities`` or ``values``; parameters keep their names."""
    if isinstance(model, EstimatorSite):
        return model.network()
    if isinstance(model, BlendSite):
        output = "values" if model.facts["classes"] is None else "probabilities"
        return mixed_network(model, [_network(part) for part in model.parts], output)
    inputs = ["x"] if model.table is None else ["network/x"]
    inputs += [DOMAIN if model.table is None else "network/domain"] if model.takes_domain else []
    output = "values" if model.facts["classes"] is None else "probabilities"
    made = torch.onnx.export(
        model.program, dynamo=True, optimize=False, verbose=False, input_names=inputs, output_names=[output]
    )
    assert made is not None
    found = made.model_proto
    for value in (*found.graph.input, *found.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del found.metadata_props[:]
    return found


# The check ---------------------------------------------------------------------------------------------------


def _difference(model: SiteModel, whole: Any) -> float:
    """Largest difference of the answers of onnxruntime and of perfed, to drawn rows.

    Raises:
        PerfedError: it is more than rounding, or onnxruntime cannot run the model.
    """
    given, arguments = _rows(model)
    runtime = onnx_package("onnxruntime")
    try:
        session = runtime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {entry.name: given[entry.name] for entry in session.get_inputs()}
        found = session.run(None, feeds)[0]
    except Exception as error:
        raise PerfedError(f"site '{model.site}': onnxruntime cannot run its model: {reason_of(error)}") from error
    expected = model.outputs(*arguments)
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
    if model.table is not None:
        frame = pandas().DataFrame(example_columns(model.table, _CHECKED, generator))
        return onnx_inputs(model.table, frame), model.arguments(frame)
    domain = generator.integers(0, len(model.facts["domains"]), _CHECKED) if model.takes_domain else None
    ranges = model.facts["data"]["inputs"]
    x = generator.normal(ranges["mean"], ranges["std"], (_CHECKED, *model.facts["input_shape"]))
    x = np.clip(x, ranges["smallest"], ranges["largest"])
    arguments = model.arguments(x.round() if ranges["whole"] else x, domain)
    return dict(zip(("x", DOMAIN), (a.numpy() for a in arguments), strict=False)), arguments


def onnx_inputs(table: TablePreprocessor, frame: Any) -> dict[str, NDArray[Any]]:
    """Return the rows of a data frame as an ONNX file of the site takes them: columns ``(rows, 1)`` by name."""
    ready = table.read(frame)
    texts = {column.name for column in table.columns if column.kind == "category"}
    found = {
        name: ready[[name]].to_numpy(object if name in texts else np.float32)
        for name in (column.name for column in table.columns)
    }
    domain = table.domain if table.domain in frame.columns else None
    return found if domain is None else {**found, domain: frame[[domain]].to_numpy(object)}
