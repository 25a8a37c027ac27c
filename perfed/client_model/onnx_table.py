"""The preprocessing of a site as ONNX, joined with its network: one model from columns to probabilities."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import MISSING_CATEGORY, Column
from perfed.data.files import optional_package
from perfed.tables.missing import missing_values
from perfed.tables.site import TablePreprocessor

_PURPOSE = "writing ONNX files"
OPSET, ML, ML_VERSION = 20, "ai.onnx.ml", 3
"""Versions of operators: the first with regular expressions of texts, and those of trees that skl2onnx writes."""
_PREFIX = "perfed/"
_SPACES = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
"""What ``str.strip`` removes, as a regular expression."""
_WHOLE = re.compile(r"-?\d+")


def onnx_package(name: str) -> Any:
    """Return the module ``name`` of the extra ``perfed[onnx]``.

    Raises:
        PerfedError: the module is not installed; the message names the extra.
    """
    return optional_package(name, _PURPOSE, extra="onnx")


def output_name(classes: Sequence[Any] | None, table: TablePreprocessor | None) -> str:
    """Return a name for the output of an ONNX file that is not the name of a column of ``table``.

    Returns:
        ``probabilities`` or, without classes, ``values``; underscores follow if a column has that name.
    """
    name = "values" if classes is None else "probabilities"
    while table is not None and name in _input_names(table):
        name += "_"
    return name


def _input_names(table: TablePreprocessor) -> tuple[str, ...]:
    names = tuple(column.name for column in table.columns)
    return names if table.domain is None else (*names, table.domain)


def with_preprocessing(table: TablePreprocessor, network: Any, output: str) -> Any:
    """Return preprocessing and network as one ONNX model, from columns ``(batch, 1)``.

    The inputs have the names of the columns. Numbers are float32: booleans 0 and 1, dates days since 1970-01-01, NaN
    if missing. Categories, and the domain if it is needed, are texts in any spelling that tables may have
    (:func:`match_spellings`), and "missing" if missing. The preprocessing is computed in float64 with the same
    operations as in scikit-learn, so that the inputs of the network are bit-identical.

    Args:
        table: the preprocessing of the site.
        network: an ONNX model of preprocessed inputs and, where the method needs them, domain ids.
        output: the name of the output.
    """
    onnx, compose = onnx_package("onnx"), onnx_package("onnx.compose")
    helper, takes_domain = onnx.helper, len(network.graph.input) > 1
    graph = _Graph(table, takes_domain)
    network = compose.add_prefix(network, graph.prefix + "network/")
    number = network.graph.input[0].type.tensor_type.elem_type
    numbers = _convert_transformer(graph) if table.own else _add_preprocessing(graph)
    ids = _encode_domain(graph) if takes_domain or table.domain_input else None
    if table.domain_input:
        hot = graph.add("Gather", [graph.add_constant(np.eye(len(table.domains))), ids])
        numbers = graph.add("Concat", [numbers, hot], axis=1)
    numbers = graph.add("Cast", [numbers], to=number)
    links = [numbers, *([ids] if takes_domain else [])]
    for value, tensor in zip(network.graph.input, links, strict=True):
        graph.nodes.append(helper.make_node("Identity", [tensor], [value.name]))
    (result,) = network.graph.output
    end = helper.make_node("Identity", [result.name], [output])
    result.name = output
    combined = helper.make_graph(
        [*graph.nodes, *network.graph.node, end],
        "site",
        graph.inputs,
        [result],
        [*graph.constants, *network.graph.initializer],
    )
    versions = {entry.domain: entry.version for entry in network.opset_import} | graph.versions
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_model(combined, opset_imports=opsets, functions=network.functions, ir_version=network.ir_version)


class _Graph:
    """A builder of an ONNX graph whose inputs are the columns of a site.

    Args:
        table: the preprocessing of the site.
        takes_domain: whether the network needs domain ids.

    Attributes:
        table: the preprocessing of the site.
        prefix: the prefix of the names of nodes and constants, with which no column's name begins.
        inputs, nodes, constants: the ONNX objects added so far.
        versions: the versions of operator sets that the network does not use.
    """

    def __init__(self, table: TablePreprocessor, takes_domain: bool) -> None:
        onnx = onnx_package("onnx")
        self.table, self.prefix = table, _PREFIX
        while any(name.startswith(self.prefix) for name in _input_names(table)):
            self.prefix += "/"
        self.inputs: list[Any] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.versions: dict[str, int] = {}
        kinds = {column.name: column.kind for column in table.columns}
        if table.domain is not None and (takes_domain or table.domain_input):
            kinds[table.domain] = "category"
        for name, kind in kinds.items():
            type_ = onnx.TensorProto.STRING if kind == "category" else onnx.TensorProto.FLOAT
            self.inputs.append(onnx.helper.make_tensor_value_info(name, type_, ["batch", 1]))

    def add(self, operator: str, inputs: Sequence[str | None], **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = f"{self.prefix}{len(self.nodes)}"
        self.nodes.append(onnx_package("onnx.helper").make_node(operator, inputs, [name], **attributes))
        return name

    def add_constant(self, array: NDArray[Any]) -> str:
        """Add a constant and return its name."""
        name = f"{self.prefix}constant {len(self.constants)}"
        self.constants.append(onnx_package("onnx.numpy_helper").from_array(array, name))
        return name

    def cast_to_double(self, tensor: str) -> str:
        """Add a conversion of ``tensor`` to float64 and return the name of its output."""
        return self.add("Cast", [tensor], to=onnx_package("onnx").TensorProto.DOUBLE)

    def get_column(self, name: str) -> str:
        """Return the tensor of a column ``(batch, 1)``; if the site lacks the column, add one with missing values."""
        column = next(column for column in self.table.inputs if column.name == name)
        if not column.absent:
            return name
        empty = np.array([[column.filling]], object if column.kind == "category" else np.float32)
        return self.add("Expand", [self.add_constant(empty), self.add("Shape", [self.table.columns[0].name])])

    def match_patterns(self, column: str, patterns: Sequence[str]) -> str:
        """Return a tensor ``(batch, patterns)`` in float64: 1 if the text matches the pattern, otherwise 0."""
        flags = [self.add("RegexFullMatch", [column], pattern=pattern) for pattern in patterns]
        return self.cast_to_double(self.add("Concat", flags, axis=1))


# Preprocessing -------------------------------------------------------------------------------------------------


def _add_preprocessing(graph: _Graph) -> str:
    """Add the nodes of a :func:`~perfed.tables.preprocess.column_transformer`; return its output."""
    parts = [
        _PARTS[name.removeprefix("own_")](graph, estimator, names)
        for name, estimator, names in graph.table.transformer.transformers_
        if name != "remainder"
    ]
    return graph.add("Concat", parts, axis=1)


def _read_numbers(graph: _Graph, names: Sequence[str]) -> str:
    return graph.add("Concat", [graph.cast_to_double(graph.get_column(name)) for name in names], axis=1)


def _fill_missing(graph: _Graph, imputer: Any, names: Sequence[str]) -> str:
    numbers = _read_numbers(graph, names)
    return graph.add("Where", [graph.add("IsNaN", [numbers]), graph.add_constant(imputer.statistics_[None]), numbers])


def _scale_numbers(graph: _Graph, pipeline: Any, names: Sequence[str]) -> str:
    scaler, numbers = pipeline["scale"], _fill_missing(graph, pipeline["fill"], names)
    centred = graph.add("Sub", [numbers, graph.add_constant(scaler.mean_[None])])
    return graph.add("Div", [centred, graph.add_constant(scaler.scale_[None])])


def _encode_categories(graph: _Graph, encoder: Any, names: Sequence[str]) -> str:
    columns = {column.name: column for column in graph.table.inputs}
    hot = [
        graph.match_patterns(
            graph.get_column(name), [_category_pattern(graph.table, columns[name], level) for level in levels]
        )
        for name, levels in zip(names, encoder.categories_, strict=True)
        if len(levels)
    ]
    return graph.add("Concat", hot, axis=1)


def _mask_missing(graph: _Graph, pipeline: Any, names: Sequence[str]) -> str:
    return graph.cast_to_double(graph.add("IsNaN", [_read_numbers(graph, names)]))


_PARTS: Mapping[str, Callable[[_Graph, Any, Sequence[str]], str]] = {
    "number": _scale_numbers,
    "date": _scale_numbers,
    "boolean": _fill_missing,
    "category": _encode_categories,
    "missing": _mask_missing,
}


def _convert_transformer(graph: _Graph) -> str:
    """Add a user's transformer as skl2onnx converts it, with texts mapped to its categories; return its output."""
    onnx, table = onnx_package("onnx"), graph.table
    types = onnx_package("skl2onnx.common.data_types")
    kinds = [types.StringTensorType if c.kind == "category" else types.FloatTensorType for c in table.inputs]
    columns = [(c.name, kind([None, 1])) for c, kind in zip(table.inputs, kinds, strict=True)]
    versions = {"": OPSET, ML: ML_VERSION}
    converted = onnx_package("skl2onnx").convert_sklearn(
        table.transformer, initial_types=columns, target_opset=versions
    )
    converted = onnx_package("onnx.compose").add_prefix(converted, f"{graph.prefix}table/")
    for column, value in zip(table.inputs, converted.graph.input, strict=True):
        tensor = graph.get_column(column.name)
        for category in column.categories if column.kind == "category" else ():
            match = graph.add("RegexFullMatch", [tensor], pattern=_category_pattern(table, column, category))
            tensor = graph.add("Where", [match, graph.add_constant(np.array([[category]], object)), tensor])
        graph.nodes.append(onnx.helper.make_node("Identity", [tensor], [value.name]))
    graph.nodes.extend(converted.graph.node)
    graph.constants.extend(converted.graph.initializer)
    graph.versions |= {entry.domain: versions.get(entry.domain, entry.version) for entry in converted.opset_import}
    return graph.cast_to_double(converted.graph.output[0].name)


