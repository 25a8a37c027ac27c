"""Intervals of single sites over their test rows and the seeds, against plain loops and on simulated data."""

import json
import shutil

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import brier_score_loss, log_loss, mean_absolute_error
from test_verdict import write

from perfed.engine.metrics import METRICS, computed
from perfed.report import load_runs, verdict
from perfed.report.paired import RESAMPLES
from perfed.report.site_intervals import FEW_RESAMPLES


def keep(where, ys, outputs, marks):
    """Predictions of a run: of each client targets, outputs, and a number that says which rows they are."""
    (where / "predictions").mkdir()
    np.savez(
        where / "predictions" / "round-0000.npz",
        ids=np.array([f"site-{number}" for number in range(len(ys))]),
        counts=np.array([len(y) for y in ys]),
        marks=np.array(marks, dtype=np.uint32),
        targets=np.concatenate(ys),
        outputs=np.concatenate(outputs),
    )


def of_values(folder, metric, tables, marks):
    """Runs ``method -> seed -> client -> (targets, outputs)`` with their predictions, and what is said of them."""
    runs = []
    for method, seeds in tables.items():
        for seed, clients in enumerate(seeds):
            values = [computed(metric, *client) for client in clients]
            runs.append(write(folder, method, seed, values, metric=metric))
            keep(runs[-1], *(list(part) for part in zip(*clients, strict=True)), marks(seed, len(clients)))
    return runs


def right_or_wrong(right):
    """Targets and logits of two classes of which ``right`` says where the model is right."""
    y = np.arange(len(right)) % 2
    return y, np.eye(2)[np.where(right, y, 1 - y)]


def accuracies(folder, tables, marks):
    """The same of ``method -> seed -> client -> whether each row is right``."""
    told = {m: [[right_or_wrong(c) for c in clients] for clients in seeds] for m, seeds in tables.items()}
    return of_values(folder, "accuracy", told, marks)


def other_rows(seed, clients):
    return [100 * seed + client for client in range(clients)]


def same_rows(seed, clients):
    return list(range(clients))


def brute(seeds, same, draws, rng, metric=lambda part: np.mean(part)):
    """Percentiles of ``metric(method's rows) - metric(base's)``: seeds, then rows, one draw after the other.

    ``seeds``: of each seed a pair of arrays whose first axis is the rows.
    """
    found = []
    for _ in range(draws):
        rows, total = {}, []
        for chosen in rng.integers(len(seeds), size=len(seeds)):
            own, base = seeds[chosen]
            if not same or not rows:
                rows = {"drawn": rng.integers(len(own), size=len(own))}
            total.append(metric(own[rows["drawn"]]) - metric(base[rows["drawn"]]))
        found.append(np.mean(total))
    return np.nanpercentile(found, (2.5, 97.5))


@pytest.mark.parametrize("same", [True, False], ids=["the same rows", "other rows"])
def test_it_is_that_of_a_plain_loop(tmp_path, same):
    rng = np.random.default_rng(5)
    sizes = [[40, 40, 40], [7, 7, 7]] if same else [[40, 30, 50], [7, 9, 4]]
    tables = {
        method: [[rng.random(sizes[site][seed]) < p + 0.05 * seed for site in (0, 1)] for seed in range(3)]
        for method, p in (("fedavg", 0.7), ("local", 0.55))
    }
    sites = verdict(load_runs(accuracies(tmp_path, tables, same_rows if same else other_rows))).sites
    for number, site in enumerate(sites):
        pairs = [(tables["fedavg"][seed][number] * 1.0, tables["local"][seed][number] * 1.0) for seed in range(3)]
        expected = brute(pairs, same, 6000, rng)
        assert site.over_rows and site.gain.mean == pytest.approx(np.mean([a.mean() - b.mean() for a, b in pairs]))
        # The 2.5th percentile of 2000 draws has a standard error of a 60th of the width.
        assert (site.gain.low, site.gain.high) == pytest.approx(expected, abs=0.1 * np.ptp(expected))


