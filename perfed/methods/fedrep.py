"""FedRep: a shared representation under personal heads."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from perfed.maths.aggregate import Average, average_weights
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort


@register("fedrep", title="FedRep")
class FedRep(Method):
    """Shared representation, personal head: head epochs, then body epochs (Collins et al. 2021, Algorithm 1).

    ``local_epochs`` are the epochs of the head. A shared embedding is part of the representation; a personal embedding
    is trained together with the head.
    """

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})
    default_placement: ClassVar[dict[str, Placement]] = {
        "embedding": SHARED,
        "body": SHARED,
        "head": PERSONAL,
    }

    body_epochs: int = Field(1, ge=0, description="epochs of the shared representation, after those of the head")
    body_from_round: int = Field(1, ge=1, description="first round in which the representation is trained")
    average: Average = "samples"

    def epochs_in(self, round_: int) -> int:
        """Return the epochs of the head and of the representation."""
        return self.local_epochs + (self.body_epochs if round_ >= self.body_from_round else 0)

    def head_parameters(self, cohort: Cohort) -> tuple[str, ...]:
        """Return the names of the parameters that are trained with the head."""
        return cohort.personal_parameters

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run one exchange, then compute the mean of the representations."""
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(
            reply.shared, average_weights(reply.num_samples, self.average), current=server.shared
        )

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train the head (with a personal embedding), then the representation."""
        cohort.load(shared)
        cohort.fit(self.head_parameters(cohort), epochs=self.local_epochs)
        if cohort.where.round >= self.body_from_round:
            cohort.fit(cohort.shared_parameters, epochs=self.body_epochs)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)
