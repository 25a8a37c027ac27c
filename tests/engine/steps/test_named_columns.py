"""Weights of columns that a client lacks: compared with a loop over clients and columns."""

from __future__ import annotations

import pytest
import torch
from engines import make, serve
from exchanges import chunk_of, run_steps

from perfed.engine.steps.named_columns import NamedColumns
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.testing.federations import make_named_columns


@pytest.mark.parametrize("average", ["samples", "uniform"])
@pytest.mark.parametrize("ids", [["c0", "c1", "c2"], ["c0", "c1"], ["c1"]])
def test_lacking_columns_get_the_mean_over_the_clients_that_have_them(average, ids):
    engine = serve(make("fedavg", average=average), make_named_columns(), model=Model(head=linear(3))).engine
    generator = torch.Generator().manual_seed(0)
    sizes = {"c0": 8.0, "c1": 6.0, "c2": 5.0}
    replies = {
        i: {
            "shared": {"head.weight": torch.randn(3, 4, generator=generator, dtype=torch.float64)},
            "num_samples": torch.tensor(sizes[i]),
            "other": torch.randn(3, 4, generator=generator),
        }
        for i in ids
    }
    _, result = run_steps([NamedColumns(engine.initialiser, engine.clients)], [chunk_of(replies)])
    assert torch.equal(result.other, torch.stack([replies[i]["other"] for i in ids]))
    for row, client in enumerate(ids):
        for column in range(4):
            weights = {i: replies[i]["shared"]["head.weight"][:, column] for i in ids}
            expected = weights[client]
            if not engine.clients[client].held[column]:
                having = [i for i in ids if engine.clients[i].held[column]] or ids
                share = {i: sizes[i] if average == "samples" else 1.0 for i in having}
                expected = sum(share[i] * weights[i] for i in having) / sum(share.values())
            assert torch.allclose(result.shared["head.weight"][row, :, column], expected)