def test_a_metric_that_is_no_mean_over_rows_is_computed_anew(tmp_path):
    rng = np.random.default_rng(6)

    def survived(strength):
        hazard = rng.normal(size=(25, 1))
        t = rng.exponential(np.exp(-strength * hazard[:, 0]))
        return np.stack([t, rng.random(25) < 0.7], 1), hazard

    tables = {"fedavg": [[survived(2.0)] for _ in range(2)], "local": [[survived(0.3)] for _ in range(2)]}
    for seed in range(2):  # the same rows of both methods
        tables["local"][seed][0] = (tables["fedavg"][seed][0][0], tables["local"][seed][0][1])
    (site,) = verdict(load_runs(of_values(tmp_path, "c-index", tables, other_rows))).sites
    pairs = [tuple(np.hstack(tables[method][seed][0]) for method in ("fedavg", "local")) for seed in range(2)]
    expected = brute(pairs, False, 2000, rng, lambda part: METRICS["c-index"].score(part[:, :2], part[:, 2:]))
    assert site.over_rows and RESAMPLES > FEW_RESAMPLES
    assert (site.gain.low, site.gain.high) == pytest.approx(expected, abs=0.3 * np.ptp(expected))


def test_of_errors_lower_is_better(tmp_path):
    rng = np.random.default_rng(8)
    y = [rng.normal(size=30) for _ in range(2)]
    tables = {
        method: [[(y[seed], (y[seed] + scale * rng.normal(size=30))[:, None])] for seed in range(2)]
        for method, scale in (("fedavg", 0.1), ("local", 2.0))
    }
    found = verdict(load_runs(of_values(tmp_path, "mse", tables, same_rows)))
    assert found.sites[0].gain.sign == 1 and found.sites[0].over_rows
    pairs = [tuple(-((tables[m][s][0][1][:, 0] - y[s]) ** 2) for m in ("fedavg", "local")) for s in range(2)]
    expected = brute(pairs, True, 6000, rng)
    gain = found.sites[0].gain
    assert (gain.low, gain.high) == pytest.approx(expected, abs=0.1 * np.ptp(expected))


def covered(folder, simulate, marks, sites):
    """At how many of ``sites`` simulated sites of a kind the interval holds the gain that is true."""
    tables, true = simulate(sites)
    runs = accuracies(folder, tables, marks)
    found = [site.gain for site in verdict(load_runs(runs)).sites]
    return sum(gain.low <= true <= gain.high for gain in found)


def simulated(seeds, rows, same, rng, of_seed=0.0):
    """Methods that are right with a chance of their own at each row, the same for both, and at each seed."""

    def simulate(sites):
        tables = {"fedavg": [[] for _ in range(seeds)], "local": [[] for _ in range(seeds)]}
        for _ in range(sites):
            hard = rng.random(rows)
            for seed in range(seeds):
                if not same:
                    hard = rng.random(rows)
                luck = of_seed * rng.choice((-1, 1))
                tables["fedavg"][seed].append((hard < 0.75 + luck) & (rng.random(rows) < 0.95))
                tables["local"][seed].append((hard > 0.4) & (rng.random(rows) < 0.95))
        return tables, 0.95 * (0.75 - 0.6)

    return simulate


@pytest.mark.parametrize(("seeds", "same"), [(1, False), (5, True)], ids=["one seed", "five seeds"])
def test_it_holds_the_truth_in_95_of_100_cases(tmp_path, seeds, same):
    sites, rng = 400, np.random.default_rng(11)
    hits = covered(tmp_path, simulated(seeds, 150, same, rng), same_rows if same else other_rows, sites)
    low, high = binom.ppf((0.001, 0.999), sites, 0.95)
    assert low <= hits <= high, hits / sites


