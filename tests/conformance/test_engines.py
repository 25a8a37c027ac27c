"""Results do not depend on how clients are cut into chunks or whether they sit behind a wire."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engines import blobs, difference, make, network, serve, train

from perfed.method.registry import method_names
from perfed.testing import checks

pytestmark = pytest.mark.every_method("name")
METHODS = {name: partial(make, name) for name in method_names()}
VARIANTS = {
    **METHODS,
    "fedavg with personal embeddings": partial(make, "fedavg", placement={"embedding": "personal"}),
    "fedrep with sgd and momentum": partial(make, "fedrep", optimizer="sgd", momentum=0.9, weight_decay=0.1),
    "fedrep in steps": partial(make, "fedrep", local_steps=6),
}


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_float64_runs_and_their_metrics_agree_to_rounding_after_three_rounds(name):
    checks.check_engines(VARIANTS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_float32_runs_agree_to_rounding_after_one_round_of_sgd(name):
    checks.check_engines_in_float32(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_the_recorded_plan_of_an_automatic_run_gives_the_same_bits_again(name):
    checks.check_recorded_plan(METHODS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_chunks_that_run_at_the_same_time_give_the_same_bits(name):
    checks.check_parallel_chunks(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_clients_are_not_mixed(name):
    checks.check_clients_are_separate(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_all_state_is_declared(name):
    checks.check_state_is_declared(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_decides(name):
    checks.check_seed(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_ends_with_the_same_bits(name):
    checks.check_resumed_run(METHODS[name])


def test_the_seed_matters():
    runs = [train(serve(make("hetfedrep"), blobs(), seed=seed), 1) for seed in (0, 0, 1)]
    assert difference(runs[0], runs[1]) == 0 and difference(runs[0], runs[2]) > 1e-3


def test_nothing_depends_on_or_disturbs_the_global_generator():
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        runs.append(train(serve(make("flic-hl"), blobs(), model=network(dropout=0.5)), 1))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert difference(*runs) == 0


def test_traffic_is_counted_in_bytes():
    server = serve(make("fedavg"), blobs((5, 4, 3)))
    record = server.round(1)
    size = sum(t.numel() * 8 for t in server.state.shared.values())
    assert record.bytes_down == 3 * size
    assert record.bytes_up == 3 * (size + 8)  # the model and the number of samples
    assert serve(make("local"), blobs((5, 4, 3))).round(1).bytes_down == 0
