"""What ``fit`` offers beside an optimiser on one model: sets trained along, proximal steps, own update rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engines import blobs, cohort, quick
from torch.func import functional_call

from perfed.data.augment import CropFlip
from perfed.errors import PerfedError
from perfed.methods.local import Local
from perfed.model.chain import STAGES, Model
from perfed.model.presets import linear, mlp
from perfed.training.cohort import Cohort
from perfed.training.optim import explicit_is_stable
from perfed.training.step import mean_loss
from perfed.training.steprules import CustomStep, ProximalStep

SIZES = (9, 6, 4, 1)
CHUNKS = pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 3}], ids=["all", "one", "three"])


def make(**options) -> Cohort:
    settings = {"optimizer": "sgd", "lr": 0.1, **options.pop("settings", {})}
    return cohort(quick(Local, **settings), blobs(SIZES), **options)


def copies(params):
    return {name: tensor.clone() for name, tensor in params.items()}


def test_a_set_trained_along_gets_what_it_would_get_alone():
    """Two models on the same mini-batches in one fit: each as if it were the only one."""
    both, first, second = make(), make(), make()
    other = {name: 0.5 * tensor for name, tensor in both.model.items()}
    alone = copies(other)

    def loss(step):
        mine = step.with_params(step.set_parameters("other"))
        return mean_loss(step) + mean_loss(mine)

    both.fit(STAGES, epochs=2, also={"other": other}, loss=loss)
    first.fit(STAGES, epochs=2)
    second.fit(STAGES, epochs=2, params=alone)
    for name in other:
        torch.testing.assert_close(both.model[name], first.model[name], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(other[name], alone[name], rtol=1e-12, atol=1e-13)


def test_a_set_of_one_stage_is_applied_by_the_loss():
    """A second head on the same features; the first model does not notice."""
    both, plain = make(), make()
    heads = {name: torch.zeros_like(t) for name, t in both.model.items() if name.startswith("head")}

    def loss(step):
        features = step.representation().detach()
        logits = step.apply("head", features, params=step.set_parameters("heads"))
        losses = F.cross_entropy(logits.flatten(0, 1), step.y.flatten(), reduction="none").view(step.y.shape)
        return mean_loss(step) + (losses * step.weight).sum(1)

    both.fit(STAGES, epochs=1, also={"heads": heads}, loss=loss)
    plain.fit(STAGES, epochs=1)
    assert all(torch.allclose(both.model[name], plain.model[name], atol=1e-13) for name in plain.model)
    assert all(t.abs().sum() > 0 for t in heads.values())


@pytest.mark.long
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("part", [0.98, 1.02])
def test_explicit_steps_are_stable_up_to_the_bound(momentum, part):
    """Torch's SGD on the quadratic alone comes to rest below it and diverges above it."""
    lr = 0.1
    pull = part * 2 * (1 + momentum) / lr
    gap = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([gap], lr, momentum=momentum)
    for _ in range(3000):
        optimizer.zero_grad()
        (pull / 2 * gap.square()).sum().backward()
        optimizer.step()
    rests = bool(gap.abs() < 1e-6)
    assert rests == (part < 1) == explicit_is_stable(lr, pull, momentum)


@CHUNKS
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_step_near_a_reference_descends_on_the_term_as_torch_does(options, momentum):
    pull, lr, federation = 3.0, 0.1, blobs((6, 5, 4))
    method = quick(Local, batch_size=100, optimizer="sgd", lr=lr, momentum=momentum)
    group = cohort(method, federation, model=Model(head=linear(3)), **options)
    start, near = copies(group.model), {name: torch.randn_like(t) for name, t in group.model.items()}
    group.fit(STAGES, epochs=4, update=ProximalStep(near, pull))
    for row, client in enumerate(group.clients):
        own = {name: t[row].clone().requires_grad_() for name, t in start.items()}
        optimizer = torch.optim.SGD(list(own.values()), lr, momentum=momentum)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(client.train.x @ own["head.weight"].T + own["head.bias"], client.train.y)
            (loss + sum(pull / 2 * (t - near[name][row]).square().sum() for name, t in own.items())).backward()
            optimizer.step()
        for name, tensor in own.items():
            torch.testing.assert_close(group.model[name][row], tensor.detach(), rtol=1e-11, atol=1e-12)


