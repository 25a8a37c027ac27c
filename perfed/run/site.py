"""A site's own model, apart from its run: it predicts, is saved and loaded, and needs no method, data or source."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from perfed.data.client import Split
from perfed.data.inputs import as_tensor, column_names, native_columns
from perfed.data.names import compose_text
from perfed.data.reading import reason_of, refuse_untrusted
from perfed.errors import PerfedError
from perfed.run.checksums import find_damage, hash_file, refuse_damage
from perfed.run.client_module import ClientModule
from perfed.run.graph import NotData, read_graph, write_graph
from perfed.run.site_facts import read_facts, read_file_checksums, write_facts
from perfed.tables.problems import describe_columns, pandas
from perfed.tables.site import TablePreprocessor

FACTS, NETWORK, PROGRAM, TABLE = "site.json", "network.safetensors", "network.pt2", "table.zip"
EXAMPLES = 3
"""Samples that a model is traced with."""
DOMAIN = "domain"
_ROWS = 4096  # that are predicted at once


@dataclass(frozen=True, repr=False)
class SiteModel:
    """One site's own model, used like an estimator of scikit-learn.

    Attributes:
        module: from inputs of the site's shape (and domain ids, where the method needs them) to class probabilities
            or values (:class:`~perfed.run.client_module.ClientModule`).
        facts: what ``site.json`` holds: site, method, settings, classes, features, counts of its data, metrics.
        table: the site's preprocessing, for sites that are tables; ``None`` where inputs are arrays.
        training_rows: the site's preprocessed training samples, on which exported files are checked; ``None`` where
            they are not at hand.
    """

    module: nn.Module | ExportedProgram
    facts: dict[str, Any]
    table: TablePreprocessor | None = None
    training_rows: Split | None = field(default=None, kw_only=True)

    @cached_property
    def program(self) -> ExportedProgram:
        """The module as a graph for any number of samples; it takes seconds, and predictions need none.

        Raises:
            PerfedError: it cannot be made one.
        """
        found = self.module
        return found if isinstance(found, ExportedProgram) else traced(found, self.site, *example_of(self.facts))

    def __repr__(self) -> str:
        return f"<SiteModel '{self.site}': {self.facts['method']} on '{self.facts['dataset']}'>"

    @property
    def site(self) -> str:
        """The id that the client has in its federation."""
        return str(self.facts["site"])

    @property
    def classes_(self) -> NDArray[Any]:
        """Labels as the data call them; column j of :meth:`predict_proba` is of ``classes_[j]``.

        Raises:
            AttributeError: of a regression, as in scikit-learn.
        """
        if self.facts["classes"] is None:
            raise AttributeError(f"site '{self.site}' predicts values, which have no classes")
        labels = self.facts["classes"]
        if self.table is not None and isinstance(labels[0], str):
            labels = [self.table.original_name(label) for label in labels]
        return np.array(labels)

    @property
    def feature_names_in_(self) -> NDArray[np.str_]:
        """The columns that a data frame must have, in any order; of arrays x0, x1, ..., and the domain if needed."""
        if self.table is None:
            return np.array([*self.facts["features"], *([DOMAIN] if self.takes_domain else [])])
        needed = self.takes_domain or self.table.domain_input
        domain = [] if self.table.domain is None or not needed else [self.table.original_name(self.table.domain)]
        return np.array([*self.table.feature_names_in_, *domain])

    @property
    def n_features_in_(self) -> int:
        """How many columns these are."""
        return len(self.feature_names_in_)

    @property
    def takes_domain(self) -> bool:
        """Whether the method needs every sample's domain."""
        return self.facts["domains"] is not None

    @property
    def says_probabilities(self) -> bool:
        """Whether :meth:`predict_proba` is there, of classes."""
        return self.facts["classes"] is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's parameters and inputs."""
        found: torch.dtype = getattr(torch, self.facts["dtype"])
        return found

    def predict(self, x: Any, domain: Any = None) -> NDArray[Any]:
        """Return the label of the likeliest class of every sample, or its value.

        Args:
            x: a data frame with the columns :attr:`feature_names_in_` in any order, or an array ``(samples, ...)``.
            domain: ``(samples,)`` domain ids beside an array, where the method needs them.

        Raises:
            PerfedError: columns that are missing or unknown (named), another shape, values that are not finite, no
                domains or unknown ones.
        """
        found = self.outputs(*self.arguments(x, domain))
        return found if self.facts["classes"] is None else self.classes_[found.argmax(1)]

    def predict_proba(self, x: Any, domain: Any = None) -> NDArray[Any]:
        """Class probabilities ``(samples, C)`` in the order of :attr:`classes_`; arguments as in :meth:`predict`.

        Raises:
            PerfedError: as :meth:`predict`, and of a regression.
        """
        if self.facts["classes"] is None:
            raise PerfedError(f"site '{self.site}' predicts values, not classes; use predict")
        return self.outputs(*self.arguments(x, domain))

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return what the network says of what :meth:`arguments` gives."""
        network = self.module.module() if isinstance(self.module, ExportedProgram) else self.module
        with torch.no_grad():
            parts = [network(*rows) for rows in zip(*(a.split(_ROWS) for a in arguments), strict=True)]
        found: NDArray[Any] = torch.cat(parts).numpy()
        return found

    # Inputs ------------------------------------------------------------------------------------------------

    def arguments(self, x: Any, domain: Any = None) -> tuple[Tensor, ...]:
        """Return what the network gets of ``x``, checked: inputs, and domain ids where it needs them."""
        if self.table is not None:
            x, domain = self.table.transform(self._framed(x))
        elif column_names(x) is not None:
            x, domain = self._from_columns(x, domain)
        return self.checked(x, domain)

    def checked(self, x: Any, domain: Any = None) -> tuple[Tensor, ...]:
        """:meth:`arguments` of inputs as the network gets them, which are behind any preprocessing."""
        inputs, shape = as_tensor(x, "x", self.site), tuple(self.facts["input_shape"])
        if inputs.ndim == 2 and inputs.shape[1] == int(np.prod(shape)):
            inputs = inputs.reshape(-1, *shape)
        if tuple(inputs.shape[1:]) != shape:
            raise PerfedError(f"site '{self.site}' has inputs of shape {shape}, not {tuple(inputs.shape[1:])}")
        inputs = inputs.to("cpu", self.dtype)
        if len(inputs) == 0:
            raise PerfedError(f"site '{self.site}': x has no rows")
        if not torch.isfinite(inputs).all():
            raise PerfedError(f"site '{self.site}': x holds values that are missing or infinite")
        return (inputs, self._domain_ids(domain, len(inputs))) if self.takes_domain else (inputs,)

    def _framed(self, x: Any) -> Any:
        """A data frame as it is; an array with the site's columns in their order."""
        names, shape = list(self.feature_names_in_), np.shape(x)
        if column_names(x) is not None:
            return x
        if len(shape) != 2 or shape[1] != len(names):
            raise PerfedError(f"site '{self.site}': x has shape {shape}, not (rows, {len(names)})")
        cells = np.array(x, object)
        cells[np.ma.getmaskarray(x)] = None  # which means missing
        return pandas().DataFrame(cells, columns=names)

    def _from_columns(self, x: Any, domain: Any) -> tuple[Any, Any]:
        self._check_columns(x, without=(DOMAIN,) if domain is not None else ())
        x = native_columns(x)
        if self.takes_domain and domain is None:
            domain = np.asarray(x[DOMAIN])
        columns = {compose_text(str(name)): name for name in x.columns}
        return x[[columns[compose_text(name)] for name in self.facts["features"]]], domain

    def _check_columns(self, x: Any, without: Sequence[str] = ()) -> None:
        columns = [compose_text(name) for name in column_names(x) or ()]
        expected = [compose_text(name) for name in self.feature_names_in_ if name not in without]
        for what, names in (
            ("x lacks", [name for name in expected if name not in columns]),
            ("remove from x the unknown", [name for name in columns if name not in expected]),
            ("x has twice", [name for name in dict.fromkeys(columns) if columns.count(name) > 1]),
        ):
            if names:
                raise PerfedError(f"site '{self.site}': {what} {describe_columns(names)}")

    def _domain_ids(self, domain: Any, samples: int) -> Tensor:
        names = self.facts["domains"]
        if domain is None:
            raise PerfedError(f"site '{self.site}': {self.facts['method']} needs the domain of every sample")
        given = np.asarray(domain)
        if given.shape != (samples,):
            raise PerfedError(f"site '{self.site}': {samples} samples, but domains of shape {given.shape}")
        are_names = given.dtype.kind in "OU"
        known: list[Any] = [compose_text(name) for name in names] if are_names else list(range(len(names)))
        values = [compose_text(value) if isinstance(value, str) else value for value in given.tolist()]
        for value in values:
            if value not in known:
                allowed = ", ".join(map(str, known))
                raise PerfedError(f"site '{self.site}': unknown domain {value!r}; allowed: {allowed}")
        return torch.tensor([known.index(value) for value in values], dtype=torch.int64)

    # Files -------------------------------------------------------------------------------------------------

    def save(self, folder: Path | str) -> Path:
        """Write ``network.safetensors`` (graph and parameters), ``site.json`` and the preprocessing into ``folder``.

        A network that is more than operations of torch on tensors is written as ``network.pt2``, and a preprocessing of
        the user's own types is pickled: who loads these must say that they are trusted.

        Raises:
            PerfedError: ``folder`` already holds a site's model.
        """
        write_site(self, Path(folder))
        return Path(folder)

    def write(self, place: Path) -> None:
        """Write what it predicts with into the folder ``place``."""
        try:
            write_graph(self.program, place / NETWORK)
        except NotData:
            write_program(self.program, place / PROGRAM)


