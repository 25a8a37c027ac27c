"""A traced network as data: its operations by name and its tensors, in safetensors; reading it runs no code."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from perfed.system import write_atomic

_GRAPH = "graph"
_ATEN = re.compile(r"aten\.(\w+)\.(\w+)")
_PATH = re.compile(r"\w+(\.\w+)*")
_OF_SIZES = ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_PLAIN = (bool, int, float, str, type(None))


class NotData(ValueError):
    """A graph that holds more than operations of torch on tensors and plain values; says what."""


@dataclass(frozen=True)
class _Step:
    name: str
    operation: Any
    args: Any
    kwargs: Any


class GraphNetwork(nn.Module):
    """Runs the operations of a graph one after the other, on buffers of its own.

    Args:
        tensors: by the name that a buffer has in the program, with dots as in ``head.weight``.
        content: what :func:`write_graph` writes beside them.

    Raises:
        NotData: an operation that is not one of torch's on tensors and sizes, or a name that is none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        super().__init__()
        for path, tensor in tensors.items():
            *above, last = path.split(".")
            if _PATH.fullmatch(path) is None:
                raise NotData(f"a tensor called {path!r}")
            owner: nn.Module = self
            for part in above:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(last, tensor)
        self.inputs, self.held, self.output = list(content["inputs"]), dict(content["tensors"]), str(content["output"])
        self.steps = [
            _Step(str(name), _operation(said), args, dict(kwargs)) for name, said, args, kwargs in content["steps"]
        ]

    def forward(self, x: Tensor, domain: Tensor | None = None) -> Tensor:
        """Return what the program says of inputs, and of domain ids where it takes them."""
        given, tensors = (x,) if domain is None else (x, domain), dict(self.named_buffers())
        values: dict[str, Any] = dict(zip(self.inputs, given, strict=True))
        values.update({name: tensors[path] for name, path in self.held.items()})
        for step in self.steps:
            values[step.name] = step.operation(*_read(step.args, values), **_read(step.kwargs, values))
        found: Tensor = values[self.output]
        return found


def write_graph(program: ExportedProgram, file: Path) -> None:
    """Write the graph of ``program`` and the tensors that it uses.

    Raises:
        NotData: it cannot be said so; nothing is written.
    """
    signature, tensors = program.graph_signature, {**program.state_dict, **program.constants}
    paths = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    placed = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    if placed != {*paths, *signature.user_inputs} or len(signature.output_specs) != 1:
        raise NotData("inputs or outputs that are no tensors")
    content: dict[str, Any] = {"inputs": list(signature.user_inputs), "tensors": paths, "steps": []}
    for node in program.graph.nodes:
        if node.op == "call_function":
            content["steps"].append([node.name, _name(node.target), _said(node.args), _said(dict(node.kwargs))])
        elif node.op == "output":
            (content["output"],) = (entry.name for entry in node.args[0])
        elif node.op != "placeholder":
            raise NotData(f"the operation {node.op}")
    held = {path: tensors[path].detach().clone().contiguous() for path in sorted(set(paths.values()))}
    write_atomic(file, bytes(save(held, {_GRAPH: json.dumps(content, separators=(",", ":"))})))


def read_graph(file: Path) -> GraphNetwork:
    """Return what :func:`write_graph` wrote; whatever the file holds, only torch's own operations are called.

    Raises:
        NotData: an operation that is not one of torch's on tensors and sizes.
        Exception: a file that is damaged: whatever safetensors, JSON and torch raise.
    """
    with safe_open(file, "pt") as opened:
        content = json.loads((opened.metadata() or {})[_GRAPH])
        return GraphNetwork({name: opened.get_tensor(name) for name in list(opened.keys())}, content)


def _name(target: Any) -> str:
    """The name of an operation, of which :func:`_operation` makes it again."""
    name = str(target)
    if _ATEN.fullmatch(name) is None:
        name = f"operator.{getattr(target, '__name__', '')}"
    if _operation(name) is not target:
        raise NotData(f"the operation {target}")
    return name


def _operation(name: str) -> Any:
    """The operation of this name: of ATen on tensors, none that opens a file, or of numbers."""
    found, kind = _ATEN.fullmatch(name), name.removeprefix("operator.")
    if found is None and name != kind and kind in _OF_SIZES:
        return getattr(operator, kind)
    operation = None if found is None else getattr(getattr(torch.ops.aten, found[1], None), found[2], None)
    if not isinstance(operation, torch._ops.OpOverload):
        raise NotData(f"the operation {name}")
    if any(argument.name == "filename" for argument in operation._schema.arguments):
        raise NotData(f"the operation {name}, which opens files")
    return operation


def _said(value: Any) -> Any:
    """An argument in JSON: a node and what is no plain value are ``{kind: name}``."""
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_said(item) for item in value]
    if isinstance(value, dict):
        return {name: _said(item) for name, item in value.items()}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, type_ in _KINDS.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}
    if not isinstance(value, _PLAIN):
        raise NotData(f"a {type(value).__name__}")
    return value


def _read(value: Any, values: Mapping[str, Any]) -> Any:
    """The inverse of :func:`_said`, with the values of the nodes."""
    if isinstance(value, list):
        return [_read(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "node":
            return values[name]
        if kind == "device":
            return torch.device(name)
        if kind in _KINDS and isinstance(found := getattr(torch, str(name), None), _KINDS[kind]):
            return found
    return {name: _read(item, values) for name, item in value.items()}
