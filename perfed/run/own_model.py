"""One client's own model, and what it says of new inputs."""

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
from perfed.engine.joining import joined
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Chain, Parameters
from perfed.run.callback import Callback
from perfed.run.callbacks.best import BestModels
from perfed.run.callbacks.budget import PrivacyBudget
from perfed.tables.site import table_of
from perfed.training.cohort import Cohort


class OwnModels:
    """Each client's own model, which a run leaves behind: to predict with, to take away, to give to a new client.

    Attributes:
        name: of the method.
        server: with the clients.
        path: the run's directory, where sites are that have joined it.
        callbacks: that rode along.
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
    def taken(self) -> BestModels:
        """Which rounds' models are taken, where they are not the last ones."""
        raise NotImplementedError

    def predict(self, client: str, x: Any, domain: Tensor | NDArray[Any] | None = None) -> Tensor:
        """Return what one client's own model says of new inputs, as in evaluation.

        Args:
            client: its id.
            x: ``(samples, ...)``, inputs of the client's shape: an array, a tensor, or a data frame with its columns.
            domain: ``(samples,)`` domain ids, for methods that need them.

        Returns:
            Logits ``(samples, C)``, column j of which is of the class ``federation.classes[j]``, or values.

        Raises:
            PerfedError: an unknown client, inputs of another shape or with other columns, values that are not finite,
                no domains or unknown ones, or a method that projects the data.
        """
        client = find_client(client, self.server.clients)
        cohort, method, federation = self._of(self.server, client), self._method(client), self.server.federation
        inputs, ids = new_inputs(self.server.clients[client], x, domain, federation.num_domains)
        if ids is None and (method.needs_domains or cohort.per_domain):
            raise PerfedError(f"{self.name} needs the domain of every sample")
        cohort.domain = None if ids is None else ids[None].to(cohort.device)
        trained = federation.domains_in("train")
        found = evaluate.predict(method, cohort, inputs[None].to(cohort.device, cohort.dtype), trained)[0]
        return found if federation.target_scale is None else federation.target_scale.up(found)

    @property
    def contributors(self) -> Mapping[str, int | None]:
        """The clients that others' models are made with too, by id: in how many rounds, where that is known."""
        return {}

    def spent_by(self, client: str) -> dict[str, Any] | None:
        """Settings of ``[privacy]``, and what ``client`` has spent; ``None`` without."""
        return self._budget.of(client) if self._budget else None

    @property
    def _budget(self) -> PrivacyBudget | None:
        return next((found for found in self.callbacks if isinstance(found, PrivacyBudget)), None)

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the model of one client, which needs no run: it predicts, and can be saved and exported.

        Args:
            client: its id, or the name of a site that has joined the run (``perfed join``).
            trust: whether files of a site that has joined may run code (:func:`perfed.load_site`).

        Raises:
            PerfedError: an unknown client, files that could run code, or a method that projects the data.
        """
        joined_site = load_joined_site(self.path, client, self.server.clients, trust)
        return joined_site or self._site(self.server, find_client(client, self.server.clients))

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the model of a new client, which trains what is its own; what the others share does not change.

        Args:
            client: with data for all its stages, of the federation's classes and domains
                (:func:`perfed.data.new_client.new_client`).
            rounds: of its training, as many as the run's if not given.

        Raises:
            PerfedError: an id that is there, a client that does not fit the others, or a method that cannot
                (:func:`perfed.engine.joining.joined`).
        """
        rounds = self.done if rounds is None else rounds
        site = self._site(joined(self.server, client, rounds), client.id)
        budget = self._budget
        privacy = {"privacy": to_json_values(budget.joined(client.id, rounds))} if budget else {}
        return replace(site, facts={**site.facts, "joined": rounds, **privacy})

    def model(self, client: str) -> tuple[Chain, Parameters]:
        """Return one client's own model: the modules with its parameters loaded, and those parameters by name.

        Raises:
            PerfedError: an unknown client, or a method that predicts with more than these modules.
        """
        client = find_client(client, self.server.clients)
        cohort, method = self._alone(self.server, client), self.server.method
        if type(method).predict is not Method.predict or method.changes_data or cohort.per_domain:
            raise PerfedError(f"{self.name} predicts with more than one chain of modules; use predict() of the run")
        kept = cohort.chain
        parameters = tree.select_row(cohort.model, 0, {key: tensor.shape for key, tensor in kept.tensors().items()})
        chain = self.server.model.build(kept.input_shape).to(cohort.dtype)
        chain.load_state_dict(parameters)
        return chain.eval(), parameters

    def _site(self, server: Server, name: str) -> SiteModel:
        cohort, method, federation = self._of(server, name), self._method(name), server.federation
        client, takes_domain = server.clients[name], method.needs_domains or bool(cohort.per_domain)
        domains = [federation.domain_name(m) for m in range(federation.num_domains)] if takes_domain else None
        about = {"method": self.name, "rounds": max(self.done, 0), "seed": server.seed, "settings": method.all_settings}
        about |= {"dtype": str(cohort.dtype).removeprefix("torch."), "contributors": dict(self.contributors) or None}
        about |= {} if (privacy := self.spent_by(name)) is None else {"privacy": privacy}
        facts = describe_model(client, federation, domains=domains, **about)
        network = Network(ClientModule(method, cohort, federation).cpu(), facts)
        return SiteModel(facts, network, table_of(client), training_rows=client.train).with_metrics(client, federation)

    def _of(self, server: Server, client: str) -> Cohort:
        """The client alone with its own model, of a method that has one for new samples."""
        cohort = self._alone(server, client)
        if server.method.changes_data:
            raise PerfedError(f"{self.name} projects a client's samples together; it has no model for new ones")
        return cohort

    def _method(self, client: str) -> Method:
        """The method with the numbers of the round that the client's model is of."""
        return self.server.method.in_round(self.taken.rounds.get(client, self.done))

    def _alone(self, server: Server, client: str) -> Cohort:
        """The client alone, with the model that evaluation uses."""
        with self.taken.at(server, client):
            (cohort,) = server.own_models([client], self.taken.rounds.get(client, self.done))
        return cohort
