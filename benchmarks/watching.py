"""What a server sees of a run: an extension for attacks and audits, and models whose rows of zeros change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from perfed import Extension
from perfed.method.disclosure import Disclosure
from perfed.model.chain import Chain, StageFactory

_AT_ONCE = 256


@dataclass(frozen=True)
class Seen:
    """One exchange.

    Attributes:
        sent: the server's sets when it sent its payload, by name.
        ids: of the clients that replied.
        replies: by entry, each ``(clients, ...)``; what extensions added is under their names.
    """

    sent: Mapping[str, Any]
    ids: Sequence[str]
    replies: Mapping[str, Any]


class Watch(Extension):
    """Keeps what the server sends and what comes back; changes nothing, and sends nothing itself."""

    disclosure: ClassVar[Disclosure | None] = Disclosure()
    name: ClassVar[str] = "watch"

    seen: Any = Field(default_factory=list, description="one Seen for each exchange")
    latest: Any = Field(default_factory=dict, description="what was sent last")

    def payload(self, server: Any) -> dict[str, Any]:
        """Note the server's sets."""
        self.latest.clear()
        self.latest.update(server.tree())
        return {}

    def on_replies(self, server: Any, replies: Any, content: Mapping[str, Any]) -> None:
        """Note the replies."""
        found = {**replies.content, **replies.content.get("extensions", {})}
        self.seen.append(Seen(dict(self.latest), replies.ids, found))


def unbiased(out: int, *, relu: bool = False) -> StageFactory:
    """A linear layer without bias: an input of zeros has zeros as output, and its gradient is zero."""

    def build(shape: tuple[int, ...]) -> nn.Module:
        layer = nn.Linear(shape[0], out, bias=False)
        return nn.Sequential(layer, nn.ReLU()) if relu else layer

    return build


def along(chain: Chain, params: Mapping[str, Tensor], change: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """How far ``change`` goes along each row's own gradient: their inner product over the gradient's length.

    Args:
        chain: the modules.
        params: their values, all of them.
        change: of some of them, by name.
        x, y: ``(rows, ...)``, ``(rows,)``; the gradient is that of the row's cross-entropy in what changed.

    Returns:
        ``(rows,)``; 0 where a gradient is.
    """

    def loss(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(chain, {**params, **own}, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, y.unsqueeze(0))

    gradients, found = vmap(grad(loss), (None, 0, 0)), []
    for rows in torch.arange(len(x)).split(_AT_ONCE):
        each = gradients({name: params[name] for name in change}, x[rows], y[rows])
        squares = sum((g.flatten(1).square().sum(1) for g in each.values()), torch.zeros(()))
        products = sum(((g * change[name]).flatten(1).sum(1) for name, g in each.items()), torch.zeros(()))
        found.append(products / squares.sqrt().clamp_min(1e-30))
    return torch.cat(found)
