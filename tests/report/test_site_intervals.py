"""Intervals of single sites over their test rows and the seeds, against plain formulas and on simulated data."""

import shutil

import numpy as np
import pytest
import verdict_coverage
from scipy.stats import binom, t
from sklearn.metrics import brier_score_loss, log_loss, mean_absolute_error
from test_verdict import write

from perfed.engine.metrics import METRICS, compute_metric
from perfed.report import load_runs, verdict, write_report


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
            values = [compute_metric(metric, *client) for client in clients]
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


def of_mean(values, share):
    """The variance of a weighted mean and its degrees of freedom, by the quadratic form's traces."""
    parts = share * (values - share @ values)
    lost = 1 - 2 * share + np.square(share).sum()
    form = np.diag(share**2 / lost)
    form = (np.eye(len(share)) - np.outer(share, np.ones(len(share)))) @ form
    form = form @ (np.eye(len(share)) - np.outer(np.ones(len(share)), share))
    return (parts**2 / lost).sum(), np.trace(form) ** 2 / np.trace(form @ form)


def half_width(columns, same, error=0.025, sizes=None):
    """From the mean to an end, of each seed's gains by row; rows have weights of their ``sizes``, and one is added."""
    padded = [np.append(column, 0.0) for column in columns]
    weights = [np.append(np.ones(len(c)) if sizes is None else sizes, 1.0) for c in columns]
    weights = [own / own.sum() for own in weights]
    seeds = len(columns)
    means = [np.average(c, weights=w) for c, w in zip(padded, weights, strict=True)]
    of_seeds = np.var(means, ddof=1) / seeds if seeds > 1 else 0.0
    if same:
        d, share = np.stack(padded), weights[0]
        of_rows, freedom = of_mean(d.mean(0), share)
        left = np.square(share * (d - d.mean(0) - np.array(means)[:, None] + np.mean(means)))
        left = (left / (seeds * (seeds - 1))).sum(0) if seeds > 1 else np.zeros(len(share))
        cells = (left / (1 - 2 * share + np.square(share).sum())).sum()
    else:  # the rows of each seed are a sample of their own, and the means of seeds vary by them too
        variances, degrees = np.transpose([of_mean(c, w) for c, w in zip(padded, weights, strict=True)])
        of_rows = cells = variances.sum() / seeds**2
        freedom = variances.sum() ** 2 / (variances**2 / degrees).sum()
    t_seeds, t_rows = (t.isf(error, n) ** 2 if n else 0.0 for n in (seeds - 1, freedom))
    either = (
        t_seeds * of_seeds + t_rows * max(of_rows - cells, 0),
        t_rows * of_rows + t_seeds * max(of_seeds - cells, 0),
    )
    return np.sqrt(max(either))


