"""The layout of the vector that is summed in an exchange with masked replies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from perfed.engine.secure_aggregation import ALWAYS
from perfed.errors import PerfedError
from perfed.maths.sums import FixedPoint, Term
from perfed.sites.flower.checks import TensorSpec, TreeSpec, make_spec
from perfed.sites.flower.wire import LOSS, MASKED, REPLY

EMPTY_REPLY: TreeSpec = {
    name: entry._replace(finite=False)
    for name, entry in make_spec({"reply": {}, LOSS: torch.zeros((), dtype=torch.float64)}).items()
}
"""The entries of a reply of which no sum is needed: only the loss, which may be NaN."""


class SumFailed(PerfedError):
    """The error of a secure sum that cannot be opened because too few sites are left."""


@dataclass(frozen=True)
class SumLayout:
    """The layout of the vector in which a site sends its masked values.

    Attributes:
        terms: The products of entries that are summed, in the order of the vector.
        shapes: The shape of each product, without the axis of the clients.
    """

    terms: tuple[Term, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_spec(cls, terms: tuple[Term, ...], spec: TreeSpec) -> SumLayout:
        """Return the layout for replies with the entries of ``spec``.

        Args:
            terms: The products of entries that are summed.
            spec: The entries of a reply without masks.

        Raises:
            PerfedError: A product has a factor that the replies do not contain.
        """
        shapes = []
        for term in terms:
            if lacking := [path for path in term if term not in ALWAYS and REPLY + path not in spec]:
                raise PerfedError(f"secure aggregation: the replies contain no '{lacking[0]}' to sum")
            factors = [() if term in ALWAYS else spec[REPLY + path].shape for path in term]
            shapes.append(max(factors, key=len))
        return cls(terms, tuple(tuple(int(n or 0) for n in shape) for shape in shapes))

    @property
    def length(self) -> int:
        """The number of values in the vector."""
        return sum(prod(shape) for shape in self.shapes)

    def decode_totals(self, vector: Tensor, numbers: FixedPoint) -> dict[Term, Tensor]:
        """Return the sum of each product, in float64, from the opened vector of fixed-point numbers."""
        parts = numbers.decode(vector).split([prod(shape) for shape in self.shapes])
        return {term: part.view(shape) for term, part, shape in zip(self.terms, parts, self.shapes, strict=True)}


def make_masked_spec(layout: SumLayout) -> TreeSpec:
    """Return the specification of a masked reply with this layout."""
    return {MASKED: TensorSpec((layout.length,), torch.int64)}
