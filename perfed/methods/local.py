"""Local training, the baseline without communication."""

from __future__ import annotations

from typing import Any, ClassVar

from perfed.cohort import Cohort
from perfed.method import Clients, Method, Reply, ServerState
from perfed.model import STAGES
from perfed.placement import PERSONAL, Placement
from perfed.registry import register


@register("local")
class Local(Method):
    """Every client trains a model of its own; nothing is sent.

    Takes part like every other method (equal local steps): a client trains in the rounds it is chosen for.
    """

    default_placement: ClassVar[dict[str, Placement]] = dict.fromkeys(STAGES, PERSONAL)

    def round(self, server: ServerState, clients: Clients) -> None:
        """One exchange in which nothing but the terms' tensors travels."""
        reply = clients.run(self.train, terms=self.term_payload(server))
        self.absorb_terms(server, reply)

    def train(self, cohort: Cohort, terms: dict[str, Any]) -> Reply:
        """All stages together."""
        cohort.fit(STAGES, epochs=self.local_epochs, penalties=self.penalties(cohort, terms))
        return Reply(terms=self.after_terms(cohort, terms))
