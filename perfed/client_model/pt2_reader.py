"""A reader for networks in torch's format ``.pt2`` that calls only operations of torch, and no code in the file."""

from __future__ import annotations

import json
import operator
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perfed.data.reading import refuse_unpacked

_SCHEMA = 8  # the version of torch's format that this module reads
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
_ARITHMETIC = re.compile(r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge)")
_PATH = re.compile(r"\w+(\.\w+)*")
_KEYWORD = 2  # of the kinds of arguments
_SOURCES = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("as_int", "as_ints", "as_bool", "as_bools", "as_string", "as_strings"), lambda value: value),
    "as_none": lambda value: None,
    "as_float": float,  # infinity is a text
    "as_floats": lambda values: [float(value) for value in values],
    "as_device": lambda device: torch.device(device["type"]),
    "as_scalar_type": lambda number: _find_constant("DTYPE", number),
    "as_layout": lambda number: _find_constant("LAYOUT", number),
    "as_memory_format": lambda number: _find_constant("MEMORY_FORMAT", number),
}
_REFERENCE = re.compile(r"as_(optional_tensor|tensor|sym_int|sym_bool)s?")


class UnsafeProgramError(ValueError):
    """An error: a file contains more than operations of torch on tensors and numbers; the message names it."""


def read_program(file: Path) -> nn.Module:
    """Return the network in ``file``, which :func:`torch.export.save` wrote.

    :func:`torch.export.load` unpickles objects and evaluates expressions in the file. This function interprets the
    list of operations, and calls only operations of ATen that open no file, and arithmetic of sizes.

    Raises:
        UnsafeProgramError: the file holds other operations, pickled tensors or another version of the format.
        Exception: the file is damaged: whatever zipfile, JSON and torch raise.
    """
    refuse_unpacked(file)
    with zipfile.ZipFile(file) as archive:
        (model,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+/models/[^/]+\.json", name))
        root, content = model.partition("/")[0], json.loads(archive.read(model))
        if content["schema_version"]["major"] != _SCHEMA:
            raise UnsafeProgramError(f"version {content['schema_version']['major']} of torch's format")
        tensors = dict[str, Tensor]()
        for kind in ("weights", "constants"):
            folder = f"{root}/data/{kind}"
            config = json.loads(archive.read(f"{folder}/{Path(model).stem}_{kind}_config.json"))["config"]
            for path, payload in config.items():
                if payload["use_pickle"]:
                    raise UnsafeProgramError("pickled tensors")
                tensors[path] = _read_tensor(archive.read(f"{folder}/{payload['path_name']}"), payload["tensor_meta"])
    return _ProgramNetwork(content["graph_module"], tensors)


def register_buffer(module: nn.Module, path: str, tensor: Tensor) -> None:
    """Register ``tensor`` as a buffer with a dotted name, such as ``head.weight``, and the modules on the way to it."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(module.named_children()):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    module.register_buffer(name, tensor)


class _ProgramNetwork(nn.Module):
    """A module that applies the operations of a program one after the other.

    Args:
        content: the graph and its signature in torch's format.
        tensors: parameters, buffers and constants by name.
    """

    def __init__(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs: list[str] = []
        self.paths: dict[str, str] = {}
        for specification in content["signature"]["input_specs"]:
            ((kind, entry),) = specification.items()
            if kind == "user_input" and "as_tensor" in entry["arg"]:
                self.inputs.append(entry["arg"]["as_tensor"]["name"])
            elif kind in _SOURCES:
                self.paths[entry["arg"]["name"]] = entry[_SOURCES[kind]]
            else:
                raise UnsafeProgramError(f"an input of the kind {kind}")
        for path in dict.fromkeys(self.paths.values()):
            if _PATH.fullmatch(path) is None:
                raise UnsafeProgramError(f"a tensor called {path!r}")
            register_buffer(self, path, tensors[path])
        (output,) = content["signature"]["output_specs"]
        self.output: str = output["user_output"]["arg"]["as_tensor"]["name"]
        self.steps = [(_find_operation(node["target"]), node) for node in content["graph"]["nodes"]]

    def forward(self, x: Tensor, domain: Tensor | None = None) -> Tensor:
        """Return the output of the program for inputs, and domain ids where it takes them."""
        arguments = (x,) if domain is None else (x, domain)
        buffers = dict(self.named_buffers())
        values: dict[str, Any] = {name: buffers[path] for name, path in self.paths.items()}
        values.update(zip(self.inputs, arguments, strict=True))
        for operation, node in self.steps:
            inputs = [(entry, _read_argument(entry["arg"], values)) for entry in node["inputs"]]
            keywords = {entry["name"]: value for entry, value in inputs if entry["kind"] == _KEYWORD}
            result = operation(*(value for entry, value in inputs if entry["kind"] != _KEYWORD), **keywords)
            outputs = node["outputs"]
            if len(outputs) == 1:
                outputs, result = (
                    (outputs[0]["as_tensors"], result) if "as_tensors" in outputs[0] else (outputs, [result])
                )
            values.update(zip(map(_find_name, outputs), result or (), strict=True))  # a check has no result
        output: Tensor = values[self.output]
        return output


def _read_tensor(content: bytes, meta: Mapping[str, Any]) -> Tensor:
    sizes, strides = ([size["as_int"] for size in meta[name]] for name in ("sizes", "strides"))
    dtype = _find_constant("DTYPE", meta["dtype"])
    storage = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return storage.as_strided(sizes, strides, meta["storage_offset"]["as_int"])


def _find_operation(target: str) -> Callable[..., Any]:
    if (arithmetic := _ARITHMETIC.fullmatch(target)) is not None:
        function: Callable[..., Any] = getattr(operator, arithmetic[1])
        return function
    name = _ATEN.fullmatch(target)
    operation = None if name is None else getattr(getattr(torch.ops.aten, name[1], None), name[2], None)
    if not isinstance(operation, torch._ops.OpOverload):
        raise UnsafeProgramError(f"the operation {target}")
    if any(argument.name == "filename" for argument in operation._schema.arguments):
        raise UnsafeProgramError(f"the operation {target}, which opens files")
    return operation


def _find_constant(kind: str, number: int) -> Any:
    """Return the dtype, layout or memory format that has this number in torch's format."""
    from torch._export.serde import serialize  # which takes a second to import

    return getattr(serialize, f"_SERIALIZE_TO_TORCH_{kind}")[number]


def _find_name(output: Any) -> str:
    """Return the name of a result, which is nested in dictionaries with one entry each, the kind of the result."""
    while isinstance(output, dict):
        (output,) = output.values()
    return str(output)


def _read_argument(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the value of an argument in torch's format; ``values`` has the results of earlier steps by name."""
    ((kind, value),) = argument.items()
    if kind in _CONVERTERS:
        return _CONVERTERS[kind](value)
    if kind in ("name", "as_name"):
        return values[value]
    if _REFERENCE.fullmatch(kind) is None:
        raise UnsafeProgramError(f"an argument of the kind {kind}")
    return [_read_argument(entry, values) for entry in value] if kind.endswith("s") else _read_argument(value, values)
