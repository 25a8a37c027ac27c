from __future__ import annotations

import pytest
import torch
from scipy import stats

from perfed import rng

WORDS = [(3, "fit", 5, 7), (4, "fit", 5, 7), (3, "fit ", 5, 7), (3, "fit", 6, 7), (3, "fit", 5, 8), (3, "fit", 7, 5)]


def test_a_key_depends_on_every_word_and_on_their_order():
    keys = {int(rng.key(*words)) for words in WORDS} | {int(rng.key(3, "fit", 5)), int(rng.key(3, "fit", 5, 7, 0))}
    assert len(keys) == len(WORDS) + 2


def test_keys_of_many_counters_are_all_different():
    keys = rng.key(0, "purpose", torch.arange(300)[:, None], torch.arange(300))
    assert keys.shape == (300, 300) and keys.unique().numel() == 90_000


def test_vectors_of_words_give_the_keys_of_the_scalars():
    rounds, steps = torch.arange(4)[:, None], torch.tensor([0, 9, -1])
    keys = rng.key(torch.tensor([5, 6, 7]), "p", rounds, steps)
    alone = [[int(rng.key(s, "p", r, t)) for s, t in ((5, 0), (6, 9), (7, -1))] for r in range(4)]
    assert keys.tolist() == alone


def test_negative_and_very_large_seeds_are_seeds_too():
    keys = {int(rng.key(seed, "p")) for seed in (-1, 0, 2**63 - 1, 2**64 + 7, -(2**63))}
    assert len(keys) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(dtype):
    draw = rng.uniform(rng.key(1, "u", torch.arange(200)), 100, dtype)
    assert draw.shape == (200, 100) and draw.dtype == dtype
    assert float(draw.min()) >= 0 and float(draw.max()) < 1
    assert stats.kstest(draw.flatten().numpy(), "uniform").pvalue > 1e-3
    # Neighbouring keys and neighbouring numbers are not correlated (standard error 0.007).
    assert abs(torch.corrcoef(torch.stack([draw[:-1].flatten(), draw[1:].flatten()]))[0, 1]) < 0.03
    assert abs(torch.corrcoef(torch.stack([draw[:, :-1].flatten(), draw[:, 1:].flatten()]))[0, 1]) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_standard_normal(dtype):
    draw = rng.normal(rng.key(2, "n", torch.arange(200)), 101, dtype)
    assert draw.shape == (200, 101) and draw.dtype == dtype and bool(torch.isfinite(draw).all())
    assert stats.kstest(draw.flatten().numpy(), "norm").pvalue > 1e-3
    # Both numbers that come from one hash (cosine and sine) are normal and uncorrelated.
    cosine, sine = draw[:, 0:100:2].flatten(), draw[:, 1:100:2].flatten()
    assert stats.kstest(sine.numpy(), "norm").pvalue > 1e-3
    assert abs(torch.corrcoef(torch.stack([cosine, sine]))[0, 1]) < 0.04


@pytest.mark.parametrize("draw", [rng.normal, rng.uniform, rng.random_bits])
def test_a_longer_draw_starts_with_the_shorter_one(draw):
    keys = rng.key(3, "prefix", torch.arange(5))
    longest = draw(keys, 12)
    for count in range(1, 12):
        assert torch.equal(draw(keys, count), longest[:, :count])


def test_order_is_a_uniform_random_permutation():
    orders = rng.draw_permutation(rng.random_bits(rng.key(4, "order", torch.arange(6000)), 3))
    assert torch.equal(orders.sort(dim=1).values, torch.arange(3).expand(6000, 3))
    counts = torch.bincount((orders * torch.tensor([9, 3, 1])).sum(1))
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("count", [0, 1, 7, 999, 1000, 1001])
def test_the_first_of_an_order_need_no_order_of_the_others(count):
    keys = rng.key(3, "first", torch.arange(1000))
    for given in (keys, keys % 5):  # the second has ties, which keep their order
        assert torch.equal(rng.draw_subset(given, count), torch.argsort(given, stable=True)[:count])


def test_torch_seed_is_keyed_and_leaves_the_global_generator_alone():
    torch.manual_seed(17)
    before = torch.random.get_rng_state()
    draws = []
    for words in ("a", "a", "b"):
        with rng.seed_torch(rng.key(0, words)):
            draws.append(torch.rand(4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_the_global_generator_comes_back_even_after_an_error():
    before = torch.random.get_rng_state()
    with pytest.raises(KeyError), rng.seed_torch(rng.key(0)):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its generators are given the seed as well")
def test_a_seed_writes_down_no_stack_for_devices_that_are_not_there(monkeypatch):
    """As torch.manual_seed does, which takes longer than building a small layer."""
    monkeypatch.setattr("traceback.format_stack", lambda: pytest.fail("the stack was written down"))
    with rng.seed_torch(rng.key(0, "a")):
        torch.rand(1)


def test_noise_of_a_secret_is_normal_and_of_that_secret_message_and_key_alone():
    one = rng.Noise(b"a" * 32, b"m" * 32)
    keys = rng.key(0, torch.arange(4))
    draws = one.draw(keys, 20_001, torch.float64)
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3
    others = [rng.Noise(b"b" * 32, b"m" * 32), rng.Noise(b"a" * 32, b"n" * 32)]
    rows = torch.cat([draws, *(other.draw(keys[:1], 20_001, torch.float64) for other in others)])
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.04  # five standard deviations
    assert torch.equal(draws, rng.Noise(b"a" * 32, b"m" * 32).draw(keys, 20_001, torch.float64))
    assert torch.equal(one.draw(keys, 9, once=True), others[1].draw(keys, 9, once=True))
    assert not torch.equal(one.draw(keys, 9, once=True), one.draw(keys, 9))
    assert torch.equal(rng.PLAIN.draw(keys, 9), rng.draw_long_normal(keys, 9))
    assert "aaa" not in repr(one)