@CHUNKS
@pytest.mark.parametrize(("pull", "proximal"), [(3.0, "implicit"), (30.0, "explicit")])
def test_the_proximal_step_is_the_implicit_one_where_asked_for_or_needed(options, pull, proximal):
    """One step: w+ minimises  <g, w> + |w - w0|^2 / (2 lr) + pull/2 |w - near|^2."""
    near, lr = 1.5, 0.1  # lr * pull = 3: explicit steps would diverge
    free, held = make(**options), make(**options)
    before = copies(held.model)
    free.fit(STAGES, steps=1)
    target = {name: torch.full_like(t, near) for name, t in before.items()}
    held.fit(STAGES, steps=1, update=ProximalStep(target, pull, proximal))
    for name, start in before.items():
        gradient = (start - free.model[name]) / lr
        expected = (start / lr - gradient + pull * near) / (1 / lr + pull)
        torch.testing.assert_close(held.model[name], expected, rtol=1e-10, atol=1e-12)


@CHUNKS
def test_an_infinite_pull_ends_at_the_reference_and_none_changes_nothing(options):
    held, free, plain = make(**options), make(**options), make(**options)
    target = {name: torch.randn_like(t) for name, t in held.model.items() if name != "head.bias"}
    held.fit(STAGES, epochs=2, update=ProximalStep(target, 1e12))
    assert all(torch.allclose(held.model[name], t, atol=1e-9) for name, t in target.items())
    assert not torch.allclose(held.model["head.bias"], plain.model["head.bias"])  # not named in ``near``
    free.fit(STAGES, epochs=2, update=ProximalStep(target, 0.0))
    plain.fit(STAGES, epochs=2)
    assert all(torch.equal(free.model[name], plain.model[name]) for name in plain.model)


