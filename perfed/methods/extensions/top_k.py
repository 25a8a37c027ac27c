"""Compression: clients send only the largest entries of their updates, and store the others for later."""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import Reply, ServerState
from perfed.method.extension import Extension, check_moves_shared, register_extension
from perfed.training.cohort import Cohort


@register_extension
class TopK(Extension):
    """Compression of updates to their largest entries, with error feedback (Stich et al. 2018, Algorithm 1).

    A client sends the values and indices of the ``keep * P`` largest entries of ``m + w - w_received``, over all P
    shared parameters together. The other entries stay in its memory m until the next round in which it takes part.
    Statistics of batch-norm, and entries of a reply besides ``shared``, are sent unchanged.

    Example:
        >>> from perfed import build_method
        >>> build_method("fedrep", {"extensions": ["top-k"], "keep": 0.01}).extensions
        (TopK(keep=0.01),)
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure(
        refused={"client": "the entries that a client has not sent yet are added to its change after clipping"}
    )
    name: ClassVar[str] = "top-k"

    keep: float = Field(0.1, gt=0, le=1, description="share of the update's entries that are sent")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``unsent``: m, the part of its updates that a client has not sent yet."""
        return {"unsent": ParameterSet("client", like="shared", init="zeros")}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse methods whose clients send no shared parameters."""
        check_moves_shared(
            f"extension '{self.name}' compresses clients' updates of shared parameters", info, moves_shared
        )

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply with values and indices of the largest entries instead of the shared parameters."""
        received = cohort.delivered.get("shared", {})
        names = [name for name in cohort.shared_parameters if name in reply.get("shared", {}) and name in received]
        if not names:
            return self._check_no_update(reply)
        shared, unsent = dict(reply["shared"]), cohort.state["unsent"]
        changes = {name: unsent[name] + shared.pop(name) - received[name] for name in names}
        flat = torch.cat([change.flatten(1) for change in changes.values()], 1)
        index = flat.abs().topk(ceil(self.keep * flat.shape[1])).indices.sort().values
        remainders = flat.scatter(1, index, 0).split([change[0].numel() for change in changes.values()], 1)
        new_unsent = {
            name: t.reshape(change.shape) for (name, change), t in zip(changes.items(), remainders, strict=True)
        }
        cohort.state["unsent"] = {**unsent, **new_unsent}
        sparse = {"values": flat.gather(1, index), "index": index.int()}
        return Reply({**reply, "shared": {**shared, **sparse}})

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply with ``w_received + top(m + w - w_received)``, computed from the server's parameters."""
        if "values" not in reply.get("shared", {}):
            return reply
        shared: dict[str, Tensor] = dict(reply["shared"])
        values, index = shared.pop("values"), shared.pop("index").long()
        names = [name for name in server.shared if name not in shared]
        sizes = [server.shared[name].numel() for name in names]
        if values.shape != index.shape or not bool(((index >= 0) & (index < sum(sizes))).all()):
            raise PerfedError(
                f"an update has entries {tuple(values.shape)} whose indices are not all in [0, {sum(sizes)})"
            )
        parts = values.new_zeros(sum(sizes)).scatter(0, index, values).split(sizes)
        parameters = {
            name: server.shared[name] + t.view_as(server.shared[name]) for name, t in zip(names, parts, strict=True)
        }
        return {**reply, "shared": {**parameters, **shared}}

    def _check_no_update(self, reply: Reply) -> Reply:
        """Return a reply without shared parameters unchanged.

        Raises:
            PerfedError: it is the reply that ends local training.
        """
        if "extensions" in reply:
            raise PerfedError(
                f"extension '{self.name}' compresses clients' updates of shared parameters, but this method's "
                f"replies have no entry 'shared'; they have: {', '.join(n for n in reply if n != 'extensions')}"
            )
        return reply
