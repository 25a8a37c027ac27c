"""The verdict of made-up comparisons: intervals by enumeration and by a plain loop, and what the sentences say."""

import csv
import itertools
import json

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, perfed

from perfed.engine.evaluate import spread
from perfed.errors import PerfedError
from perfed.report import all_tables, first_tables, leaderboard, load_runs, verdict, write_report
from perfed.report.comparison import judged_table
from perfed.report.gains import interval
from perfed.report.leaderboard import gain_text
from perfed.report.papers import CSV_COLUMNS, csv_text, latex
from perfed.report.text import difference_text


def write(folder, method, seed, values, *, metric="accuracy", curve=(), weights=None):
    """A finished run whose clients end with ``values``."""
    where = folder / f"{method.replace(':', '.')}-{seed}"
    where.mkdir()
    more = "" if weights is None else '[evaluation]\nweights = "samples"\n'
    (where / "config.toml").write_text(f'method = "{method}"\nseed = {seed}\n{more}')
    with (where / "clients.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "n_train", "n_test", f"{metric}_before", f"{metric}_after", "rounds"])
        for number, value in enumerate(values):
            there = "" if np.isnan(value) else value
            rows.writerow([f"site-{number}", 5, 10 if weights is None else weights[number], there, "", 1])
    measured = {metric: spread([value for value in values if not np.isnan(value)])}
    lines = [{"round": number, "metrics": {metric: spread([mean])}} for number, mean in enumerate(curve, 1)]
    (where / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"method": method, "dataset": "made up", "seed": seed, "rounds": len(lines), "wall_seconds": 1.0}
    (where / "summary.json").write_text(json.dumps({**summary, "metrics": measured}))
    return where


def made(folder, tables, **more):
    """The verdict on ``method -> seeds -> values of the clients``."""
    runs = [write(folder, m, s, v, **more.get(m, {})) for m, table in tables.items() for s, v in enumerate(table)]
    return verdict(load_runs(runs))


def test_an_interval_of_two_seeds_and_two_clients_is_that_of_all_their_draws():
    gains = np.array([[0.0, 0.1], [0.2, 0.6]])
    draws = [gains[np.ix_(s, c)].mean() for s in itertools.product((0, 1), repeat=2) for c in [(0, 0), (0, 1), (1, 1)]]
    found = interval(gains, np.ones(2))
    # Each corner has a sixteenth of the draws, which is more than the 2.5 % beyond an end.
    assert (found.mean, found.low, found.high) == (pytest.approx(0.225), min(draws), max(draws))


def test_an_interval_is_that_of_a_plain_loop_over_what_is_there():
    rng = np.random.default_rng(7)
    gains, weights = rng.normal(0.1, 1.0, (4, 9)), rng.integers(1, 20, 9).astype(float)
    gains[1, 3] = gains[2, :4] = np.nan
    means = []
    for _ in range(20000):
        top = bottom = 0.0
        clients = rng.integers(0, 9, 9)
        for seed in rng.integers(0, 4, 4):
            for client in clients:
                if not np.isnan(gains[seed, client]):
                    top += weights[client] * gains[seed, client]
                    bottom += weights[client]
        means.append(top / bottom)
    found, width = interval(gains, weights), np.ptp(np.percentile(means, (2.5, 97.5)))
    assert found.mean == pytest.approx(np.nansum(gains * weights) / np.sum(weights * ~np.isnan(gains)))
    assert (found.low, found.high) == pytest.approx(np.percentile(means, (2.5, 97.5)), abs=0.06 * width)


def test_one_client_of_one_seed_has_no_interval():
    assert interval(np.array([[0.25]]), np.ones(1)).low is None


def test_ahead_behind_and_neither(tmp_path):
    base = [[0.5, 0.6, 0.7], [0.52, 0.62, 0.72]]
    found = made(
        tmp_path,
        {
            "fedavg": [[v - 0.1 for v in row] for row in base],
            "flic-hl": [[v + 0.02 for v in row] for row in base],
            "sklearn:svc": [[v - 0.3 for v in row] for row in base],
            "fedrep": [[0.4, 0.6, 0.8], [0.42, 0.62, 0.82]],
            "local": base,
            "pooled:svc": [[v - 0.2 for v in row] for row in base],
        },
    )
    assert found.metric == "accuracy" and found.reference == "local"  # better than sklearn:svc
    sentences = found.sentences
    assert sentences[0] == (
        "flic-hl is ahead of local by 2.0 points (95 % interval 2.0 to 2.0, 2 seeds: weak evidence); "
        "fedrep cannot be told from local; sklearn:svc is behind local by 30.0 points (30.0 to 30.0), fedavg by 10.0 "
        "points (10.0 to 10.0), pooled:svc (data brought together) by 20.0 points (20.0 to 20.0)."
    )
    counts = "better for 6, equal for 0, worse for 0 of 6 client-runs"
    assert sentences[1] == f"Against local, flic-hl is {counts}; it sends nothing."
    assert sentences[2] == "Below local, which needs no federation: fedavg (by 10.0 points)."
    assert found.best_method is not None and found.best_method.method == "flic-hl"
    assert [site.method for site in found.sites] == ["flic-hl", "flic-hl", "fedrep"]
    assert found.best("site-2") == "fedrep" and found.sites[2].local == "local"
    gain = found.sites[2].gain
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.1, 0.1, 0.1))
    assert sentences[3].startswith("Best at each of the 3 sites: flic-hl at 2, fedrep at 1. The best federated method")
    assert "gains over the best local model there at 3, loses at 0, cannot be told from it at 0" in sentences[3]
    with pytest.raises(PerfedError, match="nothing was measured at site 'west'; sites are: site-0"):
        found.best("west")


