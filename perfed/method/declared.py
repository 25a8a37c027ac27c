"""The parameter sets that a method declares, and the server's information about the federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from perfed.data.columns import Columns
from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.tree import Tree

Home = Literal["server", "client", "table"]


@dataclass(frozen=True)
class FederationInfo:
    """The server's information about the federation before the first round.

    Attributes:
        ids: client ids in sorted order.
        task: classification, regression or survival.
        num_classes: number of classes; ``None`` if the targets are not labels.
        num_domains: M, the number of domains; 0 if the samples have no domain ids.
        latent_shape: output shape of the embedding (of the first stage if there is no embedding).
        representation: number of values that the head receives per sample, all axes together; 0 if clients differ in
            it.
        shared: shape of every shared parameter and buffer by name, without the axis of domains (see :meth:`shape`).
        dtype: data type of parameters and inputs.
        buffers: names in ``shared`` that are buffers, such as the statistics of batch-norm, and not parameters.
        per_domain: names in ``shared`` that have one value per domain.
        personal: names of the personal parameters.
        columns: the columns of each client by client id, and the columns that all clients have.
        client: in the ``init`` of a :class:`ParameterSet`, the id of the client whose row or set is created; empty
            otherwise.
        shared_inputs: number of leading inputs that have the same meaning at every client that has them; 0 if clients
            have only columns of their own.
        scaled_inputs: whether all inputs are on one scale, as in tables with one schema and in data sets with
            standardised inputs.

    Example:
        >>> def init(info: FederationInfo, key: Tensor) -> Tree:  # of a ParameterSet: one centre per class
        ...     return {"centres": torch.zeros(info.num_classes, info.representation, dtype=info.dtype)}
        >>> info = FederationInfo(("a", "b"), "classification", 10, 0, (4,), 8, {"head.weight": (10, 8)}, torch.float32)
        >>> init(info, torch.tensor(0))["centres"].shape
        torch.Size([10, 8])
    """

    ids: tuple[str, ...]
    task: Task
    num_classes: int | None
    num_domains: int
    latent_shape: tuple[int, ...]
    representation: int
    shared: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    buffers: frozenset[str] = frozenset()
    per_domain: frozenset[str] = frozenset()
    personal: frozenset[str] = frozenset()
    columns: Columns = field(default_factory=lambda: Columns({}))
    client: str = ""
    shared_inputs: int = 0
    scaled_inputs: bool = False

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the server's shape of a shared parameter or buffer; per-domain ones start with an axis of M."""
        return (self.num_domains, *self.shared[name]) if name in self.per_domain else self.shared[name]

    def shared_parameters(self, why: str) -> dict[str, tuple[int, ...]]:
        """Return the shape (:meth:`shape`) of every shared parameter by name, without buffers.

        Args:
            why: a clause that says why shared parameters are needed; the error message starts with it.

        Raises:
            PerfedError: no parameter is shared.
        """
        shapes = {name: self.shape(name) for name in self.shared if name not in self.buffers}
        if not shapes:
            raise PerfedError(f"{why}, but the placement leaves none")
        return shapes


@dataclass(frozen=True)
class ParameterSet:
    """A named set of tensors that a method or extension keeps between rounds.

    Attributes:
        home: where the set is stored: ``"server"``; ``"client"`` (one at each client); ``"table"`` (on the server, one
            row per client id).
        like: ``"model"`` for all stages, ``"shared"`` for the shared parameters, or the name of a stage.
        init: ``"initial"`` (the model's own initial values), ``"zeros"``, or a function of the :class:`FederationInfo`
            and an int64 key that returns nested dictionaries of tensors (``like`` is then unused).
        bank: length k of a bank axis, which comes first (after the clients in a cohort: ``clients x bank x ...``); each
            entry of the bank has its own initial values. ``None``: no bank axis.

    Example:
        >>> sets = {  # what Method.sets returns: server.momentum, and cohort.state["own"] at each client
        ...     "momentum": ParameterSet("server", like="shared", init="zeros"),
        ...     "own": ParameterSet("client", like="head"),
        ... }
        >>> sets["momentum"].home, sets["own"].init
        ('server', 'initial')
    """

    home: Home
    like: str = "model"
    init: Literal["initial", "zeros"] | Callable[[FederationInfo, Tensor], Tree] = "initial"
    bank: int | None = None
