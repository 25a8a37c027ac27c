"""A federation of sites in one process: their messages pass as bytes, nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import network_for

from perfed.aggregation import Aggregation
from perfed.data.federation import Federation, federation_of
from perfed.data.lazy import lazy_clients, refuse_read
from perfed.engine.initial import Initialiser
from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Model
from perfed.participation.settings import Participation
from perfed.rng import Noise
from perfed.sites.flower.dry_run import ExchangeSettings, derive_allow_list
from perfed.sites.flower.engine import FlowerEngine, Limits, RealTimeServer
from perfed.sites.flower.journal import Journal
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.signing import SigningKey
from perfed.sites.flower.site import Site
from perfed.sites.flower.store import SiteStore
from perfed.sites.flower.transport import Answer
from perfed.training.plan import Plan
from perfed.training.private import ReleaseCounter

RUN = "run"


def facts_of(federation: Federation) -> Federation:
    """The same as a server sees it."""
    facts = [client.facts(federation.survival) for client in federation]
    schema = federation.schema
    return federation_of(lazy_clients(refuse_read, facts, schema), schema, class_names=federation.class_names)


class Direct:
    """Sites answer in a given order, each a second after the one before it."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.at = dict(sites)
        self.note: Callable[[str], None] = print
        self.silent: set[str] = set()
        self.first: list[str] = []
        self.sent: list[tuple[str, bytes]] = []
        self.came: list[tuple[str, bytes]] = []

    def list_sites(self) -> list[str]:
        return sorted(set(self.at) - self.silent)

    def wait_for(self, names: list[str], seconds: float) -> list[str]:
        return sorted(set(names) - set(self.list_sites()))

    def exchange(self, messages: Mapping[str, bytes], deadline: float, least: int = 0) -> Iterator[Answer]:
        order = sorted(messages, key=lambda name: (name not in self.first, name))
        for seconds, name in enumerate(order, start=1):
            self.sent.append((name, messages[name]))
            if name in self.silent or seconds > deadline:
                yield Answer(name, None, f"site '{name}' has not answered within {deadline:g} seconds", deadline)
                continue
            try:
                reply = self.at[name].answer(messages[name])
            except PerfedError as error:
                reply = pack({"error": str(error)}, {})
            self.came.append((name, reply))
            yield Answer(name, reply, "", float(seconds))


class Free:
    """A budget without an end."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make_noise(self, message: bytes) -> Noise:
        return Noise(self._secret, message)

    def accept_message(self, exchange: str, message: bytes) -> None:
        pass

    def add_releases(self, exchange: str, counter: ReleaseCounter) -> None:
        pass


class Sites:
    """A server and its sites, in folders below ``path``; made again there, they go on."""

    def __init__(
        self,
        path: Path,
        method: Method,
        federation: Federation,
        *,
        participation: Participation | None = None,
        limits: Limits | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        rounds: int = 10,
        model: Model | None = None,
        validated: bool = False,
        secure: SecureAggregation | None = None,
        secrets: Mapping[str, bytes] | None = None,
        signers: Mapping[str, SigningKey] | None = None,
        run: str = RUN,
        aggregation: Aggregation | None = None,
        metrics: tuple[str, ...] = (),
    ) -> None:
        model = model or network_for(method, federation.num_classes or 1)
        initialisers = [
            Initialiser(method, model, seed, dtype, secure=secure, aggregation=aggregation)
            for _ in range(len(federation) + 1)
        ]
        who = participation or Participation()
        protocol = ExchangeSettings(
            rounds, len(federation), federation.num_domains, who, validated=validated, metrics=metrics
        )
        self.stores = {c.id: SiteStore(path / c.id, run) for c in federation}
        answered = [
            derive_allow_list(c, s.info(federation), s, protocol)
            for c, s in zip(federation, initialisers, strict=False)
        ]
        self.transport = Direct(
            {
                client.id: Site(
                    client.to(dtype, "cpu"),
                    initialiser,
                    Plan("sequential", threads=1),
                    info=initialiser.info(replace(federation, clients=(client,))),
                    scale=federation.target_scale,
                    store=self.stores[client.id],
                    allowed=allowed,
                    budget=None if secrets is None else Free(secrets[client.id]),
                    signer=None if signers is None else signers[client.id],
                )
                for client, initialiser, allowed in zip(federation, initialisers, answered, strict=False)
            }
        )
        self.journal = Journal(path / "journal")
        known = answered[0] if secure is not None else None
        engine = partial(
            FlowerEngine, transport=self.transport, journal=self.journal, run=run, limits=limits, allowed=known
        )
        self.server = RealTimeServer(
            facts_of(federation), initialisers[-1], Plan("sequential", threads=1), who, rounds, engine=engine
        )

    def close(self) -> None:
        for held in self.stores.values():
            held.close()

    def kill_server(self, kind: str, replies: int) -> None:
        """Begin round 1 with a server that is killed after that many replies to the messages of a kind."""
        deliver = self.transport.exchange

        def exchange(messages, deadline, least=0):
            answers = deliver(messages, deadline, least)
            if unpack(next(iter(messages.values())))[0]["kind"] == kind:
                for _ in range(replies):
                    next(answers)
                raise KeyboardInterrupt
            yield from answers

        self.server.prepare()
        self.transport.exchange = exchange
        with pytest.raises(KeyboardInterrupt):
            self.server.round(1)
        self.transport.exchange = deliver

    def state(self, client: str) -> object:
        """What the site has on its disk of the state that the server names."""
        return self.stores[client].load_state(int(self.server.engine.states[client]["sequence"]))
