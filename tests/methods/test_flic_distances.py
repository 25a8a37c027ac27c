"""Learnt covariances of FLIC's anchors, and the distances in place of the closed form, against other ways to them."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F
from engines import ENGINES, blobs, cohort, difference, make, network, quick, serve, train
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm
from torch import Tensor
from torch.distributions import MultivariateNormal
from wasserstein import plain_w2 as fixed_w2

from perfed import rng
from perfed.codec import decode, encode
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.method.exchange import Replies, ServerState
from perfed.methods.build import build_method
from perfed.methods.flic import Anchors
from perfed.methods.flic.bures import barycentre, bures_w2
from perfed.methods.flic.covariance import Covariance, pack_triangles, unpack_triangles
from perfed.methods.flic.distances import GAMMAS, mmd, transport
from perfed.methods.flic.gaussians import Gaussians
from perfed.methods.flic.mixture import cluster_samples
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.report.snapshots import load_snapshot, place_samples
from perfed.run.callbacks.snapshots import embed_samples
from perfed.run.settings import Snapshots
from perfed.training.step import Step


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flic(name="flic-hl", **settings):
    own = {key: settings.pop(key) for key in list(settings) if key in Anchors.model_fields}
    return make(name, **settings).model_copy(update={"extensions": (quick(Anchors, **own),)})


def root(matrix: Tensor) -> Tensor:
    """Symmetric root of a positive definite matrix with distinct eigenvalues, which autograd goes through."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.sqrt()) @ vectors.T


def plain_w2(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """``|m - v|^2 + tr S + tr Sigma - 2 tr (Sigma^(1/2) S Sigma^(1/2))^(1/2)``, as it is written."""
    half, spread = root(sigma), torch.cov(x.T)
    cross = root(half @ spread @ half).trace()
    return (x.mean(0) - mean).square().sum() + spread.trace() + sigma.trace() - 2 * cross


# The Bures distance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "diagonal", "number"])
@pytest.mark.parametrize("counts", [[9], [40, 20, 7]])
def test_the_distance_is_that_of_pot_and_its_gradients_those_through_a_root(kind, counts):
    k, sets = 5, len(counts)
    x, mean = normal(sets, max(counts), k), normal(sets, k, seed=1)
    factor = {"full": normal(sets, k, k, seed=2).tril(), "diagonal": normal(sets, k, seed=2), "number": 1.7}[kind]
    leaves = [t.requires_grad_() for t in (x, mean, factor) if isinstance(t, Tensor)]
    found = bures_w2(x, counts, Gaussians(mean, factor))
    expected = []
    for j, n in enumerate(counts):
        own = factor if isinstance(factor, float) else factor[j]
        square = own * torch.eye(k).double() if kind == "number" else torch.diag(own) if kind == "diagonal" else own
        sigma = square @ square.T
        if kind == "number":  # a root of equal eigenvalues has no gradient in torch
            sigma = sigma + torch.diag(1e-9 * torch.arange(k).double())
        expected.append(plain_w2(x[j, :n], mean[j], sigma))
        arrays = (t.detach().numpy() for t in (mean[j], x[j, :n].mean(0), sigma, torch.cov(x[j, :n].T)))
        assert found[j].item() == pytest.approx(float(ot.gaussian.bures_wasserstein_distance(*arrays)) ** 2, rel=1e-6)
    weights = torch.arange(1, sets + 1)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((torch.stack(expected) * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 if kind == "number" else 1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 30])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_covariances_have_a_distance_and_finite_gradients(n, rank):
    """Of samples in few directions, and of anchors that have no width in some."""
    k = 5
    x, mean, factor = normal(1, n, k), normal(1, k, seed=1), normal(1, k, k, seed=2).tril()
    factor[:, :, rank:] = 0
    for t in (x, mean, factor):
        t.requires_grad_()
    found = bures_w2(x, [n], Gaussians(mean, factor))
    spread = torch.cov(x[0].detach().T) if n > 1 else torch.zeros(k, k).double()
    between = factor[0].detach().T @ spread @ factor[0].detach()
    cross = torch.linalg.eigvalsh(between).clamp_min(0).sqrt().sum()
    expected = (x[0].mean(0) - mean[0]).square().sum() + spread.trace() + factor.square().sum() - 2 * cross
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-7)
    grads = torch.autograd.grad(found.sum(), (x, mean, factor))
    assert all(torch.isfinite(g).all() for g in grads)
    if n == 1:  # a point: the anchor is drawn to it, and made narrow
        torch.testing.assert_close(grads[0][0], 2 * (x[0] - mean))
        torch.testing.assert_close(grads[2], 2 * factor)
    if rank == k or n > rank + 1:  # small steps of the samples leave the rank of X L as it is
        assert torch.autograd.gradcheck(lambda x: bures_w2(x, [n], Gaussians(mean, factor)), x, atol=1e-5)
    if rank == k:
        assert torch.autograd.gradcheck(lambda f: bures_w2(x, [n], Gaussians(mean, f)), factor, atol=1e-5)