def _encode_domain(graph: _Graph) -> str:
    """Add the conversion of domains to ids and return these ``(batch,)``; an unknown domain gets an id out of range."""
    table = graph.table
    assert table.domain is not None
    column = Column(name=table.domain, kind="category")
    replacements = table.conversions.replacements(table.domain)
    hot = graph.match_patterns(
        table.domain, [match_spellings(name, column, (), replacements) for name in table.domains]
    )
    ids = graph.add("ArgMax", [hot], axis=1, keepdims=0)
    axis, zero = graph.add_constant(np.array([1])), graph.add_constant(np.array(0.0))
    is_known = graph.add("Greater", [graph.add("ReduceSum", [hot, axis], keepdims=0), zero])
    return graph.add("Where", [is_known, ids, graph.add_constant(np.array(len(table.domains)))])


# Texts ---------------------------------------------------------------------------------------------------------


def _category_pattern(table: TablePreprocessor, column: Column, category: str) -> str:
    return match_spellings(category, column, table.missing, table.conversions.replacements(column.name))


def match_spellings(
    category: str, column: Column, missing: Sequence[str], replacements: Mapping[str, str] | None = None
) -> str:
    """Return a regular expression that matches all spellings of a category in tables.

    Texts may be surrounded by spaces, accents may be composed or decomposed, and whole numbers may end with ``.0``
    (:func:`perfed.tables.kinds.read`). A missing value is empty or one of the codes for missing values.

    Args:
        category: the category; :data:`~perfed.tables.kinds.MISSING_CATEGORY` for missing values.
        column: the column with the category.
        missing: the site's codes for missing values (:class:`perfed.tables.options.TableOptions`).
        replacements: the replacement of each text that a study replaces (``values``).

    Example:
        >>> bool(re.fullmatch(match_spellings("1", Column(name="code", kind="category"), ()), " 1.0"))
        True
    """
    replaced = replacements or {}
    texts = [] if replaced.get(category, category) != category else [_text_pattern(category)]
    texts += [_text_pattern(text) for text, new in replaced.items() if new == category and text != category]
    if category == MISSING_CATEGORY:
        values = [value for value in missing_values(missing, column.name) if value not in column.categories]
        texts += ["", *(_code_pattern(value) for value in values if value)]
    return f"{_SPACES}(?:{'|'.join(texts)}){_SPACES}"


