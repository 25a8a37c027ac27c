"""What is summed in an exchange whose replies are masked: the order and shapes of a vector's parts."""

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
"""What a reply holds of which no sum is needed."""


class SumFailed(PerfedError):
    """Too few sites are left: nothing comes of the sum."""


@dataclass(frozen=True)
class SumLayout:
    """What is summed in an exchange.

    Attributes:
        terms: products of entries, in the order of the vector.
        shapes: of each, without the clients' axis.
    """

    terms: tuple[Term, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, terms: tuple[Term, ...], spec: TreeSpec) -> SumLayout:
        """That of replies with the entries of ``spec``.

        Raises:
            PerfedError: an entry that they do not have.
        """
        shapes = []
        for term in terms:
            if lacking := [path for path in term if term not in ALWAYS and REPLY + path not in spec]:
                raise PerfedError(f"secure aggregation: the replies hold no '{lacking[0]}' to sum")
            factors = [() if term in ALWAYS else spec[REPLY + path].shape for path in term]
            shapes.append(max(factors, key=len))
        return cls(terms, tuple(tuple(int(n or 0) for n in shape) for shape in shapes))

    @property
    def length(self) -> int:
        """Numbers in the vector."""
        return sum(prod(shape) for shape in self.shapes)

    def totals(self, vector: Tensor, numbers: FixedPoint) -> dict[Term, Tensor]:
        """The sums by their terms, float64."""
        parts = numbers.decode(vector).split([prod(shape) for shape in self.shapes])
        return {term: part.view(shape) for term, part, shape in zip(self.terms, parts, self.shapes, strict=True)}


def make_masked_spec(form: SumLayout) -> TreeSpec:
    """What a masked reply holds."""
    return {MASKED: TensorSpec((form.length,), torch.int64)}
