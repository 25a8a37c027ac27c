"""What a method declares, and what it knows of the federation before the first round."""

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
    """What the server knows about the federation before the first round.

    Attributes:
        ids: client ids in sorted order.
        task: classification, regression or survival.
        num_classes: ``None`` where targets are no labels.
        num_domains: M; 0 where domains are unknown.
        latent_shape: output shape of the embedding (of the first stage, if there is no embedding).
        representation: numbers that the head gets, all axes together; 0 where these differ between clients.
        shared: shape of every shared parameter and buffer by name, without the axis of domains (:meth:`shape`).
        dtype: of parameters and inputs.
        buffers: names among ``shared`` of what is no parameter: statistics of batch-norm.
        per_domain: names among ``shared`` of what every domain has one of.
        personal: names of the parameters that each client has of its own.
        columns: of each client, by id, and which of them all have.
        client: in the ``init`` of a :class:`ParameterSet`, the client whose row or set is made; else empty.
        shared_inputs: how many inputs, the first of every client, mean the same wherever a client has them; 0 where
            clients have columns of their own alone.
        scaled_inputs: whether inputs are on one scale, as those of tables with one schema and of data sets that
            standardise their inputs are.

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
        """Of the shared parameter or buffer ``name``, as the server has it: first M where it is per-domain."""
        return (self.num_domains, *self.shared[name]) if name in self.per_domain else self.shared[name]

    def shared_parameters(self, why: str) -> dict[str, tuple[int, ...]]:
        """:meth:`shape` of every shared parameter, without buffers.

        Raises:
            PerfedError: there is none; starts with ``why``.
        """
        found = {name: self.shape(name) for name in self.shared if name not in self.buffers}
        if not found:
            raise PerfedError(f"{why}, but the placement leaves none")
        return found


@dataclass(frozen=True)
class ParameterSet:
    """A named set of tensors that a method or extension keeps between rounds.

    Attributes:
        home: ``"server"``; ``"client"`` (kept by each client); ``"table"`` (on the server, one row per client id).
        like: ``"model"`` for all stages, ``"shared"`` for the shared parameters, or the name of a stage.
        init: ``"initial"`` (the model's own initial values), ``"zeros"``, or a function of the
            :class:`FederationInfo` and an int64 key that returns nested dictionaries of tensors (``like`` is then
            unused).
        bank: with k, a bank axis of size k in front (``clients x bank x ...`` in a cohort); each entry of a bank has
            its own initial values.

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
