"""The verdict of made-up comparisons: intervals by enumeration and by a plain loop, and what the sentences say."""

import csv
import json

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, perfed
from made_up_runs import write

from perfed.engine.evaluate import spread
from perfed.errors import PerfedError
from perfed.report import all_tables, first_tables, leaderboard, load_runs, verdict, write_report
from perfed.report.comparison import compare_with_reference
from perfed.report.intervals import estimate_gain
from perfed.report.leaderboard import format_gain
from perfed.report.papers import CSV_COLUMNS, csv_text, latex
from perfed.report.text import format_difference


def made(folder, tables, **more):
    """The verdict on ``method -> seeds -> values of the clients``."""
    runs = [write(folder, m, s, v, **more.get(m, {})) for m, table in tables.items() for s, v in enumerate(table)]
    return verdict(load_runs(runs))


def test_ahead_behind_and_neither(tmp_path):
    base = [[0.5, 0.6, 0.7], [0.52, 0.62, 0.72], [0.51, 0.61, 0.71]]
    found = made(
        tmp_path,
        {
            "fedavg": [[v - 0.1 for v in row] for row in base],
            "flic-hl": [[v + 0.02 for v in row] for row in base],
            "sklearn:svc": [[v - 0.3 for v in row] for row in base],
            "fedrep": [[0.4, 0.6, 0.8], [0.42, 0.62, 0.82], [0.41, 0.61, 0.81]],
            "local": base,
            "pooled:svc": [[v - 0.2 for v in row] for row in base],
        },
    )
    assert found.metric == "accuracy" and found.reference == "local"  # better than sklearn:svc
    sentences = found.sentences
    assert sentences[0] == (
        "FLIC-HL is ahead of Local by 2.0 points (95 % interval 2.0 to 2.0, corrected for 5 methods, 3 seeds); "
        "FedRep shows no significant difference from Local; SVC per client is behind Local by 30.0 points "
        "(30.0 to 30.0), FedAvg by 10.0 points (10.0 to 10.0), SVC (data brought together) by 20.0 points "
        "(20.0 to 20.0)."
    )
    counts = "better for 9, equal for 0, worse for 0 of 9 client-runs, counting differences of any size"
    assert sentences[1] == f"Against Local, FLIC-HL is {counts}; it sends nothing."
    assert sentences[2] == "Worse than Local, which needs no federation: FedAvg (by 10.0 points)."
    assert found.best_method is not None and found.best_method.method == "flic-hl"
    # fedrep, best at the last of them, has few rows there
    assert [(site.method, site.why) for site in found.sites] == [("flic-hl", "ahead over all clients")] * 3
    gain = found.sites[2].gain
    assert gain.mean == pytest.approx(0.02) and gain.low is None
    assert sentences[3] == "Use FLIC-HL at 3 of 3 clients: FLIC-HL is ahead over all clients together."
    assert sentences[4] == "What a single client gains is not known: the runs kept no predictions of test rows."
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
    assert found.best("site-0") == "sklearn:ridge" and found.best("site-1") == "sklearn:ridge"
    assert found.site_table.rows[1][2:] == [
        "no clear difference: keep the local model",
        "ridge regression per client",
        "FedAvg",
        "+0.5",
    ]
    assert found.sentences[0].startswith(
        "No method is ahead of ridge regression per client; FedAvg and Local show no significant difference from it; "
    )
    assert found.sentences[0].endswith(
        "the closest is FedAvg (at -0.25: 95 % interval over clients only -7.35 to 6.85, corrected for 2 methods, "
        "1 seed)."
    )
    assert found.warnings[0].startswith("One seed: the variation between trainings is unknown.")
    (tmp_path / "weighted").mkdir()
    weighed = {name: {"metric": "mse", "weights": [10, 30]} for name in tables}
    again = made(tmp_path / "weighted", tables, **weighed)
    assert again.methods[0].gain.mean == pytest.approx((10 * -1.0 + 30 * 0.5) / 40)


