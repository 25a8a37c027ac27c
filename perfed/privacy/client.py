"""Privacy of each client: what it changes in a round is cut, and the server adds noise to the mean."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.errors import PerfedError
from perfed.maths.robust import joint_norms
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Replies, Reply, ServerState
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.privacy.sample import check_classes, check_entries
from perfed.settings import exclude_default
from perfed.training.cohort import Cohort


class ClientPrivacy(Extension):
    """Protects each client as a whole: DP-FedAvg (McMahan et al. 2018, Algorithm 1) around any method with one mean.

    A client's changes of the shared parameters and of anchors are one vector, cut to the norm C at the client and again
    at the server. All clients weigh the same. To the mean over the m clients of a round the server adds noise of
    standard deviation ``z C / m``. Personal parts never leave: what others see of a client is private (joint
    differential privacy; Kearns et al. 2014). With FedRep that is CENTAUR (Shen et al. 2023, Algorithm 1).
    A client that is not there counts as one that changed nothing, so that m is the same for neighbours.

    Where the server sees sums alone it cannot cut again, and adds no noise: each client cuts its own change, on which
    nobody's privacy but its own depends, and adds noise of standard deviation ``z C / sqrt(shares)``. A sum of at least
    ``shares`` clients that do so has noise of at least ``z C``.
    """

    name: ClassVar[str] = "client-privacy"
    checks_again: ClassVar[bool] = True
    discreet: ClassVar[bool] = True
    needs_mean: ClassVar[str] = "the noise of privacy.unit = 'client' is accounted for a mean over clients"

    clip: float = Field(1.0, gt=0, description="C, largest norm of a client's change")
    noise: float = Field(0.0, ge=0, description="z, noise of the sum of changes in units of C")
    entries: tuple[str, ...] = Field((), description="what may leave, by name")
    shares: int = Field(
        0,
        ge=0,
        description="fewest clients whose noise a sum has; 0: the server adds it",
        exclude_if=exclude_default(0),
    )
    of_classes: bool = Field(
        False, description="whether something that leaves is of classes", exclude_if=exclude_default(False)
    )
    secret: bytes = Field(b"", description="of the server, where others know the seed", exclude=True, repr=False)

    def sets(self) -> dict[str, ParameterSet]:
        """``private_noise``: the key of the noise, how often some was drawn, and the clients of the round."""
        return {"private_noise": ParameterSet("server", init=_noise_to_come)}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse statistics of batch-norm, to which noise cannot be added, and anchors of values."""
        check_classes(self.of_classes, info)
        if info.buffers:
            raise PerfedError(
                f"privacy.unit = 'client' has no mechanism for '{min(info.buffers)}', statistics of batch-norm; keep "
                "them personal (fedbn), or use another normalisation"
            )

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply with its changes cut, with the same weight for all clients, and with its share of noise."""
        check_entries(reply, self.entries)
        if cohort.counter is not None and _vectors(reply):
            cohort.counter.add()
        if not self.shares:
            return Reply(_cut(reply, cohort.delivered, self.clip))
        noise = _Noise(cohort.key("share of noise"), self.noise * self.clip / sqrt(self.shares), cohort.noise)
        return Reply(_cut(reply, cohort.delivered, self.clip, noise))

    def refuses(self, sent: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
        """Return that a client's change is longer than it may be: the client has not cut it."""
        one, now = _with_axis(reply), _with_axis(sent)
        changes = _changes(_vectors(one), now)
        rounding = sum(float(tensor.double().square().sum()) for tensor in _vectors(now).values())
        norm = float(joint_norms(changes.values())) if changes else 0.0
        if norm <= self.clip * (1 + _ROUNDING) + _ROUNDING * sqrt(rounding):
            return ""
        return f"its change has the norm {norm:.4g}; at most {self.clip:g} is allowed (privacy.clip)"

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply with its changes cut again: clients may be wrong."""
        sets = server.tree()
        now = {"shared": sets["shared"], "extensions": {"anchors": sets.get("anchors", {})}}
        one: dict[str, Any] = _cut(_with_axis(reply), _with_axis(now), self.clip)
        return _without_axis(one)

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Count the clients whose mean gets noise."""
        server.private_noise = {**server.private_noise, "clients": torch.tensor(len(replies.ids))}

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Add noise to the means of shared parameters and of anchors, where the clients have not done so."""
        if self.shares:
            return
        now, source = server.private_noise, self._source(server)
        scale = self.noise * self.clip / int(now["clients"].clamp_min(1))
        key = rng.key(now["key"], now["drawn"])
        server.private_noise = {**now, "drawn": now["drawn"] + 1}
        server.shared = {name: _noisy(t, rng.key(key, name), scale, source) for name, t in server.shared.items()}
        if "anchors" in before:
            anchors = dict(server.anchors)
            server.anchors = {**anchors, "mean": _noisy(anchors["mean"], rng.key(key, "anchors"), scale, source)}

    def _source(self, server: ServerState) -> rng.Noise:
        """Where noise comes from; of other means it is other noise, so that no two means differ by themselves alone."""
        if not self.secret:
            return rng.PLAIN
        sets, content = server.tree(), hashlib.sha256()
        for tensor in _vectors({**sets, "extensions": {"anchors": sets.get("anchors", {})}}).values():
            content.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return rng.Noise(self.secret, content.digest())


def with_secret(method: Method, secret: bytes) -> Method:
    """Return the method of a server whose noise, where it draws any, nobody else can draw; others know the seed."""
    made = [
        extension.model_copy(update={"secret": secret}) if isinstance(extension, ClientPrivacy) else extension
        for extension in method.extensions
    ]
    return method.model_copy(update={"extensions": tuple(made)})


_ROUNDING = 1e-5
"""Of what a client has made in float32, in parts of what it has made it of."""
_Vectors = dict[tuple[str, str], Tensor]
"""Shared parameters and means of anchors, by set and name, a client axis in front."""


class _Noise(NamedTuple):
    """Noise of standard deviation ``scale`` that is drawn from ``source`` with ``key``."""

    key: Tensor
    scale: float
    source: rng.Noise

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return numbers ``(*key.shape, count)``; with a secret float64, and of ``dtype`` otherwise."""
        return self.scale * self.source.draw(self.key, count, torch.float64 if self.source.secret else dtype)

    def add(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return ``values`` with the ``noise`` that was drawn; float64 and on a grid where the source has a secret.

        The grid depends on the scale only: the last bits of a sum of floating-point numbers would tell which numbers
        were added (Mironov 2012).
        """
        noise = noise.view(values.shape).to(values.device)
        if not self.source.secret:
            return values + noise.to(values.dtype)
        return rng.round_to_grid(values.double() + noise, torch.tensor(self.scale, device=values.device))


def _noisy(tensor: Tensor, key: Tensor, scale: float, source: rng.Noise) -> Tensor:
    noise = _Noise(key, scale, source)
    return noise.add(tensor, noise.draw(tensor.numel(), tensor.dtype)).to(tensor.dtype)


def _changes(new: _Vectors, received: Mapping[str, Any]) -> _Vectors:
    old = _vectors(received)
    return {path: tensor - old[path] for path, tensor in new.items()}


def _cut(
    reply: Mapping[str, Any], received: Mapping[str, Any], clip: float, noise: _Noise | None = None
) -> dict[str, Any]:
    """Return a reply, with a leading client axis, whose changes of what was received are clipped together to ``clip``.

    A change that is not finite becomes zero, so that it cannot be seen from a reply whether training diverged.

    Args:
        reply, received: what a client sends and what it got.
        clip: largest norm of all changes of a client together.
        noise: is added to the clipped changes; ``None``: none.
    """
    new = _vectors(reply)
    if not new:
        return dict(reply)
    old, changes = _vectors(received), _changes(new, received)
    norms = joint_norms(changes.values())
    overflowed = ~torch.isfinite(norms)
    factor = (clip / norms).clamp(max=1)

    def cut_change(change: Tensor) -> Tensor:
        shape = (-1, *[1] * (change.ndim - 1))
        return (change * factor.to(change).view(shape)).masked_fill(overflowed.to(change.device).view(shape), 0)

    if noise is None:
        cut = {path: old[path] + cut_change(change) for path, change in changes.items()}
    else:  # what was received is known to the server: the noise hides the change
        sizes = [change[0].numel() for change in changes.values()]
        parts = noise.draw(sum(sizes), torch.float64).split(sizes, 1)
        cut = {
            path: (old[path] + noise.add(cut_change(change), part)).to(change.dtype)
            for (path, change), part in zip(changes.items(), parts, strict=True)
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


def _vectors(of: Mapping[str, Any]) -> _Vectors:
    found = {("shared", name): tensor for name, tensor in of.get("shared", {}).items()}
    anchors = of.get("extensions", {}).get("anchors", {})
    return found | ({("anchors", "mean"): anchors["mean"]} if "mean" in anchors else {})


def _with_axis(of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.unsqueeze(0) if isinstance(v, Tensor) else _with_axis(v) for name, v in of.items()}


def _without_axis(of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v[0] if isinstance(v, Tensor) else _without_axis(v) for name, v in of.items()}


def _noise_to_come(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    return {"key": key, "drawn": torch.tensor(0), "clients": torch.tensor(0)}