# The barycentre -----------------------------------------------------------------------------------------------


def objective(factor: Tensor, factors: Tensor, weights: Tensor) -> float:
    """``sum_i w_i B^2(L L^T, L_i L_i^T)``, also for singular ones."""
    total = 0.0
    for own, weight in zip(factors, weights, strict=True):
        cross = torch.linalg.svdvals(factor.T @ own).sum()
        total += float(weight * (factor.square().sum() + own.square().sum() - 2 * cross))
    return total


def pot_barycentre(factors: Tensor, shares: Tensor):
    """The barycentre's covariance, as POT finds it."""
    squares = (factors @ factors.mT).numpy()
    return ot.gaussian.bures_wasserstein_barycenter(np.zeros(squares.shape[:2]), squares, shares.numpy(), eps=1e-12)[1]


def test_the_barycentre_is_that_of_pot():
    factors, weights = normal(4, 5, 5).tril(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    found = barycentre(factors, 7 * weights)
    assert torch.equal(found, found.tril()) and bool((found.diagonal() > 0).all())
    np.testing.assert_allclose(found @ found.T, pot_barycentre(factors, weights), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_singular_covariances_have_a_barycentre(rank):
    factors, weights = normal(4, 5, 5), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    factors[:3, :, rank:] = 0
    factors[3, :, 3:] = 0
    found = barycentre(factors, weights)
    best = objective(found, factors, weights)
    gain = objective(torch.einsum("i,ijk->jk", weights, factors), factors, weights) - best
    assert gain > 1e-3 or (rank == 0 and abs(gain) < 1e-9)  # all but one are points at 0
    for seed in range(20):  # nothing near it is better
        assert best <= objective(found + 0.03 * normal(5, 5, seed=seed), factors, weights) + 1e-9
    assert not barycentre(torch.zeros_like(factors), weights).any()


def test_the_barycentre_of_factors_that_cancel_is_not_their_mean():
    """L and -L are factors of the same covariance; their mean is that of a point."""
    same = torch.stack([normal(3, 3).tril(), -normal(3, 3).tril()])
    found = barycentre(same, torch.ones(2))
    torch.testing.assert_close(found @ found.T, same[0] @ same[0].T)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_the_server_averages_factors_or_covariances_over_those_that_hold_the_entry(kind):
    k, covariance = 3, Covariance(kind, 1.0)
    kept = covariance.initial(torch.zeros(2, k).double())["factor"]
    torch.testing.assert_close(
        kept, torch.ones(2, k).double() if kind == "diagonal" else pack_triangles(torch.eye(k).expand(2, k, k)).double()
    )
    replies = normal(3, *kept.shape)
    weights = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]]).double()
    mean = covariance.mean(replies, weights, kept, exact=False)
    torch.testing.assert_close(mean[0], (replies[0, 0] + 3 * replies[1, 0]) / 4)
    exact = covariance.mean(replies, weights, kept, exact=True)
    assert torch.equal(mean[1], kept[1]) and torch.equal(exact[1], kept[1])  # nobody holds it
    factors = torch.stack([torch.diag(r) if kind == "diagonal" else unpack_triangles(r, k) for r in replies[:2, 0]])
    expected = pot_barycentre(factors, torch.tensor([0.25, 0.75]).double())
    found = torch.diag(exact[0]) if kind == "diagonal" else unpack_triangles(exact[0], k)
    np.testing.assert_allclose(found @ found.T, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("average", ["barycentre", "factors"])
def test_what_the_server_averages_is_what_the_setting_says(average):
    k, factors, weight = 3, normal(2, 2, 3, 3).tril(), torch.tensor([[1.0, 2.0], [3.0, 1.0]]).double()
    extension = Anchors(covariance="full", covariance_average=average)
    content = {"mean": normal(2, 2, k), "factor": pack_triangles(factors), "weight": weight}
    server = ServerState({"anchors": {name: torch.zeros_like(content[name][0]) for name in ("mean", "factor")}})
    extension.on_replies(server, Replies(["a", "b"], content, torch.zeros(2)), content)
    found = unpack_triangles(server.anchors["factor"], k)
    for entry, shares in enumerate((weight / weight.sum(0)).T):
        mean = torch.einsum("i,ijk->jk", shares, factors[:, entry])
        expected = pot_barycentre(factors[:, entry], shares) if average == "barycentre" else mean @ mean.T
        np.testing.assert_allclose(found[entry] @ found[entry].T, expected, rtol=1e-6, atol=1e-8)


# Maximum mean discrepancy -------------------------------------------------------------------------------------


def double_sum(x: Tensor, z: Tensor, weights: Tensor) -> float:
    """MMD^2 of samples and weighted points, from all pairs."""
    share = torch.full((len(x),), 1 / len(x)).double()
    total = 0.0
    for a, p, b, q, sign in ((x, share, x, share, 1), (z, weights, z, weights, 1), (x, share, z, weights, -2)):
        squares = (a[:, None] - b[None]).square().sum(2)
        total += sign * sum(float(p @ (-gamma * squares).exp() @ q) for gamma in GAMMAS)
    return total


@pytest.mark.parametrize("kind", ["full", "diagonal", "number"])
def test_the_discrepancy_is_a_double_sum_over_a_fine_grid(kind):
    """A Gaussian on a grid that is finer than the narrowest kernel: sums of both are exact but for rounding."""
    full = torch.tensor([[0.12, 0.0], [-0.07, 0.09]]).double()
    square = {"full": full, "diagonal": full.diagonal().diag(), "number": 0.1 * torch.eye(2).double()}[kind]
    factor = {"full": full[None], "diagonal": full.diagonal()[None], "number": 0.1}[kind]
    mean, axis = torch.tensor([0.2, -0.1]).double(), torch.linspace(-6.6, 6.6, 45, dtype=torch.float64)
    unit = torch.cartesian_prod(axis, axis)
    density = (-unit.square().sum(1) / 2).exp()
    z = mean + unit @ square.T
    x = 0.3 * normal(1, 6, 2)
    found = mmd(x, [4], Gaussians(mean[None], factor))
    assert float(found) == pytest.approx(double_sum(x[0, :4], z, density / density.sum()), abs=1e-9)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_gradients_of_the_discrepancy_are_those_of_finite_differences(kind):
    x, mean = normal(2, 5, 3), normal(2, 3, seed=1)
    factor = normal(2, 3, 3, seed=2).tril() if kind == "full" else normal(2, 3, seed=2)
    leaves = tuple(t.requires_grad_() for t in (x, mean, factor))
    assert torch.autograd.gradcheck(lambda x, v, f: mmd(x, [5, 3], Gaussians(v, f)), leaves)


# Optimal transport between samples ----------------------------------------------------------------------------


def test_transport_is_the_best_pairing_and_its_gradient_that_of_pot():
    x, z = normal(2, 6, 3).requires_grad_(), normal(2, 6, 3, seed=1).requires_grad_()
    found = transport(x, z, [6, 4])
    for j, n in enumerate((6, 4)):
        costs = (x[j, :n, None] - z[j, None, :n]).square().sum(2)
        if n == 4:
            best = min(float(sum(costs[i, p[i]] for i in range(n))) for p in itertools.permutations(range(n)))
        else:
            best = float(costs[linear_sum_assignment(costs.detach().numpy())].sum())
        assert float(found[j]) == pytest.approx(best / n, rel=1e-12)
        shares = torch.full((n,), 1 / n).double()
        expected = torch.autograd.grad(ot.emd2(shares, shares, costs), (x, z))
        for one, other in zip(torch.autograd.grad(found[j], (x, z), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_entropic_transport_is_that_of_pot_with_its_gradient():
    x, z = normal(1, 5, 3).requires_grad_(), normal(1, 5, 3, seed=1).requires_grad_()
    shares = np.full(5, 0.2)
    costs = (x[0, :, None] - z[0, None]).square().sum(2).detach().numpy()
    plan = ot.sinkhorn(shares, shares, costs, 0.7, numItermax=10_000, stopThr=1e-12)
    expected = (plan * costs).sum() + 0.7 * (plan * np.log(plan)).sum()
    assert float(transport(x, z, [5], 0.7)) == pytest.approx(expected, rel=1e-6)
    way = normal(1, 5, 3, seed=2)
    (gradient,) = torch.autograd.grad(transport(x, z, [5], 0.7).sum(), x)
    step = float(transport(x + 1e-4 * way, z, [5], 0.7) - transport(x - 1e-4 * way, z, [5], 0.7)) / 2e-4
    assert float((gradient * way).sum()) == pytest.approx(step, rel=1e-4)


def test_transport_of_values_that_are_not_finite_is_nan():
    assert bool(transport(normal(1, 3, 2) / 0, normal(1, 3, 2), [3]).isnan())


def test_without_its_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(PerfedError, match=r"distance = \"ot\" needs the package 'ot'.*\[ot\]") as error:
        serve(flic(distance="ot"), blobs())
    assert "\n" not in str(error.value)


# Mixtures -----------------------------------------------------------------------------------------------------


def test_clusters_are_those_of_samples_far_from_their_modes():
    """With the modes' own means all samples would be nearest to the same one."""
    blob = torch.arange(40) % 3
    z = 0.1 * normal(40, 4) + 5 * torch.eye(3, 4).double()[blob]
    found = cluster_samples(80 + 10 * normal(3, 4, seed=1), z)
    assert len({(int(a), int(b)) for a, b in zip(blob, found, strict=True)}) == 3  # one cluster for each
    assert cluster_samples(normal(2, 4), z[:1].expand(5, -1)).unique().numel() == 1


def two_modes(clients=3, samples=40) -> Federation:
    """Class 0 lies on both sides of class 1."""
    draw, arrays = np.random.default_rng(0), {}
    centres = np.array([[-4.0, 0.0], [4.0, 0.0], [0.0, 0.0]])
    for i in range(clients):
        blob = np.arange(samples) % 3
        turn = np.linalg.qr(draw.normal(size=(2 + i, 2 + i)))[0][:2]
        x = (centres[blob] + 0.5 * draw.normal(size=(samples, 2))) @ turn
        arrays[f"c{i}"] = {"x_train": x, "y_train": (blob == 2).astype(np.int64)}
    return Federation.from_arrays(arrays, num_classes=2)


def halves(server) -> list[tuple[Tensor, Tensor]]:
    """Embedded samples of class 0 of each client, those of one blob and of the other."""
    found = []
    for group in server.engine.cohorts(server.engine.federation.ids, server.method.download(server.state)):
        samples, z = group.samples(), group.features("embedding")
        for row, start in enumerate(samples.starts):
            place = torch.arange(samples.counts[row])
            mine = z[start : start + samples.counts[row]]
            found.append((mine[place % 3 == 0], mine[place % 3 == 1]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("distance", ["mixture", "w2"])
def test_a_mixture_keeps_the_two_modes_of_a_class_apart_and_one_gaussian_does_not(distance):
    model = Model(embedding=mlp((), 4), head=linear(2))
    method = flic("flic-class", distance=distance, lambda1=1.0, pretrain_epochs=60, lr=0.05, anchor_std=5.0)
    server = train(serve(method, two_modes(), model=model), 1)
    modes = server.state.anchors["mean"][: 2 if distance == "mixture" else 1]
    gaps, matched = [], []
    for one, other in halves(server):
        gaps.append(float((one.mean(0) - other.mean(0)).norm()))
        nearest = [torch.cdist(z, modes).argmin(1) for z in (one, other)]
        matched.append({int(n) for n in nearest[0]}.isdisjoint(int(n) for n in nearest[1]))
    if distance == "mixture":
        assert all(matched) and min(gaps) > 8
    else:  # the standard deviation in each direction is 1: two halves are 2 apart
        assert not any(matched) and max(gaps) < 4


@pytest.mark.long
def test_the_modes_of_an_anchor_move_to_those_of_the_samples():
    """With an embedding that stays; one Gaussian moves to the middle, where there are no samples of the class."""
    far = {}
    for distance in ("mixture", "w2"):
        method = flic(
            "flic-class", distance=distance, lambda2=0.0, pretrain_epochs=0, lr=0.0, anchor_lr=0.4, local_epochs=1
        )
        server = serve(method, two_modes(clients=1), model=Model(embedding=mlp((), 4), head=linear(2)))
        modes = 2 if distance == "mixture" else 1
        server.state.anchors = {"mean": 0.1 * normal(2 * modes, 4)}
        for number in range(1, 36):
            server.round(number)
        one, other = halves(server)[0]
        centres = torch.stack([one.mean(0), other.mean(0)])
        far[distance] = torch.cdist(centres, server.state.anchors["mean"][:modes]).amin(1)
    assert float(far["mixture"].max()) < 0.8 and float(far["w2"].min()) > 3


# The extension, with each setting ----------------------------------------------------------------------------------

SETTINGS = {
    "diagonal": {"covariance": "diagonal"},
    "full": {"covariance": "full", "w2": "closed-form", "anchor_steps": "per-batch"},
    "full, barycentre": {"covariance": "full", "covariance_average": "barycentre", "anchor_average": "samples"},
    "mmd": {"distance": "mmd"},
    "mmd, full": {"distance": "mmd", "covariance": "full"},
    "ot, diagonal": {"distance": "ot", "covariance": "diagonal"},
    "entropic ot": {"distance": "ot", "ot_entropy": 5.0},
    "mixture": {"distance": "mixture", "realign_epochs": 1, "meta_classes": ((0, 2), (1,))},
    "mixture, full": {"distance": "mixture", "modes": 3, "covariance": "full", "pretrain_epochs": "validated"},
}


def run(settings, **how):
    federation = blobs((13, 9, 6, 1), dims=(4, 6), labels=[[0, 1, 2], [0, 1], [2]])
    weights = {"lambda1": 0.1, "lambda2": 0.1, "anchor_lr": 0.05, "anchor_std": 2.0, "pretrain_max_epochs": 3}
    return train(serve(flic(**{**weights, **settings}), federation, model=network(dropout=0.2), rate=0.8, **how), 2)


def loaded(method, federation):
    """A cohort that has received shared parameters, and anchors for it."""
    group, server = cohort(method, federation), serve(method, federation)
    group.load({name: t.expand(group.n, *t.shape).clone() for name, t in server.state.shared.items()})
    sent = {name: t.expand(group.n, *t.shape) for name, t in server.state.anchors.items()}
    return group, {name: t + 0.3 * normal(*t.shape, seed=len(name)) for name, t in sent.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_engines_and_chunks_agree_with_every_setting(name):
    runs = {how: run(SETTINGS[name], **options) for how, options in ENGINES.items()}
    for how, other in runs.items():
        assert difference(other, runs["sequential"]) < 1e-8, how
    start = serve(flic(**SETTINGS[name]), blobs()).state.anchors
    anchors = runs["stacked"].state.anchors
    assert start.keys() == anchors.keys() and ("factor" in anchors) == ("covariance" in SETTINGS[name])
    for name in anchors:  # all of it is learnt
        assert not torch.equal(anchors[name], start[name])


def sigma_of(numbers: Tensor) -> Tensor:
    """``L L^T`` of the numbers of a diagonal, or of a lower triangle, in three dimensions."""
    factor = torch.diag(numbers) if len(numbers) == 3 else unpack_triangles(numbers, 3)
    return factor @ factor.T


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_step_on_learnt_covariances_follows_the_gradient_of_the_objective(covariance):
    """Autograd of lambda1 W2^2 + lambda2 mean loss on samples, written down with roots of matrices."""
    federation = blobs((24, 12), labels=[[0, 1, 2], [1]])
    method = flic(covariance=covariance, lambda1=0.3, lambda2=0.7, anchor_samples=5, anchor_scale=2.0)
    group, sent = loaded(method, federation)
    found = method.extensions[0].anchor_gradient(group, sent)(sent, 1)
    noise = rng.normal(group.key("anchor step", 1), 3 * 5 * 3, torch.float64).view(2, 3, 5, 3)
    embedded = group.features("embedding").split([24, 12])
    for row, client in enumerate(federation):
        leaves = {name: t[row].clone().requires_grad_() for name, t in sent.items()}
        own = {n: (group.received.get(n, group.model[n]))[row] for n in group.chain.tensors() if "embedding" not in n}
        total = torch.zeros(()).double()
        for label in client.train.y.unique().tolist():
            numbers = leaves["factor"][label]
            factor = torch.diag(numbers) if covariance == "diagonal" else unpack_triangles(numbers, 3)
            z = leaves["mean"][label] + noise[row, label] @ factor.T
            hidden = F.leaky_relu(z @ own["body.0.weight"].T + own["body.0.bias"])
            logits = hidden @ own["head.weight"].T + own["head.bias"]
            total = total + 0.7 * F.cross_entropy(logits, torch.full((5,), label))
            mine = embedded[row][client.train.y == label]
            total = total + 0.3 * plain_w2(mine, leaves["mean"][label], factor @ factor.T)
        expected = torch.autograd.grad(total, list(leaves.values()))
        for name, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(found[name][row], gradient, rtol=1e-6, atol=1e-9)


def expected_mmd(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """MMD^2 of samples and N(mean, sigma): a kernel is a Gaussian density but for its size, and so is its mean."""
    k, total = len(mean), torch.zeros(()).double()
    for gamma in GAMMAS:
        size, kernel = (torch.pi / gamma) ** (k / 2), torch.eye(k).double() / (2 * gamma)
        across = MultivariateNormal(mean, kernel + sigma).log_prob(x).exp().mean()
        drawn = MultivariateNormal(mean, kernel + 2 * sigma).log_prob(mean).exp()
        total = total + (-gamma * torch.cdist(x, x).square()).exp().mean() + size * (drawn - 2 * across)
    return total


@pytest.mark.parametrize("covariance", ["fixed", "full"])
def test_the_step_by_discrepancy_is_that_of_all_samples_of_a_class_however_many(covariance):
    """Whatever number of them is taken at once: what it has in the anchor is a mean over the samples."""
    federation = blobs((300, 20), labels=[[0, 1, 1, 1], [1, 2]])
    settings = {"lambda1": 0.3, "lambda2": 0.0, "anchor_std": 0.5, "anchor_scale": 0.5}
    method = flic(distance="mmd", covariance=covariance, **settings)
    group, sent = loaded(method, federation)
    found = method.extensions[0].anchor_gradient(group, sent)(sent, 1)
    embedded = group.features("embedding").split([300, 20])
    for row, client in enumerate(federation):
        leaves = {name: t[row].clone().requires_grad_() for name, t in sent.items()}
        total = torch.zeros(()).double()
        for label in client.train.y.unique().tolist():
            sigma = sigma_of(leaves["factor"][label]) if covariance == "full" else torch.eye(3).double() / 2
            total = total + 0.3 * expected_mmd(embedded[row][client.train.y == label], leaves["mean"][label], sigma)
        for name, gradient in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
            torch.testing.assert_close(found[name][row], gradient, rtol=1e-8, atol=1e-10)


def on_a_line(method, x: Tensor):
    """A client whose embedding leaves its numbers as they are; all are of class 0."""
    federation = Federation.from_arrays({"c": {"x_train": x[:, None], "y_train": [0] * len(x)}}, num_classes=2)
    group = cohort(method, federation, model=Model(embedding=mlp((), 1), head=linear(2)))
    for name, value in (("weight", 1.0), ("bias", 0.0)):
        group.model[f"embedding.0.{name}"] = torch.full_like(group.model[f"embedding.0.{name}"], value)
    return group


@pytest.mark.parametrize(("entropy", "expected"), [(0.0, 2 - 2 * (2 / np.pi) ** 0.5), (1e4, 2.0)])
def test_transport_sees_two_modes_where_the_closed_form_sees_the_anchor(entropy, expected):
    """Of halves at -1 and 1 and of N(0, 1): (1 - E|Z|) twice; with much entropy all pairs weigh the same."""
    x = torch.tensor([-1.0, 1.0]).double().repeat(200)
    method = flic("flic-class", distance="ot", ot_entropy=entropy)
    group = on_a_line(method, x)
    (found,) = losses_of(group, method.extensions[0], {"mean": torch.zeros(1, 2, 1).double()})
    assert found + 2 * entropy * np.log(len(x)) == pytest.approx(expected, abs=0.1)


@pytest.mark.long
def test_the_step_by_transport_pairs_at_most_128_samples_at_a_time_and_weighs_them_alike():
    """Of points at -1 below a share p of N(0, 1) and at 1 above it, ``E xZ = 2 phi(Phi^-1(p))``."""
    x = torch.ones(300).double()
    x[:100] = -1
    method = flic("flic-class", distance="ot", covariance="diagonal", lambda1=1.0, lambda2=0.0)
    group = on_a_line(method, x)
    sent = {"mean": torch.full((1, 2, 1), 0.5).double(), "factor": torch.full((1, 2, 1), 0.5).double()}
    at = method.extensions[0].anchor_gradient(group, sent)
    found = {name: torch.stack([at(sent, count)[name] for count in range(1, 41)]).mean(0)[0, 0] for name in sent}
    pairs = sum(len(part) / 300 * 2 * norm.pdf(norm.ppf((part < 0).double().mean())) for part in x.split(128))
    assert float(found["mean"]) == pytest.approx(2 * (0.5 - 1 / 3), abs=0.03)
    assert float(found["factor"]) == pytest.approx(2 * (0.5 - pairs), abs=0.03)


def losses_of(group, extension, sent) -> list[float]:
    """The alignment of each client's samples, in one mini-batch."""
    align, found = extension.alignment(group, sent), {}

    def loss(step):
        value = align(step)
        found.update(zip(step.rows.tolist(), value.tolist(), strict=True))
        return value

    group.fit("embedding", steps=1, loss=loss, samples=group.samples().in_batches("all"))
    return [found[row] for row in range(group.n)]


def test_the_distance_of_mixtures_is_that_of_the_best_coupling():
    """Over all maps from the components of the samples to the modes of the anchor; proportions there are free."""
    federation = blobs((30, 11, 1), dims=(4, 6), labels=[[0, 1, 2], [0, 1], [2]])
    extension = (method := flic(distance="mixture", modes=3, anchor_scale=0.5, anchor_std=0.5)).extensions[0]
    group, sent = loaded(method, federation)
    embedded = group.features("embedding").split([30, 11, 1])
    found = losses_of(group, extension, sent)
    for row, client in enumerate(federation):
        total = 0.0
        for label in client.train.y.unique().tolist():
            z, modes = embedded[row][client.train.y == label], sent["mean"][row, 3 * label : 3 * label + 3]
            parts = [z[torch.cdist(z, modes).argmin(1) == j] for j in range(3)]
            total += min(
                sum(len(x) / len(z) * far(x, modes[j]) for x, j in zip(parts, way, strict=True) if len(x))
                for way in itertools.product(range(3), repeat=3)
            )
        assert found[row] == pytest.approx(total, rel=1e-6)


def far(x: Tensor, mean: Tensor) -> float:
    """W2^2 of N(mean, I / 2) and the Gaussian fitted to the rows of x."""
    return float(fixed_w2(x, mean, 0.5**0.5))


def test_other_distances_are_those_of_each_class_and_its_anchor():
    federation = blobs((9, 5, 1), dims=(4, 6), labels=[[0, 1, 2], [0, 2], [1]])
    extension = (method := flic(distance="mmd", anchor_std=0.5)).extensions[0]
    group, sent = loaded(method, federation)
    embedded = group.features("embedding").split([9, 5, 1])
    found = losses_of(group, extension, sent)
    draws = normal(20_000, 3)
    for row, client in enumerate(federation):
        labels = client.train.y.unique().tolist()
        sums = [sampled_mmd(embedded[row][client.train.y == c], sent["mean"][row, c] + draws) for c in labels]
        assert found[row] == pytest.approx(sum(sums), abs=0.02 * len(labels))


def sampled_mmd(x: Tensor, z: Tensor) -> float:
    """With pairs of draws in place of all pairs."""
    kernel = lambda squares: sum((-gamma * squares).exp() for gamma in GAMMAS)  # noqa: E731
    own, across = torch.cdist(x, x).square(), torch.cdist(x, z).square()
    pairs = (z[: len(z) // 2] - z[len(z) // 2 :]).square().sum(1)
    return float(kernel(own).mean() + kernel(pairs).mean() - 2 * kernel(across).mean())


@pytest.mark.parametrize(("covariance", "modes"), [("diagonal", 1), ("full", 1), ("full", 2)])
def test_the_alignment_is_with_the_covariances_as_they_came(covariance, modes):
    """Of each mode with its own, by the share of the class's samples that are nearest to it."""
    federation = blobs((90, 50), dims=(4, 6), labels=[[0, 1, 2], [0, 2]])
    mixture = {"distance": "mixture", "modes": modes} if modes > 1 else {}
    method = flic(covariance=covariance, **mixture)
    group, sent = loaded(method, federation)
    embedded, expected = group.features("embedding").split([90, 50]), []
    for row, client in enumerate(federation):
        total = 0.0
        for label in client.train.y.unique().tolist():
            z, entries = embedded[row][client.train.y == label], range(modes * label, modes * (label + 1))
            for part, entry in zip(z[z[:, 0].argsort()].chunk(modes), entries, strict=True):
                sent["mean"][row, entry] = part.mean(0) + 0.1
            own = torch.cdist(z, sent["mean"][row, entries]).argmin(1)
            for j, entry in enumerate(entries):
                far = plain_w2(z[own == j], sent["mean"][row, entry], sigma_of(sent["factor"][row, entry]))
                total += float((own == j).double().mean() * far)
        expected.append(total)
    assert losses_of(group, method.extensions[0], sent) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_samples_for_the_classifier_have_the_covariances_as_they_came(covariance, monkeypatch):
    many, drawn, apply = 20_000, [], Step.apply_after
    method = flic(covariance=covariance, anchor_samples=many)
    group, sent = loaded(method, blobs((12,), labels=[[0, 2]]))
    monkeypatch.setattr(Step, "apply_after", lambda step, stage, z: drawn.append(z) or apply(step, stage, z))
    group.fit(("body", "head"), steps=1, loss=method.extensions[0].loss(group, sent))
    for label, z in zip((0, 2), drawn[0][0].split(many), strict=True):
        torch.testing.assert_close(z.mean(0), sent["mean"][0, label], rtol=0, atol=0.05)
        torch.testing.assert_close(torch.cov(z.T), sigma_of(sent["factor"][0, label]), rtol=0, atol=0.05)


def test_what_is_learnt_travels_and_a_fixed_covariance_does_not():
    down = {}
    for covariance, numbers in (("fixed", 3), ("diagonal", 6), ("full", 9)):
        server = serve(flic("flic-class", covariance=covariance), blobs())
        server.prepare()
        down[covariance] = server.round(1).bytes_down
        assert down[covariance] * 3 == down["fixed"] * numbers  # only anchors: 3 means, 3 or 6 numbers of a factor
    server = serve(flic("flic-class", distance="mixture", modes=4), blobs())
    server.prepare()
    assert server.round(1).bytes_down == 4 * down["fixed"]
    method = flic(covariance="full")
    group, sent = loaded(method, blobs((9, 6), labels=[[0, 1], [1]]))
    reply = method.extensions[0].client_update(group, sent)
    assert {name: tuple(t.shape) for name, t in reply.items()} == {
        "mean": (2, 3, 3),
        "factor": (2, 3, 6),
        "weight": (2, 3),
    }
    assert torch.equal(reply["factor"][1, 0], sent["factor"][1, 0])  # of a class that it does not hold: as it came
    assert not torch.equal(reply["factor"][1, 1], sent["factor"][1, 1])


@pytest.mark.parametrize(("settings", "classes"), [({"modes": 2}, [0, 0, 1, 1, 2, 2]), ({}, None)])
def test_pictures_show_every_mode_in_the_colour_of_its_class(settings, classes, tmp_path):
    method = flic("flic-class", **settings, **({"distance": "mixture"} if settings else {}))
    server = train(serve(method, blobs()), 0)
    arrays = embed_samples(server, Snapshots(clients=1), 0)
    assert ("anchor_class" in arrays) == bool(settings)
    np.savez(tmp_path / "round-0000.npz", **arrays)
    assert place_samples(load_snapshot(tmp_path / "round-0000.npz")).anchor_classes.tolist() == (classes or [0, 1, 2])


def test_a_server_goes_on_from_what_it_wrote_down():
    runs = []
    for _ in range(2):
        server = serve(flic(covariance="full", distance="mixture"), blobs())
        server.prepare()
        server.round(1)
        runs.append(server)
    before = runs[0].snapshot()
    runs[1].restore(replace(before, server=decode(encode(before.server)), clients=decode(encode(before.clients))))
    for server in runs:
        server.round(2)
    assert difference(*runs) == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"w2": "two-sample", "covariance": "full"},
            "w2 = 'two-sample' needs distance = 'w2' and covariance = 'fixed'",
        ),
        ({"w2": "two-sample", "distance": "mmd"}, "w2 = 'two-sample' needs"),
        ({"modes": 3}, "modes = 3 needs distance = 'mixture'"),
        ({"distance": "mixture", "modes": 1}, "modes"),
        ({"ot_entropy": 0.1}, "ot_entropy = 0.1 needs distance = 'ot'"),
        ({"covariance_average": "barycentre"}, "needs a covariance that is learnt"),
        ({"covariance": "identity"}, "covariance"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, problem):
    with pytest.raises(PerfedError, match=problem) as error:
        build_method("flic-class", settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting", [{"distance": "ot"}, {"covariance": "full"}])
def test_values_have_the_closed_form_alone(setting):
    with pytest.raises(PerfedError, match=f"{next(iter(setting))} is for class labels"):
        serve(flic(**setting), blobs(regression=True), model=network(1))


def test_settings_of_before_are_written_down_as_before():
    later = {"distance", "modes", "ot_entropy", "covariance", "covariance_average"}
    assert not later & set(Anchors().model_dump())
    assert Anchors(distance="mixture", modes=3).model_dump().keys() >= {"distance", "modes"}
