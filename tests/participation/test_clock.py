"""Speed models: distributions, and times that depend on nothing but seed, client and round."""

from __future__ import annotations

import numpy as np
import pytest
from engines import blobs, make, serve
from pydantic import ValidationError
from scipy import stats

from perfed import rng
from perfed.errors import PerfedError
from perfed.participation.clock import Clock, Population, Timer
from perfed.participation.schedule import order_statistic


def people(count: int, *, sizes=None, group=None, batch: int = 10, epochs: int = 2) -> Population:
    ids = tuple(f"{i:05d}" for i in range(count))
    sizes = np.full(count, 20) if sizes is None else np.array(sizes)
    return Population(
        ids,
        rng.encode_texts(ids),
        sizes,
        -(-sizes // batch),
        None if group is None else np.array(group),
        lambda _: epochs,
    )


def times(clock: dict, who: Population, round_: int = 1, seed: int = 0) -> np.ndarray:
    return Timer(Clock(**clock), who, seed, 10).compute_times(np.arange(len(who)), round_)


def trace(tmp_path, *lines: str) -> dict:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["client,round,seconds", *lines]) + "\n")
    return {"speeds": "trace", "trace": {"file": str(file)}}


def test_without_a_speed_model_everyone_takes_one_second():
    assert times({}, people(3)).tolist() == [1.0, 1.0, 1.0]


def test_fixed_speeds_are_exponential_and_the_same_in_every_round():
    who = people(4000)
    found = times({"speeds": "fixed", "fixed": {"rate": 2.0}}, who)
    assert stats.kstest(found, stats.expon(scale=0.5).cdf).pvalue > 1e-3
    assert (times({"speeds": "fixed", "fixed": {"rate": 2.0}}, who, round_=7) == found).all()
    assert not (times({"speeds": "fixed", "fixed": {"rate": 2.0}}, who, seed=1) == found).any()


@pytest.mark.parametrize("n", [1, 5, 16, 20])
def test_the_nth_fastest_client_takes_as_long_as_the_theory_says(n):
    who = people(20)
    found = [np.sort(times({"speeds": "fixed"}, who, seed=seed))[n - 1] for seed in range(1500)]
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - order_statistic(n, 20)) < 4 * error
    assert order_statistic(n, 20) == pytest.approx(sum(1 / j for j in range(20 - n + 1, 21)))  # H_N - H_{N-n}


@pytest.mark.long
@pytest.mark.parametrize("parameter", ["rate", "mean"])
def test_dynamic_speeds_are_exponential_with_a_parameter_of_each_client(parameter):
    who = people(50)
    clock = {"speeds": "dynamic", "dynamic": {"parameter": parameter}}
    found = np.stack([times(clock, who, round_) for round_ in range(1, 1001)])
    scale = found.mean(0)
    # Divided by its own mean, every client's time is exponential; a mean of 1000 is known to about 3 %.
    assert stats.kstest((found / scale).flatten()[::7], stats.expon.cdf).pvalue > 1e-3
    own = 1 / scale if parameter == "rate" else scale
    assert stats.kstest(own, stats.uniform(1 / 50, 1 - 1 / 50).cdf).pvalue > 1e-3
    assert not (found[0] == found[1]).any()


@pytest.mark.long
def test_dynamic_speeds_do_not_come_near_zero_with_few_clients():
    clock = {"speeds": "dynamic", "dynamic": {"parameter": "mean"}}
    found = np.stack([times(clock, people(2), seed=seed) for seed in range(4000)])
    assert found.mean() == pytest.approx((1 / 2 + 1) / 2, rel=0.04)  # lambda ~ U[1/2, 1]; from 0 on: 0.5


def test_stragglers_are_a_share_of_the_clients_and_their_numbers_are_means():
    who = people(1000)
    clock = {"speeds": "stragglers", "stragglers": {"share": 0.3, "fast": 0.1, "slow": 10.0}}
    found = [times(clock, who, seed=seed) for seed in range(20)]
    assert np.mean([f.mean() for f in found]) == pytest.approx(0.7 * 0.1 + 0.3 * 10, rel=0.05)
    # Fewer than 1 % of the fast clients take longer than 0.5 seconds, fewer than 5 % of the slow ones less.
    assert np.mean([(f > 0.5).mean() for f in found]) == pytest.approx(0.3 * np.exp(-0.05) + 0.7 * np.exp(-5), rel=0.03)


def test_correlated_speeds_are_the_fixed_ones_sorted_by_label_group():
    group = np.arange(30) % 3
    who = people(30, group=group)
    found = times({"speeds": "correlated"}, who)
    assert found[group == 0].max() < found[group == 1].min() and found[group == 1].max() < found[group == 2].min()
    assert sorted(found) == sorted(times({"speeds": "fixed"}, who))
    assert sorted(found[group == 0]) != list(found[group == 0])  # within a group at random


def test_correlated_speeds_need_groups():
    with pytest.raises(PerfedError, match=r"clock\.speeds = 'correlated' needs data whose clients are in groups"):
        Timer(Clock(speeds="correlated"), people(4), 0, 1)


def test_steps_count_the_mini_batches_of_a_round():
    who = people(3, sizes=[1, 10, 21], batch=10, epochs=4)
    assert times({"speeds": "steps", "steps": {"seconds": 0.5}}, who).tolist() == [2.0, 2.0, 6.0]


