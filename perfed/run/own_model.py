"""The personal models of clients, and their predictions for new inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from perfed import tree
from perfed.client_model.facts import describe_model
from perfed.client_model.load import load_joined_site
from perfed.client_model.network import ClientModule, Network
from perfed.client_model.site_model import SiteModel
from perfed.data.checks import new_inputs
from perfed.data.client import Client
from perfed.data.names import find_client
from perfed.data.reading import to_json_values
from perfed.engine import evaluate
from perfed.engine.joining import add_client
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Chain, Parameters
from perfed.run.callback import Callback
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.budget import PrivacyBudget
from perfed.tables.site import table_of
from perfed.training.cohort import Cohort


class PersonalModels:
    """The personal models of a run's clients, for prediction, export, and training of new clients.

    Attributes:
        name: name of the method.
        server: the server with its clients.
        path: directory of the run, which contains the sites that have joined it.
        callbacks: callbacks of the run.
    """

    name: str
    server: Server
    path: Path | None = None
    callbacks: list[Callback]

    @property
    def done(self) -> int:
        """The last finished round."""
        raise NotImplementedError

    @property
    def best_models(self) -> BestModels:
        """The rounds whose models are used, for clients whose model is not that of the last round."""
        raise NotImplementedError

    def predict(self, client: str, x: Any, domain: Tensor | NDArray[Any] | None = None) -> Tensor:
        """Return the outputs of a client's personal model for new inputs, as in evaluation.

        Args:
            client: id of the client.
            x: inputs ``(samples, ...)`` of the client's shape: an array, a tensor, or a data frame with its columns.
            domain: domain ids ``(samples,)``, for methods that need them.

        Returns:
            Logits ``(samples, C)``, whose column j belongs to the class ``federation.classes[j]``, or values.

        Raises:
            PerfedError: if the client is unknown, inputs have another shape, other columns or values that are not
                finite, domains are missing or unknown, or the method projects the data.
        """
        client = find_client(client, self.server.clients)
        cohort, method, federation = (
            self._build_cohort(self.server, client),
            self._method_for(client),
            self.server.federation,
        )
        inputs, ids = new_inputs(self.server.clients[client], x, domain, federation.num_domains)
        if ids is None and (method.needs_domains or cohort.per_domain):
            raise PerfedError(f"{self.name} needs the domain of every sample")
        cohort.domain = None if ids is None else ids[None].to(cohort.device)
        trained = federation.domains_in("train")
        outputs = evaluate.predict(method, cohort, inputs[None].to(cohort.device, cohort.dtype), trained)[0]
        return outputs if federation.target_scale is None else federation.target_scale.up(outputs)

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The clients that contributed to shared parameters: the number of rounds by id; ``None`` if it is unknown."""
        return {}

    def privacy_spending(self, client: str) -> dict[str, Any] | None:
        """Return the privacy settings and the epsilon that ``client`` has spent; ``None`` without ``[privacy]``."""
        return self._budget_callback.describe_client(client) if self._budget_callback else None

    @property
    def _budget_callback(self) -> PrivacyBudget | None:
        return next((callback for callback in self.callbacks if isinstance(callback, PrivacyBudget)), None)

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the model of one client as an object that predicts without the run, and can be saved and exported.

        Args:
            client: id of the client, or the name of a site that has joined the run (``perfed join``).
            trust: whether files of a site that has joined may run code (:func:`perfed.load_site`).

        Raises:
            PerfedError: if the client is unknown, files could run code, or the method projects the data.
        """
        joined_site = load_joined_site(self.path, client, self.server.clients, trust)
        return joined_site or self._build_site_model(self.server, find_client(client, self.server.clients))

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Train the personal parameters of a new client and return its model; shared parameters do not change.

        Args:
            client: a client with the inputs, classes and domains of the federation
                (:func:`perfed.data.new_client.new_client`).
            rounds: number of rounds of its training; by default that of the run.

        Raises:
            PerfedError: if the id exists already, the client does not fit the federation, or the method does not
                support new clients (:func:`perfed.engine.joining.add_client`).
        """
        rounds = self.done if rounds is None else rounds
        site = self._build_site_model(add_client(self.server, client, rounds), client.id)
        budget = self._budget_callback
        privacy = {"privacy": to_json_values(budget.describe_joined_client(client.id, rounds))} if budget else {}
        return replace(site, facts={**site.facts, "joined": rounds, **privacy})

    def model(self, client: str) -> tuple[Chain, Parameters]:
        """Return one client's personal model: the modules with loaded parameters, and these parameters by name.

        Raises:
            PerfedError: if the client is unknown, or the method predicts with more than these modules.
        """
        client = find_client(client, self.server.clients)
        cohort, method = self._load_client(self.server, client), self.server.method
        if type(method).predict is not Method.predict or method.changes_data or cohort.per_domain:
            raise PerfedError(f"{self.name} predicts with more than one chain of modules; use predict() of the run")
        shapes = {key: tensor.shape for key, tensor in cohort.chain.tensors().items()}
        parameters = tree.select_row(cohort.model, 0, shapes)
        chain = self.server.model.build(cohort.chain.input_shape).to(cohort.dtype)
        chain.load_state_dict(parameters)
        return chain.eval(), parameters

    def _build_site_model(self, server: Server, name: str) -> SiteModel:
        cohort, method, federation = self._build_cohort(server, name), self._method_for(name), server.federation
        client, takes_domain = server.clients[name], method.needs_domains or bool(cohort.per_domain)
        domains = [federation.domain_name(m) for m in range(federation.num_domains)] if takes_domain else None
        training_facts = {
            "method": self.name,
            "rounds": max(self.done, 0),
            "seed": server.seed,
            "settings": method.all_settings,
        }
        training_facts |= {
            "dtype": str(cohort.dtype).removeprefix("torch."),
            "contributors": dict(self.contributors) or None,
        }
        training_facts |= {} if (privacy := self.privacy_spending(name)) is None else {"privacy": privacy}
        facts = describe_model(client, federation, domains=domains, **training_facts)
        network = Network(ClientModule(method, cohort, federation).cpu(), facts)
        return SiteModel(facts, network, table_of(client), training_rows=client.train).with_metrics(client, federation)

    def _build_cohort(self, server: Server, client: str) -> Cohort:
        """Return a cohort of one client with its personal model, after checking that it can predict new samples."""
        cohort = self._load_client(server, client)
        if server.method.changes_data:
            raise PerfedError(f"{self.name} projects a client's samples together; it has no model for new ones")
        return cohort

    def _method_for(self, client: str) -> Method:
        """Return the method with its scheduled settings at the round of the client's model."""
        return self.server.method.in_round(self.best_models.rounds.get(client, self.done))

    def _load_client(self, server: Server, client: str) -> Cohort:
        """Return a cohort of one client with the model that evaluation uses."""
        with self.best_models.restore_best(server, client):
            (cohort,) = server.own_models([client], self.best_models.rounds.get(client, self.done))
        return cohort
