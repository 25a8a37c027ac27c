"""The export of a site's model for other programs: as ONNX, as torch's ``.pt2``, or only its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from perfed.client_model.card import card
from perfed.client_model.network import Network, silence_torch, write_program
from perfed.client_model.onnx_table import example_columns, onnx_package, output_name, with_preprocessing
from perfed.client_model.site_model import DOMAIN, SiteModel
from perfed.data.reading import reason_of
from perfed.errors import PerfedError
from perfed.system import write_atomic
from perfed.tables.problems import pandas
from perfed.tables.site import TablePreprocessor

Format = Literal["onnx", "pt2", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)

_RANDOM_ROWS = 64  # number of random rows
_ROWS = 4096  # number of rows in a batch for onnxruntime
_TOLERANCE = 1e-4  # of a probability, or of the largest value


def export(model: SiteModel, file: Path | str, format_: Format) -> dict[str, Any]:
    """Write ``model`` to ``file``, and its card beside it (``NAME.md``).

    * ``onnx``: from inputs, for tables from their columns, to ``probabilities`` or ``values``; metadata has the facts
      of the site and the largest difference to perfed's own answers.
    * ``pt2``: from preprocessed inputs (and domain ids) to the same; ``torch.export.load`` reads it.
    * ``safetensors``: the parameters by name, with the facts as metadata; nothing that can be run.

    Returns:
        ``largest_difference`` for ``onnx``, otherwise nothing.

    Raises:
        PerfedError: the format is unknown, packages are not installed, the model or its preprocessing cannot be
            converted, or the converted model predicts something else; nothing is written then.
    """
    if format_ not in FORMATS:
        raise PerfedError(f"format '{format_}' is not known; allowed: {', '.join(FORMATS)}")
    path, results, facts = Path(file), {}, json.dumps(model.facts)
    if format_ == "onnx":
        content, difference = onnx_file(model)
        results = {"largest_difference": difference}
        write_atomic(path, content)
    elif not isinstance(model.predictor, Network):
        raise PerfedError(f"{model.facts['method']} has no network of torch's; allowed: --format onnx")
    elif format_ == "pt2":
        write_program(model.predictor.program, path, {"site.json": facts})
    else:
        tensors = {name: tensor.contiguous().clone() for name, tensor in model.predictor.program.state_dict.items()}
        write_atomic(path, bytes(save(tensors, {"site": facts})))
    write_atomic(path.with_suffix(".md"), card({**model.facts, **results}))
    return results


def onnx_file(model: SiteModel) -> tuple[bytes, float]:
    """Return an ONNX model and the largest difference between its predictions and those of ``model``.

    The network is compared on all training rows of the site, if they are available, and the whole file on random rows.

    Raises:
        PerfedError: as in :func:`export`.
    """
    converts = not isinstance(model.predictor, Network) or (model.table is not None and model.table.own)
    for package in ("onnx", "onnxscript", "onnxruntime", *(("skl2onnx",) if converts else ())):
        onnx_package(package)
    try:
        with silence_torch("torch.onnx"):
            network = model.predictor.to_onnx(output_name(model.facts["classes"], None))
            name = output_name(model.facts["classes"], model.table)
            onnx_model = network if model.table is None else with_preprocessing(model.table, network, name)
    except Exception as error:
        raise PerfedError(f"site '{model.site}': its model cannot be written as ONNX: {reason_of(error)}") from error
    difference = _compare_answers(model, onnx_model, *_draw_rows(model), f"{_RANDOM_ROWS} drawn rows")
    if model.training_rows is not None:
        rows = model.training_rows.loaded()
        arguments = model.check_inputs(rows.x, rows.domain)
        feeds = _network_inputs(arguments)
        difference = max(
            difference, _compare_answers(model, network, feeds, arguments, f"its {len(rows)} training rows")
        )
    for key, value in {**model.facts, "largest_difference": difference}.items():
        entry = onnx_model.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    content: bytes = onnx_model.SerializeToString()
    return content, difference


# Comparison --------------------------------------------------------------------------------------------------


def _compare_answers(
    model: SiteModel,
    onnx_model: Any,
    feeds: Mapping[str, NDArray[Any]],
    arguments: tuple[torch.Tensor, ...],
    rows_text: str,
) -> float:
    """Return the largest difference between the answers of onnxruntime and of perfed.

    Args:
        model: the model of perfed.
        onnx_model: the exported model.
        feeds: the rows, by the name of the ONNX input.
        arguments: the same rows as arguments of the network.
        rows_text: a description of the rows for the message.

    Raises:
        PerfedError: the difference is larger than rounding errors, or onnxruntime cannot run the model.
    """
    runtime = onnx_package("onnxruntime")
    try:
        session = runtime.InferenceSession(onnx_model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        answers = np.concatenate(
            [
                session.run(None, {name: feeds[name][start : start + _ROWS] for name in names})[0]
                for start in range(0, len(arguments[0]), _ROWS)
            ]
        )
    except Exception as error:
        raise PerfedError(f"site '{model.site}': onnxruntime cannot run its model: {reason_of(error)}") from error
    expected = model.outputs(*arguments)
    difference = float(np.abs(answers - expected).max())
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise PerfedError(
            f"site '{model.site}': its ONNX model differs from perfed's by {difference:.3g} on {rows_text}; nothing "
            "was written"
        )
    return difference


def _draw_rows(model: SiteModel) -> tuple[dict[str, NDArray[Any]], tuple[torch.Tensor, ...]]:
    """Return random rows in the format of the site: by name of the ONNX input, and as arguments of the network."""
    generator = np.random.default_rng(0)
    if model.table is not None:
        frame = pandas().DataFrame(example_columns(model.table, _RANDOM_ROWS, generator))
        return onnx_inputs(model.table, frame), model.prepare_inputs(frame)
    domain = generator.integers(0, len(model.facts["domains"]), _RANDOM_ROWS) if model.takes_domain else None
    ranges = model.facts["data"]["inputs"]
    x = generator.normal(ranges["mean"], ranges["std"], (_RANDOM_ROWS, *model.facts["input_shape"]))
    x = np.clip(x, ranges["smallest"], ranges["largest"])
    arguments = model.prepare_inputs(x.round() if ranges["whole"] else x, domain)
    return _network_inputs(arguments), arguments


def _network_inputs(arguments: tuple[torch.Tensor, ...]) -> dict[str, NDArray[Any]]:
    return dict(zip(("x", DOMAIN), (argument.numpy() for argument in arguments), strict=False))


def onnx_inputs(table: TablePreprocessor, frame: Any) -> dict[str, NDArray[Any]]:
    """Return the rows of a data frame as an ONNX file of the site takes them: columns ``(rows, 1)`` by name."""
    ready = table.read(frame)
    texts = {column.name for column in table.columns if column.kind == "category"}
    columns = {
        name: ready[[name]].to_numpy(object if name in texts else np.float32)
        for name in (column.name for column in table.columns)
    }
    domain = table.domain if table.domain in frame.columns else None
    return columns if domain is None else {**columns, domain: frame[[domain]].to_numpy(object)}
