"""The papers' theorems on linear problems, as tests of the programs and of the claims."""

from __future__ import annotations

import math
from itertools import pairwise

import linear_theory as theory
import log_speedup as speedup
import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from perfed import rng
from perfed.datasets.linear import domain_problem, draw_orthonormal
from perfed.errors import PerfedError
from perfed.participation import schedule

F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spectrum(heads):
    """Squares of the smallest and the largest singular value of W*/sqrt(n)."""
    values = torch.linalg.svdvals(heads).square() / len(heads)
    return float(values[-1]), float(values[0])


def fitted_rate(distances, low=1e-9, high=1e-2):
    """Slope of log distance per round between two levels, and how straight the line is (R^2)."""
    rounds = ((distances > low) & (distances < high)).nonzero().flatten()
    x, y = rounds.double(), distances[rounds].log()
    correlation = torch.corrcoef(torch.stack([x, y]))[0, 1]
    return float(correlation * y.std() / x.std()), float(correlation**2)


def falls_linearly(distances, theorem):
    """Below 1e-8, on a straight line in the logarithm, at least at the theorem's rate."""
    if not distances[-1] < 1e-8:
        return False
    rate, straight = fitted_rate(distances)
    return straight > 0.99 and rate <= theorem


def theorem_rate(problem_heads, step, start):
    return 0.5 * math.log1p(-float(theory.contraction_constant(step, start, problem_heads)))


# Distance, problems and start


@pytest.mark.parametrize(("d", "k"), [(5, 1), (8, 3), (4, 4)])
def test_distance_is_the_sine_of_the_largest_angle(d, k):
    keys = rng.key(0, "test", torch.arange(12))
    first, second = rng.normal(keys, d * k, F64).view(2, 6, d, k)
    found = theory.principal_angle_distance(first, second)
    for a, b, value in zip(first, second, found, strict=True):
        assert float(value) == pytest.approx(float(np.sin(subspace_angles(a.numpy(), b.numpy())[0])), abs=1e-7)


def test_distance_depends_on_the_column_space_alone():
    basis = draw_orthonormal(rng.key(0, "basis"), 7, 2)
    mixed = basis @ torch.tensor([[3.0, -1.0], [0.5, 2.0]], dtype=F64)
    assert theory.principal_angle_distance(basis, mixed) < 1e-15
    other = draw_orthonormal(rng.key(1, "basis"), 7, 4)
    assert float(theory.principal_angle_distance(other[:, :2], other[:, 2:])) == pytest.approx(1)


def test_domain_problem():
    problem = domain_problem(40, 5, 12, 3, samples=(5, 20), alpha=0.4, noise=0.0, seed=1)
    identity = torch.eye(3, dtype=F64)
    assert torch.allclose(problem.basis.mT @ problem.basis, identity)
    assert torch.allclose(problem.heads.mT @ problem.heads, identity)
    assert torch.allclose(problem.mixture.sum(1), torch.ones(40, dtype=F64))
    batch = problem.sample(torch.arange(40), 0)
    assert batch.x.shape == (40, 20, 12) and batch.y.shape == (40, 20) and batch.member.shape == (40, 20, 5)
    assert batch.member.sum((1, 2)).equal(problem.sizes.double())
    assert 5 <= problem.sizes.min() < problem.sizes.max() <= 20
    # every sample obeys the model with the head of its domain, and padding is zero
    predicted = torch.einsum("nsd,dk,mk,nsm->ns", batch.x, problem.basis, problem.heads, batch.member)
    assert torch.allclose(predicted, batch.y)
    # domains follow the mixture: 4000 samples of one client
    many = domain_problem(1, 5, 3, 2, samples=4000, alpha=5.0, seed=1)
    share = many.sample(torch.arange(1), 0).member.mean((0, 1))
    assert torch.allclose(share, many.mixture[0], atol=0.03)


def test_client_problem_and_its_noise():
    problem = theory.client_problem(30, 10, 2, samples=400, noise=0.5, seed=2)
    assert torch.allclose(problem.heads.norm(dim=1), torch.full((30,), math.sqrt(2), dtype=F64))
    batch = problem.sample(torch.arange(30), 3)
    error = batch.y - ((batch.x @ problem.basis) * problem.heads[:, None]).sum(-1)
    assert float(error.std()) == pytest.approx(0.5, rel=0.03)
    covariance = batch.x.flatten(0, 1).T.cov()
    assert torch.allclose(covariance, torch.eye(10, dtype=F64), atol=0.06)


