"""The server optimisers FedAdam, FedYogi and FedAdagrad, for any method that changes shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import Disclosure
from perfed.method.exchange import ServerState
from perfed.method.extension import Extension, check_moves_shared, register_extension

# From v, the square of Delta and beta2 to the new v.
_SCALE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
    "yogi": lambda v, square, beta2: v - (1 - beta2) * square * (v - square).sign(),
    "adagrad": lambda v, square, beta2: v + square,
}


@register_extension
class ServerOptimizer(Extension):
    """Steps of Adam, Yogi or Adagrad on the server along the change of a round (Reddi et al. 2021, Algorithm 2).

    Delta is the change of the shared parameters in the method's round: with FedAvg the (weighted) mean of the clients'
    changes. ``m <- beta1 m + (1 - beta1) Delta``; v becomes Adam's ``beta2 v + (1 - beta2) Delta^2``, Yogi's ``v - (1 -
    beta2) Delta^2 sign(v - Delta^2)`` or Adagrad's ``v + Delta^2``; then ``x <- x + server_lr m / (sqrt(v) + tau)``. m
    starts at 0 and v at tau^2, without bias correction, as in the paper. Statistics of batch-norm are not parameters,
    and keep the method's result.

    Example:
        >>> from perfed import build_method
        >>> settings = {"extensions": ["server-optimizer"], "server_optimizer": "yogi"}
        >>> build_method("fedrep", settings).extensions[0].server_lr
        0.1
    """

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    name: ClassVar[str] = "server-optimizer"

    server_optimizer: Literal["adam", "yogi", "adagrad"] = Field("adam", description="optimiser of the server")
    server_lr: float = Field(0.1, gt=0, description="eta: step of the server")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the server's m")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the server's v (adam, yogi)")
    tau: float = Field(1e-3, gt=0, description="adaptivity: with a smaller tau, steps depend less on the size of Delta")

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``server_m`` and ``server_v``, with m and v of each shared parameter."""
        return {
            "server_m": ParameterSet("server", init=partial(_init_constant, value=0.0)),
            "server_v": ParameterSet("server", init=partial(_init_constant, value=self.tau**2)),
        }

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse methods whose server does not change a shared model."""
        check_moves_shared(f"extension '{self.name}' moves the server's shared parameters", info, moves_shared)

    def server_step(self, server: ServerState, before: Mapping[str, Any]) -> None:
        """Replace the method's new shared parameters by those of the optimiser's step."""
        first, scale, shared = {}, {}, dict(server.shared)
        for name, m in server.server_m.items():
            x, v = before["shared"][name], server.server_v[name]
            delta = shared[name] - x
            first[name] = self.beta1 * m + (1 - self.beta1) * delta
            scale[name] = _SCALE[self.server_optimizer](v, delta.square(), self.beta2)
            shared[name] = x + self.server_lr * first[name] / (scale[name].sqrt() + self.tau)
        server.server_m, server.server_v, server.shared = first, scale, shared


def _init_constant(info: FederationInfo, key: Tensor, value: float) -> dict[str, Tensor]:
    return {n: torch.full(info.shape(n), value, dtype=info.dtype) for n in info.shared if n not in info.buffers}
