"""Initial values of the parameter sets of clients and of the server.

Values are drawn with keys from the run's seed and are not stored with the method, so that a client starts from the same
values in every engine. A personal embedding is drawn per client; all other stages have the same initial values at all
clients.
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
    """The method, model and seed of a run, from which the server and every client create their initial values.

    Args:
        method: the method with its hyper-parameters.
        model: the model of the experiment; stages that the method does not use are dropped.
        seed: the seed of the run.
        dtype, device: the data type and device of parameters and inputs.
        watched: the ids of the clients whose loss of each local epoch is recorded.
        secure: the settings of secure aggregation; ``None`` if the server receives single replies.
        aggregation: the kind of mean with which the server averages replies; default: the plain mean.

    Raises:
        PerfedError: the method cannot use the kind of aggregation, an extension needs single replies in spite of
            ``secure``, or a parameter set is declared twice.
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
            self.sets[POSITION] = ParameterSet("client", init=_initial_position)

    def chain(self, input_shape: Shape) -> Chain:
        """Return the modules for inputs of ``input_shape``, which are built once."""
        if input_shape not in self._chains:
            with rng.seed_torch(rng.key(self.seed, "build")):
                self._chains[input_shape] = self.model.build(input_shape).to(self.dtype)
        return self._chains[input_shape]

    def places(self, input_shape: Shape) -> dict[str, Placement]:
        """Return the placement of every parameter for inputs of ``input_shape``."""
        if input_shape not in self._places:
            self._places[input_shape] = self.method.places(self.chain(input_shape))
        return self._places[input_shape]

    def transform_data(self, federation: Federation) -> Federation:
        """Return the federation after the method's transformation of each client's data."""
        if not self.method.changes_data:
            return federation
        clients = tuple(self.method.local_data(c, rng.key(self.seed, "local data", c.id)) for c in federation)
        images = all(len(client.input_shape) == 3 for client in clients)
        return replace(federation, clients=clients, augment=federation.augment if images else None)

    def draw_initial(
        self, input_shape: Shape, stages: Sequence[str], *, client: str = "", entry: int = 0
    ) -> Parameters:
        """Return initial values of ``stages``, which differ between clients and between entries of a bank.

        Args:
            input_shape: the shape of the inputs.
            stages: the names of the stages.
            client: the id of the client; empty for values that all clients share.
            entry: the index of the entry of a bank.
        """
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
        """Return the initial personal and frozen parameters of a client."""
        places = self.places(client.input_shape)
        values: Parameters = {}
        for stage in self.chain(client.input_shape).stages:
            if all(place in SENT for name, place in places.items() if stage_of(name) == stage):
                continue
            cache_key = (stage, client.input_shape)
            if stage == "embedding":
                values.update(self.draw_initial(client.input_shape, [stage], client=client.id))
                continue
            if cache_key not in self._values:
                self._values[cache_key] = self.draw_initial(client.input_shape, [stage])
            values.update(self._values[cache_key])
        return {name: tensor for name, tensor in values.items() if places[name] not in SENT}

    def client_state(self, client: Client, info: FederationInfo) -> dict[str, Any]:
        """Return the state of a client before its first exchange: ``{"model": personal parameters, set: ...}``."""
        places = self.places(client.input_shape)
        model = {name: t for name, t in self.client_model(client).items() if places[name] == "personal"}
        state: dict[str, Any] = {"model": model}
        for name, declared in self.sets.items():
            if declared.home == "client":
                state[name] = self._client_set(name, client, info)
        return state

    def _client_set(self, name: str, client: Client, info: FederationInfo) -> dict[str, Any]:
        """Return the initial value of a client's set, cached if it depends only on the shape of inputs."""
        declared, cache_key = self.sets[name], ("set", name, client.input_shape)
        if callable(declared.init):
            client_info, key = replace(info, client=client.id), rng.key(self.seed, "set", name, client.id)
            return self._draw_set(declared, client.input_shape, client_info, key)
        if cache_key not in self._values:
            self._values[cache_key] = self._draw_set(
                declared, client.input_shape, info, rng.key(self.seed, "set", name)
            )
        return self._values[cache_key]

    def server_state(self, federation: Federation) -> ServerState:
        """Return the server's sets before the first round.

        Raises:
            PerfedError: the method does not fit the federation, for example because the shapes of shared parameters
                differ between clients; the message names two such clients.
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
        everything = self.draw_initial(shape, self.chain(shape).stages)
        per_domain = {stage_of(name) for name, place in places.items() if place == PER_DOMAIN}
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
        everything = self._add_domain_axis(everything, places, info)
        sets: dict[str, Any] = {"shared": {name: t for name, t in everything.items() if places[name] in SENT}}
        for name, declared in self.sets.items():
            key = rng.key(self.seed, "set", name)
            if declared.home == "server":
                sets[name] = self._draw_set(declared, shape, info, key)
            elif declared.home == "table":
                sets[name] = {
                    client.id: self._draw_set(
                        declared, client.input_shape, replace(info, client=client.id), rng.key(key, client.id)
                    )
                    for client in federation
                }
        return ServerState(sets)

    def info(self, federation: Federation) -> FederationInfo:
        """Return the facts about the federation that the server knows before the first round."""
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
            representation=prod(chain.output_shapes[before[-1]]) if before else _count_inputs(federation),
            shared={name: tuple(t.shape) for name, t in chain.tensors().items() if places[name] in SENT},
            dtype=self.dtype,
            buffers=frozenset(name for name, _ in chain.named_buffers() if places[name] in SENT),
            per_domain=frozenset(name for name, place in places.items() if place == PER_DOMAIN),
            personal=frozenset(name for name, _ in chain.named_parameters() if places[name] == PERSONAL),
            columns=Columns.of_clients(federation),
            shared_inputs=_shared_inputs(federation),
            scaled_inputs=federation.scaled_inputs or federation.columns is not None,
        )

    def _draw_set(self, declared: ParameterSet, shape: Shape, info: FederationInfo, key: Tensor) -> dict[str, Any]:
        if callable(declared.init):
            return map_leaves(declared.init(info, key), lambda _, t: t.to(self.device))
        entries = [self._draw_entry(declared, shape, info, entry) for entry in range(declared.bank or 1)]
        if declared.bank is None:
            return entries[0]
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}

    def _draw_entry(self, declared: ParameterSet, shape: Shape, info: FederationInfo, entry: int) -> Parameters:
        chain, places = self.chain(shape), self.places(shape)
        stages = chain.stages if declared.like in ("model", "shared") else (declared.like,)
        values = self._add_domain_axis(self.draw_initial(shape, stages, entry=entry), places, info)
        if declared.like == "shared":
            values = {name: t for name, t in values.items() if places[name] in SENT}
        return {name: torch.zeros_like(t) for name, t in values.items()} if declared.init == "zeros" else values

    def _add_domain_axis(self, values: Parameters, places: Mapping[str, Placement], info: FederationInfo) -> Parameters:
        """Return values in which per-domain parameters have a domain axis; all domains have the same values."""
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
        first_stage = self.chain(first.input_shape).stages[0]
        if any(place in SENT for name, place in places.items() if stage_of(name) == first_stage):
            self._check_columns(federation, first_stage)
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
                        f"{self._suggest_remedy(first)}, or use a method with a personal embedding, such as hetfedrep, "
                        "flic-class, flic-hl, lg-fedavg or local"
                    )

    def _check_columns(self, federation: Federation, stage: str) -> None:
        """Raise an error if the names of columns differ, since a shared first stage needs column j to be the same."""
        named = [
            (client.id, names if client.held is None else names[: len(client.held)])
            for client in federation
            if (names := client.feature_names) is not None
        ]
        for client, names in named[1:]:
            first, expected = named[0]
            if len(names) == len(expected):  # otherwise the shapes differ, which is checked elsewhere
                where = f"this method shares '{stage}', so that columns must mean the same at all clients"
                try:
                    check_names(where, f"client '{client}'", names, f"client '{first}'", expected)
                except PerfedError as error:
                    raise PerfedError(f"{error}; {self._suggest_remedy(federation.clients[0])}") from None

    def _suggest_remedy(self, client: Client) -> str:
        """Return advice for clients with different inputs under a shared first stage."""
        embedding = suggest_personal_embedding(EMBEDDING in self.chain(client.input_shape).stages)
        if client.table is None:
            return f"add {embedding}"
        same = "columns=named, columns=common or columns=union (inputs that mean the same everywhere)"
        return f"add {same} or {embedding} (each client's own)"


def _shared_inputs(federation: Federation) -> int:
    """Return how many leading inputs have the same meaning at all clients: those of shared columns, all, or none."""
    if federation.named_inputs is not None:
        return federation.named_inputs
    kinds = {(client.input_shape, client.feature_names) for client in federation}
    return prod(federation.clients[0].input_shape) if len(kinds) == 1 else 0


def _count_inputs(federation: Federation) -> int:
    """Return the number of values of an input; 0 if it differs between clients."""
    widths = {prod(client.input_shape) for client in federation}
    return widths.pop() if len(widths) == 1 else 0


def _initial_position(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"steps": torch.tensor(0)}


def group_key(chain: Chain) -> str:
    """Return a key of the architecture; clients with the same key can be stacked.

    Two chains have the same key if they consist of the same layers of ``torch.nn`` with the same settings. For vectors,
    the number of inputs of a first linear layer may differ, because padding inputs and weights with zeros changes no
    result. Chains with other modules have the same key only for equal input shapes.
    """
    modules = [m for m in chain.modules() if m is not chain]
    is_standard = all(type(m).__module__.startswith("torch.nn") or type(m) is ColumnLinear for m in modules)
    leaves = [m for m in modules if not list(m.children())]
    parts = [f"{type(m).__name__}({m.extra_repr()})" for m in leaves]
    if is_standard and len(chain.input_shape) == 1 and leaves and isinstance(leaves[0], ColumnLinear):
        out, shared = leaves[0].weight.shape
        parts[0] = f"ColumnLinear({shared} + *, {out}, {leaves[0].bias is not None})"
        return "|".join([*chain.stages, *parts])
    if is_standard and len(chain.input_shape) == 1 and leaves and isinstance(leaves[0], nn.Linear):
        first = leaves[0]
        parts[0] = f"Linear(*, {first.out_features}, {first.bias is not None})"
        return "|".join([*chain.stages, *parts])
    return "|".join([*chain.stages, str(chain.input_shape), *parts])


def find_stacking_obstacle(chain: Chain) -> tuple[str, str] | None:
    """Return the layer that prevents stacking of clients with this architecture, and the reason; ``None`` without one.

    Clients that cannot be stacked run one at a time.
    """
    shape = chain.input_shape
    for stage in chain.stages:
        reason = why_not_stackable(chain.get_submodule(stage), shape, stage)
        if reason is not None:
            return reason
        shape = chain.output_shapes[stage]
    return None


def _check_incoming(method: Method) -> None:
    """Raise an error if an extension processes single replies on the server.

    Raises:
        SingleReplies: the message names the extension.
    """
    for extension in method.extensions:
        if type(extension).incoming is not Extension.incoming and not extension.checks_again:
            raise SingleReplies(f"single replies for its extension '{extension.name}'")