@CHUNKS
def test_an_own_update_rule_can_be_plain_gradient_descent(options):
    own, plain = make(**options), make(**options)

    def descend(params, gradient, batches):
        (batch,) = batches
        found = gradient(params, batch)
        return {name: t - 0.1 * found[name] for name, t in params.items()}

    own.fit(STAGES, epochs=2, update=CustomStep(descend))
    plain.fit(STAGES, epochs=2)
    for name in plain.model:
        torch.testing.assert_close(own.model[name], plain.model[name], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(own.train_loss, plain.train_loss)


@CHUNKS
def test_an_own_update_rule_may_take_gradients_anywhere_and_gets_independent_batches(options):
    group = make(**options)
    seen = []

    def step(params, gradient, batches):
        seen.append([batch.block.index[batch.at].clone() for batch in batches])
        middle = gradient({name: 2 * t for name, t in params.items()}, batches[1])
        return {name: t - 0.1 * middle[name] for name, t in params.items()}

    start = copies(group.model)
    group.fit(STAGES, steps=1, update=CustomStep(step, streams=3))
    assert all(len(parts) == 3 for parts in seen)
    assert any(not torch.equal(parts[0], parts[1]) for parts in seen)
    data = [client.train for client in group.clients]
    for row, client in enumerate(group.clients):
        if options.get("chunk") or row > 0:
            continue  # the indices below are those of the whole stack
        index = seen[0][1][0, : min(4, len(data[0]))]
        chain = group.chain
        values = {n: (2 * t[row]).requires_grad_() for n, t in start.items()}
        loss = F.cross_entropy(functional_call(chain, values, (client.train.x[index],)), client.train.y[index])
        for (name, leaf), grad in zip(values.items(), torch.autograd.grad(loss, values.values()), strict=True):
            torch.testing.assert_close(group.model[name][row], start[name][row] - 0.1 * grad, msg=name)
            assert leaf.shape == grad.shape


@CHUNKS
def test_weights_of_samples_multiply_their_losses(options):
    """Weight 0 on a client's samples of class 0, and 2 on the others, in a full batch."""
    settings = {"batch_size": 100}
    group = make(settings=settings, **options)
    start = copies(group.model)
    samples = group.samples()
    weight = 2.0 * (samples.y != 0).double()
    group.fit(STAGES, steps=1, samples=replace(samples, weight=weight))
    for row, client in enumerate(group.clients):
        values = {n: t[row].clone().requires_grad_() for n, t in start.items()}
        each = F.cross_entropy(
            functional_call(group.chain, values, (client.train.x,)), client.train.y, reduction="none"
        )
        grads = torch.autograd.grad((each * 2 * (client.train.y != 0)).mean(), values.values())
        for name, grad in zip(values, grads, strict=True):
            torch.testing.assert_close(group.model[name][row], start[name][row] - 0.1 * grad)


def test_losses_of_samples_are_those_of_the_module():
    group = make()
    flat = group.sample_losses()
    expected = []
    for row, client in enumerate(group.clients):
        values = {name: tensor[row] for name, tensor in group.model.items()}
        logits = functional_call(group.chain, values, (client.train.x,))
        expected.append(F.cross_entropy(logits, client.train.y, reduction="none"))
    torch.testing.assert_close(flat, torch.cat(expected))
    torch.testing.assert_close(group.losses(), torch.stack([e.mean() for e in expected]))


# Augmentation ------------------------------------------------------------------------------------------------


def test_crops_and_flips_are_those_of_a_plain_loop():
    images = torch.arange(2 * 50 * 2 * 5 * 4, dtype=torch.float64).view(2, 50, 2, 5, 4) + 1
    out = CropFlip(padding=2, fill=(-1.0, -2.0))(images, torch.tensor([1, 2]))
    kinds = set()
    for before, after in zip(images.flatten(0, 1), out.flatten(0, 1), strict=True):
        padded = torch.stack([F.pad(before[channel], (2, 2, 2, 2), value=-1.0 - channel) for channel in (0, 1)])
        found = [
            (i, j, flip)
            for i in range(5)
            for j in range(5)
            for flip in (False, True)
            if torch.equal(after, padded[:, i : i + 5, j : j + 4].flip(2) if flip else padded[:, i : i + 5, j : j + 4])
        ]
        assert found
        kinds.add(found[0])
    assert len(kinds) > 25  # of 50


def test_augmentation_does_not_depend_on_padding_and_is_new_in_every_step():
    images = torch.rand(3, 8, 1, 6, 6)
    keys = torch.tensor([5, 6, 7])
    change = CropFlip()
    assert torch.equal(change(images, keys)[:, :3], change(images[:, :3], keys))
    assert torch.equal(change(images, keys)[1:2], change(images[1:2], keys[1:2]))
    assert not torch.equal(change(images, keys), change(images, keys + 1))
    plain = CropFlip(padding=0, flip=False)
    assert torch.equal(plain(images, keys), images)


def test_augmented_data_reach_a_head_behind_a_frozen_body():
    """Features of a frozen prefix must then be computed anew, and the results change."""
    model = Model(body=mlp((), 4), head=linear(3))
    federation = blobs((8, 5), dims=(16,))
    clients = tuple(replace(c, train=replace(c.train, x=c.train.x.view(-1, 1, 4, 4))) for c in federation)
    federation = replace(federation, clients=tuple(replace(c, test=None) for c in clients))
    heads = []
    for augment in (None, CropFlip(padding=1)):
        group = cohort(quick(Local), replace(federation, augment=augment), model=model)
        group.fit("head", epochs=2)
        heads.append(group.model["head.weight"])
    assert not torch.allclose(*heads)


def test_only_images_can_be_augmented():
    with pytest.raises(PerfedError, match=r"client 'c0' has inputs of shape \(4,\); augmentation needs images"):
        replace(blobs(), augment=CropFlip())


@pytest.mark.long
def test_the_resting_point_of_a_pulled_fit_does_not_depend_on_the_optimiser():
    """It minimises the loss plus pull / 2 |w - near|^2: there the gradient is pull (near - w)."""
    federation = blobs((12,))
    plain = {"optimizer": "sgd", "lr": 0.05}
    for pull in (0.5, 20.0):
        ends = []
        for settings in (plain, {**plain, "momentum": 0.8}, {"optimizer": "adam", "lr": 3e-3}):
            group = cohort(quick(Local, batch_size=100, **settings), federation, model=Model(head=linear(3)))
            near = {name: torch.ones_like(t) for name, t in group.model.items()}
            group.fit(STAGES, steps=3000, update=ProximalStep(near, pull))
            ends.append({name: tensor[0].clone() for name, tensor in group.model.items()})
        data = federation.clients[0].train
        leaf = ends[0]["head.weight"].clone().requires_grad_()
        loss = F.cross_entropy(data.x @ leaf.T + ends[0]["head.bias"], data.y)
        (gradient,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(gradient, pull * (1 - leaf.detach()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=5e-3)