@pytest.mark.parametrize("direction", [1, -1], ids=["accuracy", "mse"])
def test_what_is_chosen_at_a_site_is_its_own_best_where_its_rows_outweigh_200_of_all_sites(tmp_path, direction):
    """fedavg is better than fedrep by 0.1 at each of the first three sites, fedrep by 0.02 over all five."""
    gains, rows = np.array([0.1, 0.1, 0.1, -0.2, -0.2]), [39, 41, 10_000, 10, 10]
    tables = {"local": [[0.5] * 5] * 2, "fedrep": [[0.5] * 5] * 2, "fedavg": [list(0.5 + direction * gains)] * 2}
    more = {"metric": "accuracy" if direction == 1 else "mse", "rows": rows}
    found = made(tmp_path, tables, **dict.fromkeys(tables, more))
    assert [site.federated for site in found.sites] == ["fedrep", "fedavg", "fedavg", "fedrep", "fedrep"]
    assert [site.gain.mean for site in found.sites] == pytest.approx([0, 0.1, 0.1, 0, 0])  # at the site, as measured
    assert {(site.method, site.why) for site in found.sites} == {("local", "no clear difference: keep the local model")}
    assert found.sentences[-2] == "Use Local at 5 of 5 clients: keep the local models."


def test_a_site_that_does_not_say_how_many_rows_it_has_is_judged_by_them_alone(tmp_path):
    tables = {"local": [[0.5, 0.5]], "fedrep": [[0.5, 0.5]], "fedavg": [[0.6, 0.1]]}
    runs = [write(tmp_path, method, seed, v) for method, t in tables.items() for seed, v in enumerate(t)]
    for run in runs:
        table = list(csv.reader((run / "clients.csv").read_text().splitlines()))
        with (run / "clients.csv").open("w", newline="") as file:
            csv.writer(file).writerows([line[:2] + line[3:] for line in table])
    assert [site.federated for site in verdict(load_runs(runs)).sites] == ["fedavg", "fedrep"]


def test_where_a_method_is_ahead_over_all_sites_it_is_to_be_used_where_nothing_speaks_against_it(tmp_path):
    """The last site's own mean is so much lower that 200 rows of all sites do not outweigh it."""
    gains, rows = np.array([0.1, 0.12, 0.11, 0.1, 0.09, 0.12, 0.11, -0.02]), [10] * 7 + [10_000]
    tables = {"local": [[0.5] * 8] * 3, "fedavg": [list(0.5 + gains)] * 3}
    found = made(tmp_path, tables, local={"rows": rows}, fedavg={"rows": rows})
    assert found.methods[0].gain.sign == 1
    assert [site.why for site in found.sites] == ["ahead over all clients"] * 7 + [
        "no clear difference: keep the local model"
    ]
    assert [site.method for site in found.sites] == ["fedavg"] * 7 + ["local"]


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
            "FedAvg has not converged: in the last quarter of the rounds it still gained 2.0 points",
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


FLAT = (0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)


@pytest.mark.parametrize(
    ("curve", "losses", "said"),
    [
        # The accuracy says nothing yet, as where a class is rare: the loss does.
        (FLAT, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), "from 0.55 to 0.35"),
        (FLAT, (1.0, 0.5, 0.2, 0.1, 0.08, 0.06, 0.05, 0.04), None),  # it fits its rows ever better, by little
        (FLAT, (0.92, 0.92, 0.91, 0.91, 0.90, 0.90, 0.89, 0.88), None),
        (FLAT, (1.0, 0.6, 0.5, 0.4, 0.4, 0.4, 0.5, 0.6), None),
        (FLAT, (1.0, None, 0.8, 0.7, None, 0.5, 0.4, 0.3), "from 0.5 to 0.35"),  # a round in which nobody trained
        (FLAT, (None,) * 8, None),
        ((0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.59, 0.58), (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), None),  # it over-fits
    ],
)
def test_a_run_whose_training_loss_still_falls_is_said(tmp_path, curve, losses, said):
    found = made(tmp_path, {"local": [[0.5, 0.5]], "fedavg": [[0.6, 0.6]]}, fedavg={"curve": curve, "losses": losses})
    line = "FedAvg has not converged: in the last quarter of the rounds its training loss still fell"
    assert [s for s in found.sentences if "converged" in s] == (
        [] if said is None else [f"{line} {said}; more rounds may change the verdict."]
    )