def write_site(model: SiteModel, place: Path) -> None:
    """Write what ``model`` predicts with, its preprocessing and ``site.json`` with their checksums into ``place``.

    Raises:
        PerfedError: it already holds a site's model, or this one cannot be kept.
    """
    if (place / FACTS).exists():
        raise PerfedError(f"{place}: already holds a site's model")
    place.mkdir(parents=True, exist_ok=True)
    model.write(place)
    if model.table is not None:
        model.table.save(place / TABLE)
    files = {name: hash_file(place / name) for name in (NETWORK, PROGRAM, TABLE) if (place / name).exists()}
    write_facts({**model.facts, "files": files}, place / FACTS)


def load_network(place: Path, trust: bool = False) -> SiteModel:
    """Return the site's model whose one network is in ``place``; parameters as of :func:`perfed.load_site`.

    Raises:
        PerfedError: as :func:`perfed.load_site`.
    """
    facts = read_facts(place / FACTS)
    table = TablePreprocessor.load(place / TABLE, trust) if facts["columns"] is not None else None
    model = SiteModel(_read_network(place, facts, trust), facts, table)
    if not trust:  # files that are trusted may have been replaced on purpose
        checksums = read_file_checksums(place / FACTS)
        refuse_damage(place, find_damage(place, checksums), "save the model of the site again")
    return model


