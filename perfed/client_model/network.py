"""One client's own model as a module: its parameters, and what else its method predicts with, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from perfed.data.federation import Federation
from perfed.engine.evaluate import everywhere
from perfed.method.method import Method
from perfed.training.cohort import Cohort
from perfed.tree import Tree

_PARTS = ("model", "state", "scratch")


class ClientModule(nn.Module):
    """What the method's ``predict`` does for one client, of buffers of its own: it can be traced and exported.

    Buffers are named after where the method finds them: ``model.head.weight``, ``state.personal_head.head.weight``,
    ``scratch.memory.features``.

    Args:
        method: that predicts.
        cohort: the client alone, with its own model.
        federation: that it is of.
    """

    def __init__(self, method: Method, cohort: Cohort, federation: Federation) -> None:
        super().__init__()
        self.method, self.cohort = method, cohort
        self.trained = tuple(federation.domains_in("train"))
        self.outputs, self.scale = federation.num_classes, federation.target_scale
        for part in _PARTS:
            self._hold(getattr(cohort, part), part)

    def _hold(self, tree: Tree, path: str) -> None:
        for name, value in tree.items():
            if isinstance(value, Mapping):
                self._hold(value, f"{path}.{name}")
            else:
                owner: nn.Module = self
                *above, last = f"{path}.{name}".split(".")
                for part in above:
                    if part not in dict(owner.named_children()):
                        owner.add_module(part, nn.Module())
                    owner = owner.get_submodule(part)
                owner.register_buffer(last, value[0].detach().clone())

    def forget(self, names: Sequence[str]) -> None:
        """Drop buffers that :meth:`forward` does not need."""
        for name in names:
            owner, _, last = name.rpartition(".")
            delattr(self.get_submodule(owner), last)

    def _tree(self, tree: Tree, path: str, held: Mapping[str, Tensor]) -> dict[str, Any]:
        """``tree`` with the module's buffers as its tensors, a client axis in front."""
        found: dict[str, Any] = {}
        for name, value in tree.items():
            where = f"{path}.{name}"
            if isinstance(value, Mapping):
                found[name] = self._tree(value, where, held)
            else:
                found[name] = held[where][None] if where in held else value
        return found

    def forward(self, x: Tensor, domain: Tensor | None = None) -> Tensor:
        """Class probabilities ``(samples, C)``, or values.

        Args:
            x: ``(samples, ...)`` inputs.
            domain: ``(samples,)`` domain ids, where the method needs them.
        """
        cohort, held = self.cohort, dict(self.named_buffers())
        before = {part: getattr(cohort, part) for part in _PARTS}
        try:
            for part in _PARTS:
                setattr(cohort, part, self._tree(before[part], part, held))
            cohort.domain = None if domain is None else domain[None]
            found = everywhere(self.method, cohort, x[None], self.trained)[0]
        finally:
            cohort.domain = None
            for part in _PARTS:
                setattr(cohort, part, before[part])
        if self.outputs is not None:
            return found[:, : self.outputs].softmax(1)
        return found if self.scale is None else self.scale.up(found)