@pytest.mark.parametrize("same", [True, False], ids=["the same rows", "other rows"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_it_is_students_of_seeds_and_rows(tmp_path, same, seeds):
    rng = np.random.default_rng(5)
    sizes = [40] * 3 if same else [40, 30, 50]
    tables = {
        method: [[rng.random(sizes[seed]) < p + 0.05 * seed] for seed in range(seeds)]
        for method, p in (("fedavg", 0.7), ("local", 0.55))
    }
    (site,) = verdict(load_runs(accuracies(tmp_path, tables, same_rows if same else other_rows))).sites
    columns = [tables["fedavg"][seed][0] * 1.0 - tables["local"][seed][0] for seed in range(seeds)]
    mean, width = np.mean([own.mean() for own in columns]), half_width(columns, same)
    assert (site.gain.mean, site.gain.low, site.gain.high) == pytest.approx((mean, mean - width, mean + width))


def test_it_is_corrected_for_the_methods_and_for_the_sites_by_benjamini_and_hochberg(tmp_path):
    """Of four sites two are significant, with twice the error of a single one; two methods to choose from."""
    rng, rows = np.random.default_rng(0), 60
    chances = [(0.95, 0.3), (0.9, 0.35), (0.5, 0.5), (0.5, 0.52)]
    tables = {
        "local": [[rng.random(rows) < p for _, p in chances]],
        "fedavg": [[rng.random(rows) < p for p, _ in chances]],
        "fedrep": [[np.zeros(rows, dtype=bool)] * 4],
    }
    sites = verdict(load_runs(accuracies(tmp_path, tables, same_rows))).sites
    assert [site.gain.sign for site in sites] == [1, 1, 0, 0]
    assert [site.why for site in sites][:2] == ["helps here"] * 2
    for number, site in enumerate(sites):
        column = tables["fedavg"][0][number] * 1.0 - tables["local"][0][number]
        ends = [half_width([column], True, 0.025 * 2 / 4 / methods) for methods in (2, 1)]
        assert (site.gain.low, site.gain.high) == pytest.approx((column.mean() - ends[0], column.mean() + ends[1]))


@pytest.mark.parametrize("rows", [25, 130], ids=["one by one", "two by two"])
def test_a_metric_that_is_no_mean_over_rows_has_pseudo_values(tmp_path, rows):
    rng = np.random.default_rng(6)

    def survived(strength):
        hazard = rng.normal(size=(rows, 1))
        times = rng.exponential(np.exp(-strength * hazard[:, 0]))
        return np.stack([times, rng.random(rows) < 0.7], 1), hazard

    tables = {"fedavg": [[survived(2.0)] for _ in range(2)], "local": [[survived(0.3)] for _ in range(2)]}
    for seed in range(2):  # the same rows of both methods
        tables["local"][seed][0] = (tables["fedavg"][seed][0][0], tables["local"][seed][0][1])
    (site,) = verdict(load_runs(of_values(tmp_path, "c-index", tables, other_rows))).sites
    score, groups, columns, gains = METRICS["c-index"].score, min(rows, 65), [], []
    for seed in range(2):
        (y, own), (_, base) = (tables[method][seed][0] for method in ("fedavg", "local"))
        whole = score(y, own) - score(y, base)
        kept = [np.arange(rows) % groups != group for group in range(groups)]
        columns.append([groups * whole - (groups - 1) * (score(y[k], own[k]) - score(y[k], base[k])) for k in kept])
        gains.append(whole)
    width = half_width(columns, False, sizes=np.full(groups, rows / groups))
    assert site.gain.mean == pytest.approx(np.mean(gains))
    assert (site.gain.low, site.gain.high) == pytest.approx((np.mean(gains) - width, np.mean(gains) + width))


def test_where_a_metric_needs_its_only_case_there_is_no_interval(tmp_path):
    y = np.arange(20) == 0
    tables = {
        m: [[(y.astype(int), np.random.default_rng(n).normal(size=(20, 2)))]] for n, m in enumerate(("local", "fedavg"))
    }
    (site,) = verdict(load_runs(of_values(tmp_path, "auc", tables, same_rows))).sites
    assert site.gain.low is None and np.isfinite(site.gain.mean)


def test_of_errors_lower_is_better(tmp_path):
    rng = np.random.default_rng(8)
    y = rng.normal(size=30)
    tables = {
        method: [[(y, (y + scale * rng.normal(size=30))[:, None])] for _ in range(3)]
        for method, scale in (("fedavg", 0.1), ("local", 2.0))
    }
    found = verdict(load_runs(of_values(tmp_path, "mse", tables, same_rows)))
    errors = [[(tables[m][s][0][1][:, 0] - y) ** 2 for m in ("fedavg", "local")] for s in range(3)]
    columns = [base - own for own, base in errors]
    width, gain = half_width(columns, True), found.sites[0].gain
    assert gain.sign == 1 and gain.mean == pytest.approx(np.mean(columns))
    assert (gain.low, gain.high) == pytest.approx((gain.mean - width, gain.mean + width))


def covered(folder, simulate, marks, comparisons):
    """In how many of so many comparisons of one site the interval holds the gain that is true."""
    hits = 0
    for number in range(comparisons):
        (folder / str(number)).mkdir()
        tables, true = simulate()
        gain = verdict(load_runs(accuracies(folder / str(number), tables, marks))).sites[0].gain
        hits += gain.low <= true <= gain.high
    return hits


def simulated(seeds, rows, same, rng, of_seed=0.0):
    """Methods that are right with a chance of their own at each row, the same for both, and at each seed."""

    def simulate():
        tables = {"fedavg": [], "local": []}
        hard = rng.random(rows)
        for _ in range(seeds):
            if not same:
                hard = rng.random(rows)
            luck = of_seed * rng.choice((-1, 1))
            tables["fedavg"].append([(hard < 0.75 + luck) & (rng.random(rows) < 0.95)])
            tables["local"].append([(hard > 0.4) & (rng.random(rows) < 0.95)])
        return tables, 0.95 * (0.75 - 0.6)

    return simulate


@pytest.mark.long
@pytest.mark.parametrize(("seeds", "same"), [(1, False), (5, True), (5, False)])
def test_it_holds_the_truth_in_95_of_100_cases_at_least(tmp_path, seeds, same):
    cases, rng = 200, np.random.default_rng(11)
    luck = 0.1 if seeds > 1 and not same else 0.0
    hits = covered(tmp_path, simulated(seeds, 150, same, rng, luck), same_rows if same else other_rows, cases)
    assert hits >= binom.ppf(0.001, cases, 0.95), hits / cases
    if seeds == 1:  # nothing but rows varies
        assert hits <= binom.ppf(0.999, cases, 0.95), hits / cases


@pytest.mark.long
def test_rows_that_are_the_same_with_every_seed_do_not_average_out(tmp_path):
    """As if they were others each time, the interval of five seeds would be narrower."""
    rng = np.random.default_rng(12)
    tables, _ = simulated(5, 150, True, rng)()
    widths = []
    for marks in (same_rows, other_rows):
        (tmp_path / marks.__name__).mkdir()
        gain = verdict(load_runs(accuracies(tmp_path / marks.__name__, tables, marks))).sites[0].gain
        widths.append(gain.high - gain.low)
    assert widths[0] > 1.3 * widths[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("federated", "seeds", "rows"), [(10, 1, 50), (5, 3, 50), (5, 3, 12)])
def test_equal_methods_gain_at_no_site(federated, seeds, rows):
    """Chosen and judged on the same rows, 10 to 37 of 100 sites gained, and one in nine comparisons of ten."""
    cases = 25
    found = verdict_coverage.of_sites(federated, seeds, 20, rows, cases)
    most = binom.ppf(0.999, cases, 0.05) / cases
    assert found["sites"] <= 0.025 and found["comparisons"] <= most and found["advice"] <= most


@pytest.mark.long
def test_few_rows_and_seeds_that_agree_are_no_certainty(tmp_path):
    fedavg, local = np.arange(10) < 8, np.arange(10) < 7
    runs = accuracies(tmp_path, {"fedavg": [[fedavg]] * 3, "local": [[local]] * 3}, same_rows)
    found = verdict(load_runs(runs))
    (site,) = found.sites
    assert site.gain.mean == pytest.approx(0.1) and site.gain.low <= 0.0 < 0.1 < site.gain.high and site.gain.sign == 0
    assert (site.method, site.why) == ("local", "no clear difference: keep the local model")
    assert "[95 % interval over test rows and seeds]" in found.site_table.header[5]
    assert found.sentences[-2] == "Use Local at 1 of 1 clients: keep the local models."
    assert found.sentences[-1] == (
        "The test rows of a single client show a gain at 0 of 1 client, a loss at 0, and leave it open at 1; at the "
        "median client a gain must exceed 20.3 points to show (the best federated model against the best local one; "
        "95 % intervals over rows and seeds, corrected for 2 methods and 1 client)."
    )
    one = verdict([run for run in load_runs(runs) if run.seed == 0]).sites[0]
    assert one.gain.low <= 0.0 < one.gain.high
    for where in runs:  # a directory that was passed on without them
        shutil.rmtree(where / "predictions")
    without = verdict(load_runs(runs))
    assert without.sites[0].gain.low is None and without.sites[0].gain.mean == pytest.approx(0.1)
    assert without.sentences[-1].endswith("not known: the runs kept no predictions of test rows.")


@pytest.mark.long
@pytest.mark.parametrize("seeds", [2, 3])
def test_few_seeds_do_not_hide_a_gain_at_a_site(seeds):
    """With each site's seeds on their own, a gain of four standard errors showed at 0 and 4 of 100 sites."""
    assert verdict_coverage.of_sites_power(5, seeds, 20, 200, 2) > 0.55


def test_how_much_seeds_vary_is_estimated_from_all_sites(tmp_path):
    """Three sites, two seeds: on its own each would have one degree of freedom."""
    rng, rows = np.random.default_rng(3), 200
    tables = {
        m: [[rng.random(rows) < p for _ in range(3)] for _ in range(2)] for m, p in (("fedavg", 0.8), ("local", 0.5))
    }
    sites = verdict(load_runs(accuracies(tmp_path, tables, same_rows))).sites
    for number, site in enumerate(sites):
        columns = [tables["fedavg"][seed][number] * 1.0 - tables["local"][seed][number] for seed in range(2)]
        assert site.gain.mean - site.gain.low < 0.5 * half_width(columns, True, error=0.025 / 3)
        assert site.gain.sign == 1 and site.could_gain is True


def test_where_no_gain_could_have_been_shown_the_verdict_says_so_and_counts_no_clients(tmp_path):
    """The local models are right of nine rows of ten: being right of all is no significant gain with so few rows."""
    rng = np.random.default_rng(1)
    local = [[np.arange(10) != 3, np.arange(10) != 4] for _ in range(2)]
    fedavg = [[rng.permutation(np.arange(10) < 8) for _ in range(2)] for _ in range(2)]
    found = verdict(load_runs(accuracies(tmp_path, {"fedavg": fedavg, "local": local}, same_rows)))
    assert [site.could_gain for site in found.sites] == [False, False]
    assert found.sentences[-1].startswith(
        "The test rows of a single client are too few to show a gain: at none of 2 clients would even the best "
        "possible value have been a significant one (the best federated model against the best local one; "
    )
    assert "gain at 0" not in str(found)


def test_card_and_text_say_the_same_of_who_is_worse_off(tmp_path):
    rng = np.random.default_rng(6)
    tables = {
        m: [[rng.random(30) < p for _ in range(5)] for _ in range(3)] for m, p in (("fedavg", 0.55), ("local", 0.5))
    }
    loaded = load_runs(accuracies(tmp_path, tables, same_rows))
    found = verdict(loaded)
    (sentence,) = found.worse_off
    assert sentence in found.sentences and "by their own test rows, 0 of 5 clients are worse off" in sentence
    page = write_report(loaded, tmp_path / "report.html", title="T").read_text()
    card = page[page.index("<h3>Who is worse off?</h3>") :]
    card = card[: card.index("</div>")]
    assert "<strong>0 of 5 clients</strong>" in card and sentence in card
    assert page.count("client-runs, counting") == 2  # in the card and in the text


@pytest.mark.parametrize("rows", [2, 3])
def test_two_or_three_rows_that_all_agree_say_nothing(tmp_path, rows):
    tables = {"fedavg": [[np.ones(rows, dtype=bool)]] * 3, "local": [[np.zeros(rows, dtype=bool)]] * 3}
    gain = verdict(load_runs(accuracies(tmp_path, tables, same_rows))).sites[0].gain
    assert gain.mean == 1.0 and (gain.sign == 0 if rows == 2 else gain.low > 0)


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
    assert [site.gain.low is not None for site in found.sites] == [False, fault != "one run without"]


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
    assert [text for text in found.sentences if "every test row" in text] == [
        "HetFedRep predicts the same for every test row at 2 of 4 clients (site-0, site-1): it has "
        "learnt nothing there."
    ]
    means = {method: np.mean([compute_metric("accuracy", *seed[0]) for seed in of]) for method, of in tables.items()}
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
    assert not [text for text in found.sentences if "every test row" in text]
    values = [[(rng.normal(size=(8, 1)), np.full((8, 1), 3.0))]]
    more = {"local": values, "fedavg": [[(values[0][0][0], rng.normal(size=(8, 1)))]]}
    (tmp_path / "values").mkdir()
    found = verdict(load_runs(of_values(tmp_path / "values", "mse", more, other_rows)))
    assert (
        "Local predicts the same for every test row at 1 of 1 clients (site-0): it has learnt nothing there."
        in found.sentences
    )