def test_the_reference_is_the_best_by_the_direction_and_weights_of_the_metric(tmp_path):
    errors = {"metric": "mse"}
    tables = {"fedavg": [[2.0, 1.0]], "local": [[1.5, 1.5]], "sklearn:ridge": [[1.0, 1.5]]}
    found = made(tmp_path, tables, **dict.fromkeys(tables, errors))
    assert found.reference == "sklearn:ridge"
    fedavg, local = found.methods
    assert fedavg.gain.mean == pytest.approx(-0.25) and (fedavg.better, fedavg.worse) == (1, 1)
    assert local.gain.mean == pytest.approx(-0.25) and (local.equal, local.worse) == (1, 1)
    assert found.best("site-0") == "sklearn:ridge" and found.best("site-1") == "fedavg"
    assert found.site_table.rows[1][3:] == ["fedavg", "+0.5"]
    assert found.sentences[0].startswith(
        "No method is ahead of sklearn:ridge; fedavg and local cannot be told from it, "
    )
    assert found.sentences[0].endswith(
        "the closest is fedavg (at -0.25: 95 % interval -1 to 0.5, 1 seed: weak evidence)."
    )
    (tmp_path / "weighted").mkdir()
    weighed = {name: {"metric": "mse", "weights": [10, 30]} for name in tables}
    again = made(tmp_path / "weighted", tables, **weighed)
    assert again.methods[0].gain.mean == pytest.approx((10 * -1.0 + 30 * 0.5) / 40)


def test_without_a_local_model_the_first_method_is_the_reference(tmp_path):
    found = made(tmp_path, {"fedrep": [[0.5, 0.6]], "fedavg": [[0.4, 0.5]]})
    assert found.reference == "fedrep" and found.sites[0].gain is None and found.best("site-0") == "fedrep"
    assert not any("Below" in sentence for sentence in found.sentences)
    assert verdict(load_runs([tmp_path / "fedrep-0"])) is None


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (
            (0.2, 0.4, 0.50, 0.52),
            "fedavg has not converged: in the last quarter of the rounds it still gained 2.0 points",
        ),
        ((0.2, 0.4, 0.50, 0.504), None),
        ((0.2, 0.4, 0.50, 0.40), None),
        ((0.2,), None),
    ],
)
def test_a_run_that_still_rises_is_said(tmp_path, curve, said):
    found = made(tmp_path, {"local": [[0.5, 0.5]], "fedavg": [[0.6, 0.6]]}, fedavg={"curve": curve})
    assert [s for s in found.sentences if "converged" in s] == (
        [] if said is None else [f"{said}; more rounds may change the verdict."]
    )


def test_the_report_says_it_first(tmp_path):
    runs = [write(tmp_path, name, 0, [0.5, value]) for name, value in (("local", 0.5), ("fedavg", 0.7))]
    page = write_report(load_runs(runs), tmp_path / "report.html", title="made up").read_text()
    said = "cannot be told from it, the closest is fedavg (at +10.0: 95 % interval 0.0 to 20.0, 1 seed: weak evidence)."
    assert (
        page.index('<p class="headline">No method is ahead of local; fedavg ') < page.index(said) < page.index("<table")
    )


