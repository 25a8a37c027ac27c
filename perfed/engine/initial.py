"""Initial values: of each client's own parameter sets and of the server's.

Values are drawn by key from the run's seed, never stored with the method: the same client starts from the same values
in every engine. A personal embedding is drawn per client; every other stage starts from the same values everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from perfed import rng
from perfed.aggregation.settings import Aggregation
from perfed.data.client import Client
from perfed.data.columns import Columns
from perfed.data.federation import Federation
from perfed.data.inputs import check_names
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.maths.sums import SingleReplies
from perfed.method.aggregation import check_aggregation, refuse_aggregation
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import ServerState
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.model.chain import BATCH_NORM, EMBEDDING, Chain, Model, Parameters, Shape, stage_of
from perfed.model.columns import ColumnLinear
from perfed.model.placement import PER_DOMAIN, PERSONAL, SENT, Placement, suggest_personal_embedding
from perfed.model.stacked import why_not_stackable
from perfed.training.batches import POSITION
from perfed.tree import map_leaves


class Initialiser:
    """A method, a model and a seed: what is needed to start a run, on the server or at one client.

    Args:
        method: with its hyper-parameters.
        model: the experiment's model; stages the method leaves out are dropped.
        seed: of the run.
        dtype, device: of parameters and inputs.
        watched: ids of the clients whose loss of each local epoch is wanted.
        secure: how replies are summed where the server sees their sums alone; ``None``: it sees the replies.
        aggregation: what the server makes of replies that are averaged; default: their mean.

    Raises:
        PerfedError: a kind of aggregation that the method cannot use; with ``secure``, an extension that must see
            single replies; a set that is declared twice.
    """

    def __init__(
        self,
        method: Method,
        model: Model,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        watched: Collection[str] = (),
        secure: SecureAggregation | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        self.aggregation = aggregation or Aggregation()
        check_aggregation(self.aggregation, method, sums_only=secure is not None)
        self.aggregator = self.aggregation.aggregator
        self.method = method
        self.model = method.adapt(model)
        self.seed = seed
        self.dtype = dtype
        self.device = torch.device(device)
        self.watched = frozenset(watched)
        self.secure = secure
        if secure is not None:
            _check_incoming(method)
        if method.precision != "full" and (dtype != torch.float32 or any(e.private() for e in method.extensions)):
            raise PerfedError("precision = 'bf16' needs dtype = 'float32', and does not combine with [privacy] of rows")
        self._chains: dict[Shape, Chain] = {}
        self._places: dict[Shape, dict[str, Placement]] = {}
        self._values: dict[Any, Parameters] = {}
        self.sets: dict[str, ParameterSet] = dict(method.sets())
        for extension in method.extensions:
            for name, declared in extension.sets().items():
                if name in self.sets or name == "shared":
                    raise PerfedError(
                        f"the parameter set '{name}' is declared twice; rename it in extension '{extension.name}'"
                    )
                self.sets[name] = declared
        if method.local_steps is not None:
            self.sets[POSITION] = ParameterSet("client", init=_none_seen)

    def chain(self, input_shape: Shape) -> Chain:
        """The modules for inputs of ``input_shape``, built once."""
        if input_shape not in self._chains:
            with rng.seed_torch(rng.key(self.seed, "build")):
                self._chains[input_shape] = self.model.build(input_shape).to(self.dtype)
        return self._chains[input_shape]

    def places(self, input_shape: Shape) -> dict[str, Placement]:
        """Placement of every parameter for inputs of ``input_shape``."""
        if input_shape not in self._places:
            self._places[input_shape] = self.method.places(self.chain(input_shape))
        return self._places[input_shape]

    def seen(self, federation: Federation) -> Federation:
        """The federation with what the method makes of each client's data."""
        if not self.method.changes_data:
            return federation
        made = tuple(self.method.local_data(c, rng.key(self.seed, "local data", c.id)) for c in federation)
        images = all(len(client.input_shape) == 3 for client in made)
        return replace(federation, clients=made, augment=federation.augment if images else None)

    def initial(self, input_shape: Shape, stages: Sequence[str], *, client: str = "", entry: int = 0) -> Parameters:
        """Initial values of ``stages``; ``client`` and ``entry`` (of a bank) make them differ."""
        chain = self.chain(input_shape)
        values: Parameters = {}
        shape = input_shape
        for stage, factory in self.model.factories.items():
            if stage in stages:
                with rng.seed_torch(rng.key(self.seed, "initial", stage, client, entry)):
                    module: nn.Module = factory(shape)
                tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                for name, tensor in tensors.items():
                    value = tensor.detach()
                    dtype = self.dtype if value.is_floating_point() else value.dtype
                    values[f"{stage}.{name}"] = value.to(self.device, dtype)
            shape = chain.output_shapes[stage]
        return values

    def client_model(self, client: Client) -> Parameters:
        """Initial personal and frozen parameters of one client."""
        places = self.places(client.input_shape)
        own: Parameters = {}
        for stage in self.chain(client.input_shape).stages:
            if all(place in SENT for name, place in places.items() if stage_of(name) == stage):
                continue
            cache_key = (stage, client.input_shape)
            if stage == "embedding":
                own.update(self.initial(client.input_shape, [stage], client=client.id))
                continue
            if cache_key not in self._values:
                self._values[cache_key] = self.initial(client.input_shape, [stage])
            own.update(self._values[cache_key])
        return {name: tensor for name, tensor in own.items() if places[name] not in SENT}

    def client_state(self, client: Client, info: FederationInfo) -> dict[str, Any]:
        """What a client holds before its first exchange: ``{"model": personal parameters, set: ...}``."""
        places = self.places(client.input_shape)
        model = {name: t for name, t in self.client_model(client).items() if places[name] == "personal"}
        state: dict[str, Any] = {"model": model}
        for name, declared in self.sets.items():
            if declared.home == "client":
                state[name] = self._own_set(name, client, info)
        return state

    def _own_set(self, name: str, client: Client, info: FederationInfo) -> dict[str, Any]:
        """One client's initial value of a set; made once for all clients where it depends on shapes alone."""
        declared, cache_key = self.sets[name], ("set", name, client.input_shape)
        if callable(declared.init):
            own = replace(info, client=client.id)
            return self._set(declared, client.input_shape, own, rng.key(self.seed, "set", name, client.id))
        if cache_key not in self._values:
            self._values[cache_key] = self._set(declared, client.input_shape, info, rng.key(self.seed, "set", name))
        return self._values[cache_key]

    def server_state(self, federation: Federation) -> ServerState:
        """The server's sets before the first round.

        Raises:
            PerfedError: shared parameters whose shapes differ between clients; names two of them.
        """
        info = self.info(federation)
        if not self.aggregator.is_mean and any(not all(client.held or ()) for client in federation):
            raise refuse_aggregation(
                self.aggregation, "clients share columns by name (data.columns = 'named'), and some lack a column"
            )
        self._check_shared(federation)
        self._check_outputs(federation)
        shape = federation.clients[0].input_shape
        places = self.places(shape)
        everything = self.initial(shape, self.chain(shape).stages)
        per_domain = {stage_of(name) for name, found in places.items() if found == PER_DOMAIN}
        if info.num_domains == 0 and (self.method.needs_domains or per_domain):
            first = federation.clients[0]
            way = "; name the column that says it: domain=COLUMN" if first.table is not None else ""
            raise PerfedError(
                "this method needs domains; the data do not say every sample's domain "
                f"(client '{first.id}': train samples without domain ids){way}"
            )
        for name, module in self.chain(shape).named_modules():
            if isinstance(module, BATCH_NORM) and stage_of(name) in per_domain:
                raise PerfedError(f"'{name}' is batch-norm, which cannot be {PER_DOMAIN}; use another normalisation")
        for extension in self.method.extensions:
            extension.check(info, self.method.moves_shared)
        everything = self._per_domain(everything, places, info)
        sets: dict[str, Any] = {"shared": {name: t for name, t in everything.items() if places[name] in SENT}}
        for name, declared in self.sets.items():
            key = rng.key(self.seed, "set", name)
            if declared.home == "server":
                sets[name] = self._set(declared, shape, info, key)
            elif declared.home == "table":
                sets[name] = {
                    client.id: self._set(
                        declared, client.input_shape, replace(info, client=client.id), rng.key(key, client.id)
                    )
                    for client in federation
                }
        return ServerState(sets)

    def info(self, federation: Federation) -> FederationInfo:
        """What the server knows before the first round."""
        shape = federation.clients[0].input_shape
        chain, places = self.chain(shape), self.places(shape)
        latent = chain.output_shapes["embedding" if "embedding" in chain.stages else chain.stages[0]]
        before = chain.stages_before("head")
        return FederationInfo(
            ids=tuple(federation.ids),
            task=federation.task,
            num_classes=federation.num_classes,
            num_domains=federation.num_domains,
            latent_shape=latent,
            representation=prod(chain.output_shapes[before[-1]]) if before else _width(federation),
            shared={name: tuple(t.shape) for name, t in chain.tensors().items() if places[name] in SENT},
            dtype=self.dtype,
            buffers=frozenset(name for name, _ in chain.named_buffers() if places[name] in SENT),
            per_domain=frozenset(name for name, place in places.items() if place == PER_DOMAIN),
            personal=frozenset(name for name, _ in chain.named_parameters() if places[name] == PERSONAL),
            columns=Columns.of_clients(federation),
            shared_inputs=_shared_inputs(federation),
            scaled_inputs=federation.scaled_inputs or federation.columns is not None,
        )

    def _set(self, declared: ParameterSet, shape: Shape, info: FederationInfo, key: Tensor) -> dict[str, Any]:
        if callable(declared.init):
            return map_leaves(declared.init(info, key), lambda _, t: t.to(self.device))
        entries = [self._like(declared, shape, info, entry) for entry in range(declared.bank or 1)]
        if declared.bank is None:
            return entries[0]
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}

    def _like(self, declared: ParameterSet, shape: Shape, info: FederationInfo, entry: int) -> Parameters:
        chain, places = self.chain(shape), self.places(shape)
        stages = chain.stages if declared.like in ("model", "shared") else (declared.like,)
        values = self._per_domain(self.initial(shape, stages, entry=entry), places, info)
        if declared.like == "shared":
            values = {name: t for name, t in values.items() if places[name] in SENT}
        return {name: torch.zeros_like(t) for name, t in values.items()} if declared.init == "zeros" else values

    def _per_domain(self, values: Parameters, places: Mapping[str, Placement], info: FederationInfo) -> Parameters:
        """Parameters per domain get a domain axis; every domain starts from the same values."""
        return {
            name: t.expand(info.num_domains, *t.shape).clone() if places[name] == PER_DOMAIN else t
            for name, t in values.items()
        }

    def _check_outputs(self, federation: Federation) -> None:
        first = federation.clients[0]
        chain, target = self.chain(first.input_shape), first.train.target_shape
        shape = chain.output_shapes[chain.stages[-1]]
        if federation.survival:
            fits, needed = prod(shape) == 1, "survival times, for which one output is needed (log hazard)"
        elif federation.num_classes is None:
            fits, needed = prod(shape) == prod(target), f"{prod(target)} values"
        else:
            fits, needed = len(shape) == 1 and shape[0] >= federation.num_classes, f"{federation.num_classes} classes"
        if not fits:
            raise PerfedError(f"the model's outputs have shape {shape}, but the data have {needed}; change the head")

    def _check_shared(self, federation: Federation) -> None:
        first = federation.clients[0]
        expected = self.chain(first.input_shape).tensors()
        places = self.places(first.input_shape)
        begin = self.chain(first.input_shape).stages[0]
        if any(place in SENT for name, place in places.items() if stage_of(name) == begin):
            self._check_columns(federation, begin)
        first_of: dict[Shape, Client] = {}
        for client in federation:
            first_of.setdefault(client.input_shape, client)
        for client in first_of.values():
            for name, tensor in self.chain(client.input_shape).tensors().items():
                if places.get(name) in SENT and tensor.shape != expected[name].shape:
                    raise PerfedError(
                        f"this method shares '{name}', but its shape differs between clients: "
                        f"{tuple(expected[name].shape)} at '{first.id}' (inputs {first.input_shape}), "
                        f"{tuple(tensor.shape)} at '{client.id}' (inputs {client.input_shape}); "
                        f"{self._ways_to_fit(first)}, or use a method with a personal embedding, such as hetfedrep, "
                        "flic-class, flic-hl, lg-fedavg or local"
                    )

    def _check_columns(self, federation: Federation, stage: str) -> None:
        """A shared first stage takes column j of every client for the same feature."""
        named = [
            (client.id, names if client.held is None else names[: len(client.held)])
            for client in federation
            if (names := client.feature_names) is not None
        ]
        for client, names in named[1:]:
            first, expected = named[0]
            if len(names) == len(expected):  # else the shapes differ
                where = f"this method shares '{stage}', so that columns must mean the same at all clients"
                try:
                    check_names(where, f"client '{client}'", names, f"client '{first}'", expected)
                except PerfedError as error:
                    raise PerfedError(f"{error}; {self._ways_to_fit(federation.clients[0])}") from None

    def _ways_to_fit(self, client: Client) -> str:
        """What to add where clients' inputs differ and the first stage is shared."""
        own = suggest_personal_embedding(EMBEDDING in self.chain(client.input_shape).stages)
        if client.table is None:
            return f"add {own}"
        same = "columns=named, columns=common or columns=union (inputs that mean the same everywhere)"
        return f"add {same} or {own} (each client's own)"


