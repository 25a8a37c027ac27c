"""Privacy of each client: what it changes in a round is cut, and the server adds noise to the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Replies, Reply, ServerState
from perfed.method.extension import Extension
from perfed.privacy.sample import check_entries
from perfed.training.cohort import Cohort


class ClientPrivacy(Extension):
    """Protects each client as a whole: DP-FedAvg (McMahan et al. 2018, Algorithm 1) around any method with one mean.

    A client's changes of the shared parameters and of anchors are one vector, cut to the norm C at the client and again
    at the server. All clients weigh the same. To the mean over the m clients of a round the server adds noise of
    standard deviation ``z C / m``. Personal parts never leave: what others see of a client is private (joint
    differential privacy; Kearns et al. 2014). With FedRep that is CENTAUR (Shen et al. 2023, Algorithm 1).
    A client that is not there counts as one that changed nothing, so that m is the same for neighbours.
    """

    name: ClassVar[str] = "client-privacy"

    clip: float = Field(1.0, gt=0, description="C, largest norm of a client's change")
    noise: float = Field(0.0, ge=0, description="z, noise of the sum of changes in units of C")
    entries: tuple[str, ...] = Field((), description="what may leave, by name")

    def sets(self) -> dict[str, ParameterSet]:
        """``private_noise``: the key of the noise, how often some was drawn, and the clients of the round."""
        return {"private_noise": ParameterSet("server", init=_noise_to_come)}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse statistics of batch-norm, to which noise cannot be added."""
        if info.buffers:
            raise PerfedError(
                f"privacy.unit = 'client' has no mechanism for '{min(info.buffers)}', statistics of batch-norm; keep "
                "them personal (fedbn), or use another normalisation"
            )

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply with its changes cut, and with the same weight for all clients."""
        check_entries(reply, self.entries)
        return Reply(_cut(reply, cohort.delivered, self.clip, cohort.n))

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply with its changes cut again: clients may be wrong."""
        sets = server.tree()
        now = {"shared": sets["shared"], "extensions": {"anchors": sets.get("anchors", {})}}
        one: dict[str, Any] = _cut(_with_axis(reply), _with_axis(now), self.clip, 1)
        return _without_axis(one)

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Count the clients whose mean gets noise."""
        server.private_noise = {**server.private_noise, "clients": torch.tensor(len(replies.ids))}

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Add noise to the means of shared parameters and of anchors."""
        now = server.private_noise
        scale = self.noise * self.clip / int(now["clients"].clamp_min(1))
        key = rng.key(now["key"], now["drawn"])
        server.private_noise = {**now, "drawn": now["drawn"] + 1}
        server.shared = {name: _noisy(t, rng.key(key, name), scale) for name, t in server.shared.items()}
        if "anchors" in before:
            anchors = dict(server.anchors)
            server.anchors = {**anchors, "mean": _noisy(anchors["mean"], rng.key(key, "anchors"), scale)}


def _noisy(tensor: Tensor, key: Tensor, scale: float) -> Tensor:
    return tensor + scale * rng.gaussian(key, tensor.numel(), tensor.dtype).view(tensor.shape).to(tensor.device)


def _cut(reply: Mapping[str, Any], received: Mapping[str, Any], clip: float, n: int) -> dict[str, Any]:
    """A reply, a client axis in front, whose changes of what was received have together at most the norm ``clip``."""
    new = _vectors(reply)
    if not new:
        return dict(reply)
    old = _vectors(received)
    changes = {path: tensor - old[path] for path, tensor in new.items()}
    squares = torch.stack([change.double().flatten(1).square().sum(1) for change in changes.values()]).sum(0)
    factor = (clip / squares.sqrt()).clamp(max=1)
    cut = {
        path: old[path] + change * factor.to(change).view(-1, *[1] * (change.ndim - 1))
        for path, change in changes.items()
    }
    made = {**reply, "shared": {name: cut["shared", name] for name in reply.get("shared", {})}}
    if "shared" not in reply:
        del made["shared"]
    if "num_samples" in reply:
        made["num_samples"] = torch.ones_like(reply["num_samples"])
    if anchors := reply.get("extensions", {}).get("anchors"):
        equal = {**anchors, "mean": cut["anchors", "mean"], "weight": torch.ones_like(anchors["weight"])}
        made["extensions"] = {**reply["extensions"], "anchors": equal}
    return made


def _vectors(of: Mapping[str, Any]) -> dict[tuple[str, str], Tensor]:
    """Shared parameters and means of anchors, by set and name."""
    found = {("shared", name): tensor for name, tensor in of.get("shared", {}).items()}
    anchors = of.get("extensions", {}).get("anchors", {})
    return found | ({("anchors", "mean"): anchors["mean"]} if "mean" in anchors else {})


def _with_axis(of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.unsqueeze(0) if isinstance(v, Tensor) else _with_axis(v) for name, v in of.items()}


def _without_axis(of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v[0] if isinstance(v, Tensor) else _without_axis(v) for name, v in of.items()}


def _noise_to_come(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"key": key, "drawn": torch.tensor(0), "clients": torch.tensor(0)}