def test_what_a_method_sends_is_said_where_every_round_knows_it(tmp_path):
    tables = {"local": [[0.5, 0.5]] * 2, "fedavg": [[0.6, 0.7]] * 2}
    runs = [write(tmp_path, m, s, v, curve=(0.4, 0.5)) for m, table in tables.items() for s, v in enumerate(table)]
    assert verdict(load_runs(runs)).sentences[1].endswith("worse for 0 of 4 client-runs.")
    for seed, run in enumerate(runs[2:]):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        sizes = {"bytes_up": 1_000_000 * (1 + seed), "bytes_down": 500_000}
        (run / "rounds.jsonl").write_text("".join(json.dumps(line | sizes) + "\n" for line in lines))
    found = verdict(load_runs(runs))
    # Two rounds of 1.5 MB with seed 0 and of 2.5 MB with seed 1.
    assert found.methods[0].sent == 4e6 and found.sentences[1].endswith("client-runs; it sends 4.0 MB.")
    assert found.to_dict()["methods"][0]["sent"] == 4e6


def test_compare_prints_it_and_keeps_it(tmp_path):
    out = tmp_path / "made"
    done = perfed("compare", EXPERIMENT, *TINY, "--methods", "local,flic-hl", "--seeds", "0..1", "--out", out)
    assert done.code == 0, done.err
    kept = json.loads((out / "comparison.json").read_text())["verdict"]
    assert kept["reference"] == "local" and [site["site"] for site in kept["sites"]] == ["000", "001", "002", "003"]
    assert done.said.endswith(" ".join(kept["sentences"])) and "what to use at each site" in done.out
    values = {}
    for method in ("local", "flic-hl"):
        for seed in (0, 1):
            rows = csv.DictReader((out / method / f"seed-{seed}" / "clients.csv").open())
            values[method, seed] = [float(row["accuracy_before"]) for row in rows]
    gains = np.array([np.subtract(values["flic-hl", seed], values["local", seed]) for seed in (0, 1)])
    assert kept["methods"][0]["gain"]["mean"] == pytest.approx(gains.mean())


def test_one_interval_for_one_difference_wherever_it_stands(tmp_path):
    """A site without a metric in some runs: terminal, files for papers, page and Python say what the verdict says."""
    nan = float("nan")
    tables = {
        "local": [[0.50, 0.60, 0.70, nan], [0.52, 0.61, nan, 0.30]],
        "fedavg": [[0.55, 0.58, 0.90, 0.99], [0.60, 0.66, 0.80, nan]],
    }
    # By hand: only what both have with the same seed.
    gain = np.mean([0.55 - 0.50, 0.58 - 0.60, 0.90 - 0.70, 0.60 - 0.52, 0.66 - 0.61])
    for metric, side in (("accuracy", 1), ("mse", -1)):
        (tmp_path / metric).mkdir()
        runs = [write(tmp_path / metric, m, s, v, metric=metric) for m, t in tables.items() for s, v in enumerate(t)]
        loaded = load_runs(runs)
        found = verdict(loaded)
        (judged,) = found.methods
        assert judged.gain.mean == pytest.approx(side * gain)
        (row,) = [row for row in judged_table(loaded, found) if row.difference]
        ends = sorted((side * judged.gain.low, side * judged.gain.high))
        assert (row.difference.mean, row.difference.low, row.difference.high) == (side * judged.gain.mean, *ends)
        assert row.difference.over == "clients and seeds"
        cells = dict(zip(CSV_COLUMNS, csv_text(judged_table(loaded, found)).splitlines()[2].split(","), strict=True))
        assert float(cells["low"]) == ends[0] and cells["interval_over"] == "clients and seeds"
        assert f"Difference to local [95 {chr(92)}% over clients and seeds]" in latex([row], "x")
        (short,) = first_tables(loaded, found)
        assert short.header[2] == "Difference to local [95 % over clients and seeds]"
        assert short.rows[1][2] == difference_text(metric, row.difference.mean, *ends)
        board = leaderboard(loaded)
        (there,) = [line for line in board.rows if line[0] == "fedavg"]
        assert board.header[3] == "Better than local by [95 % interval over clients and seeds]"
        assert there[3] == gain_text(judged, metric)


