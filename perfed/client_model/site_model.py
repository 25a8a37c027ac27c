"""The model of one client, independent of its run: it predicts and can be saved without method, data or source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.client_model.facts import write_facts
from perfed.client_model.metrics import compute_metrics
from perfed.data.checksums import hash_file
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.data.inputs import as_tensor, column_names, native_columns
from perfed.data.names import compose_text
from perfed.data.reading import to_json_values
from perfed.errors import PerfedError
from perfed.tables.problems import describe_columns, pandas
from perfed.tables.site import TablePreprocessor

FACTS, TABLE = "site.json", "table.zip"
DOMAIN = "domain"


class Predictor(Protocol):
    """The part of a model that computes outputs from preprocessed inputs: a network, an estimator or a mixture."""

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs for classes are probabilities."""

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return class probabilities ``(samples, C)``, scores whose largest is of the predicted class, or values.

        Args:
            arguments: the tensors that :meth:`SiteModel.prepare_inputs` returns.
        """

    def to_onnx(self, output: str) -> Any:
        """Return an ONNX model from ``x``, and ``domain`` where it is needed, to ``output``.

        Raises:
            Exception: the predictor cannot be converted.
        """

    def save(self, folder: Path) -> list[str]:
        """Write the predictor into ``folder``, and return the names of its files.

        Raises:
            PerfedError: it cannot be saved.
        """


@dataclass(frozen=True, repr=False)
class SiteModel:
    """The model of one client, used like an estimator of scikit-learn.

    Attributes:
        facts: the content of ``site.json``: site, method, settings, classes, features, counts of its data, metrics.
        predictor: computes class probabilities or values from the preprocessed inputs.
        table: the preprocessing of the site, for sites that are tables; ``None`` where inputs are arrays.
        training_rows: the preprocessed training samples of the site, on which exported files are checked; ``None``
            where they are not available.
    """

    facts: dict[str, Any]
    predictor: Predictor
    table: TablePreprocessor | None = None
    training_rows: Split | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return f"<SiteModel '{self.site}': {self.facts['method']} on '{self.facts['dataset']}'>"

    @property
    def site(self) -> str:
        """The id that the client has in its federation."""
        return str(self.facts["site"])

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels in the spelling of the data; column j of :meth:`predict_proba` is of ``classes_[j]``.

        Raises:
            AttributeError: the model predicts values; scikit-learn raises the same error.
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
        """The number of columns in :attr:`feature_names_in_`."""
        return len(self.feature_names_in_)

    @property
    def takes_domain(self) -> bool:
        """Whether the method needs every sample's domain."""
        return self.facts["domains"] is not None

    @property
    def has_probabilities(self) -> bool:
        """Whether :meth:`predict_proba` returns probabilities of classes."""
        return self.facts["classes"] is not None and self.predictor.has_probabilities

    @property
    def dtype(self) -> torch.dtype:
        """The type of the preprocessed inputs."""
        dtype: torch.dtype = getattr(torch, self.facts["dtype"])
        return dtype

    def predict(self, x: Any, domain: Any = None) -> NDArray[Any]:
        """Return the label of the likeliest class of every sample, or its value.

        Args:
            x: a data frame with the columns :attr:`feature_names_in_` in any order, or an array ``(samples, ...)``.
            domain: ``(samples,)`` domain ids beside an array, where the method needs them.

        Raises:
            PerfedError: columns are missing or unknown (they are named), the shape is wrong, values are not finite, or
                domains are missing or unknown.
        """
        outputs = self.predictor.outputs(*self.prepare_inputs(x, domain))
        return outputs if self.facts["classes"] is None else self.classes_[outputs.argmax(1)]

    def predict_proba(self, x: Any, domain: Any = None) -> NDArray[Any]:
        """Return class probabilities ``(samples, C)`` in the order of :attr:`classes_`.

        Args:
            x, domain: as for :meth:`predict`.

        Raises:
            PerfedError: as in :meth:`predict`, and if the model has no probabilities.
        """
        if self.facts["classes"] is None:
            raise PerfedError(f"site '{self.site}' predicts values, not classes; use predict")
        return self.outputs(*self.prepare_inputs(x, domain))

    def outputs(self, *arguments: Tensor) -> NDArray[Any]:
        """Return class probabilities ``(samples, C)`` or values for the tensors that :meth:`prepare_inputs` returns.

        Raises:
            PerfedError: the model predicts classes and has no probabilities.
        """
        if self.facts["classes"] is not None and not self.has_probabilities:
            raise PerfedError(f"site '{self.site}': {self.facts['method']} has no probabilities, which are needed here")
        return self.predictor.outputs(*arguments)

    def with_metrics(self, client: Client, federation: Federation) -> Self:
        """Return a copy of the model whose facts contain its metrics on the test data of ``client``.

        The metrics are empty if the client has no test data, or if a model for classes has no probabilities.
        """
        test, metrics = client.split("test"), dict[str, Any]()
        if test is not None and (federation.num_classes is None or self.has_probabilities):
            outputs = self.outputs(*self.check_inputs(test.x, test.domain))
            if federation.target_scale is not None:
                test = test.with_targets(federation.target_scale.up)
            metrics = compute_metrics(test, outputs, federation.task, federation.num_classes)
        return replace(self, facts={**self.facts, "metrics": to_json_values(metrics)})

    def save(self, folder: Path | str) -> Path:
        """Write the predictor, ``site.json`` and the preprocessing into ``folder``, for :func:`perfed.load_site`.

        A preprocessing with types of the user is pickled, and can be loaded only with ``trust``.

        Raises:
            PerfedError: ``folder`` already holds the model of a site, or this one cannot be saved.
        """
        path = Path(folder)
        if (path / FACTS).exists():
            raise PerfedError(f"{path}: already holds a site's model")
        path.mkdir(parents=True, exist_ok=True)
        names = self.predictor.save(path)
        if self.table is not None:
            self.table.save(path / TABLE)
            names.append(TABLE)
        write_facts({**self.facts, "files": {name: hash_file(path / name) for name in names}}, path / FACTS)
        return path

    # Inputs ------------------------------------------------------------------------------------------------

    def prepare_inputs(self, x: Any, domain: Any = None) -> tuple[Tensor, ...]:
        """Return preprocessed and checked inputs, and domain ids where the model needs them, for :meth:`outputs`."""
        if self.table is not None:
            x, domain = self.table.transform(self._to_frame(x))
        elif column_names(x) is not None:
            x, domain = self._select_columns(x, domain)
        return self.check_inputs(x, domain)

    def check_inputs(self, x: Any, domain: Any = None) -> tuple[Tensor, ...]:
        """Check preprocessed inputs, and domain ids where the model needs them, and return both as tensors."""
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
        return (inputs, self._find_domain_ids(domain, len(inputs))) if self.takes_domain else (inputs,)

    def _to_frame(self, x: Any) -> Any:
        """Return a data frame unchanged, and an array as a frame with the columns of the site in their order."""
        names, shape = list(self.feature_names_in_), np.shape(x)
        if column_names(x) is not None:
            return x
        if len(shape) != 2 or shape[1] != len(names):
            raise PerfedError(f"site '{self.site}': x has shape {shape}, not (rows, {len(names)})")
        cells = np.array(x, object)
        cells[np.ma.getmaskarray(x)] = None  # which means missing
        return pandas().DataFrame(cells, columns=names)

    def _select_columns(self, x: Any, domain: Any) -> tuple[Any, Any]:
        self._check_columns(x, without=(DOMAIN,) if domain is not None else ())
        x = native_columns(x)
        if self.takes_domain and domain is None:
            domain = np.asarray(x[DOMAIN])
        columns = {compose_text(str(name)): name for name in x.columns}
        return x[[columns[compose_text(name)] for name in self.facts["features"]]], domain

    def _check_columns(self, x: Any, without: Sequence[str] = ()) -> None:
        columns = [compose_text(name) for name in column_names(x) or ()]
        expected = [compose_text(name) for name in self.feature_names_in_ if name not in without]
        for problem, names in (
            ("x lacks", [name for name in expected if name not in columns]),
            ("remove from x the unknown", [name for name in columns if name not in expected]),
            ("x has twice", [name for name in dict.fromkeys(columns) if columns.count(name) > 1]),
        ):
            if names:
                raise PerfedError(f"site '{self.site}': {problem} {describe_columns(names)}")

    def _find_domain_ids(self, domain: Any, samples: int) -> Tensor:
        names = self.facts["domains"]
        if domain is None:
            raise PerfedError(f"site '{self.site}': {self.facts['method']} needs the domain of every sample")
        ids = np.asarray(domain)
        if ids.shape != (samples,):
            raise PerfedError(f"site '{self.site}': {samples} samples, but domains of shape {ids.shape}")
        are_names = ids.dtype.kind in "OU"
        allowed: list[Any] = [compose_text(name) for name in names] if are_names else list(range(len(names)))
        values = [compose_text(value) if isinstance(value, str) else value for value in ids.tolist()]
        for value in values:
            if value not in allowed:
                listed = ", ".join(map(str, allowed))
                raise PerfedError(f"site '{self.site}': unknown domain {value!r}; allowed: {listed}")
        return torch.tensor([allowed.index(value) for value in values], dtype=torch.int64)