def test_with_other_rows_for_each_seed_it_is_rather_too_wide(tmp_path):
    sites, rng = 200, np.random.default_rng(11)
    hits = covered(tmp_path, simulated(8, 60, False, rng, of_seed=0.1), other_rows, sites)
    assert hits >= binom.ppf(0.001, sites, 0.95), hits / sites


def test_rows_that_are_the_same_with_every_seed_are_drawn_once(tmp_path):
    """As if they were others each time, the interval of five seeds would hold the truth far too seldom."""
    rng = np.random.default_rng(12)
    assert covered(tmp_path, simulated(5, 150, True, rng), other_rows, 200) < 0.8 * 200


def test_few_rows_and_seeds_that_agree_are_no_certainty(tmp_path):
    """Each seed gives the same: over the seeds alone the gain was certain, and with one seed there was no interval."""
    fedavg, local = np.arange(10) < 8, np.arange(10) < 7
    runs = accuracies(tmp_path, {"fedavg": [[fedavg]] * 3, "local": [[local]] * 3}, same_rows)
    found = verdict(load_runs(runs))
    gain = found.sites[0].gain
    assert gain.mean == pytest.approx(0.1) and gain.low <= 0.0 < 0.1 < gain.high and gain.sign == 0
    assert "[95 % interval over its test rows and the seeds]" in found.site_table.header[4]
    assert found.sentences[-1].endswith(
        "gains over the local model chosen for it at 0, loses at 0, cannot be told from it at 1 "
        "(intervals over its test rows and the seeds)."
    )
    assert json.loads(json.dumps(found.to_dict()))["sites"][0]["over_rows"] is True
    one = verdict([run for run in load_runs(runs) if run.seed == 0]).sites[0]
    assert one.over_rows and one.gain.low <= 0.0 < one.gain.high
    for where in runs:  # a directory that was passed on without them
        shutil.rmtree(where / "predictions")
    without = verdict(load_runs(runs))
    gain = without.sites[0].gain
    assert (gain.low, gain.high) == pytest.approx((0.1, 0.1)) and not without.sites[0].over_rows
    assert "[95 % interval over the seeds alone]" in without.site_table.header[4]
    assert without.sentences[-1].endswith(
        "gains over the local model chosen for it at 1, loses at 0, cannot be told from "
        "it at 0 (intervals over the seeds alone)."
    )


@pytest.mark.parametrize("fault", ["other rows of one method", "not what is reported", "one run without"])
def test_rows_that_do_not_fit_are_not_used(tmp_path, fault):
    rng = np.random.default_rng(2)
    tables = {m: [[rng.random(20) < 0.5, rng.random(20) < 0.5] for _ in range(2)] for m in ("fedavg", "local")}
    runs = accuracies(tmp_path, tables, same_rows)
    file = runs[0] / "predictions" / "round-0000.npz"
    arrays = dict(np.load(file))
    if fault == "other rows of one method":
        arrays["marks"] = np.array([7, 1], dtype=np.uint32)
    elif fault == "not what is reported":
        arrays["outputs"][:20] = np.eye(2)[arrays["targets"][:20]]
    np.savez(file, **arrays)
    if fault == "one run without":
        file.unlink()
    found = verdict(load_runs(runs))
    assert [site.over_rows for site in found.sites] == [False, fault != "one run without"]
    both = "over its test rows and the seeds, at some sites over the seeds alone"
    assert (both in found.sentences[-1]) is (fault != "one run without")


