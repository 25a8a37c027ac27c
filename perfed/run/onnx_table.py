"""A site's preprocessing as ONNX, in front of its network: one file from the columns of a table to probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.files import optional_package
from perfed.data.tables.kinds import MISSING_CATEGORY
from perfed.data.tables.site import TablePreprocessor

_PURPOSE = "writing ONNX files"
ML, ML_VERSION = "ai.onnx.ml", 3


def onnx_package(name: str) -> Any:
    """Return the module ``name`` of the extra ``perfed[onnx]``.

    Raises:
        PerfedError: it is not installed; names the extra.
    """
    return optional_package(name, _PURPOSE, extra="onnx")


def joined(table: TablePreprocessor, network: Any) -> Any:
    """Preprocessing and network as one model, from columns ``(batch, 1)``.

    Columns are as :meth:`~perfed.data.tables.site.TablePreprocessor.read` has them: numbers, booleans as 0 and
    1, dates as days since 1970-01-01, NaN where missing; categories as texts, "missing" where they are; the domain,
    where it counts, by its name.

    Args:
        table: the site's.
        network: an ONNX model of preprocessed inputs and, where the method needs them, domain ids.
    """
    onnx, compose = onnx_package("onnx"), onnx_package("onnx.compose")
    helper, (inputs, *domain) = onnx.helper, network.graph.input
    opset = next(entry.version for entry in network.opset_import if entry.domain == "")
    network = compose.add_prefix(network, "network/", rename_inputs=False, rename_outputs=False)
    before = compose.add_prefix(_preprocessing(table, opset), "table/", rename_inputs=False)
    graph, number = before.graph, inputs.type.tensor_type.elem_type
    graph.node.append(helper.make_node("Cast", [graph.output[0].name], ["table/numbers"], to=number))
    links = [("table/numbers", inputs.name), *(("table/domain", value.name) for value in domain)]
    if table.domain is not None and (domain or table.domain_input):
        graph.input.append(helper.make_tensor_value_info(table.domain, onnx.TensorProto.STRING, ["batch", 1]))
        graph.node.extend(_domain_ids(helper, table))
        if not any(entry.domain == ML for entry in before.opset_import):
            before.opset_import.append(helper.make_opsetid(ML, ML_VERSION))
    if table.domain_input:
        eye = onnx.numpy_helper.from_array(np.eye(len(table.domains)), "table/eye")
        graph.initializer.append(eye)
        graph.node.append(helper.make_node("Gather", ["table/eye", "table/domain"], ["table/exact"]))
        graph.node.append(helper.make_node("Cast", ["table/exact"], ["table/hot"], to=number))
        graph.node.append(helper.make_node("Concat", ["table/numbers", "table/hot"], ["table/all"], axis=1))
        links[0] = ("table/all", inputs.name)
    del graph.output[:]
    for (name, _), value in zip(links, (inputs, *domain), strict=True):
        graph.output.add().CopyFrom(value)
        graph.output[-1].name = name
    network.ir_version = before.ir_version = min(network.ir_version, before.ir_version)
    return compose.merge_models(before, network, io_map=links)


def _preprocessing(table: TablePreprocessor, opset: int) -> Any:
    """The fitted transformer, from the site's own columns."""
    types = onnx_package("skl2onnx.common.data_types")
    kinds = [types.StringTensorType if c.kind == "category" else types.FloatTensorType for c in table.inputs]
    names = [column.name for column in table.inputs]
    columns = [(name, kind([None, 1])) for name, kind in zip(names, kinds, strict=True)]
    found = onnx_package("skl2onnx").convert_sklearn(
        table.transformer, initial_types=columns, target_opset=(versions := {"": opset, ML: ML_VERSION})
    )
    for entry in found.opset_import:  # it is written for these, and says the lowest that its operators need
        entry.version = versions.get(entry.domain, entry.version)
    said = {value.name: name for value, name in zip(found.graph.input, names, strict=True)}
    for value in found.graph.input:  # skl2onnx makes names of variables of them
        value.name = said[value.name]
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    for node in found.graph.node:
        node.input[:] = [said.get(name, name) for name in node.input]
    _replace_texts(table, found.graph)
    _fill_absent(table, found.graph)
    return found