def test_samples_depend_on_seed_client_and_draw_alone():
    before = torch.random.get_rng_state()
    problem = domain_problem(20, samples=6, seed=5)
    everyone, some = torch.arange(20), torch.tensor([3, 17, 4])
    whole, part = problem.sample(everyone, 7), problem.sample(some, 7)
    assert whole.x[some].equal(part.x) and whole.member[some].equal(part.member)
    assert torch.allclose(whole.y[some], part.y)
    again = domain_problem(20, samples=6, seed=5)
    assert again.basis.equal(problem.basis) and again.sample(everyone, 7).y.equal(whole.y)
    assert not problem.sample(everyone, 8).x.equal(whole.x)
    assert not domain_problem(20, samples=6, seed=6).basis.equal(problem.basis)
    assert before.equal(torch.random.get_rng_state())


def test_embedded_problem():
    problem = theory.embedded_problem(12, 5, 2, widest=9, samples=3000, seed=0)
    clients = torch.arange(12)
    eye = torch.eye(9, dtype=F64)
    assert torch.allclose(problem.axes @ problem.axes.mT, eye.expand(12, 9, 9))
    assert (problem.variances.diff() <= 0).all() and len(set((problem.variances > 0).sum(1).tolist())) > 1
    x, y = problem.observe(clients, 0)
    beyond = problem.variances == 0
    assert x.transpose(1, 2)[beyond].abs().max() < 1e-14
    sigma = problem.axes @ torch.diag_embed(problem.variances) @ problem.axes.mT
    centred = x - problem.means[:, None]
    assert torch.allclose(centred.mT @ centred / 3000, sigma, atol=0.2)
    latent = problem.embed(x, clients, problem.signs)
    oracle = problem.oracle.sample(clients, 0)
    assert torch.allclose(latent, oracle.x) and y.equal(oracle.y)
    # another S gives Q phi*(x) with the same Q = diag(S S*) for all
    flipped = problem.embed(x, clients, -problem.signs)
    assert torch.allclose(flipped, -latent)


def test_moment_start_is_near_the_truth_with_many_samples():
    problem = theory.client_problem(200, 10, 2, samples=200, noise=0.1, seed=0)
    start = theory.moment_start(problem.sample(torch.arange(200), 0), 2)
    assert torch.allclose(start.mT @ start, torch.eye(2, dtype=F64))
    assert theory.principal_angle_distance(start, problem.basis) < 0.1


# FedDAR, algorithm 2 and theorem A.4


def feddar_run(noise, *, fresh=True, rounds=80, samples=20, seed=0, round_=theory.feddar_round):
    problem = domain_problem(samples=samples, noise=noise, seed=seed)
    everyone = torch.arange(100)
    start = theory.moment_start(problem.sample(everyone, 0), 2)
    smallest, largest = spectrum(problem.heads)
    step = 1 / (4 * largest)
    bases = theory.trajectory(round_, problem.sample, start, step, [everyone] * rounds, fresh=fresh)
    distances = theory.principal_angle_distance(bases, problem.basis)
    return distances, theorem_rate(problem.heads, step, distances[0]), math.log1p(-step * smallest)


@pytest.mark.long
@pytest.mark.parametrize("samples", [20, (5, 20)])
def test_feddar_falls_linearly(samples):
    distances, theorem, population = feddar_run(0.0, samples=samples)
    assert falls_linearly(distances, theorem)
    # with new samples each time the rate is that of infinitely many: 1 - step sigma_min^2 = 3/4
    assert fitted_rate(distances)[0] == pytest.approx(population, rel=0.08)


@pytest.mark.long
def test_feddar_falls_linearly_on_the_same_samples_too():
    distances, theorem, population = feddar_run(0.0, fresh=False, rounds=130)
    assert falls_linearly(distances, theorem)
    assert fitted_rate(distances)[0] > population  # more slowly than with new ones


