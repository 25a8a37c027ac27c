"""Clipped gradients: the norm that a step sees, and with whom clipping combines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import blobs, cohort, difference, make, network, quick, serve, train

from perfed.errors import PerfedError
from perfed.method.extension import Extension
from perfed.methods.extensions.clip import Clip
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear
from perfed.training.steprules import CustomStep, DirectionStep, GradientTransform, ProximalStep, StepRules

METHODS = ("fedrep", "ditto", "pfedme", "fedpac", "scaffold")


class Norms(Extension):
    """Notes the norms of the gradients that come to it, in a list of the test's."""

    name = "norms"
    seen: object = None

    def gradient(self, cohort, payload):
        def note(step, grads):
            self.seen.append(max(np.sqrt(sum((g.flatten(1).numpy() ** 2).sum(1) for g in grads.values()))))
            return grads

        return note


def test_one_step_is_that_of_torch_s_own_clipping():
    federation, lr, norm = blobs((6, 9)), 0.3, 0.2
    method = quick(FedAvg, extensions=(Clip(clip_norm=norm),), optimizer="sgd", lr=lr, batch_size=99, local_epochs=1)
    server = serve(method, federation, model=Model(head=linear(3)))
    before = {name: tensor.clone() for name, tensor in server.state.shared.items()}
    server.round(1)
    made = []
    for client in server.federation:
        module = torch.nn.Linear(*before["head.weight"].shape[::-1]).double()
        module.load_state_dict({name.removeprefix("head."): t for name, t in before.items()})
        torch.nn.functional.cross_entropy(module(client.train.x), client.train.y).backward()
        assert torch.nn.utils.clip_grad_norm_(module.parameters(), norm) > norm
        made.append([p.detach() - lr * p.grad for p in module.parameters()])
    weights = torch.tensor([6.0, 9.0]).double() / 15
    for name, values in zip(("head.weight", "head.bias"), zip(*made, strict=True), strict=True):
        expected = sum(w * v for w, v in zip(weights, values, strict=True))
        torch.testing.assert_close(server.state.shared[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_every_gradient_of_the_loss_is_clipped_and_a_large_norm_changes_nothing(name):
    plain = train(serve(make(name), blobs((6, 4)), model=network()), 2)
    wide = train(serve(make(name, more_extensions=(Clip(clip_norm=1e9),)), blobs((6, 4)), model=network()), 2)
    assert difference(wide, plain) == 0
    ahead, behind, clip = Norms(seen=[]), Norms(seen=[]), Clip(clip_norm=0.05)
    runs = [
        train(serve(make(name, more_extensions=given), blobs((6, 4)), model=network()), 2)
        for given in ((ahead, clip), (clip, behind))
    ]
    assert difference(*runs) == 0 and difference(runs[0], plain) > 1e-6
    assert len(ahead.seen) == len(behind.seen) > 0
    assert max(ahead.seen) > 0.05 >= max(behind.seen) * (1 - 1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name):
    runs = [
        train(serve(make(name, more_extensions=(Clip(clip_norm=0.05),)), blobs((6, 4, 1)), engine=engine), 2)
        for engine in ("stacked", "sequential")
    ]
    assert difference(*runs) <= 1e-8


def test_what_has_no_derivative_is_one_line():
    server = serve(make("hf-maml", variant="exact", more_extensions=(Clip(),)), blobs(), model=network())
    with pytest.raises(PerfedError, match="an extension changes gradients, and what it makes of them has no second"):
        server.round(1)
    train(serve(make("hf-maml", variant="hessian-free", more_extensions=(Clip(),)), blobs(), model=network()), 1)


def test_a_norm_that_is_none_is_refused():
    with pytest.raises(ValueError, match="greater than 0"):
        Clip(clip_norm=0)


# Rules that combine ---------------------------------------------------------------------------------------------


def ahead(params, gradient, batches):
    return gradient(params, batches[0])


def test_a_pull_and_edited_gradients_are_both_in_the_step():
    """SGD's step on g is w - lr g; with twice the gradient and a pull towards nought it is w - lr (2 g + s w)."""
    group = cohort(quick(FedAvg, optimizer="sgd", lr=0.1, batch_size=99), blobs((6, 4)), model=network())
    group.load({name: t.expand(2, *t.shape) for name, t in group.chain.tensors().items()})
    start = {name: t.clone() for name, t in group.model.items()}
    group.fit(STAGES, steps=1)
    step = {name: start[name] - t for name, t in group.model.items()}
    group.model.update({name: t.clone() for name, t in start.items()})
    nought = ProximalStep({name: torch.zeros_like(t) for name, t in start.items()}, 0.5)
    twice = GradientTransform(lambda step, grads: {name: 2 * g for name, g in grads.items()})
    for rules in ((nought, twice), (twice, nought, DirectionStep(ahead))):
        group.model.update({name: t.clone() for name, t in start.items()})
        group.fit(STAGES, steps=1, update=rules)
        for name, t in group.model.items():
            torch.testing.assert_close(t, start[name] - 2 * step[name] - 0.05 * start[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ((ProximalStep({}, 1.0), CustomStep(ahead)), "ProximalStep and CustomStep"),
        ((ProximalStep({}, 1.0), ProximalStep({}, 2.0)), "ProximalStep and ProximalStep"),
        ((DirectionStep(ahead), CustomStep(ahead)), "DirectionStep and CustomStep"),
    ],
)
def test_rules_without_a_meaning_together_are_refused_in_one_line(rules, names):
    with pytest.raises(PerfedError, match=f"^a step has {names}, which do not combine; allowed: .*") as error:
        StepRules.combine(rules)
    assert "\n" not in str(error.value)
