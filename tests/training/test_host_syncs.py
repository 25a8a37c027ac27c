"""The host never waits for the device within a step: twice the steps of a round ask for no more values.

On a GPU each value that Python looks at (``item``, ``tolist``, ``if tensor``) waits for all that was begun.
Counted on the CPU, where the same calls are made.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from engines import blobs, make, network, serve
from test_golden import METHODS as SHAPES
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LOOKS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}
SIZES = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim"}
"""Operations whose results Python must know before it goes on."""


class Calls(TorchFunctionMode):
    """Counts methods of tensors that give Python their values."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in LOOKS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations whose results the host waits for, and all."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found, self.number = found, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.number += 1
        if name in SIZES or (name.startswith("index") and any(map(is_mask, args))):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def is_mask(given) -> bool:
    """Whether these are indices with a mask among them: how many entries it takes is not known before."""
    return isinstance(given, list | tuple) and any(getattr(t, "dtype", None) is torch.bool for t in given)


def looks(work) -> tuple[Counter[str], int]:
    """What ``work`` asks tensors for, and of how many operations it is made."""
    found: Counter[str] = Counter()
    with Calls(found), Operations(found) as operations:
        work()
    return found, operations.number


def test_the_count_sees_every_way_of_looking():
    values = torch.arange(4.0)
    for look in (
        lambda: values.sum().item(),
        lambda: float(values[1]),
        lambda: values.tolist(),
        lambda: values.numpy(),
        lambda: values.cpu(),
        lambda: bool(values.any()),
        lambda: values[values > 1],
        lambda: values.nonzero(),
    ):
        assert sum(looks(look)[0].values()) > 0
    assert looks(lambda: (values + 1).square().sum()) == (Counter(), 3)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["stacked", "sequential"])
@pytest.mark.parametrize("name", sorted({name.partition("+")[0] for name in SHAPES} - {"fedrep-srpfl"}))
def test_more_steps_ask_for_no_more_values(name, engine):
    def of(local_epochs: int) -> tuple[Counter[str], int]:
        method = make(name, local_epochs=local_epochs)
        server = serve(method, blobs((8, 6, 5)), model=network(), rounds=2, engine=engine)
        server.prepare()
        server.round(1)  # what is looked at once
        return looks(lambda: server.round(2))

    (few, operations), (many, more) = of(1), of(8)
    assert more > 1.3 * operations
    assert many == few