@pytest.mark.long
def test_feddar_with_noise_falls_to_a_floor_that_is_proportional_to_it():
    floors = []
    for noise in (1e-3, 1e-2):
        distances, *_ = feddar_run(noise, rounds=80)
        late, later = distances[40:60].mean(), distances[60:].mean()
        assert distances[0] > 0.2 and 1e-6 < later < 0.05
        assert 2 / 3 < float(late / later) < 1.5
        floors.append(float(later))
    assert floors[1] / floors[0] == pytest.approx(10, rel=0.1)
    assert 1e-5 < floors[0] < 1e-4


@pytest.mark.long
def test_a_small_gradient_step_for_the_heads_would_not_do(monkeypatch):
    monkeypatch.setattr(theory, "solve_heads", lambda gram, moment: 1e-3 * moment)
    distances, theorem, _ = feddar_run(0.0)
    assert not falls_linearly(distances, theorem)


@pytest.mark.long
def test_one_clients_own_update_would_not_do():
    def alone(basis, for_heads, for_basis, step):
        return theory.feddar_round(basis, for_heads, theory.Batch(*(part[:1] for part in for_basis)), step)

    distances, theorem, _ = feddar_run(0.0, round_=alone)
    assert not falls_linearly(distances, theorem)


def test_feddar_heads_are_pooled_least_squares_and_absent_domains_do_not_count():
    problem = domain_problem(6, 4, 8, 2, samples=10, noise=0.3, seed=3)
    batch = problem.sample(torch.arange(6), 0)
    batch = batch._replace(member=batch.member * torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=F64))
    real = batch.member.sum(-1, keepdim=True)
    batch = batch._replace(x=batch.x * real, y=batch.y * real[..., 0])
    basis, step = draw_orthonormal(rng.key(9, "basis"), 8, 2), 0.1
    expected = basis.clone()
    for m in (0, 1, 3):
        rows = batch.member[..., m] > 0
        x, y = batch.x[rows], batch.y[rows]
        head = torch.linalg.lstsq(x @ basis, y[:, None]).solution
        expected -= step / 3 * x.T @ (x @ basis @ head - y[:, None]) @ head.T / len(y)
    found = theory.feddar_round(basis, batch, batch, step)
    assert theory.principal_angle_distance(found, expected) < 1e-12


# FLIC, algorithm S3 and theorem S3


def flic_run(signs, *, share=1.0, rounds=90, round_=theory.fedrep_round):
    problem = theory.embedded_problem(60, 12, 2, widest=16, samples=20, seed=1)
    estimate = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0).to(F64) if signs is None else signs
    sample, everyone = problem.sampler(estimate), torch.arange(60)
    smallest, largest = spectrum(problem.oracle.heads)
    step = 1 / (4 * largest)
    active = [rng.draw_permutation(rng.key(0, "active", t, everyone))[: int(share * 60)] for t in range(rounds)]
    start = theory.moment_start(sample(everyone, 0), 2)
    bases = theory.trajectory(round_, sample, start, step, active)
    flipped = (estimate * problem.signs)[..., None] * problem.oracle.basis
    return problem, bases, flipped, step, smallest


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_flic_finds_the_flipped_map_and_not_the_oracles(share):
    problem, bases, flipped, step, smallest = flic_run(None, share=share)
    to_flipped = theory.principal_angle_distance(bases, flipped)
    assert falls_linearly(to_flipped, theorem_rate(problem.oracle.heads, step, to_flipped[0]))
    assert fitted_rate(to_flipped)[0] == pytest.approx(math.log1p(-step * smallest), rel=0.1)
    to_oracle = theory.principal_angle_distance(bases, problem.oracle.basis)
    assert to_oracle.min() > 0.5 and abs(to_oracle[-1] - to_oracle[60]) < 1e-5


def flic_recovers(**changes):
    problem, bases, flipped, step, _ = flic_run(None, **changes)
    distances = theory.principal_angle_distance(bases, flipped)
    return falls_linearly(distances, theorem_rate(problem.oracle.heads, step, distances[0]))


@pytest.mark.long
def test_flic_would_not_find_it_with_a_small_step_for_the_heads_or_one_clients_update(monkeypatch):
    def alone(basis, for_heads, for_basis, step):
        one = [theory.Batch(*(part[:1] for part in batch)) for batch in (for_heads, for_basis)]
        return theory.fedrep_round(basis, *one, step)

    assert flic_recovers() and not flic_recovers(round_=alone)
    monkeypatch.setattr(theory, "solve_heads", lambda gram, moment: 1e-3 * moment)
    assert not flic_recovers()


