"""Results do not depend on how clients are cut into chunks or whether they sit behind a wire."""

from __future__ import annotations

import pytest
import torch
from engines import CodecEngine, blobs, difference, make, network, serve, train

from perfed.method.registry import method_names
from perfed.training.plan import Path, Plan, PlanSettings

pytestmark = pytest.mark.every_method("name")
SIZES, DIMS = (13, 9, 9, 6, 4, 3, 2, 1, 1), (4, 3, 6)
WAYS = {
    "stacked": {"engine": "stacked"},
    "chunks of 1": {"engine": "stacked", "chunk": 1},
    "chunks of 7": {"engine": "stacked", "chunk": 7},
    "codec": {"engine": "stacked", "chunk": 4, "runner": CodecEngine},
    "codec, one by one": {"engine": "sequential", "runner": CodecEngine},
}
PERSONAL_EMBEDDING = {"placement": {"embedding": "personal"}}
VARIANTS = {
    **{name: (name, {}) for name in method_names()},
    "fedavg with personal embeddings": ("fedavg", PERSONAL_EMBEDDING),
    "fedrep with sgd and momentum": ("fedrep", {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}),
    "fedrep in steps": ("fedrep", {"local_steps": 6}),
}


def federation(name: str):
    """Inputs of different lengths wherever the method can deal with them."""
    personal = name in ("local", "hetfedrep") or name.startswith("flic") or "personal" in name
    return blobs(SIZES, dims=DIMS if personal else (4,))


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_runs_and_their_metrics_agree_to_rounding_after_three_rounds(name):
    method, settings = VARIANTS[name]
    runs, scores = {}, {}
    for way, options in {"sequential": {"engine": "sequential"}, **WAYS}.items():
        model = network(dropout=0.3, batch_norm=method == "fedbn")
        server = serve(make(method, **settings), federation(name), model=model, rate=0.6, rounds=3, **options)
        runs[way] = train(server, 2)
        record = server.round(3, measure="test")
        assert set(record.after) == set(record.participants)
        scores[way] = (server.evaluate("test"), record.after, record.train_loss)
        assert scores[way][0].keys() == set(server.engine.federation.ids)
    for way in WAYS:
        assert difference(runs[way], runs["sequential"]) <= 1e-8, way
        assert scores[way][2] == pytest.approx(scores["sequential"][2], rel=1e-8), way
        for found, expected in zip(scores[way][:2], scores["sequential"][:2], strict=True):
            assert found.keys() == expected.keys()
            for client, values in found.items():
                assert values == pytest.approx(expected[client], rel=1e-8), (way, client)
    assert difference(runs["codec, one by one"], runs["sequential"]) == 0  # bytes change nothing at all


@pytest.mark.parametrize("name", method_names())
def test_float32_runs_agree_to_rounding_after_one_round_of_sgd(name):
    runs = [
        train(
            serve(make(name, optimizer="sgd", lr=1e-3), federation(name), dtype=torch.float32, rounds=1, **options), 1
        )
        for options in ({"engine": "sequential"}, *WAYS.values())
    ]
    for run in runs[1:]:
        assert difference(run, runs[0]) <= 1e-4


@pytest.mark.parametrize("name", method_names())
def test_the_recorded_plan_of_an_automatic_run_gives_the_same_bits_again(name):
    plan, model = Plan("auto", threads=1), network(dropout=0.3, batch_norm=name == "fedbn")
    first = train(serve(make(name), federation(name), model=model, rate=0.8, plan=plan), 2)
    first.evaluate("test")
    recorded = plan.to_dict()
    assert recorded["paths"] or plan.reasons  # batch-norm leaves nothing to choose
    runs = []
    for _ in range(2):
        again = PlanSettings.model_validate(recorded).build()
        runs.append(train(serve(make(name), federation(name), model=model, rate=0.8, plan=again), 2))
        runs[-1].evaluate("test")
        assert again.to_dict() == recorded  # nothing is decided anew
    assert difference(runs[0], runs[1]) == 0 and difference(runs[0], first) == 0


@pytest.mark.parametrize("name", [name for name in method_names() if name != "fedbn"])  # batch-norm is never cut up
def test_chunks_that_run_at_the_same_time_give_the_same_bits(name):
    plan, model = Plan("auto", threads=1), network(dropout=0.3)
    train(serve(make(name), federation(name), model=model, plan=plan), 2).evaluate("test")
    runs = []
    for threads in (1, 3):
        pairs = Plan("auto", threads=threads, paths={kind: Path(2, 1) for kind in plan.paths})
        runs.append(train(serve(make(name), federation(name), model=model, plan=pairs), 2))
        runs[-1].evaluate("test")
        assert set(pairs.paths) == set(plan.paths)
    assert difference(*runs) == 0


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
