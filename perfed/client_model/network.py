"""Networks as predictors: the module of one client in plain torch, traced as a graph for any number of samples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from perfed.client_model.onnx_table import OPSET
from perfed.client_model.pt2_reader import UnsafeProgramError, read_program, register_buffer
from perfed.data.federation import Federation
from perfed.data.reading import reason_of, refuse_untrusted
from perfed.engine.evaluate import predict_all_domains
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.training.cohort import Cohort
from perfed.tree import iterate_leaves

NETWORK = "network.pt2"
_EXAMPLES = 3  # samples with which a network is traced
_ROWS = 4096  # samples in a batch
_PARTS = ("model", "state", "scratch")


@dataclass(frozen=True)
class Network:
    """A predictor that is a network.

    Attributes:
        module: from inputs of the site's shape, and domain ids where the method needs them, to class probabilities or
            values (:class:`ClientModule`, or the module of a loaded program).
        facts: the facts of the client's model, which describe the inputs.
    """

    module: nn.Module
    facts: Mapping[str, Any]

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs for classes are probabilities, which is always the case."""
        return True

    @cached_property
    def program(self) -> ExportedProgram:
        """The module as a graph for any number of samples, which takes seconds; predictions do not need it.

        Raises:
            PerfedError: a stage depends on the values of its inputs in a way that a graph cannot express.
        """
        try:
            with torch.no_grad():
                return self._trace_module()
        except Exception as error:
            site = self.facts["site"]
            raise PerfedError(
                f"site '{site}': its model cannot be made a graph by torch.export: {reason_of(error)}"
            ) from error

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return class probabilities ``(samples, C)`` or values."""
        with torch.no_grad():
            batches = [self.module(*rows) for rows in zip(*(a.split(_ROWS) for a in arguments), strict=True)]
        outputs: NDArray[Any] = torch.cat(batches).numpy()
        return outputs

    def to_onnx(self, output: str) -> Any:
        """Return the network as an ONNX model with named parameters, from ``x`` and ``domain`` to ``output``."""
        inputs = ["x", "domain"][: len(self.example_inputs)]
        options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False, "opset_version": OPSET}
        exported = torch.onnx.export(self.program, input_names=inputs, output_names=[output], **options)
        assert exported is not None
        model = exported.model_proto
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
        del model.metadata_props[:]
        return model

    def save(self, folder: Path) -> list[str]:
        """Write ``network.pt2`` into a folder and return its name."""
        write_program(self.program, folder / NETWORK)
        return [NETWORK]

    @property
    def example_inputs(self) -> tuple[Tensor, ...]:
        """Samples of the shape that the network takes, and domain ids where it needs them."""
        x = torch.zeros(_EXAMPLES, *self.facts["input_shape"], dtype=getattr(torch, self.facts["dtype"]))
        return (x,) if self.facts["domains"] is None else (x, torch.zeros(_EXAMPLES, dtype=torch.int64))

    def _trace_module(self) -> ExportedProgram:
        inputs = self.example_inputs
        shapes = ({0: Dim("batch")},) * len(inputs)
        program = torch.export.export(self.module, inputs, dynamic_shapes=shapes, strict=False)
        unused = _find_unused_buffers(program)
        if unused and isinstance(self.module, ClientModule):
            self.module.drop_buffers(unused)
            program = torch.export.export(self.module, inputs, dynamic_shapes=shapes, strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # has paths of this machine
        return program


def load_network(folder: Path, facts: Mapping[str, Any], trust: bool) -> Network:
    """Return the network that :meth:`Network.save` wrote into ``folder``.

    Raises:
        PerfedError: the folder has no network, or it is damaged, or can execute code and is not trusted.
    """
    file = folder / NETWORK
    if not file.exists():
        raise PerfedError(f"{folder}: no site's model here ({NETWORK} is missing)")
    try:
        try:
            network = Network(read_program(file), facts)
            network.outputs(*network.example_inputs)
        except UnsafeProgramError as error:
            refuse_untrusted(file, f"a network with {error}", trust)
            with silence_torch("torch.export"):
                network = Network(torch.export.load(file).module(), facts)
    except PerfedError:
        raise
    except Exception as error:  # zipfile, JSON and torch each raise their own errors
        raise PerfedError(f"{file}: is damaged, or no network: {reason_of(error)}") from None
    return network


def write_program(program: ExportedProgram, file: Path, texts: dict[str, str] | None = None) -> None:
    """Write ``program`` in torch's format ``.pt2``, with ``texts`` by name as extra files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, file, extra_files=texts)


@contextmanager
def silence_torch(name: str) -> Iterator[None]:
    """Return a context without warnings and without the log of the part of torch whose logger has this name."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _find_unused_buffers(program: ExportedProgram) -> list[str]:
    """Return the names of the buffers on which no output depends."""
    names, visited = program.graph_signature.inputs_to_buffers, set()
    pending = [node for node in program.graph.nodes if node.op == "output"]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in visited:
                visited.add(node)
                pending.append(node)
    return [names[node.name] for node in program.graph.nodes if node.name in names and node not in visited]


class ClientModule(nn.Module):
    """A module that computes the predictions of a method for one client, and that can be traced.

    The tensors are buffers with the names that the method uses: ``model.head.weight``,
    ``state.personal_head.head.weight``, ``scratch.memory.features``.

    Args:
        method: the method.
        cohort: the client, with its model.
        federation: the federation of the client.
    """

    def __init__(self, method: Method, cohort: Cohort, federation: Federation) -> None:
        super().__init__()
        self.method, self.cohort = method, cohort
        self.trained = tuple(federation.domains_in("train"))
        self.num_classes, self.scale = federation.num_classes, federation.target_scale
        for part in _PARTS:
            for path, tensor in iterate_leaves(getattr(cohort, part)):
                register_buffer(self, f"{part}.{path.replace('/', '.')}", tensor[0].detach().clone())

    def drop_buffers(self, names: Sequence[str]) -> None:
        """Delete buffers that :meth:`forward` does not need."""
        for name in names:
            owner, _, last = name.rpartition(".")
            delattr(self.get_submodule(owner), last)

    def _fill_tree(self, tree: Any, path: str, buffers: Mapping[str, Tensor]) -> Any:
        """Return ``tree`` with its tensors replaced by ``buffers``, each with a leading client axis."""
        if isinstance(tree, Mapping):
            return {name: self._fill_tree(value, f"{path}.{name}", buffers) for name, value in tree.items()}
        return buffers[path][None] if path in buffers else tree

    def forward(self, x: Tensor, domain: Tensor | None = None) -> Tensor:
        """Return class probabilities ``(samples, C)`` or values.

        Args:
            x: ``(samples, ...)`` inputs.
            domain: ``(samples,)`` domain ids, where the method needs them.
        """
        cohort, buffers = self.cohort, dict(self.named_buffers())
        before = {part: getattr(cohort, part) for part in _PARTS}
        try:
            for part in _PARTS:
                setattr(cohort, part, self._fill_tree(before[part], part, buffers))
            cohort.domain = None if domain is None else domain[None]
            outputs = predict_all_domains(self.method, cohort, x[None], self.trained)[0]
        finally:
            cohort.domain = None
            for part in _PARTS:
                setattr(cohort, part, before[part])
        if self.num_classes is not None:
            return outputs[:, : self.num_classes].softmax(1)
        return outputs if self.scale is None else self.scale.up(outputs)
