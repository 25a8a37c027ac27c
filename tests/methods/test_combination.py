from __future__ import annotations

import numpy as np
import pytest
import torch
from quadratic import reference

from perfed.errors import PerfedError
from perfed.methods.fedpac import combination
from perfed.methods.fedpac.combination import client_statistics, combination_weights, combination_weights_general


def federation(seed=0, m=6, classes=4, d=3):
    """Statistics of clients that hold some of the classes, from samples: (features, labels, clients, m, classes)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, d)) * 2
    sizes = rng.integers(5, 40, m)
    labels = [rng.choice(classes, n, p=rng.dirichlet(np.ones(classes) * 0.7)) for n in sizes]
    features = [centres[y] + rng.normal(size=(len(y), d)) for y in labels]
    clients = np.repeat(np.arange(m), sizes)
    order = rng.permutation(len(clients))
    parts = (torch.from_numpy(np.concatenate(x)[order]) for x in (features, labels))
    return *parts, torch.from_numpy(clients[order]), m, classes


def statistics(seed=0, second_moments=False, **sizes):
    sample = federation(seed, **sizes)
    found = client_statistics(*sample, second_moments=second_moments)
    return found, torch.bincount(sample[2], minlength=sample[3])


# ---- simplex_qp


def brute_force_problem(h, v, n, i):
    """diag(V / n) + D^(i) from the definition, by loops."""
    m, classes, _ = h.shape
    p = np.diag(v / n)
    for j in range(m):
        for k in range(m):
            for y in range(classes):
                p[j, k] += (h[i, y] - h[j, y]) @ (h[i, y] - h[k, y])
    return p


@pytest.mark.parametrize("seed", range(4))
def test_the_matrices_and_weights_are_those_of_the_definition(seed, monkeypatch):
    found, n = statistics(seed)
    solved, real = [], combination.simplex_qp
    monkeypatch.setattr(combination, "simplex_qp", lambda p: solved.append(p) or real(p))
    weights, failed = combination_weights(found.means, found.variances, n)
    assert not failed.any() and weights.dtype == torch.float64
    for i, row in enumerate(weights.numpy()):
        p = brute_force_problem(found.means.numpy(), found.variances.numpy(), n.numpy(), i)
        np.testing.assert_allclose(solved[i], p, atol=1e-12)
        np.testing.assert_allclose(row, reference(p / p.max(), np.zeros(len(p))), atol=1e-6)


def test_identical_clients_get_equal_weights():
    h = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).expand(5, 3, 4)
    weights, _ = combination_weights(h, torch.full((5,), 2.0), torch.full((5,), 30))
    torch.testing.assert_close(weights, torch.full((5, 5), 0.2, dtype=torch.float64))


def test_with_equal_means_weights_are_proportional_to_n_over_v():
    h = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).expand(4, 3, 4)
    v, n = torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.tensor([10, 600, 30, 1])
    weights, _ = combination_weights(h, v, n)
    expected = (n / v).double()
    torch.testing.assert_close(weights, (expected / expected.sum()).expand(4, 4), rtol=1e-6, atol=1e-9)


def test_clients_of_disjoint_label_groups_keep_apart():
    h = torch.zeros(6, 4, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    h[:3, :2] = 1 + 0.01 * torch.randn(3, 2, 8, generator=generator)
    h[3:, 2:] = -1 + 0.01 * torch.randn(3, 2, 8, generator=generator)
    weights, _ = combination_weights(h, torch.full((6,), 5.0), torch.full((6,), 1000))
    assert weights[:3, 3:].max() < 1e-3 and weights[3:, :3].max() < 1e-3
    assert weights[:3, :3].min() > 0.1 and weights[3:, 3:].min() > 0.1


def test_the_order_of_the_clients_only_permutes_the_weights():
    found, n = statistics(3, m=15)
    weights, _ = combination_weights(found.means, found.variances, n)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    shuffled, _ = combination_weights(found.means[order], found.variances[order], n[order])
    torch.testing.assert_close(shuffled, weights[order][:, order], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1e-6, 3.0, 1e6])
def test_the_scale_of_the_features_does_not_matter(scale):
    found, n = statistics(4)
    weights, _ = combination_weights(found.means, found.variances, n)
    scaled, _ = combination_weights(found.means * scale, found.variances * scale**2, n)
    torch.testing.assert_close(scaled, weights, rtol=1e-9, atol=1e-11)


def test_a_shift_of_all_means_changes_nothing():
    found, n = statistics(4)
    weights, _ = combination_weights(found.means, found.variances, n)
    shifted, _ = combination_weights(found.means + 2.0**13, found.variances, n)  # without centring, 1e-8
    torch.testing.assert_close(shifted, weights, rtol=0, atol=1e-10)


def test_with_many_samples_a_client_outside_the_hull_keeps_its_own_head():
    h = torch.eye(4, dtype=torch.float64)[:, None]
    few, _ = combination_weights(h, torch.ones(4), torch.full((4,), 2))
    many, _ = combination_weights(h, torch.ones(4), torch.full((4,), 10**12))
    assert few.diagonal().max() < 0.9
    torch.testing.assert_close(many, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)


def test_variance_is_divided_by_n_once_and_more_samples_weigh_more():
    h = torch.tensor([[[0.0]], [[1.0]]])
    weights, _ = combination_weights(h, torch.tensor([8.0, 8.0]), torch.tensor([4, 2]))
    # a_1 of client 0 minimises 2 (1 - a)^2 + 4 a^2 + a^2
    assert weights[0, 1] == pytest.approx(2 / 7, abs=1e-9)


def test_constant_features_have_no_variance_and_need_no_one_else():
    f = torch.tensor([[0.1, 0.2]] * 7 + [[0.7, 0.3]] * 3)
    owner, labels = torch.tensor([0] * 7 + [1] * 3), torch.zeros(10, dtype=torch.long)
    found = client_statistics(f, labels, owner, 2, 1)
    assert found.variances.max() < 1e-30
    weights, failed = combination_weights(found.means, found.variances, torch.tensor([7, 3]))
    assert not failed.any()
    torch.testing.assert_close(weights, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-7)
    for constant in (0.0, 1e-9, 3.0):  # all alike: only the numbers of samples differ
        h = torch.full((6, 1, 3), constant)
        h[3:] += 1
        weights, failed = combination_weights(h, torch.zeros(6), torch.tensor([3, 1, 4, 3, 1, 4]))
        assert not failed.any()
        row = torch.tensor([3 / 8, 1 / 8, 1 / 2]).double()
        expected = torch.block_diag(row.expand(3, 3), row.expand(3, 3))
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-3)


def test_one_client_is_left_alone():
    weights, failed = combination_weights(torch.ones(1, 2, 3), torch.ones(1), torch.ones(1))
    assert weights.tolist() == [[1.0]] and failed.tolist() == [False]


@pytest.mark.parametrize("broken", ["nan", "no samples"])
def test_a_client_without_usable_statistics_fails_alone(broken):
    found, n = statistics(5)
    others = [0, 1, 3, 4, 5]
    expected, _ = combination_weights(found.means[others], found.variances[others], n[others])
    if broken == "nan":
        found.means[2, 0, 0] = torch.nan
    else:
        n[2] = 0
    weights, failed = combination_weights(found.means, found.variances, n)
    assert failed.tolist() == [i == 2 for i in range(6)]
    assert weights[2].tolist() == [0, 0, 1, 0, 0, 0] and not weights[others, 2].any()
    torch.testing.assert_close(weights[others][:, others], expected)


@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_a_client_far_off_does_not_spoil_the_others(factor):
    """Its tiny weight may help a little, but by the definition nobody is worse off than without it."""
    found, n = statistics(6)
    without, _ = combination_weights(found.means[:5], found.variances[:5], n[:5])
    found.means[5] *= factor
    found.variances[5] *= factor**2
    weights, failed = combination_weights(found.means, found.variances, n)
    assert not failed.any() and weights[:5, 5].max() < 10 / factor
    for i in range(5):
        p = brute_force_problem(found.means.numpy(), found.variances.numpy(), n.numpy(), i)
        a, b = weights[i].numpy(), without[i].numpy()
        assert a @ p @ a <= b @ p[:5, :5] @ b * (1 + 1e-4)


def test_cut_drops_small_weights_and_keeps_the_sum():
    found, n = statistics(7, m=10)
    whole, _ = combination_weights(found.means, found.variances, n)
    weights, _ = combination_weights(found.means, found.variances, n, cut=0.1)
    kept = whole.where(whole >= 0.1, 0)
    assert ((whole > 0) & (whole < 0.1)).any()
    torch.testing.assert_close(weights, kept / kept.sum(1, keepdim=True))
    equal, _ = combination_weights(torch.zeros(4, 1, 1), torch.ones(4), torch.ones(4), cut=0.9)
    assert torch.isfinite(equal).all() and equal.sum(1).tolist() == pytest.approx([1] * 4)  # the largest stay


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2), torch.ones(2), 0.0), "means must be of shape"),
        ((torch.ones(2, 3, 1), torch.ones(3), torch.ones(2), 0.0), "variances must be of shape"),
        ((torch.ones(2, 3, 1), torch.ones(2), torch.ones(1), 0.0), "counts must be of shape"),
        ((torch.ones(2, 3, 1), torch.ones(2), -torch.ones(2), 0.0), "negative"),
        ((torch.ones(2, 3, 1), torch.ones(2), torch.ones(2), 1.0), "cut must be in"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(PerfedError, match=message):
        combination_weights(*arguments[:3], cut=arguments[3])


# ---- with the covariance of the target


def test_the_identity_as_covariance_is_the_plain_form():
    found, n = statistics(8, second_moments=True, m=9)
    plain, _ = combination_weights(found.means, found.variances, n)
    identity = torch.eye(3).expand(9, 3, 3)
    general, _ = combination_weights_general(found.means, found.second_moments, n, covariances=identity)
    torch.testing.assert_close(general, plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_general_form_is_equations_33_and_35(ridge, monkeypatch):
    features, labels, owner, m, classes = federation(9)
    found = client_statistics(features, labels, owner, m, classes, second_moments=True)
    n = torch.bincount(owner)
    solved, real = [], combination.simplex_qp
    monkeypatch.setattr(combination, "simplex_qp", lambda p: solved.append(p) or real(p))
    combination_weights_general(found.means, found.second_moments, n, ridge=ridge)
    f = [features[owner == j].numpy() for j in range(m)]
    of = [labels[owner == j].numpy() for j in range(m)]
    for i in range(m):
        moment = f[i].T @ f[i] / len(f[i])
        inverse = np.linalg.inv(moment + ridge * np.trace(moment) / 3 * np.eye(3))
        h = np.zeros((m, classes, 3))
        v = np.zeros(m)
        for j in range(m):
            for y in set(of[j].tolist()):
                x, share = f[j][of[j] == y], (of[j] == y).mean()
                mean, second = x.mean(0), x.T @ x / len(x)
                h[j, y] = share * mean
                v[j] += share * np.trace(inverse @ second) - share**2 * mean @ inverse @ mean
        expected = np.diag(v / n.numpy())
        for j in range(m):
            for k in range(m):
                expected[j, k] += np.trace(
                    inverse @ sum(np.outer(h[i, y] - h[j, y], h[i, y] - h[k, y]) for y in range(classes))
                )
        np.testing.assert_allclose(solved[i], expected, rtol=1e-9, atol=1e-11)


def test_the_general_form_does_not_depend_on_a_linear_map_of_the_features():
    """Without a ridge the inverse second moment undoes any invertible map; the plain form changes."""
    features, labels, owner, m, classes = federation(10)
    n = torch.bincount(owner)
    mixing = torch.tensor([[2.0, 0.3, 0.0], [0.0, 0.5, 0.1], [0.4, 0.0, 1.0]], dtype=torch.float64)
    plain, general = [], []
    for x in (features, features @ mixing):
        found = client_statistics(x, labels, owner, m, classes, second_moments=True)
        plain.append(combination_weights(found.means, found.variances, n).weights)
        general.append(combination_weights_general(found.means, found.second_moments, n, ridge=0.0).weights)
    torch.testing.assert_close(general[0], general[1], rtol=1e-8, atol=1e-10)
    assert (plain[0] - plain[1]).abs().max() > 0.01


def test_a_singular_covariance_needs_its_ridge_and_fails_alone():
    found, n = statistics(11, second_moments=True)
    targets = found.second_moments.clone()
    targets[1] = 0.0
    weights, failed = combination_weights_general(found.means, found.second_moments, n, covariances=targets)
    assert failed.tolist() == [i == 1 for i in range(6)] and weights[1, 1] == 1 and weights[0, 1] >= 0
    targets[1] = torch.ones(3, 3)
    assert not combination_weights_general(found.means, found.second_moments, n, covariances=targets).failed.any()
    with pytest.raises(PerfedError, match="ridge"):
        combination_weights_general(found.means, found.second_moments, n, ridge=-1.0)


# ---- statistics


@pytest.mark.parametrize("rows", [7, 16384])
def test_statistics_are_those_of_a_loop_over_samples_and_of_numpy(rows, monkeypatch):
    monkeypatch.setattr(combination, "ROWS", rows)
    features, labels, owner, m, classes = federation(12)
    found = client_statistics(features, labels, owner, m + 1, classes + 1, second_moments=True)
    total = np.zeros((m, classes, 3))
    held = np.zeros((m, classes))
    for f, y, i in zip(features.numpy(), labels.tolist(), owner.tolist(), strict=True):
        total[i, y] += f
        held[i, y] += 1
    np.testing.assert_allclose(found.means[:m, :classes], total / held.sum(1)[:, None, None], atol=1e-13)
    np.testing.assert_allclose(found.priors[:m, :classes], held / held.sum(1, keepdims=True), atol=1e-15)
    for i in range(m):
        f, y = features[owner == i].numpy(), labels[owner == i].numpy()
        v = 0.0
        for k in np.unique(y):
            share, x = (y == k).mean(), f[y == k]
            v += share * np.einsum("nd,ne->nde", x, x).mean(0).trace() - np.square(share * x.mean(0)).sum()
        assert found.variances[i] == pytest.approx(v, rel=1e-12)
        np.testing.assert_allclose(found.second_moments[i], f.T @ f / len(f), atol=1e-13)
    # no samples of a class, no samples at all
    assert not found.means[:, classes].any() and not found.means[m].any() and found.variances[m] == 0
    assert not found.second_moments[m].any() and not found.priors[m].any()


def test_float32_features_are_summed_in_float64():
    f = torch.rand(100_000, 2, generator=torch.Generator().manual_seed(0)) * 1e-3 + 100
    labels = torch.zeros(len(f), dtype=torch.long)
    found = client_statistics(f, labels, labels, 1, 1)
    assert found.means.dtype == found.variances.dtype == torch.float64
    np.testing.assert_allclose(found.means[0, 0], f.double().numpy().mean(0), rtol=1e-13)
    assert float(found.variances) == pytest.approx(f.double().numpy().var(0).sum(), rel=1e-9)


def test_a_clients_statistics_do_not_depend_on_who_else_is_there():
    features, labels, owner, m, classes = federation(13)
    together = client_statistics(features, labels, owner, m, classes)
    for i in range(m):
        own = owner == i
        alone = client_statistics(features[own], labels[own], torch.zeros_like(owner[own]), 1, classes)
        torch.testing.assert_close(alone.means[0], together.means[i], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(alone.variances[0], together.variances[i], rtol=1e-12, atol=1e-14)


def test_samples_out_of_range_are_refused():
    f, zeros = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    for arguments, message in (
        ((f, torch.tensor([0, 2]), zeros, 1, 2), r"labels must be in \[0, 2\)"),
        ((f, zeros, torch.tensor([-1, 0]), 1, 2), "clients must be in"),
        ((f, zeros[:1], zeros, 1, 2), "labels must be of shape"),
        ((f[0], zeros, zeros, 1, 2), "features must be of shape"),
    ):
        with pytest.raises(PerfedError, match=message):
            client_statistics(*arguments)
