"""Privacy of each client: its change in a round is clipped, and the server adds noise to the mean."""

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
    """An extension that protects all data of each client, by DP-FedAvg (McMahan et al. 2018, Algorithm 1).

    It extends any method that aggregates by one mean. A client's changes of the shared parameters and of anchors are
    one vector, which is clipped to the norm C at the client and again at the server. All clients have the same weight.
    The server adds noise of standard deviation ``z C / m`` to the mean over the m clients of a round. Personal
    parameters never leave a client, so that what others see of it is private (joint differential privacy; Kearns et
    al. 2014). With FedRep the result is CENTAUR (Shen et al. 2023, Algorithm 1). A client that does not take part
    counts as a client without changes, so that m is the same for neighbouring federations.

    With secure aggregation the server only sees sums. It cannot clip again and adds no noise: each client clips its
    change, on which only its own privacy depends, and adds noise of standard deviation ``z C / sqrt(shares)``. A sum
    over at least ``shares`` such clients has noise of standard deviation at least ``z C``.
    """

    name: ClassVar[str] = "client-privacy"
    checks_again: ClassVar[bool] = True
    discreet: ClassVar[bool] = True
    needs_mean: ClassVar[str] = "the noise of privacy.unit = 'client' is accounted for a mean over clients"

    clip: float = Field(1.0, gt=0, description="C, largest norm of a client's change")
    noise: float = Field(0.0, ge=0, description="z, noise of the sum of changes in units of C")
    entries: tuple[str, ...] = Field((), description="names of the entries of a reply that may leave")
    shares: int = Field(
        0,
        ge=0,
        description="fewest clients that add a share of the noise to a sum; 0: the server adds the noise",
        exclude_if=exclude_default(0),
    )
    of_classes: bool = Field(
        False, description="whether an entry has one value for each class", exclude_if=exclude_default(False)
    )
    secret: bytes = Field(
        b"", description="secret of the server, which makes the noise unpredictable", exclude=True, repr=False
    )

    def sets(self) -> dict[str, ParameterSet]:
        """Return the set ``private_noise``: the noise's key, the number of draws, and the number of clients."""
        return {"private_noise": ParameterSet("server", init=_init_noise_state)}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Check that noise can be added to everything that leaves.

        Raises:
            PerfedError: if the model has batch-norm statistics, or if anchors are used for regression.
        """
        check_classes(self.of_classes, info)
        if info.buffers:
            raise PerfedError(
                f"privacy.unit = 'client' has no mechanism for '{min(info.buffers)}', statistics of batch-norm; keep "
                "them personal (fedbn), or use another normalisation"
            )

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply with its changes clipped, with equal weights, and with its share of the noise if any."""
        check_entries(reply, self.entries)
        if cohort.counter is not None and _extract_vectors(reply):
            cohort.counter.add()
        if not self.shares:
            return Reply(_clip_changes(reply, cohort.delivered, self.clip))
        noise = _ScaledNoise(cohort.key("share of noise"), self.noise * self.clip / sqrt(self.shares), cohort.noise)
        return Reply(_clip_changes(reply, cohort.delivered, self.clip, noise))

    def refuses(self, sent: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
        """Return why the server refuses a reply whose change is too long; empty if the client has clipped it."""
        reply, sent = _add_client_axis(reply), _add_client_axis(sent)
        changes = _compute_changes(_extract_vectors(reply), sent)
        sent_square = sum(float(tensor.double().square().sum()) for tensor in _extract_vectors(sent).values())
        norm = float(joint_norms(changes.values())) if changes else 0.0
        if norm <= self.clip * (1 + _ROUNDING) + _ROUNDING * sqrt(sent_square):
            return ""
        return f"its change has the norm {norm:.4g}; at most {self.clip:g} is allowed (privacy.clip)"

    def incoming(self, server: ServerState, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the reply with its changes clipped again, since the server cannot rely on the clients."""
        sets = server.tree()
        sent = {"shared": sets["shared"], "extensions": {"anchors": sets.get("anchors", {})}}
        clipped: dict[str, Any] = _clip_changes(_add_client_axis(reply), _add_client_axis(sent), self.clip)
        return _remove_client_axis(clipped)

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Record the number of clients in the mean, on which the noise depends."""
        server.private_noise = {**server.private_noise, "clients": torch.tensor(len(replies.ids))}

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Add noise to the means of shared parameters and of anchors, unless the clients have added it."""
        if self.shares:
            return
        state, source = server.private_noise, self._choose_source(server)
        scale = self.noise * self.clip / int(state["clients"].clamp_min(1))
        key = rng.key(state["key"], state["drawn"])
        server.private_noise = {**state, "drawn": state["drawn"] + 1}
        server.shared = {name: _add_noise(t, rng.key(key, name), scale, source) for name, t in server.shared.items()}
        if "anchors" in before:
            anchors = dict(server.anchors)
            server.anchors = {**anchors, "mean": _add_noise(anchors["mean"], rng.key(key, "anchors"), scale, source)}

    def _choose_source(self, server: ServerState) -> rng.Noise:
        """Return the source of the noise: the secret together with a hash of the means; without a secret, the seed.

        Different means get different noise, so that the difference of two noisy means never reveals the difference of
        the means.
        """
        if not self.secret:
            return rng.PLAIN
        sets, content = server.tree(), hashlib.sha256()
        for tensor in _extract_vectors({**sets, "extensions": {"anchors": sets.get("anchors", {})}}).values():
            content.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return rng.Noise(self.secret, content.digest())


def set_noise_secret(method: Method, secret: bytes) -> Method:
    """Return the method with a secret of the server, so that others, who know the seed, cannot compute its noise."""
    extensions = [
        extension.model_copy(update={"secret": secret}) if isinstance(extension, ClientPrivacy) else extension
        for extension in method.extensions
    ]
    return method.model_copy(update={"extensions": tuple(extensions)})


_ROUNDING = 1e-5
"""The relative rounding error of numbers that a client computes in float32."""
_Vectors = dict[tuple[str, str], Tensor]
"""Shared parameters and means of anchors by set and name; the first axis is the client axis."""


class _ScaledNoise(NamedTuple):
    """Gaussian noise of standard deviation ``scale``, drawn from ``source`` with ``key``."""

    key: Tensor
    scale: float
    source: rng.Noise

    def draw(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return noise of shape ``(*key.shape, count)``, in float64 if the source has a secret, otherwise ``dtype``."""
        return self.scale * self.source.draw(self.key, count, torch.float64 if self.source.secret else dtype)

    def add(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return ``values`` plus ``noise`` (from :meth:`draw`).

        If the source has a secret, the sum is in float64 and rounded to a grid. The grid depends only on the scale.
        Without rounding, the last bits of a floating-point sum would reveal which numbers were added (Mironov 2012).
        """
        noise = noise.view(values.shape).to(values.device)
        if not self.source.secret:
            return values + noise.to(values.dtype)
        return rng.round_to_grid(values.double() + noise, torch.tensor(self.scale, device=values.device))


def _add_noise(tensor: Tensor, key: Tensor, scale: float, source: rng.Noise) -> Tensor:
    noise = _ScaledNoise(key, scale, source)
    return noise.add(tensor, noise.draw(tensor.numel(), tensor.dtype)).to(tensor.dtype)


def _compute_changes(new: _Vectors, received: Mapping[str, Any]) -> _Vectors:
    old = _extract_vectors(received)
    return {path: tensor - old[path] for path, tensor in new.items()}


def _clip_changes(
    reply: Mapping[str, Any], received: Mapping[str, Any], clip: float, noise: _ScaledNoise | None = None
) -> dict[str, Any]:
    """Return the reply with each client's changes clipped together to the norm ``clip``.

    A change that is not finite becomes zero, so that a reply does not reveal whether training diverged.

    Args:
        reply: the replies of clients, stacked along the first axis.
        received: what the clients received, stacked along the first axis; changes are differences from it.
        clip: the largest norm of all changes of a client together.
        noise: the noise that is added to the clipped changes; ``None``: no noise.
    """
    new = _extract_vectors(reply)
    if not new:
        return dict(reply)
    old, changes = _extract_vectors(received), _compute_changes(new, received)
    norms = joint_norms(changes.values())
    overflowed = ~torch.isfinite(norms)
    factor = (clip / norms).clamp(max=1)

    def clip_change(change: Tensor) -> Tensor:
        shape = (-1, *[1] * (change.ndim - 1))
        return (change * factor.to(change).view(shape)).masked_fill(overflowed.to(change.device).view(shape), 0)

    if noise is None:
        clipped = {path: old[path] + clip_change(change) for path, change in changes.items()}
    else:  # the server knows what it sent, so that noise on the change is enough
        sizes = [change[0].numel() for change in changes.values()]
        parts = noise.draw(sum(sizes), torch.float64).split(sizes, 1)
        clipped = {
            path: (old[path] + noise.add(clip_change(change), part)).to(change.dtype)
            for (path, change), part in zip(changes.items(), parts, strict=True)
        }
    private_reply = {**reply, "shared": {name: clipped["shared", name] for name in reply.get("shared", {})}}
    if "shared" not in reply:
        del private_reply["shared"]
    if "num_samples" in reply:
        private_reply["num_samples"] = torch.ones_like(reply["num_samples"])
    if anchors := reply.get("extensions", {}).get("anchors"):
        equal = {**anchors, "mean": clipped["anchors", "mean"], "weight": torch.ones_like(anchors["weight"])}
        private_reply["extensions"] = {**reply["extensions"], "anchors": equal}
    return private_reply


def _extract_vectors(tree: Mapping[str, Any]) -> _Vectors:
    """Return the shared parameters and the means of anchors in a reply or a message."""
    shared = {("shared", name): tensor for name, tensor in tree.get("shared", {}).items()}
    anchors = tree.get("extensions", {}).get("anchors", {})
    return shared | ({("anchors", "mean"): anchors["mean"]} if "mean" in anchors else {})


def _add_client_axis(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.unsqueeze(0) if isinstance(value, Tensor) else _add_client_axis(value)
        for name, value in tree.items()
    }


def _remove_client_axis(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, Tensor) else _remove_client_axis(value) for name, value in tree.items()}


def _init_noise_state(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    """Return the noise's key, the number of draws so far, and the number of clients in the last mean."""
    return {"key": key, "drawn": torch.tensor(0), "clients": torch.tensor(0)}