@pytest.mark.long
def test_fedrep_on_the_oracles_features_finds_the_oracles_map():
    problem, bases, *_ = flic_run(theory.embedded_problem(60, 12, 2, widest=16, samples=20, seed=1).signs)
    assert theory.principal_angle_distance(bases[-1], problem.oracle.basis) < 1e-8
    everyone = torch.arange(60)
    start = theory.moment_start(problem.oracle.sample(everyone, 0), 2)
    direct = theory.trajectory(theory.fedrep_round, problem.oracle.sample, start, 0.2, [everyone] * 3)
    through = theory.trajectory(theory.fedrep_round, problem.sampler(problem.signs), start, 0.2, [everyone] * 3)
    assert torch.allclose(direct, through)


def test_flic_fails_when_each_client_has_signs_of_its_own():
    signs = rng.normal(rng.key(4, "signs", torch.arange(60)), 12, F64).sign()
    _, bases, flipped, *_ = flic_run(signs, rounds=60)
    distances = theory.principal_angle_distance(bases[:, None], flipped[None])
    assert distances.min() > 0.3


# FedRep and SRPFL, algorithm 2


def test_participants_as_numbers_mask_or_policy():
    problem = theory.client_problem(9, 6, 2, samples=8, seed=0)
    start = theory.moment_start(problem.sample(torch.arange(9), 0), 2)
    numbers = [torch.tensor([0, 3]), torch.tensor([1, 2, 8])]
    masks = (torch.isin(torch.arange(9), ids) for ids in numbers)
    first = theory.trajectory(theory.fedrep_round, problem.sample, start, 0.1, numbers)
    second = theory.trajectory(theory.fedrep_round, problem.sample, start, 0.1, masks)
    assert first.shape == (3, 6, 2) and first.equal(second)
    # by hand: least squares, one step of each participant, mean, QR
    heads, own = problem.sample(numbers[0], 1), problem.sample(numbers[0], 2)
    updated = []
    for i in range(2):
        w = torch.linalg.lstsq(heads.x[i] @ start, heads.y[i, :, None]).solution
        basis = start.clone().requires_grad_()
        (0.5 * (own.x[i] @ basis @ w - own.y[i, :, None]).square().mean()).backward()
        updated.append(start - 0.1 * basis.grad)
    assert theory.principal_angle_distance(torch.stack(updated).mean(0), first[1]) < 1e-12


def test_order_statistic():
    assert schedule.order_statistic(1, 4) == pytest.approx(1 / 4)
    assert schedule.order_statistic(4, 4, 2.0) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 2)
    times = np.sort(np.random.default_rng(0).exponential(1 / 2.5, (40_000, 16)), axis=1)
    for n in (1, 2, 8, 15, 16):
        harmonic = sum(1 / j for j in range(1, 17)) - sum(1 / j for j in range(1, 17 - n))
        assert schedule.order_statistic(n, 16, 2.5) == pytest.approx(harmonic / 2.5)
        error = times[:, n - 1].std() / 200
        assert abs(times[:, n - 1].mean() - schedule.order_statistic(n, 16, 2.5)) < 4 * error


def test_stages_of_the_theory():
    sizes = schedule.stage_sizes(64, 4)
    assert sizes == [4, 8, 16, 32, 64]
    times = [schedule.order_statistic(n, 64) for n in sizes]
    # the check values of spec/srpfl.md
    assert schedule.middle_stage_rounds(64, 4, 0.25) == pytest.approx([8.0, 9.1, 18.5], abs=0.05)
    lengths = schedule.stage_lengths(64, 4, 0.25, excess=1.1)
    assert lengths[1:4] == [8, 10, 19]
    assert lengths[0] == 1 and lengths[4] == math.ceil(2 * math.log(10) / math.log(4 / 3))
    assert theory.expected_time(sizes, lengths, 64, cost=10.0) == pytest.approx(
        sum(tau * (time + 10) for tau, time in zip(lengths, times, strict=True))
    )
    assert schedule.stage_sizes(10, 4) == [4, 8, 10] and schedule.stage_sizes(5, 5) == [5]
    assert len(schedule.stage_lengths(5, 5, 0.25, excess=1.1)) == 1