RISEN, FALLEN = (0.60, 0.74, 0.71, 0.52), (0.60, 0.61, 0.60, 0.61)
BETTER = "FedAvg was better after round 2"
ADVICE = (
    "Tune lr and weight_decay, or keep each client's best round: evaluation.stop = 'validated' with "
    "data.validation_fraction."
)


@pytest.mark.parametrize(
    ("metric", "more", "said"),
    [
        ("accuracy", {"curve": RISEN}, "(accuracy 74.0 %) than it is at the end (accuracy 52.0 %)"),
        (
            "accuracy",
            {"curve": FALLEN, "auc": (0.70, 0.743, 0.6, 0.521)},
            "(auc 0.743) than it is at the end (auc 0.521)",
        ),
        ("mse", {"curve": (4.0, 2.0, 2.5, 3.0)}, "(mse 2) than it is at the end (mse 3)"),
        ("mse", {"curve": (4.0, 2.0, 2.05, 2.15)}, None),
        ("accuracy", {"curve": (0.60, 0.74, 0.73, 0.72)}, None),
        ("accuracy", {"curve": FALLEN}, None),
        ("accuracy", {"curve": RISEN, "ends": {"accuracy": 0.74}}, None),  # each client has its best round's model
    ],
)
def test_a_run_that_ends_much_worse_than_it_was_is_said(tmp_path, metric, more, said):
    more = {"metric": metric, **more}
    values = [more["curve"][-1]] * 2
    found = made(tmp_path, {"local": [[1.0, 1.0]] * 2, "fedavg": [values] * 2}, local={"metric": metric}, fedavg=more)
    assert [s for s in found.sentences if "at the end" in s] == ([] if said is None else [f"{BETTER} {said}. {ADVICE}"])


def test_a_run_that_one_seed_ends_worse_is_not_said(tmp_path):
    for seed, curve in enumerate((RISEN, (0.5, 0.6, 0.7, 0.75))):
        write(tmp_path, "fedavg", seed, curve[-1:], curve=curve)
        write(tmp_path, "local", seed, [0.5])
    assert not [s for s in verdict(load_runs(sorted(tmp_path.iterdir()))).sentences if "at the end" in s]


def test_the_report_says_it_first(tmp_path):
    runs = [write(tmp_path, name, 0, [0.5, value]) for name, value in (("local", 0.5), ("fedavg", 0.7))]
    page = write_report(load_runs(runs), tmp_path / "report.html", title="made up").read_text()
    student = "95 % interval over clients only -100.0 to 100.0"  # -117.1 to 137.1 without the metric's range
    said = f"shows no significant difference from it (at +10.0: {student}, 1 seed)."
    assert (
        page.index('<p class="headline">No method is significantly better than Local.')
        < page.index(said)
        < page.index("<table")
    )


def test_what_a_method_sends_is_said_where_every_round_knows_it(tmp_path):
    tables = {"local": [[0.5, 0.5]] * 2, "fedavg": [[0.6, 0.7]] * 2}
    runs = [write(tmp_path, m, s, v, curve=(0.4, 0.5)) for m, table in tables.items() for s, v in enumerate(table)]
    assert verdict(load_runs(runs)).sentences[1].endswith("client-runs, counting differences of any size.")
    for seed, run in enumerate(runs[2:]):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        sizes = {"bytes_up": 1_000_000 * (1 + seed), "bytes_down": 500_000}
        (run / "rounds.jsonl").write_text("".join(json.dumps(line | sizes) + "\n" for line in lines))
    found = verdict(load_runs(runs))
    # Two rounds of 1.5 MB with seed 0 and of 2.5 MB with seed 1.
    assert found.methods[0].sent == 4e6 and found.sentences[1].endswith("; it sends 4.0 MB.")
    assert found.to_dict()["methods"][0]["sent"] == 4e6


