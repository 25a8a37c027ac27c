"""Rows in private: gradients against torch row by row, sensitivities by brute force, noise against theory, the trap."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import pytest
import torch
from engines import ENGINES, blobs, difference, every_tensor, make, network, quick, serve, train
from scipy import stats
from torch import nn

from perfed import rng
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.extension import Extension
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedrep import FedRep
from perfed.methods.flic.anchors import Anchors
from perfed.methods.flic.flic import FLICHL
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.privacy.sample import SamplePrivacy
from perfed.training.private import PrivateTraining

SENT = ("shared", "num_samples")


@dataclass(frozen=True)
class Noting(PrivateTraining):
    """Notes each step with its gradients, and how often each row is used."""

    seen: list[Any] = field(default_factory=list)

    def compute_gradients(self, loss, step, params, count):
        at = {name: tensor.detach().clone() for name, tensor in params.items()}  # the step changes them in place
        losses, grads = super().compute_gradients(loss, step, params, count)
        valid = torch.from_numpy(step.block.valid[step.at])
        used = [step.block.index[step.at, row][valid[row]].tolist() for row in range(len(step.rows))]
        self.seen.append((step.rows.tolist(), used, {n: g.clone() for n, g in grads.items()}, step, loss, at))
        return losses, grads


class Watched(SamplePrivacy):
    name = "sample-privacy"
    by: object = None

    def private(self):
        return self.by


def watched(**settings: Any) -> tuple[Watched, list[Any]]:
    by = Noting(**{"clip": 1.0, "noise": 0.0, **settings})
    return Watched(by=by, entries=SENT), by.seen


def one_step(model: Model, *extra: Extension, federation: Federation | None = None, **settings: Any):
    """The first step of FedAvg on a mini-batch of all rows: ``_, rows used, gradients, step, loss, params``."""
    own, seen = watched(**settings)
    method = quick(FedAvg, extensions=(own, *extra), local_epochs=1, batch_size=99, optimizer="sgd")
    serve(method, federation or blobs((6, 9)), model=model).round(1)
    return seen[0]


class Branch(nn.Module):
    """Not a chain of linear layers: its rows go through vmap."""

    def __init__(self, shape):
        super().__init__()
        self.a, self.b = nn.Linear(*shape, 3), nn.LayerNorm(3)

    def forward(self, x):
        return self.b(self.a(x)).sin()


MODELS = {
    "linear layers": Model(body=mlp((5,), 4), head=linear(3)),
    "own module": Model(body=Branch, head=linear(3)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("extra", [(), (Proximal(mu=0.3),)], ids=["alone", "with a term"])
def test_gradients_are_means_of_each_row_s_cut_gradient(model, extra):
    _, used, grads, step, _, params = one_step(model, *extra, clip=0.4)
    federation, found = blobs((6, 9)), 0
    for place, indices in enumerate(used):
        own = {name: tensor[place].detach().requires_grad_(True) for name, tensor in params.items()}
        data = next(client.train for client in federation if len(client.train) == len(indices))
        total = dict.fromkeys(own, 0.0)
        for i in range(len(data)):
            out = torch.func.functional_call(step.chain, own, (data.x[i : i + 1].double(),))
            row = torch.autograd.grad(nn.functional.cross_entropy(out, data.y[i : i + 1]), [*own.values()])
            norm = sqrt(sum(float(g.square().sum()) for g in row))
            found += norm > 0.4
            for name, g in zip(own, row, strict=True):  # the term is at its minimum: no gradient
                total[name] = total[name] + g * min(1.0, 0.4 / norm) / len(data)
        for name, expected in total.items():
            torch.testing.assert_close(grads[name][place], expected, rtol=1e-9, atol=1e-12)
    assert found > 5


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_row_adds_at_most_clip_to_the_sum_of_gradients(model):
    *_, step, loss, params = one_step(model, clip=0.1)
    private = PrivateTraining(clip=0.1, noise=0.0)

    def sums(weight):
        block = replace(step.block, weight=weight, _cache={})
        return private.compute_gradients(loss, replace(step, block=block, _outputs={}), params, 0)[1]

    full, changes = sums(step.block.weight), []
    for row in range(6):
        without = step.block.weight.clone()
        without[:, :, row] = 0
        changes.append(sum((full[n] - g).flatten(1).square().sum(1) for n, g in sums(without).items()).sqrt())
    bound = 0.1 * step.weight.amax(1)
    worst = torch.stack(changes).amax(0) / bound
    assert (worst <= 1 + 1e-9).all() and (worst > 0.99).any()  # the bound is reached


def test_counts_and_sums_change_by_at_most_what_the_table_says():
    private = PrivateTraining(clip=1.0, noise=0.0, rows=1.5)
    torch.manual_seed(0)
    x, y = 3 * torch.randn(20, 4).double(), torch.arange(20) % 3
    place, keys = y, rng.key(0, torch.arange(1))
    worst = 0.0
    whole = private.noisy_sums(x, place, 4, keys)
    for row in range(20):
        rest = torch.arange(20) != row
        worst = max(worst, float((whole - private.noisy_sums(x[rest], place[rest], 4, keys)).norm()))
    assert worst <= 1.5 + 1e-9 and worst > 1.49
    counts = torch.bincount(y, minlength=4)[None].double()
    assert torch.equal(private.noisy_counts(counts, 0, ["a"], "classes"), counts)


def test_noise_has_the_scale_of_theory_and_is_new_in_every_step():
    found = []
    for _ in range(1):
        own, seen = watched(clip=0.5, noise=3.0)
        plain, without = watched(clip=0.5, noise=0.0)
        for extension in (own, plain):
            method = quick(FedAvg, extensions=(extension,), local_epochs=40, batch_size=99, optimizer="sgd", lr=0.0)
            serve(method, blobs((6, 9)), model=MODELS["linear layers"]).round(1)
        for (_, _, noisy, step, *_), (_, _, exact, *_) in zip(seen, without, strict=True):
            scale = 3.0 * 0.5 * step.weight.amax(1)
            found.append(torch.cat([(noisy[n] - exact[n]).flatten(1) for n in noisy], 1) / scale[:, None])
    draws = torch.stack(found)  # (steps, clients, numbers), each standard normal
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float(draws.std()) - 1) < 0.02
    flat = draws.flatten(0, 1)
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 0.75  # of 80 draws of 62 numbers; the same noise twice would be 1


def test_each_client_has_the_noise_of_its_number_of_rows():
    grads = []
    for settings in ({"noise": 1.0, "noises": {6: 4.0}}, {"noise": 1.0}, {"noise": 0.0}):
        own, seen = watched(clip=0.5, **settings)
        method = quick(FedAvg, extensions=(own,), local_epochs=1, batch_size=99, optimizer="sgd", lr=0.0)
        serve(method, blobs((9, 6, 7)), model=MODELS["linear layers"]).round(1)
        (_, used, found, *_), *_ = seen
        grads.append(found)
    more, plain, exact = grads
    assert sorted(len(rows) for rows in used) == [6, 7, 9]
    for place, rows in enumerate(used):
        times = 4.0 if len(rows) == 6 else 1.0
        for name in exact:
            noisy, one = (of[name][place] - exact[name][place] for of in (more, plain))
            torch.testing.assert_close(noisy, times * one)
    private = PrivateTraining(clip=1.0, noise=1.0, rows=2.0, noises={6: 4.0}).for_cohort(
        torch.tensor([9.0, 6.0]), rng.PLAIN
    )
    both, keys = (private, replace(private, client_noise=None)), rng.key(0, torch.arange(2))
    times = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    noisy, one = (p.noisy_counts(1000 + 0 * times.expand(2, 3), 0, ["a", "b"], "classes") - 1000 for p in both)
    torch.testing.assert_close(noisy, times * one)
    rows, place = torch.zeros(10, 4, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)
    noisy, one = (p.noisy_sums(rows, place, 3, keys) for p in both)
    torch.testing.assert_close(noisy, times[:, :, None] * one)


def test_noise_of_counts_is_drawn_once_and_of_all_classes():
    private = PrivateTraining(clip=1.0, noise=4.0)
    counts = torch.zeros(500, 4).double()
    ids = [f"c{i}" for i in range(500)]
    first, again = (private.noisy_counts(counts + 100, 7, ids, "classes") for _ in range(2))
    assert torch.equal(first, again)
    assert abs(float((first - 100).std()) - 4) < 0.2 and (first != 100).all()
    assert not torch.equal(first, private.noisy_counts(counts + 100, 8, ids, "classes"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "pfedme", "flic-hl", "fedproto"])
def test_engines_give_the_same(name):
    entries = (*SENT, "means", "counts")
    runs = [
        train(serve(make(name, more_extensions=(SamplePrivacy(noise=1.0, entries=entries),)), blobs(), **engine), 2)
        for engine in (*ENGINES.values(), {"engine": "stacked", "chunk": 1})
    ]
    assert max(difference(runs[0], other) for other in runs[1:]) < 1e-8


def test_noise_has_the_same_bits_for_clients_alone_and_together():
    keys = rng.key(3, torch.arange(5))
    together = rng.draw_long_normal(keys, 100)
    assert all(torch.equal(rng.draw_long_normal(key, 100), row) for key, row in zip(keys, together, strict=True))
    assert (
        stats.kstest(rng.draw_long_normal(rng.key(4, torch.arange(50)), 1000).flatten().numpy(), "norm").pvalue > 1e-3
    )


def body_after(federation: Federation, *, head_epochs: int, noise: float, clip: float = 0.05) -> torch.Tensor:
    """The shared body of one round of FedRep with one mini-batch, a step of SGD with rate 1."""
    private = SamplePrivacy(clip=clip, noise=noise, entries=SENT)
    settings = {
        "local_epochs": head_epochs,
        "body_epochs": 1,
        "batch_size": 99,
        "optimizer": "sgd",
        "lr": {"head": 2000.0, "body": 1.0},
    }
    server = serve(
        quick(FedRep, extensions=(private,), **settings), federation, model=Model(body=mlp((), 3), head=linear(3))
    )
    server.round(1)
    return torch.cat([t.flatten() for t in server.state.shared.values()])


def test_the_trap_a_head_without_noise_carries_a_row_into_the_gradients_of_all_others():
    def neighbour(federation):
        client = federation.clients[0]
        x = client.train.x.clone()
        x[0] = -20 * x[0]
        return replace(federation, clients=(replace(client, train=replace(client.train, x=x)),))

    one = blobs((10,))
    other, bound = neighbour(one), 2 * 0.05 / 10  # a row is replaced: it leaves, and another comes
    fixed_head = body_after(one, head_epochs=0, noise=0.0) - body_after(other, head_epochs=0, noise=0.0)
    assert fixed_head.norm() <= bound + 1e-9
    own_head = body_after(one, head_epochs=1, noise=0.0) - body_after(other, head_epochs=1, noise=0.0)
    assert own_head.norm() > 1.5 * bound  # cutting row by row bounds nothing: the head has seen the row


def test_personal_parts_are_trained_with_noise_and_counted():
    heads = []
    for noise in (0.0, 1.0):
        private = SamplePrivacy(noise=noise, entries=SENT)
        server = serve(quick(FedRep, extensions=(private,), local_epochs=1), blobs((10,)), model=network())
        server.round(1)
        heads.append(every_tensor(server)["c0", "model", "head.weight"])
    assert (heads[0] - heads[1]).norm() > 1e-3


@pytest.mark.long
def test_poisson_mini_batches_hold_each_row_by_a_coin():
    own, seen = watched(poisson=True)
    method = quick(FedAvg, extensions=(own,), local_epochs=200, batch_size=4, optimizer="sgd", lr=0.0)
    serve(method, blobs((12, 7)), model=Model(head=linear(3))).round(1)
    for client, n in enumerate((12, 7)):  # the cohort has those with more steps first
        steps = [used[rows.index(client)] for rows, used, *_ in seen if client in rows]
        assert len(steps) == 200 * -(-n // 4)
        sizes = [len(used) for used in steps]
        share, trials = 4 / n, n * len(steps)
        assert abs(sum(sizes) / trials - share) < 4 * sqrt(share * (1 - share) / trials)
        variance = stats.tvar(sizes) / (n * share * (1 - share))
        assert 0.7 < variance < 1.4  # of a binomial size; in fixed ones it would be near 0
        weight = {
            round(float(w), 12)
            for rows, _, _, step, *_ in seen
            if client in rows
            for w in step.weight[rows.index(client)]
            if w > 0
        }
        assert weight == {0.25}  # one over the expected size


def test_what_looks_at_several_rows_at_once_is_refused():
    private = SamplePrivacy(noise=1.0, entries=SENT)
    with pytest.raises(PerfedError, match="tried out on rows and chosen by them"):
        anchors = Anchors(pretrain_epochs="validated")
        train(serve(quick(FLICHL, extensions=(private, anchors)), blobs()), 1)
    with pytest.raises(PerfedError, match="class_weights = 'balanced'"):
        serve(quick(FedAvg, extensions=(private,), class_weights="balanced"), blobs()).round(1)
    with pytest.raises(PerfedError, match="entry 'shared' of a reply has no mechanism"):
        serve(quick(FedAvg, extensions=(SamplePrivacy(noise=1.0, entries=("means",)),)), blobs()).round(1)
    with pytest.raises(PerfedError, match="statistics of batch-norm"):
        serve(quick(FedAvg, extensions=(private,)), blobs(), model=network(batch_norm=True))
    with pytest.raises(PerfedError, match="refuses batch-norm"):  # at home as well
        own = {"placement": {"embedding": "personal"}}
        serve(quick(FedAvg, extensions=(private,), **own), blobs(), model=network(batch_norm=True)).round(1)