def test_a_last_doubling_that_is_none_takes_the_rounds_between_its_doubling_points():
    assert schedule.middle_stage_rounds(100, 5, 0.25)[-1] == pytest.approx(17.86, abs=0.005)  # with root 2: 10.76
    assert schedule.middle_stage_rounds(100, 3, 0.1)[-1] == pytest.approx(54.22, abs=0.005)  # with root 2: 3.46


@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_the_stages_are_those_of_the_bound_from_one_doubling_point_to_the_next(seed):
    """For any N and n_0: in closed form, and by the recursion of theorem 4.7 itself, whatever communication costs."""
    draw = np.random.default_rng(seed)
    for _ in range(40):
        clients = int(2 ** draw.uniform(1, 10))
        first, a, cost = int(draw.integers(1, clients + 1)), float(draw.uniform(0.02, 0.3)), float(draw.exponential(5))
        sizes, found = schedule.stage_sizes(clients, first), schedule.middle_stage_rounds(clients, first, a)
        harmonic = np.cumsum(np.append(0, 1 / np.arange(clients, 0, -1)))  # E[T_(n)] at position n
        gaps = np.diff(harmonic[sizes])
        q = np.sqrt(np.divide(sizes[:-1], sizes[1:]))
        ratio = (1 - q[:-1]) / (q[:-1] * (1 - q[1:])) * gaps[1:] / gaps[:-1]
        assert found == pytest.approx(-2 * np.log(ratio) / np.log1p(-a), rel=1e-8, abs=1e-8)
        points = schedule.doubling_points(clients, first, a, rate=draw.uniform(0.1, 10), cost=cost)
        for size, t, (distance, end) in zip(sizes[1:-1], found, pairwise(points), strict=True):
            rounds = 0
            while distance > end:
                distance = distance * math.sqrt(1 - a) + a / math.sqrt(size / first * (1 - a))
                rounds += 1
            assert rounds == max(0, math.ceil(t))
    assert schedule.middle_stage_rounds(7, 7, 0.2) == schedule.middle_stage_rounds(7, 4, 0.2) == []


def test_at_a_doubling_point_both_numbers_make_the_same_progress_per_time():
    a, cost = 0.2, 3.0
    points = schedule.doubling_points(100, 6, a, cost=cost)
    sizes = schedule.stage_sizes(100, 6)
    assert len(points) == len(sizes) - 1
    for point, pair in zip(points, pairwise(sizes), strict=True):
        now, later = (
            (point - theory.contraction_bound(torch.tensor(point, dtype=F64), a, n / 6))
            / (schedule.order_statistic(n, 100) + cost)
            for n in pair
        )
        assert float(now) == pytest.approx(float(later))
    # the bound rests at its floor, and the rounds to a target are those of the recursion
    floor = schedule.error_floor(a, 4)
    assert float(theory.contraction_bound(torch.tensor(floor, dtype=F64), a, 4)) == pytest.approx(floor)
    distance, rounds = torch.tensor(5.0, dtype=F64), 0
    while distance > 1.3 * floor:
        distance, rounds = theory.contraction_bound(distance, a, 4), rounds + 1
    assert theory.rounds_to_reach(1.3 * floor, floor, a, 5.0) == rounds


@pytest.fixture(scope="module")
def floors():
    return speedup.floors()


@pytest.mark.long
def test_the_floor_falls_with_the_root_of_the_participants(floors):
    slope, error = speedup.regression(np.log(speedup.NUMBERS[:4]).repeat(3).tolist(), floors.log().flatten().tolist())
    assert error < 0.03 and abs(slope + 0.5) < 4 * error


@pytest.fixture(scope="module")
def comparison(floors):
    """SRPFL's schedule against full participation: rounds by lemma B.1 from the measured contraction and floor."""
    return speedup.comparisons(2, floors)


