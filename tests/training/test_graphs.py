"""Steps replayed as graphs: what a CUDA graph does is done on the processor, for no GPU is at hand.

:class:`Tape` notes the operations of torch below autograd, with the tensors that they read and write. It does them
again on these tensors, and nothing of Python: a step whose numbers come from anywhere else would go wrong.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engines import blobs, difference, make, serve, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfed import Federation, Model, cnn, linear, mlp
from perfed.errors import PerfedError
from perfed.training import fit, graphs
from perfed.training.plan import Plan, PlanSettings


class Tape(TorchDispatchMode):
    """A graph of the processor's operations."""

    made: list[Tape] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0
        self.made.append(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar" not in func.name(), "a GPU would have to wait for the processor"
        found = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, found))
        return found

    def record(self, step):
        with self:
            return step()  # unlike a GPU's, it is done while it is recorded: so the first replay does nothing

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        if self.replays == 1:
            return
        for func, args, kwargs, found in self.operations:
            again = func(*args, **kwargs)
            outs = found if isinstance(found, tuple | list) else (found,)
            news = again if isinstance(again, tuple | list) else (again,)
            for out, new in zip(outs, news, strict=True):
                if isinstance(out, torch.Tensor) and out.data_ptr() != new.data_ptr():
                    out.copy_(new)


@pytest.fixture
def tape(monkeypatch):
    monkeypatch.setattr(fit, "Replays", partial(graphs.Replays, new=Tape))
    monkeypatch.setattr(Tape, "made", [])
    return Tape.made


SIZES = (23, 23, 11, 4)
NETWORKS = {
    "dense": lambda: Model(body=mlp((7,), 5), head=linear(3)),
    "tanh": lambda: Model(body=lambda shape: nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh()), head=linear(3)),
}
SETTINGS = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
}


def both(method, model, federation, *, chunk=0):
    """The same training without graphs and with them."""
    return [
        train(serve(method, federation, model=model(), plan=Plan("stacked", chunk, 1, graphs=on)), 2)
        for on in (False, True)
    ]


@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto"])
def test_replayed_steps_have_the_bits_of_the_steps_themselves(tape, name, network, optimizer):
    """Smaller last mini-batches, clients that end earlier, and a pull to where training began are all there."""
    method = make(name, **SETTINGS[optimizer], local_epochs=9, batch_size=5)
    plain, replayed = both(method, NETWORKS[network], blobs(SIZES))
    assert difference(plain, replayed) == 0
    assert sum(graph.replays for graph in tape) > 50  # most steps


def test_images_too(tape):
    method = make("fedavg", lr=0.05, local_epochs=9, batch_size=5)
    x, y = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    images = Federation.from_arrays({f"c{i}": {"x_train": x[i::2], "y_train": y[i::2]} for i in range(2)})
    plain, replayed = both(method, lambda: Model(body=cnn((3,), 3, 6), head=linear(3)), images, chunk=1)
    assert difference(plain, replayed) == 0
    assert sum(graph.replays for graph in tape) > 10


@pytest.mark.parametrize(
    ("settings", "dropout"),
    [({"local_epochs": 1}, 0.0), ({"local_epochs": 9}, 0.5)],
    ids=["few steps", "random numbers"],
)
def test_what_would_not_gain_or_is_not_the_same_each_time_is_not_recorded(tape, settings, dropout):
    method = make("fedavg", lr=0.1, batch_size=5, **settings)
    plain, replayed = both(method, lambda: Model(body=mlp((7,), 5, dropout=dropout), head=linear(3)), blobs(SIZES))
    assert difference(plain, replayed) == 0 and not tape


@pytest.mark.parametrize("name", ["fedpac", "scaffold", "pfedme", "fedprox"])
def test_methods_whose_steps_are_more_than_the_optimisers_are_as_without(tape, name):
    plain, replayed = both(make(name, batch_size=5), NETWORKS["dense"], blobs(SIZES))
    assert difference(plain, replayed) == 0


def test_graphs_without_a_gpu_are_one_line():
    assert PlanSettings.model_validate({"graphs": True}).build().to_dict()["graphs"] is True
    assert "graphs" not in Plan().to_dict()
    with pytest.raises(PerfedError, match=r"plan\.graphs = true needs device = 'cuda'; this is 'cpu'"):
        Plan(graphs=True).check(torch.device("cpu"))
    with pytest.raises(PerfedError, match=r"plan\.graphs = true is for engines of this process; this is 'ray'"):
        Plan("ray", graphs=True).check(torch.device("cuda"))