def _replace_texts(table: TablePreprocessor, graph: Any) -> None:
    """Let the graph accept the texts that a study replaces (``values``), as :class:`TablePreprocessor` does."""
    helper, added = onnx_package("onnx.helper"), []
    for column in table.columns:
        replacements = table.conversions.replacements(column.name)
        if column.kind != "category" or not replacements:
            continue
        known = {text: text for text in (*column.categories, *column.levels, MISSING_CATEGORY)} | replacements
        replaced = f"replaced {column.name}"
        for node in graph.node:
            node.input[:] = [replaced if name == column.name else name for name in node.input]
        texts = {"keys_strings": [*known], "values_strings": [*known.values()], "default_string": ""}
        added.append(helper.make_node("LabelEncoder", [column.name], [replaced], domain=ML, **texts))
    nodes = [*added, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _fill_absent(table: TablePreprocessor, graph: Any) -> None:
    """Columns that the site does not have are missing in every row, and are no inputs."""
    absent = {column.name: column for column in table.inputs if column.absent}
    if not absent:
        return
    onnx, helper = onnx_package("onnx"), onnx_package("onnx.helper")
    added = [helper.make_node("Shape", [table.columns[0].name], ["shape of a column"])]
    for name, column in absent.items():
        empty = np.array([[column.filling]], object if column.kind == "category" else np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(empty, f"absent {name}"))
        added.append(helper.make_node("Expand", [f"absent {name}", "shape of a column"], [name]))
    kept = [value for value in graph.input if value.name not in absent]
    nodes = [*added, *graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(kept)
    graph.node.extend(nodes)


def _domain_ids(helper: Any, table: TablePreprocessor) -> list[Any]:
    """From the domain's column to ids ``(batch,)``; an unknown domain is out of range, which onnxruntime refuses."""
    unknown = len(table.domains)
    numbers = {name: number for number, name in enumerate(table.domains)}
    replaced = table.conversions.replacements(table.domain or "")
    numbers |= {old: numbers[new] for old, new in replaced.items() if new in numbers}
    ids = {"keys_strings": [*numbers], "values_int64s": [*numbers.values()], "default_int64": unknown}
    shape = helper.make_node("Constant", [], ["table/one axis"], value_ints=[-1])
    return [
        shape,
        helper.make_node("LabelEncoder", [table.domain], ["table/domain column"], domain=ML, **ids),
        helper.make_node("Reshape", ["table/domain column", "table/one axis"], ["table/domain"]),
    ]


def example_columns(table: TablePreprocessor, rows: int, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return columns like those of the site, drawn: numbers around their mean, categories that training has seen."""
    ranges: dict[str, tuple[float, float]] = {}
    for _, part, names in getattr(table.transformer, "transformers_", ()):
        for step in [step for _, step in getattr(part, "steps", ())]:
            if hasattr(step, "mean_") and hasattr(step, "scale_"):
                ranges |= {name: (m, s) for name, m, s in zip(names, step.mean_, step.scale_, strict=True)}
    found: dict[str, NDArray[Any]] = {}
    for column in table.columns:
        if column.kind == "category":
            found[column.name] = generator.choice(np.array(column.categories, object), rows)
        elif column.kind == "boolean":
            found[column.name] = generator.integers(0, 2, rows).astype(np.float64)
        else:
            mean, std = ranges.get(column.name, (0.0, 1.0))
            found[column.name] = generator.normal(mean, std, rows).astype(np.float32).astype(np.float64)
        if column.masked and column.kind != "category":
            found[column.name][:: max(2, rows // 8)] = np.nan
        if column.kind == "date":
            found[column.name] = np.round(found[column.name]).astype("datetime64[D]").astype("datetime64[s]")
    if table.domain is not None:
        found[table.domain] = generator.choice(np.array(table.domains, object), rows)
    return found