@pytest.mark.parametrize("speeds", ["fixed", "dynamic", "stragglers", "correlated", "steps"])
def test_a_clients_time_does_not_depend_on_who_else_is_asked(speeds):
    who = people(40, group=np.arange(40) % 4, sizes=np.arange(1, 41))
    timer = Timer(Clock(speeds=speeds), who, 3, 10)
    everyone = timer.compute_times(np.arange(40), 5)
    some = np.array([31, 2, 17])
    assert (timer.compute_times(some, 5) == everyone[some]).all()
    assert (everyone > 0).all() and np.isfinite(everyone).all()


@pytest.mark.long
def test_the_steps_of_a_round_are_those_of_all_its_phases():
    federation = blobs((5, 21, 10))
    for method, epochs in (
        (make("fedavg", local_epochs=3), 3),
        (make("fedrep", local_epochs=3, body_epochs=2), 5),
        (make("fedpac", local_epochs=3, head_epochs=1), 4),
        (make("feddar-wa", local_epochs=3, head_epochs=4), 7),
        (make("ditto", local_epochs=3), 6),  # two models
        (make("apfl", local_epochs=3), 6),
        (make("fedem", local_epochs=3, components=4), 12),
        (make("pfedme", local_epochs=3, inner_steps=2), 6),
        (make("l2gd", p=0.25), 4),  # on average
        (make("hf-maml", local_epochs=3), 12),
        (make("hf-maml", local_epochs=3, variant="first-order"), 6),
    ):
        server = serve(method, federation, clock=Clock(speeds="steps", steps={"seconds": 1.0}))
        server.prepare()
        assert server.round(1).replied == {"c0": 2.0 * epochs, "c1": 6.0 * epochs, "c2": 3.0 * epochs}


def test_the_steps_are_those_of_the_round():
    federation = blobs((5, 21, 10))
    for method, epochs in (
        (make("fedrep", local_epochs=3, body_epochs=2, body_from_round=2), (3, 5)),
        (make("feddar-wa", local_epochs=3, head_epochs=4, warmup_rounds=1, warmup_epochs=2), (2, 7)),
        (make("fedavg-multi-head", local_epochs=3, warmup_rounds=1, warmup_epochs=2), (2, 3)),
    ):
        server = serve(method, federation, clock=Clock(speeds="steps", steps={"seconds": 1.0}))
        server.prepare()
        assert tuple(server.round(number).replied["c0"] / 2 for number in (1, 2)) == epochs


def test_times_that_would_not_add_up_are_refused():
    for wrong in ({"communication": 1e308}, {"fixed": {"rate": 1e-320}}, {"steps": {"seconds": float("inf")}}):
        with pytest.raises(ValidationError):
            Clock(**wrong)


def test_a_trace_is_followed_and_rounds_it_does_not_name_take_the_star(tmp_path):
    clock = trace(tmp_path, "00000,*,1.5", "00001,2,4", "00001,*,0", "00002,1,7", "00002,2,8")
    timer = Timer(Clock(**clock), people(3), 0, 2)
    assert timer.compute_times(np.arange(3), 1).tolist() == [1.5, 0.0, 7.0]
    assert timer.compute_times(np.array([2, 1]), 2).tolist() == [8.0, 4.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["00000,*,1"], "lacks client '00001'; every client needs a line"),
        (["00000,*,1", "00001,1,1"], "lacks round 2 of client '00001'"),
        (["00000,*,-1"], r"line 2: seconds must be from 0 to 1e.09 and round at least 1 \(given: -1.0, \*\)"),
        (["00000,*,nan"], "line 2: seconds must be from 0"),
        (["00000,0,1"], "line 2: seconds must be from 0 to 1e.09 and round at least 1"),
        (["00000,x,1"], r"line 2: round must be a number or \*, seconds a number"),
        (["00000,*,fast"], "line 2: round must be a number or"),
        (["00000,*"], "line 2 needs client, round and seconds"),
        (["00000,1,1", "00000,1,2"], "line 3 says this client and round again"),
        (["00000,1"], "line 2 needs client, round and seconds"),
        (['"' + "x" * 140000], "cannot be read: it is not CSV text"),
    ],
)
def test_traces_that_cannot_be_used_are_refused(tmp_path, lines, message):
    with pytest.raises(PerfedError, match=message) as error:
        Timer(Clock(**trace(tmp_path, *lines)), people(2), 0, 2)
    assert "clock.trace.file" in str(error.value) and "\n" not in str(error.value)


def test_a_trace_without_its_heading_says_so(tmp_path):
    for heading in ("client;round;seconds", "client, round, seconds", "00000,*,1"):
        (tmp_path / "trace.csv").write_text(f"{heading}\n00000,*,1\n")
        with pytest.raises(PerfedError, match=r"the first line must be client,round,seconds \(given: "):
            Timer(Clock(speeds="trace", trace={"file": str(tmp_path / "trace.csv")}), people(1), 0, 1)


def test_a_trace_whose_name_no_file_can_have_is_refused():
    with pytest.raises(PerfedError, match=r"clock\.trace\.file = .* cannot be read"):
        Timer(Clock(speeds="trace", trace={"file": "a\0b"}), people(2), 0, 1)


def test_a_trace_that_is_not_there_is_refused():
    with pytest.raises(ValidationError, match="home"):
        Clock(speeds="trace", trace={"file": "~no-such-user/x.csv"})
    with pytest.raises(PerfedError, match=r"clock\.speeds = 'trace' needs clock\.trace\.file"):
        Timer(Clock(speeds="trace"), people(2), 0, 2)
    with pytest.raises(PerfedError, match=r"clock\.trace\.file = '/.*/nowhere\.csv': cannot be read: No such file"):
        Timer(Clock(speeds="trace", trace={"file": "nowhere.csv"}), people(2), 0, 2)