@pytest.mark.long
@pytest.mark.parametrize("doubling", [True, False])
def test_srpfl_contracts_as_theorem_4_7(doubling):
    first, clients, rounds = 4, 256, 36
    problem = theory.client_problem(clients, 6, 2, samples=40, noise=1.0, seed=1)
    start = theory.moment_start(problem.sample(torch.arange(first), 0), 2)
    order = rng.draw_permutation(rng.key(0, "speed", torch.arange(clients)))
    sizes = schedule.stage_sizes(clients, first) if doubling else [clients]
    counts = [sizes[t * len(sizes) // rounds] for t in range(rounds)]
    # the theorem's extremes are over all sets of at least n_0 clients; here over the sets that take part
    extremes = [spectrum(problem.heads[order[:n]]) for n in sizes]
    step = 1 / (8 * max(largest for _, largest in extremes))
    bases = theory.trajectory(theory.fedrep_round, problem.sample, start, step, [order[:n] for n in counts])
    distances = theory.principal_angle_distance(bases, problem.basis)
    a = min(float(theory.contraction_constant(step, distances[0], problem.heads[order[:n]])) for n in sizes)
    assert 0 < a <= 0.25
    for before, after, n in zip(distances, distances[1:], counts, strict=False):
        assert after <= theory.contraction_bound(before, a, n / first)
    # not by default: a basis that stays where it started breaks the bound once many take part
    if not doubling:
        assert distances[0] > theory.contraction_bound(distances[0], a, clients / first)
        assert distances[-1] < schedule.error_floor(a, clients / first) < distances[0]


@pytest.mark.long
@pytest.mark.parametrize("method", ["srpfl", "fedrep"])
def test_both_reach_the_target_and_need_their_rounds(comparison, method):
    runs = [(getattr(row, method).distances, row.target) for row in comparison]
    reached = torch.stack([distances[-5:].square().mean() / target**2 for distances, target in runs])
    assert reached.mean().sqrt() < 1.15
    halfway = torch.stack([distances[len(distances) // 2] / target for distances, target in runs])
    assert halfway.mean() > 1.5


@pytest.mark.long
@pytest.mark.parametrize("method", ["srpfl", "fedrep"])
def test_time_taken_is_the_expected_time(comparison, method):
    shares = []
    for row in comparison:
        run = getattr(row, method)
        expected = theory.expected_time(run.participants, [1] * len(run.participants), row.clients)
        shares.append(run.total(0.0) / expected)
    assert sum(shares) / len(shares) == pytest.approx(1, abs=0.06)


@pytest.mark.long
@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_the_speed_up_grows_like_log_n(comparison, cost):
    x, y = [math.log(row.clients) for row in comparison], [row.speed_up(cost) for row in comparison]
    slope, error = speedup.regression(x, y)
    assert slope > 5 * error > 0
    assert slope - 3 * error > theory.speed_up_slope(excess=speedup.EXCESS, cost=cost)
    for row, ratio in zip(comparison, y, strict=True):
        assert ratio > theory.speed_up_bound(row.clients, excess=speedup.EXCESS, cost=cost)


@pytest.mark.parametrize(
    ("clients", "a", "excess", "rate", "cost", "b_2", "b_3", "speed_up", "slope"),
    [
        # log N = log 16 = 2.772589, l = log 4 = 1.386294, log(1/(1-a)) = log(4/3) = 0.287682, c = 0.5 x 2 = 1:
        # 2.772589 (6 x 2 + 4 x 1.386294) / 0.287682 / 2 = 2.772589 x 17.545177 / 0.575364 = 84.5474
        # 2.772589 (2.772589 + 2 x 1.386294) / 0.287682 / 2 = 2.772589 x 5.545177 / 0.575364 = 26.7213
        (16, 0.25, 1.25, 2.0, 0.5, 84.5474, 26.7213, 5.545177 / 17.545177, 1 / 17.545177),
        # log N = log 256 = 5.545177, l = log 8 = 2.079442, log(1/(1-a)) = log(10/9) = 0.105361, c = 20 x 0.5 = 10:
        # 5.545177 (6 x 11 + 4 x 2.079442) / 0.105361 / 0.5 = 5.545177 x 74.317766 / 0.0526803 = 7822.76
        # 5.545177 (5.545177 + 2 x 2.079442) / 0.105361 / 0.5 = 5.545177 x 9.704061 / 0.0526803 = 1021.459
        (256, 0.1, 1.125, 0.5, 20.0, 7822.76, 1021.459, 9.704061 / 74.317766, 1 / 74.317766),
    ],
)
def test_lemmas_b_2_and_b_3_and_theorem_4_9_are_as_published(clients, a, excess, rate, cost, b_2, b_3, speed_up, slope):
    """Equations 217, 248 and 256, by hand."""
    assert theory.srpfl_time_bound(clients, a, excess=excess, rate=rate, cost=cost) == pytest.approx(b_2, rel=1e-5)
    assert theory.full_time_bound(clients, a, excess=excess, rate=rate) == pytest.approx(b_3, rel=1e-5)
    assert theory.speed_up_bound(clients, excess=excess, rate=rate, cost=cost) == pytest.approx(speed_up, rel=1e-5)
    assert theory.speed_up_slope(excess=excess, rate=rate, cost=cost) == pytest.approx(slope, rel=1e-5)


BOUNDED = [(a, excess, cost) for a in (0.02, 0.25) for excess in (1.02, 1.1, 1.4) for cost in (0.0, 1.0, 10.0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("a", "excess", "cost"), BOUNDED)
def test_lemma_b_2_bounds_the_expected_time_of_the_schedule(a, excess, cost):
    """Order statistics and rounds summed up exactly, for N = 16 to 2^20; times of rate 3."""
    for clients in (2**e for e in range(4, 21, 4)):
        lengths = schedule.stage_lengths(clients, 4, a, excess=excess)
        exact = theory.expected_time(schedule.stage_sizes(clients, 4), lengths, clients, rate=3.0, cost=cost)
        bound = theory.srpfl_time_bound(clients, a, excess=excess, rate=3.0, cost=cost)
        assert 0.2 * bound < exact < bound
        ratio = bound / theory.full_time_bound(clients, a, excess=excess, rate=3.0)
        assert 1 / ratio == pytest.approx(theory.speed_up_bound(clients, excess=excess, rate=3.0, cost=cost))


def test_lemma_b_3_is_a_lower_bound_only_where_communication_or_the_federation_is_large():
    """Without communication the expected time stays below it up to 2^20 clients, ever nearer."""

    def ratios(cost: float) -> list[float]:
        found = []
        for clients in (2**e for e in range(8, 21, 4)):
            floor = schedule.error_floor(0.1, clients / 8)
            exact = theory.expected_time(
                [clients], [theory.rounds_to_reach(1.1 * floor, floor, 0.1)], clients, cost=cost
            )
            found.append(exact / theory.full_time_bound(clients, 0.1, excess=1.1))
        return found

    without = ratios(0.0)
    assert without == sorted(without) and 0.6 < without[0] < without[-1] < 0.9
    assert min(ratios(10.0)) > 1
    # by how much: what equation 253 leaves out of the rounds of equation 252
    left_out = 2 * math.log((1 + math.sqrt(0.9)) * math.sqrt(8 / 0.9)) / -math.log1p(-0.1)
    promised = (math.log(2**20) + 2 * math.log(10)) / -math.log1p(-0.1)
    floor = schedule.error_floor(0.1, 2**20 / 8)
    assert theory.rounds_to_reach(1.1 * floor, floor, 0.1) == pytest.approx(promised - left_out, abs=1.5)


# Bad input


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: schedule.stage_sizes(10, 11), "n0 is 11, but must be from 1 to the number of clients, 10"),
        (lambda: schedule.stage_sizes(10, 0), "n0 is 0"),
        (lambda: schedule.order_statistic(5, 4), "n is 5, but must be from 1 to the number of clients, 4"),
        (lambda: schedule.order_statistic(1, 4, 0.0), "rate is 0.0, but must be above 0"),
        (lambda: schedule.error_floor(1.0, 2), "a is 1.0, but must be strictly between 0 and 1"),
        (lambda: schedule.stage_lengths(8, 2, 0.2, excess=1.5), "excess is 1.5"),
        (
            lambda: theory.rounds_to_reach(0.1, 0.2, 0.2),
            "the target distance is 0.1, but must be above the floor, 0.2",
        ),
        (lambda: domain_problem(4, 2, 6, 3, seed=0), "2 rows cannot hold 3 orthonormal columns"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises(PerfedError, match=text):
        call()