def _shared_inputs(federation: Federation) -> int:
    """How many of the clients' inputs, the first of each, mean the same: those of shared columns, all, or none."""
    if federation.named_inputs is not None:
        return federation.named_inputs
    kinds = {(client.input_shape, client.feature_names) for client in federation}
    return prod(federation.clients[0].input_shape) if len(kinds) == 1 else 0


def _width(federation: Federation) -> int:
    """How many numbers an input has; 0 where clients differ."""
    widths = {prod(client.input_shape) for client in federation}
    return widths.pop() if len(widths) == 1 else 0


def _none_seen(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"steps": torch.tensor(0)}


def group_key(chain: Chain) -> str:
    """Clients whose chains have the same key can share one stack.

    Two chains match if they are built from the same layers of ``torch.nn`` with the same settings; for vectors, the
    number of inputs of a first linear layer may differ (inputs and weights are padded with zeros, which changes no
    result). Other modules match only for equal input shapes.
    """
    modules = [m for m in chain.modules() if m is not chain]
    known = all(type(m).__module__.startswith("torch.nn") or type(m) is ColumnLinear for m in modules)
    leaves = [m for m in modules if not list(m.children())]
    parts = [f"{type(m).__name__}({m.extra_repr()})" for m in leaves]
    if known and len(chain.input_shape) == 1 and leaves and isinstance(leaves[0], ColumnLinear):
        out, shared = leaves[0].weight.shape
        parts[0] = f"ColumnLinear({shared} + *, {out}, {leaves[0].bias is not None})"
        return "|".join([*chain.stages, *parts])
    if known and len(chain.input_shape) == 1 and leaves and isinstance(leaves[0], nn.Linear):
        first = leaves[0]
        parts[0] = f"Linear(*, {first.out_features}, {first.bias is not None})"
        return "|".join([*chain.stages, *parts])
    return "|".join([*chain.stages, str(chain.input_shape), *parts])


def find_stacking_obstacle(chain: Chain) -> tuple[str, str] | None:
    """The layer for which clients of this architecture must run one at a time, and why; ``None`` if there is none."""
    shape = chain.input_shape
    for stage in chain.stages:
        reason = why_not_stackable(chain.get_submodule(stage), shape, stage)
        if reason is not None:
            return reason
        shape = chain.output_shapes[stage]
    return None


def _check_incoming(method: Method) -> None:
    """Refuse extensions that make something of single replies where they arrive.

    Raises:
        SingleReplies: names the extension.
    """
    for extension in method.extensions:
        if type(extension).incoming is not Extension.incoming and not extension.checks_again:
            raise SingleReplies(f"single replies for its extension '{extension.name}'")