@pytest.mark.long
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
        "local": [[0.50, 0.60, 0.70, nan], [0.52, 0.61, nan, 0.30], [0.51, 0.62, 0.69, nan]],
        "fedavg": [[0.55, 0.58, 0.90, 0.99], [0.60, 0.66, 0.80, nan], [0.56, 0.60, 0.88, nan]],
    }
    # By hand: only what both have with the same seed.
    pairs = [(0.55, 0.50), (0.58, 0.60), (0.90, 0.70), (0.60, 0.52), (0.66, 0.61)]
    pairs += [(0.56, 0.51), (0.60, 0.62), (0.88, 0.69)]
    gain = np.mean([own - base for own, base in pairs])
    for metric, side in (("accuracy", 1), ("mse", -1)):
        (tmp_path / metric).mkdir()
        runs = [write(tmp_path / metric, m, s, v, metric=metric) for m, t in tables.items() for s, v in enumerate(t)]
        loaded = load_runs(runs)
        found = verdict(loaded)
        (judged,) = found.methods
        assert judged.gain.mean == pytest.approx(side * gain)
        (row,) = [row for row in compare_with_reference(loaded, found) if row.difference]
        ends = [judged.gain.low, judged.gain.high]
        assert (row.difference.mean, row.difference.low, row.difference.high) == (judged.gain.mean, *ends)
        assert row.difference.over == "clients and seeds"
        cells = dict(
            zip(CSV_COLUMNS, csv_text(compare_with_reference(loaded, found)).splitlines()[2].split(","), strict=True)
        )
        assert float(cells["low"]) == ends[0] and cells["interval_over"] == "clients and seeds"
        sense = "" if side > 0 else ", + is better"
        assert f"difference to Local{sense} [95 {chr(92)}% interval over clients and seeds]" in latex([row], "x", [])
        (short,) = first_tables(loaded, found)
        assert short.header[2] == f"Difference to Local{sense} [95 % over clients and seeds]"
        assert short.rows[1][2] == format_difference(metric, row.difference.mean, *ends)
        assert short.rows[1][2][0] == format_gain(judged, metric)[0] == ("+" if side > 0 else "-")
        board = leaderboard(loaded)
        (there,) = [line for line in board.rows if line[0] == "FedAvg"]
        assert board.header[3] == "Better than Local by [95 % interval over clients and seeds]"
        assert there[3] == format_gain(judged, metric)


def test_other_metrics_have_intervals_of_the_same_kind_or_say_which(tmp_path):
    """Those of each client's loss, as the leaderboard has them; where no client is known Student's t, by its name."""
    values = {"local": [[0.5, 0.7], [0.4, 0.7], [0.5, 0.6]], "fedavg": [[0.6, 0.9], [0.6, 0.7], [0.7, 0.7]]}
    losses = {"local": [[2.0, 1.0], [1.5, 1.2], [1.6, 1.1]], "fedavg": [[1.0, 1.1], [1.0, 0.9], [1.1, 1.0]]}
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
    (row,) = [row for row in compare_with_reference(loaded, found) if row.metric == "loss" and row.difference]
    expected = estimate_gain(np.subtract(losses["local"], losses["fedavg"]), np.ones(2))
    assert (row.difference.low, row.difference.high) == pytest.approx((expected.low, expected.high))
    heads = [table.header[6] for table in all_tables(loaded, found)]
    assert heads == [f"Difference to Local{s} [95 % interval over clients and seeds]" for s in ("", ", + is better")]
    by_seed = [table.header[6] for table in all_tables(loaded)]  # without a verdict, as where no client was measured
    assert by_seed == [f"Difference to Local{s} [95 % interval, Student's t over seeds]" for s in ("", ", + is better")]


