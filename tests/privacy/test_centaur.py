"""CENTAUR's rates on the linear problem, and the mean that its server takes."""

from __future__ import annotations

import math

import centaur
import pytest
import torch

from perfed.datasets.linear import F64, make_key


def gradients(clients: int, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(clients, 4, 2, generator=drawn, dtype=F64) * torch.rand(clients, 1, 1, generator=drawn)


def test_one_client_moves_the_mean_by_at_most_the_cut_over_n():
    many, key = gradients(30, 0), make_key(0, "noise")
    whole = centaur.private_mean(many, 0.5, 0.0, key)
    for client in range(len(many)):
        without = many.clone()
        without[client] = 0
        far = (whole - centaur.private_mean(without, 0.5, 0.0, key)).norm()
        assert far <= 0.5 / 30 + 1e-12
        assert torch.isclose(far, min(many[client].norm(), torch.tensor(0.5, dtype=F64)) / 30)


def test_noise_of_the_mean_is_the_multiplier_times_the_cut_over_n():
    zero = torch.zeros(50, 40, 5, dtype=F64)
    drawn = torch.stack([centaur.private_mean(zero, 0.5, 3.0, make_key(seed, "noise")) for seed in range(100)])
    assert float(drawn.std()) == pytest.approx(3 * 0.5 / 50, rel=0.03)  # 20,000 numbers: 0.5 % is one deviation


def test_slope_of_a_power_is_its_exponent():
    slope, half = centaur.line([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)])
    assert slope == pytest.approx(1.5)
    assert half == pytest.approx(0, abs=1e-6)


@pytest.mark.long
def test_the_plateau_is_as_wide_as_the_noise_and_the_dimension():
    """Shen et al. 2023: the radius of the ball is as 1 / epsilon and d, not d^1.5."""
    far = {
        (d, noise): centaur.plateau(d, noise, 1, clients=2000, rounds=45)[0] for d in (8, 32) for noise in (5.0, 20.0)
    }
    for d in (8, 32):
        assert math.log(far[d, 20.0] / far[d, 5.0], 4) == pytest.approx(1, abs=0.15)
    for noise in (5.0, 20.0):
        assert math.log(far[32, noise] / far[8, noise], 4) == pytest.approx(1, abs=0.25)


@pytest.mark.long
def test_without_noise_there_is_no_plateau():
    far, cut = centaur.plateau(16, 0.0, 1, clients=1000, rounds=45)
    assert far < 1e-4
    assert cut == 0
