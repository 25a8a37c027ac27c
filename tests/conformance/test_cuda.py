"""On a GPU every kind of program gives what it gives on the processor, to rounding; skipped where there is no GPU.

Nobody has run this yet: see the page on benchmarks.
"""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, blobs, difference, make, network_for, serve, train
from test_golden import METHODS

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine")
# On the processor twice the same bits: what is compared, and how, is right.
WAYS = [("cpu", "stacked"), *(pytest.param("cuda", engine, marks=GPU) for engine in ENGINES)]


@pytest.mark.parametrize(("device", "engine"), WAYS)
@pytest.mark.parametrize("name", sorted({name.partition("-srpfl")[0] for name in METHODS}))
def test_a_device_gives_what_the_processor_gives_in_float64(name, device, engine):
    def done(where: str):
        method = make(name)
        model = network_for(method, dropout=0.3)
        return train(serve(method, blobs((9, 6, 4, 1)), model=model, device=where, **ENGINES[engine]), 2)

    found, expected = done(device), done("cpu")
    assert found.device.type == device
    assert difference(found, expected) <= (0 if device == "cpu" else 1e-8)
    for client, values in expected.evaluate("test").items():
        assert found.evaluate("test")[client] == pytest.approx(values, rel=1e-8)