def test_small_and_equal_differences_are_said_as_such(tmp_path):
    indices = {"local": {"metric": "c-index"}, "flic-hl": {"metric": "c-index"}}
    table = {"local": [[0.7, 0.61234]] * 3, "flic-hl": [[0.7, 0.61236532]] * 3}
    found = made(tmp_path, table, **indices)
    assert "(at +0.000: 95 % interval -0.0001 to 0.0002, 3 seeds" in found.sentences[0]
    assert [row[3:] for row in found.site_table.rows] == [["Local", "FLIC-HL", "+0.0000"]] * 2
    assert format_difference("c-index", 0.0, 0.0, 0.0) == "no difference on these rows"
    (tmp_path / "more").mkdir()
    table = {"local": [[0.7, 0.6]] * 3, "flic-hl": [[0.9, 0.8004]] * 3}
    found = made(tmp_path / "more", table, **indices)
    assert "is ahead of Local by 0.200 of c-index (95 % interval 0.198 to 0.203, 3 seeds" in found.sentences[0]


def test_a_sentence_has_the_tables_sign_where_a_decimal_less_has_none(tmp_path):
    rows = {"sklearn:logistic": [[0.5004, 0.6, 0.7004]] * 2, "local": [[0.5, 0.6, 0.7]] * 2, "fedrep": [[0.3] * 3] * 2}
    found = made(tmp_path, rows)
    assert found.reference == "sklearn:logistic" and "-0.03" in found.sentences[0]
    (local,) = [
        row for row in compare_with_reference(load_runs(sorted(tmp_path.iterdir())), found) if row.method == "local"
    ]
    assert format_difference("accuracy", local.difference.mean, None, None) == "-0.03"


def test_a_second_with_the_larger_mean_is_not_said_to_be_behind(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 0.6, (3, 8))
    wide = 0.06 + np.array([1.0, -0.9] * 4) * 0.4
    runs = {"local": base, "fedpac": base + 0.05, "fedrep": base + wide}
    found = made(tmp_path, runs)
    assert found.best_method.method == "fedpac" and [of.gain.sign for of in found.methods] == [1, 0]
    page = write_report(load_runs(sorted(tmp_path.glob("*-*"))), tmp_path / "report.html", title="T").read_text()
    assert "FedRep is 3.0 points ahead of it, but its gain is not significant" in page and "-3.0 points" not in page


def test_accuracies_that_say_no_more_than_the_most_frequent_class_are_warned_of(tmp_path):
    def warnings(sick, accuracy):
        folder = tmp_path / f"{sick}-{accuracy}"
        folder.mkdir()
        runs = [write(folder, method, seed, [accuracy] * 3) for method in ("local", "fedavg") for seed in (0, 1)]
        clients = {f"site-{i}": {"rows": {"train": 100}, "classes": [100 - sick, sick]} for i in range(3)}
        held = {"data": "0", "classes": ["no", "yes"], "domains": [], "clients": clients}
        for run in runs:
            (run / "federation.json").write_text(json.dumps(held))
        return [line for line in verdict(load_runs(runs)).warnings if "most frequent class" in line]

    assert warnings(6, 0.945) == [
        "Always predicting a client's most frequent class is right for 94.00 % of the rows, and no method for more "
        "than 94.50 %: compare by another metric, evaluation.compare_by = 'auc' or 'log-loss'."
    ]
    assert warnings(6, 0.97) == [] and warnings(40, 0.6) == []