def example_of(facts: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return samples such as the network of a site with these facts takes, and domain ids where it needs them."""
    x = torch.zeros(EXAMPLES, *facts["input_shape"], dtype=getattr(torch, facts["dtype"]))
    return (x,) if facts["domains"] is None else (x, torch.zeros(EXAMPLES, dtype=torch.int64))


def _read_network(place: Path, facts: dict[str, Any], trust: bool) -> nn.Module | ExportedProgram:
    """The network of the site with these facts, which was tried."""
    file = place / NETWORK if (place / NETWORK).exists() else place / PROGRAM
    if not file.exists():
        raise PerfedError(f"{place}: no site's model here ({NETWORK} is missing)")
    if file.name == PROGRAM:
        refuse_untrusted(file, "a network in torch's own format", trust)
    try:
        if file.name == PROGRAM:
            with quiet("torch.export"):
                return torch.export.load(file)
        network = read_graph(file)
        with torch.no_grad():
            network(*example_of(facts))
        return network
    except Exception as error:  # whatever safetensors and torch raise
        raise PerfedError(f"{file}: is damaged, or no network: {reason_of(error)}") from None


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Without what the part of torch whose logger has this name says of packages and faults."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def write_program(program: ExportedProgram, file: Path, texts: dict[str, str] | None = None) -> None:
    """Write ``program`` in torch's own format, ``.pt2``, with ``texts`` by name as extra files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, file, extra_files=texts)


def traced(module: nn.Module, site: str, *arguments: Tensor) -> ExportedProgram:
    """``module`` as a graph for any number of samples, with the buffers that it uses.

    Args:
        module: of one client; of a :class:`ClientModule` buffers that are not used are dropped.
        site: its id, for messages.
        arguments: inputs, and domain ids where it takes them, of some samples; their values do not matter.

    Raises:
        PerfedError: a stage of the model depends on the values of its inputs in a way that no graph can say.
    """
    batch = Dim("batch")

    def export() -> ExportedProgram:
        return torch.export.export(module, arguments, dynamic_shapes=({0: batch},) * len(arguments), strict=False)

    try:
        with torch.no_grad():
            program = export()
            unused = _unused(program)
            if unused and isinstance(module, ClientModule):
                module.forget(unused)
                program = export()
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PerfedError(f"site '{site}': its model cannot be made a graph by torch.export: {reason}") from error
    return program


def _unused(program: ExportedProgram) -> list[str]:
    """Buffers that no output depends on."""
    names, live = program.graph_signature.inputs_to_buffers, set()
    waiting = [node for node in program.graph.nodes if node.op == "output"]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in live:
                live.add(node)
                waiting.append(node)
    return [names[node.name] for node in program.graph.nodes if node.name in names and node not in live]