def test_other_metrics_have_intervals_of_the_same_kind_or_say_which(tmp_path):
    """Those of each client's loss, as the leaderboard has them; where no client is known Student's t, by its name."""
    values = {"local": [[0.5, 0.7], [0.4, 0.7]], "fedavg": [[0.6, 0.9], [0.6, 0.7]]}
    losses = {"local": [[2.0, 1.0], [1.5, 1.2]], "fedavg": [[1.0, 1.1], [1.0, 0.9]]}
    runs = [write(tmp_path, m, s, v) for m, table in values.items() for s, v in enumerate(table)]
    for run, own in zip(runs, [own for table in losses.values() for own in table], strict=True):
        lines = [line.split(",") for line in (run / "clients.csv").read_text().splitlines()]
        more = [["loss_before", "loss_after"], *([str(value), ""] for value in own)]
        (run / "clients.csv").write_text("".join(",".join(a + b) + "\n" for a, b in zip(lines, more, strict=True)))
        summary = json.loads((run / "summary.json").read_text())
        summary["metrics"] |= {"loss": spread(own)}
        (run / "summary.json").write_text(json.dumps(summary))
    loaded = load_runs(runs)
    found = verdict(loaded)
    (row,) = [row for row in judged_table(loaded, found) if row.metric == "loss" and row.difference]
    expected = interval(np.subtract(losses["fedavg"], losses["local"]), np.ones(2))
    assert (row.difference.low, row.difference.high) == pytest.approx((expected.low, expected.high))
    heads = [table.header[6] for table in all_tables(loaded, found)]
    assert heads == ["Difference to local [95 % interval over clients and seeds]"] * 2
    by_seed = [table.header[6] for table in all_tables(loaded)]  # without a verdict, as where no client was measured
    assert by_seed == ["Difference to local [95 % interval, Student's t over seeds]"] * 2


def test_small_and_equal_differences_are_said_as_such(tmp_path):
    indices = {"local": {"metric": "c-index"}, "flic-hl": {"metric": "c-index"}}
    table = {"local": [[0.7, 0.61234]] * 2, "flic-hl": [[0.7, 0.61236532]] * 2}
    found = made(tmp_path, table, **indices)
    assert "by 0.000 of c-index (95 % interval 0.000 to 0.000, 2 seeds" in found.sentences[0] or (
        "(at +0.000: 95 % interval 0.000 to 0.000, 2 seeds" in found.sentences[0]
    )
    assert [row[2:] for row in found.site_table.rows] == [
        ["local", "flic-hl", "no difference on these rows"],
        ["local", "flic-hl", "+0.0000 [+0.0000, +0.0000]"],
    ]
    (tmp_path / "more").mkdir()
    table = {"local": [[0.7, 0.6]] * 2, "flic-hl": [[0.9, 0.808]] * 2}
    found = made(tmp_path / "more", table, **indices)
    assert "is ahead of local by 0.204 of c-index (95 % interval 0.200 to 0.208, 2 seeds" in found.sentences[0]


def test_below_is_what_an_interval_says_and_the_others_are_not_above(tmp_path):
    base = [[0.5, 0.6, 0.7], [0.5, 0.6, 0.7]]
    level, worse = [[0.4, 0.6, 0.75]] * 2, [[0.4, 0.5, 0.6]] * 2
    found = made(tmp_path, {"local": base, "fedrep": level, "fedavg": worse})
    assert "fedrep cannot be told from it" in found.sentences[0]
    assert found.warnings == ("Below local, which needs no federation: fedavg (by 10.0 points); not above it: fedrep.",)
    (tmp_path / "level").mkdir()
    assert made(tmp_path / "level", {"local": base, "fedrep": level}).warnings == (
        "Not above local, which needs no federation: fedrep.",
    )


def test_the_page_says_what_to_use_at_each_site_among_who_gains(tmp_path):
    runs = [write(tmp_path, name, 0, [0.5, value]) for name, value in (("local", 0.5), ("fedavg", 0.7))]
    page = write_report(load_runs(runs), tmp_path / "report.html", title="made up").read_text()
    gains = page[page.index("Who gains, who loses</h2>") :]
    assert gains.index("what to use at each site") < gains.index("<h3>Clients</h3>")