def test_parts_of_rows_have_the_metrics_as_their_means():
    rng = np.random.default_rng(1)
    for classes in (2, 4):
        y, logits = rng.integers(0, classes, 30), rng.normal(size=(30, classes))
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        own = {name: METRICS[name].rows(y, logits) for name in ("accuracy", "log-loss", "brier")}
        assert all(part.shape == (30,) for part in own.values())
        assert own["accuracy"].mean() == pytest.approx(METRICS["accuracy"].score(y, logits))
        assert own["log-loss"].mean() == pytest.approx(log_loss(y, p, labels=range(classes)))
        if classes == 2:
            assert own["brier"].mean() == pytest.approx(brier_score_loss(y, p[:, 1]))
        assert own["brier"].mean() == pytest.approx(METRICS["brier"].score(y, logits))
    y, values = rng.normal(size=(30, 2)), rng.normal(size=(30, 2))
    assert METRICS["mse"].rows(y, values).mean() == pytest.approx(np.mean((y - values) ** 2))
    assert METRICS["mae"].rows(y, values).mean() == pytest.approx(mean_absolute_error(y, values))


def logits(rng, y, good):
    """Of two classes; ``good``: better than chance, else the same for every row but for rounding."""
    if good:
        return rng.normal(0, 1, (len(y), 2)) + 2 * np.eye(2)[y]
    return np.tile([0.25, 0.75], (len(y), 1)) * (1 + 1e-8 * rng.normal(size=(len(y), 1)))


def test_a_model_that_says_the_same_of_everybody_is_named_and_not_to_be_used(tmp_path):
    """Outputs are compared and not metrics: rows of one class, or few, tell nothing of a model."""
    rng = np.random.default_rng(3)
    mixed, one, few = (
        np.arange(40) % 4 // 3,
        np.ones(12, dtype=int),
        np.array([1, 0, 1]),
    )  # three of four are of class 0
    sites = [mixed, one, few, mixed]
    said = {"hetfedrep": (False, False, False, True), "local": (True, True, True, True)}
    tables = {
        method: [[(y, logits(rng, y, good)) for y, good in zip(sites, each, strict=True)] for _ in range(2)]
        for method, each in {**said, "sklearn:majority": (False,) * 4}.items()  # which is meant to
    }
    for seed in tables["hetfedrep"]:
        seed[0] = (mixed, seed[0][1][:, ::-1])  # class 0: right of three of four
    for seed in tables["local"]:
        seed[0] = (mixed, np.eye(2)[1 - mixed] + rng.normal(0, 0.1, (40, 2)))  # worse than that
    found = verdict(load_runs(of_values(tmp_path, "accuracy", tables, other_rows)))
    assert [text for text in found.sentences if "everybody" in text] == [
        "hetfedrep says the same of everybody at 2 of 4 sites (site-0, site-1): it has learnt nothing there."
    ]
    means = {method: np.mean([computed("accuracy", *seed[0]) for seed in of]) for method, of in tables.items()}
    assert means["hetfedrep"] > means["local"] and found.best("site-0") == "local"


def test_answers_without_a_doubt_and_few_seeds_are_not_taken_for_nothing(tmp_path):
    """A tree that is right of rows of one class; a model that says the same with one seed of three."""
    rng, one, mixed = np.random.default_rng(5), np.zeros(9, dtype=int), np.arange(20) % 2
    sure = np.log(np.maximum(np.eye(2)[one], np.finfo(float).tiny))
    good = [(mixed, logits(rng, mixed, True)) for _ in range(3)]
    tables = {
        "sklearn:random-forest": [[(one, sure), own] for own in good],
        "local": [[(one, logits(rng, one, True)), own] for own in [(mixed, logits(rng, mixed, False)), *good[1:]]],
    }
    found = verdict(load_runs(of_values(tmp_path, "accuracy", tables, other_rows)))
    assert not [text for text in found.sentences if "everybody" in text]
    values = [[(rng.normal(size=(8, 1)), np.full((8, 1), 3.0))]]
    more = {"local": values, "fedavg": [[(values[0][0][0], rng.normal(size=(8, 1)))]]}
    (tmp_path / "values").mkdir()
    found = verdict(load_runs(of_values(tmp_path / "values", "mse", more, other_rows)))
    assert "local says the same of everybody at 1 of 1 sites (site-0): it has learnt nothing there." in found.sentences