def test_where_a_class_is_rare_auc_and_log_loss_stand_beside_accuracy(tmp_path):
    for sick in (6, 40):
        (tmp_path / str(sick)).mkdir()
        runs = [
            write(tmp_path / str(sick), m, s, [0.94, 0.95], curve=(0.9, 0.945), auc=(0.6, 0.71 + s / 100))
            for m in ("local", "fedavg")
            for s in (0, 1)
        ]
        clients = {f"site-{i}": {"rows": {"train": 100}, "classes": [100 - sick, sick]} for i in range(2)}
        for run in runs:
            held = {"data": "0", "classes": ["no", "yes"], "domains": [], "clients": clients}
            (run / "federation.json").write_text(json.dumps(held))
        loaded = load_runs(runs)
        found = [
            table
            for table in first_tables(loaded, verdict(loaded))
            if table.title == "Accuracy and the frequencies of the classes"
        ]
        assert [table.header for table in found] == [["Method", "Accuracy (%)", "auc"]] * (sick == 6)
    found = first_tables(load_runs(sorted((tmp_path / "6").iterdir())), None)[1]
    assert found.rows == [[m, "94.50 ± 0.00", "0.715 ± 0.007071"] for m in ("FedAvg", "Local")]


def test_one_client_is_said(tmp_path):
    found = made(tmp_path, {"local": [[0.5], [0.6], [0.7]], "fedavg": [[0.6], [0.65], [0.9]]})
    assert found.warnings[0] == (
        "One client: the variation between clients is unknown. Intervals of methods are over seeds only."
    )


def test_below_is_what_an_interval_says_and_the_others_are_not_above(tmp_path):
    base = [[0.5, 0.6, 0.7]] * 3
    level, worse = [[0.4, 0.6, 0.75]] * 3, [[0.4, 0.5, 0.6]] * 3
    found = made(tmp_path, {"local": base, "fedrep": level, "fedavg": worse})
    assert "FedRep shows no significant difference from it" in found.sentences[0]
    assert found.warnings == (
        "Worse than Local, which needs no federation: FedAvg (by 10.0 points); no better: FedRep.",
    )
    (tmp_path / "level").mkdir()
    assert made(tmp_path / "level", {"local": base, "fedrep": level}).warnings == (
        "No better than Local, which needs no federation: FedRep.",
    )


def test_the_page_says_what_to_use_at_each_site_among_who_gains(tmp_path):
    runs = [write(tmp_path, name, 0, [0.5, value]) for name, value in (("local", 0.5), ("fedavg", 0.7))]
    page = write_report(load_runs(runs), tmp_path / "report.html", title="made up").read_text()
    gains = page[page.index("Who gains, who loses</h2>") :]
    assert gains.index("what to use at each site") < gains.index("<h3>Clients</h3>")


def test_with_two_seeds_there_are_differences_without_an_interval(tmp_path):
    base = [[0.5, 0.6, 0.7], [0.52, 0.62, 0.72]]
    tables = {"local": base, "fedavg": [[v - 0.1 for v in row] for row in base], "fedpac": [[0.9] * 3] * 2}
    found = made(tmp_path, tables)
    assert found.sentences[0] == (
        "On average, FedPAC differs from Local by +29.0 points and FedAvg by -10.0 points (2 seeds, no interval)."
    )
    assert found.warnings[0].startswith("Two seeds do not support an interval over trainings")
    assert all(of.gain.low is None and of.gain.high is None for of in found.methods) and found.below_local == []
    loaded = load_runs(sorted(tmp_path.glob("*-*")))
    assert {row[3] for row in leaderboard(loaded).rows} == {"\u2013", "+29.0", "-10.0"}
    page = write_report(loaded, tmp_path / "report.html", title="T").read_text()
    assert "only 2 seeds" in page and "<strong>not known</strong>" in page


@pytest.mark.parametrize("metric", ["accuracy", "auc", "c-index", "brier"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_no_interval_exceeds_the_range_of_the_metrics_differences(tmp_path, metric, seeds):
    rng = np.random.default_rng(4)
    tables = {name: rng.uniform(0, 1, (seeds, 2)).tolist() for name in ("local", "fedavg", "fedrep")}
    found = made(tmp_path, tables, **{name: {"metric": metric} for name in tables})
    most = 2.0 if metric == "brier" else 1.0
    for of in found.methods:
        assert -most <= of.gain.low < of.gain.high <= most
    write_report(load_runs(sorted(tmp_path.glob("*-*"))), tmp_path / "report.html", title="T")
