from __future__ import annotations

import pytest
import torch
from engines import blobs, cohort, difference, make, network, quick, serve, train

from perfed.errors import PerfedError
from perfed.method.declared import ParameterSet
from perfed.method.extension import (
    Extension,
    extension_class,
    extension_names,
    qualified_extension_name,
    register_extension,
)
from perfed.methods.build import build_method
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.methods.local import Local
from perfed.model.chain import STAGES, stage_of


def test_extensions_are_found_by_name():
    assert extension_class("proximal") is Proximal and {"proximal", "anchors"} <= set(extension_names())
    with pytest.raises(PerfedError, match="unknown extension 'nothing'; allowed: anchors"):
        extension_class("nothing")
    with pytest.raises(PerfedError, match="cannot import 'nowhere': No module named 'nowhere'"):
        extension_class("nowhere:nothing")
    with pytest.raises(
        PerfedError, match="extension 'engines:shrink': 'engines' registers no 'shrink'; it registers no"
    ):
        extension_class("engines:shrink")
    with pytest.raises(PerfedError, match="'engines' registers no 'proximal'; perfed has it"):
        extension_class("engines:proximal")
    with pytest.raises(ValueError):
        Proximal(mu=-1.0)
    with pytest.raises(ValueError):
        Proximal(nu=1.0)


def distance_after_a_round(mu: float, **settings) -> float:
    method = quick(FedAvg, extensions=(Proximal(mu=mu),), optimizer="sgd", **settings)
    server = serve(method, blobs(), model=network())
    before = {name: tensor.clone() for name, tensor in server.state.shared.items()}
    server.round(1)
    return sum(float((server.state.shared[n] - t).square().sum()) for n, t in before.items()) ** 0.5


@pytest.mark.long
def test_a_large_mu_keeps_the_shared_parameters_near_the_received_ones():
    free, pulled = (distance_after_a_round(mu, lr=0.01, local_epochs=20) for mu in (0.0, 100.0))
    assert free > 1e-3 and pulled < 0.2 * free


@pytest.mark.parametrize("name", ["fedavg", "hetfedrep"])
def test_mu_zero_changes_nothing(name):
    plain = train(serve(make(name), blobs(), rate=0.7), 2)
    zero = train(serve(make(name, more_extensions=(Proximal(mu=0.0),)), blobs(), rate=0.7), 2)
    assert difference(zero, plain) == 0
    some = train(serve(make(name, more_extensions=(Proximal(mu=0.1),)), blobs(), rate=0.7), 2)
    assert difference(some, plain) > 1e-6


def test_the_gradient_is_mu_times_the_way_back():
    """With learning rate lr, one more step of SGD differs by - lr mu (w - received), and for shared parameters only."""
    mu, lr, federation = 0.7, 0.1, blobs((6, 4))
    settings = {"optimizer": "sgd", "lr": lr, "batch_size": 99}
    extension = Proximal(mu=mu)
    with_term = cohort(quick(HetFedRep, extensions=(extension,), **settings), federation)
    without = cohort(quick(HetFedRep, **settings), federation)
    shared = {
        n: torch.randn(2, *t.shape, generator=torch.Generator().manual_seed(0)).double()
        for n, t in with_term.chain.tensors().items()
        if stage_of(n) == "body"
    }
    moved = {n: t + torch.linspace(-1, 1, t[0].numel()).view(t.shape[1:]) for n, t in shared.items()}
    for group in (with_term, without):
        group.load(shared)
    penalties = [extension.loss(with_term, {})]
    for group, active in ((with_term, penalties), (without, [])):
        group.model.update({n: t.clone() for n, t in moved.items()})
        group.penalties = active
        group.fit(STAGES, steps=1)
    for name, tensor in with_term.model.items():
        expected = -lr * mu * (moved[name] - shared[name]) if name in shared else torch.zeros_like(tensor)
        torch.testing.assert_close(tensor - without.model[name], expected, rtol=1e-10, atol=1e-12)


class Shrink(Extension):
    """A user's extension: weight decay on the head, in the loss."""

    name = "shrink"

    def loss(self, cohort, payload):
        return lambda step: 5.0 * step.params["head.weight"].square().flatten(1).sum(1)


@pytest.mark.long
def test_a_users_term_works_in_every_method():
    for name, beside in (("fedavg", (Proximal(),)), ("hetfedrep", (Proximal(),)), ("local", ())):
        plain = train(serve(make(name), blobs()), 1)
        shrunk = train(serve(make(name, more_extensions=(Shrink(), *beside)), blobs()), 1)
        norms = []
        for server in (plain, shrunk):
            heads = [s["model"]["head.weight"] for s in server.engine.states.values() if "head.weight" in s["model"]]
            norms.append(float(torch.stack(heads or [server.state.shared["head.weight"]]).norm()))
        assert norms[1] < 0.97 * norms[0]


def test_a_name_is_that_of_one_extension(forgotten):
    register_extension(Shrink)
    register_extension(Shrink)  # as a notebook's cell that is run again
    assert extension_class("test_extensions:shrink") is extension_class("shrink") is Shrink
    assert [qualified_extension_name(name) for name in ("shrink", "proximal")] == ["test_extensions:shrink", "proximal"]
    with pytest.raises(PerfedError, match="'test_extensions' registers no 'shrnk'; it has: shrink"):
        extension_class("test_extensions:shrnk")
    with pytest.raises(
        PerfedError, match="extension 'shrink' is registered twice, by 'test_extensions' and by 'elsewhere'"
    ):
        register_extension(type("Shrink", (Shrink,), {"__module__": "elsewhere"}))
    with pytest.raises(PerfedError, match=r"the extension Nameless has no name; write name: ClassVar\[str\]"):
        register_extension(type("Nameless", (Extension,), {}))
    assert build_method("local", {"extensions": ["test_extensions:shrink"]}).extensions == (Shrink(),)
    for name, given in (
        ("local", ["proximal"] * 2),
        ("local", ["shrink", "test_extensions:shrink"]),
        ("fedprox", ["proximal"]),
    ):
        with pytest.raises(PerfedError, match=rf"methods\.{name}\.extensions: '\w+' is listed twice; allowed: once"):
            build_method(name, {"extensions": given})


def test_a_set_that_is_declared_twice_is_an_error():
    class Taken(Shrink):
        def sets(self):
            return {"shared": ParameterSet("server")}

    with pytest.raises(PerfedError, match=r"'shared' is declared twice.*'shrink'"):
        serve(quick(Local, extensions=(Taken(),)), blobs())