def _text_pattern(text: str) -> str:
    pattern = ""
    for letter in unicodedata.normalize("NFC", text):
        parts = unicodedata.normalize("NFD", letter)
        pattern += re.escape(letter) if parts == letter else f"(?:{re.escape(letter)}|{re.escape(parts)})"
    return pattern + r"(?:\.0+)?" if _WHOLE.fullmatch(text) else pattern


def _code_pattern(code: str) -> str:
    """Return the pattern of a code for missing values; an integer may have leading zeros and decimal zeros."""
    if not _WHOLE.fullmatch(code):
        return _text_pattern(code)
    sign = "-" if code.startswith("-") else r"\+?"
    return sign + "0*" + code.lstrip("-") + r"(?:\.0*)?"


# Examples ------------------------------------------------------------------------------------------------------


def example_columns(table: TablePreprocessor, rows: int, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return random columns like those of the site: numbers around their means, and categories of the training data."""
    ranges: dict[str, tuple[float, float]] = {}
    for _, part, names in getattr(table.transformer, "transformers_", ()):
        for step in [step for _, step in getattr(part, "steps", ())]:
            if hasattr(step, "mean_") and hasattr(step, "scale_"):
                ranges |= {name: (m, s) for name, m, s in zip(names, step.mean_, step.scale_, strict=True)}
    columns: dict[str, NDArray[Any]] = {}
    for column in table.columns:
        if column.kind == "category":
            columns[column.name] = generator.choice(np.array(column.categories, object), rows)
        elif column.kind == "boolean":
            columns[column.name] = generator.integers(0, 2, rows).astype(np.float64)
        else:
            mean, std = ranges.get(column.name, (0.0, 1.0))
            columns[column.name] = generator.normal(mean, std, rows).astype(np.float32).astype(np.float64)
        if column.masked and column.kind != "category":
            columns[column.name][:: max(2, rows // 8)] = np.nan
        if column.kind == "date":
            columns[column.name] = np.round(columns[column.name]).astype("datetime64[D]").astype("datetime64[s]")
    if table.domain is not None:
        columns[table.domain] = generator.choice(np.array(table.domains, object), rows)
    return columns
