"""The report of synthetic run directories: its numbers, its structure, and what a browser draws."""

import csv
import itertools
import json
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from perfed.engine.evaluate import spread as over_clients
from perfed.errors import PerfedError
from perfed.report import compare_table, comparison_rows, figures, gather_runs, leaderboard, write_report
from perfed.report.comparison import metric_tables
from perfed.report.leaderboard import standings
from perfed.report.load_runs import load_runs
from perfed.report.paired import holm, paired_p
from perfed.report.snapshots import MAX_SAMPLES, Snapshot, place_samples
from perfed.run.directory import RunDirectory

MEANS = {("fedavg", 0): 0.60, ("fedavg", 1): 0.64, ("flic", 0): 0.80, ("flic", 1): 0.82}
SECTIONS = ["verdict", "leaderboard", "gains", "curves", "embedding", "federation", "reproduce"]


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "std": 0.1, "min": mean - 0.2, "p10": mean - 0.1, "p90": mean + 0.1, "max": mean + 0.15}


def write_run(directory: Path, method: str, seed: int, *, metric: str = "accuracy", finished: bool = True) -> Path:
    """A run of four clients and three rounds; ``flic`` keeps snapshots."""
    mean = MEANS[method, seed]
    rng = np.random.default_rng(seed)
    directory.mkdir()
    settings = f'name = "toy"\nmethod = "{method}"\nseed = {seed}\nrounds = 3\n[data]\nname = "<script>x & y"\n'
    RunDirectory(directory).write_config(settings)
    lines = [{"round": number, "training_seconds": 0.5, "train_loss": 1.0} for number in (1, 2, 3)]
    for line in lines[::2]:
        value = spread(mean - 0.1 * (3 - line["round"]))
        line.update({"metrics": {metric: value}} | ({"accuracy": value} if metric == "accuracy" else {}))
    (directory / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not finished:
        return directory
    with (directory / "clients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "n_train", "n_test", f"{metric}_before", f"{metric}_after", "rounds"])
        for number, value in enumerate(mean + rng.uniform(-0.15, 0.15, 3)):
            table.writerow([f"<b>{number}", 20, 10, value - 0.1, value, 3])
        table.writerow(["untested", 20, 0, "", "", 3])
    summary = {"method": method, "dataset": "toy", "seed": seed, "rounds": 3, "wall_seconds": 1.5 + seed}
    summary |= {
        "metrics": {metric: spread(mean)},
        "plan": {"path": "stacked"},
        "notes": ["1 client < 2 samples"],
    }
    if metric == "accuracy":
        summary |= {"accuracy": spread(mean), "oracle_accuracy": 0.9}
    (directory / "summary.json").write_text(json.dumps(summary))
    if method == "flic":
        write_snapshots(directory / "snapshots", rng)
    return directory


def write_snapshots(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    anchors = 4 * np.eye(3, 5)
    for number in (0, 2, 3):
        y = np.repeat(np.arange(3), 20)
        z = number * anchors[y] + rng.normal(size=(60, 5))
        client = np.array(["a", "b"])[rng.integers(0, 2, 60)]
        np.savez(folder / f"round-{number:04d}.npz", z=z, y=y, client=client, anchors=anchors)


def write_combination(folder: Path, clients: int = 4, rounds: int = 4) -> None:
    folder.mkdir()
    names = np.array([f"c{i}" for i in range(clients)])
    for number in range(1, rounds + 1):
        weights = np.eye(clients) * number / rounds + (1 - number / rounds) / clients
        np.savez(folder / f"round-{number:04d}.npz", weights=weights, clients=names)


@pytest.fixture
def run_dirs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / f"{method}-{seed}", method, seed) for method, seed in MEANS]


class Page(HTMLParser):
    """What the tests ask of a page: sections, figures, cells by row, what is folded away, addresses of other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.figures: list[str] = []
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self.settings: list[str] = []
        self.words = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "section":
            self.sections.append(values["id"])
        self.references += [value for key, value in attrs if key in {"src", "href", "data", "action"}]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "pre":
            self.settings.append("")
        if tag not in ("meta", "input"):
            self._inside.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for key, value in attrs if key in {"src", "href", "data", "action"}]

    def handle_endtag(self, tag):
        assert self._inside.pop() == tag

    def handle_data(self, data):
        inside = self._inside[-1] if self._inside else ""
        if inside == "title" and self._inside[-2] == "svg":
            self.figures.append(data)
        if {"td", "th"} & {*self._inside} and "title" not in self._inside:
            self.rows[-1][-1] += data
        if inside == "pre":
            self.settings[-1] += data
        if inside not in {"script", "style"}:
            self.words += data


def read_page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def test_table_has_the_means_and_the_paired_differences(run_dirs):
    fedavg, flic = compare_table(comparison_rows(load_runs(run_dirs)))
    assert (fedavg.method, fedavg.metric, fedavg.seeds, fedavg.difference) == (
        "fedavg",
        "accuracy",
        (0, 1),
        None,
    )
    assert flic.mean == pytest.approx(0.81)
    assert flic.mean_std == pytest.approx(0.02 / np.sqrt(2))
    assert (flic.std, flic.worst, flic.tenth_worst) == pytest.approx((0.1, 0.61, 0.71))
    assert flic.wall_seconds == 2.0
    # Differences 0.20 and 0.18, of two seeds, which do not support an interval.
    assert flic.difference.mean == pytest.approx(0.19)
    assert (flic.difference.low, flic.difference.high) == (None, None)


def test_differences_pair_common_seeds_only(run_dirs):
    rows = comparison_rows(load_runs([run_dirs[1], *run_dirs[2:]]))
    assert [(row["method"], row["seed"]) for row in rows] == [("fedavg", 1), ("flic", 0), ("flic", 1)]
    difference = compare_table(rows)[1].difference
    assert (difference.seeds, difference.low, difference.high) == ((1,), None, None)
    assert difference.mean == pytest.approx(0.18)
    assert compare_table(comparison_rows(load_runs([run_dirs[0], run_dirs[3]])))[1].difference is None


def test_differences_are_so_that_more_is_better_whatever_the_metric():
    def spread(mean: float) -> dict[str, float]:
        return {"mean": mean, "std": 0.1, "min": 0.3, "p10": 0.4, "p90": 0.8, "max": 0.9}

    losses = {"local": (0.5, 0.6, 0.4), "fedavg": (0.2, 0.4, 0.2)}
    rows = [
        {"method": method, "seed": seed, "metrics": {"mse": spread(value)}, "wall_seconds": 1.0}
        for method, values in losses.items()
        for seed, value in enumerate(values)
    ]
    difference = compare_table(rows)[1].difference
    mean, half = 0.7 / 3, 4.302653 * np.std([0.3, 0.2, 0.2], ddof=1) / np.sqrt(3)  # Student's t, 2 degrees of freedom
    assert (difference.mean, difference.low, difference.high) == pytest.approx((mean, mean - half, mean + half))


def test_an_interval_over_seeds_is_within_the_range_of_the_metric():
    def spread(mean: float) -> dict[str, float]:
        return {"mean": mean, "std": 0.1, "min": 0.0, "p10": 0.0, "max": 1.0}

    values = {"local": (0.5, 0.9, 0.1), "fedavg": (0.9, 0.1, 0.5)}
    rows = [
        {"method": method, "seed": seed, "metrics": {}, "accuracy": spread(value), "wall_seconds": 1.0}
        for method, seeds in values.items()
        for seed, value in enumerate(seeds)
    ]
    difference = compare_table(rows)[1].difference
    assert (difference.low, difference.high) == (-1.0, 1.0)


def test_the_worst_clients_of_a_loss_are_those_with_the_highest():
    """By the clients' values themselves; results of before there was a 90th percentile say that they do not know it."""
    losses = np.random.default_rng(0).exponential(size=101)
    rows = [{"method": "local", "seed": 0, "wall_seconds": 1.0, "metrics": {}}]
    rows[0]["metrics"] = {name: over_clients(losses) for name in ("accuracy", "loss", "mse")}
    accuracy, loss, mse = compare_table(rows)
    ordered = np.sort(losses)
    assert (accuracy.worst, accuracy.tenth_worst) == pytest.approx((ordered[0], ordered[10]))
    assert (loss.worst, loss.tenth_worst) == pytest.approx((ordered[100], ordered[90]))
    assert (mse.worst, mse.tenth_worst) == (loss.worst, loss.tenth_worst)
    titles = [table.title for table in metric_tables([accuracy, loss], "after local training")]
    assert titles == ["accuracy: after local training", "loss (lower is better): after local training"]
    shown = metric_tables([loss], "")[0]
    cells = dict(zip(shown.header, shown.rows[0], strict=True))
    assert cells["Worst client (max)"] == f"{ordered[100]:.4g}"
    assert cells["10 % worst (90th percentile)"] == f"{ordered[90]:.4g}"
    del rows[0]["metrics"]["loss"]["p90"]
    assert metric_tables([compare_table(rows)[1]], "")[0].rows[0][5] == "–"


def test_comparison_keeps_the_order_in_which_methods_were_given(run_dirs):
    rows = comparison_rows(load_runs(run_dirs[::-1]))
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("flic", 0),
        ("flic", 1),
        ("fedavg", 0),
        ("fedavg", 1),
    ]
    assert set(rows[0]) == {"method", "seed", "metrics", "accuracy", "wall_seconds"}


def test_page_is_complete_and_self_contained(run_dirs, tmp_path):
    out = write_report(load_runs(run_dirs), tmp_path / "new" / "report.html", title="A <b> & c", command="perfed & x")
    page = read_page(out)
    assert page.sections == SECTIONS
    assert [name for name in page.references if not name.startswith(("#", "data:image/png;base64,"))] == []
    found = {row[0]: row for row in page.rows if len(row) == 10}
    assert found["flic"][1] == "81.00 ± 1.41" and found["flic"][3].endswith("0 / 0 / 6")
    assert found["FedAvg"][1:4] == ["62.00 ± 2.83", "–", "–"] and found["flic"][4:6] == ["61.00", "71.00"]
    assert page.settings[0].startswith("perfed & x\n") and page.settings[1] == (run_dirs[2] / "config.toml").read_text()
    assert "A <b> & c" in page.words and "flic: 1 client < 2 samples (seed 0, 1)" in page.words
    text = out.read_text(encoding="utf-8")
    assert "<script>x" not in text and "<b>" not in text
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]
    assert out.stat().st_size < 200_000 and "Content-Security-Policy" in text


@pytest.mark.long
def test_every_figure_and_table_says_what_it_is(run_dirs, tmp_path):
    text = write_report(load_runs(run_dirs), tmp_path / "report.html", title="t").read_text()
    drawings = text.count("<svg xmlns")
    assert drawings == text.count('role="img" font-family') == text.count("</title><desc>") > 5
    assert text.count("<th ") == text.count("<th scope=")
    assert "var(--" in text and "prefers-color-scheme:dark" in text and "@media print" in text


def test_a_further_metric_that_was_asked_for_has_its_curve(run_dirs):
    for run in run_dirs:
        summary = json.loads((run / "summary.json").read_text())
        asked = {"last": 1, "who": "all", "when": "before", "split": "test", "metrics": ["generalisation-gap"]}
        (run / "summary.json").write_text(json.dumps({**summary, "evaluation": asked}))
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        for line in lines[::2]:
            line["metrics"]["generalisation-gap"] = spread(-0.25)
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = figures(load_runs(run_dirs))["curves-generalisation-gap"]
    assert "FedAvg, round 3: -0.25 (seeds -0.25 to -0.25)" in drawn and "lower is better" in drawn


def test_unfinished_runs_are_reported_as_far_as_they_are(tmp_path):
    run = write_run(tmp_path / "run", "flic", 0, finished=False)
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Half"))
    assert page.sections == ["curves", "reproduce"]
    assert "Not finished, so only in the learning curves: flic with seed 0." in page.words
    (run / "rounds.jsonl").unlink()
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Nothing yet"))
    assert page.figures == [] and "No round has been evaluated yet." in page.words


def test_one_method_has_cards_and_nothing_to_compare(tmp_path):
    run = write_run(tmp_path / "run", "fedavg", 0, metric="mse")
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Regression"))
    assert page.sections == ["verdict", "gains", "curves", "federation", "reproduce"]
    assert "mse0.6± 0.1 over the clientsworst client 0.75, 10 % worst 0.7lower is better" in page.words
    assert "There is no other method to compare with." in page.words and "Better than" not in page.words
    assert "accuracy" not in comparison_rows(load_runs([run]))[0]


def test_the_leaderboard_is_the_verdict_in_a_table(run_dirs):
    runs = load_runs(run_dirs)
    first, second = standings(runs)
    assert (first.row.method, first.against, second.row.method) == ("fedavg", None, "flic")
    values = {run.method: {} for run in runs}
    for run in runs:
        values[run.method][run.seed] = run.clients.reported
    gains = np.array([values["flic"][seed] - values["fedavg"][seed] for seed in (0, 1)])
    assert second.against.gain.mean == pytest.approx(np.nanmean(gains))
    table = leaderboard(runs)
    assert [row[0] for row in table.rows] == ["flic", "FedAvg"] and table.rows[0][4] == "0 / 0 / 6"
    assert table.header[3] == "Better than FedAvg by [95 % interval over clients and seeds]"
    other = leaderboard(runs, "flic")
    assert other.rows[1][4] == "6 / 0 / 0" and other.rows[0][3] == "–"
    assert other.rows[1][3].startswith("-")


def test_p_values_are_scipys_over_clients_and_holms():
    rng = np.random.default_rng(3)
    differences = rng.normal(0.3, 1, (3, 60))
    differences[0, 4] = np.nan
    expected = stats.wilcoxon(np.nanmean(differences, 0), zero_method="pratt", method="approx").pvalue
    assert paired_p(differences) == pytest.approx(expected)
    assert paired_p(np.zeros((2, 5))) == 1.0 and paired_p(np.full((2, 5), np.nan)) is None
    # Holm 1979: 4 x 0.01, 3 x 0.015, 2 x 0.03, 0.04; never less than the one before.
    found = holm({"a": 0.03, "b": 0.01, "c": 0.04, "d": 0.015})
    assert found == pytest.approx({"a": 0.06, "b": 0.04, "c": 0.06, "d": 0.045})


def test_p_values_of_few_clients_count_every_sign():
    assert paired_p(np.arange(1.0, 6)[None]) == 2 / 2**5  # the normal approximation says .043
    rng = np.random.default_rng(0)
    plain = rng.normal(0.4, 1, (1, 20))
    assert paired_p(plain) == pytest.approx(stats.wilcoxon(plain[0], method="exact").pvalue)
    tied = np.array([[3.0, -1.0, 1.0, 0.0, 2.0, 2.0, -2.0, 4.0, 0.0]])
    ranks = stats.rankdata(abs(tied[0]))
    sums = [float(np.dot(ranks, signs * abs(np.sign(tied[0])))) for signs in itertools.product((-1, 1), repeat=9)]
    far = np.mean(np.abs(sums) >= abs(np.dot(ranks, np.sign(tied[0]))))
    assert paired_p(tied) == pytest.approx(far)
    # What rounding alone tells apart is a tie.
    assert paired_p(tied * 0.1 + np.where(tied, 1e-15, 0)) == pytest.approx(far)


def test_figures_are_files_of_their_own(run_dirs):
    drawn = figures(load_runs(run_dirs))
    assert {"gains", "gains-sorted-flic", "gains-scatter-flic", "curves-mean", "curves-tenth"} <= drawn.keys()
    assert "embedding-flic" in drawn
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in text
    bars = ElementTree.fromstring(drawn["gains-sorted-flic"]).findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 1 + 3  # the ground, and a bar for each client that was measured


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", "method = \n", r"config.toml: .*line 1"),
        ("config.toml", 'method = "a"\n', "integer 'seed'"),
        ("rounds.jsonl", '{"round": 1}\n{"rou\n', "rounds.jsonl, line 2: not JSON"),
        ("rounds.jsonl", '{"round": "one"}\n', "rounds.jsonl, line 1: round: "),
        (
            "clients.csv",
            "id,accuracy_before,accuracy_after\na,0.5,0.6\nb,0.5\n",
            "clients.csv, line 3: needs",
        ),
        ("clients.csv", "id,accuracy_before,accuracy_after\na,good,0.6\n", "clients.csv, line 2: needs"),
        ("summary.json", '{\n"method": }', "summary.json, line 2: not JSON"),
        ("summary.json", "{}", "summary.json: method: "),
    ],
)
def test_corrupt_files_are_named(run_dirs, tmp_path, file, text, message):
    (run_dirs[2] / file).write_text(text)
    with pytest.raises(PerfedError, match=message) as error:
        write_report(load_runs(run_dirs), tmp_path / "report.html", title="x")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_impossible_collections_of_runs_are_refused(run_dirs, tmp_path):
    with pytest.raises(PerfedError, match="no run directory given"):
        load_runs([])
    with pytest.raises(PerfedError, match=r"no config\.toml, so not a run directory"):
        load_runs([tmp_path / "absent"])
    with pytest.raises(PerfedError, match=r"fedavg with seed 0 is in .*fedavg-0 already; counted once"):
        load_runs([run_dirs[0], shutil.copytree(run_dirs[0], tmp_path / "copy")])
    summary = run_dirs[0] / "summary.json"
    summary.write_text(summary.read_text().replace('"toy"', '"digits"'))
    with pytest.raises(PerfedError, match="data set 'toy', not 'digits' as"):
        load_runs(run_dirs)


@pytest.mark.parametrize(("samples", "dimension"), [(1, 2), (3, 1), (5, 1), (700, 3)])
def test_embedding_adapts_to_the_number_of_samples(samples, dimension):
    rng = np.random.default_rng(0)
    client = np.full(samples, "a")
    snapshot = Snapshot(1, rng.normal(size=(samples, dimension)), np.zeros(samples, np.int64), client, None)
    found = place_samples(snapshot)
    assert (found is None) == (samples < 4)
    assert found is None or len(found.points) == len(found.y) == min(samples, MAX_SAMPLES)


def test_what_cannot_be_read_is_a_line_and_the_rest_is_drawn(run_dirs, tmp_path):
    """Half of a comparison is better than none of it."""
    (run_dirs[2] / "snapshots" / "round-0002.npz").write_text("no zip")
    (run_dirs[1] / "clients.csv").write_text("id,accuracy_before,accuracy_after\na,good,0.6\n")
    other = write_run(tmp_path / "other", "fedavg", 1)
    summary = other / "summary.json"
    summary.write_text(summary.read_text().replace('"toy"', '"digits"'))
    found = gather_runs([*run_dirs, other, run_dirs[0], tmp_path / "absent"])
    runs, left_out = found.runs, found.left_out
    assert [(run.method, run.seed) for run in runs] == [("fedavg", 0), ("flic", 0), ("flic", 1)]
    for line, part in zip(
        left_out, ("clients.csv, line 2", "data set 'digits', not 'toy'", "given twice", "no config"), strict=True
    ):
        assert part in line
    page = read_page(write_report(runs, tmp_path / "report.html", title="t", left_out=left_out))
    assert page.sections == SECTIONS and "round-0002.npz: not a snapshot" in page.words
    assert all(line in page.words for line in left_out)
    with pytest.raises(PerfedError, match=r"no config\.toml"):
        gather_runs([tmp_path / "absent"])


@pytest.mark.long
def test_runs_that_held_other_data_are_not_compared_in_silence(run_dirs, tmp_path):
    for number, directory in enumerate(run_dirs):
        held = {"data": f"{number % 3:08x}", "classes": ["x"], "domains": [], "clients": {}}
        (directory / "federation.json").write_text(json.dumps(held))
    page = read_page(write_report(load_runs(run_dirs), tmp_path / "report.html", title="t"))
    assert "With seed 0 flic and FedAvg had different data: do not compare them." in page.words


def test_half_a_last_line_of_a_killed_run_is_passed_over(run_dirs):
    file = run_dirs[2] / "rounds.jsonl"
    before = len(load_runs(run_dirs)[2].rounds)
    file.write_text(file.read_text() + '{"rou')
    assert len(load_runs(run_dirs)[2].rounds) == before


@pytest.mark.long
def test_the_embedding_shown_first_is_of_a_method_with_anchors(run_dirs, tmp_path):
    without = run_dirs[0]
    (without / "snapshots").mkdir()
    np.savez(without / "snapshots" / "round-0000.npz", z=np.eye(6), y=np.arange(6) % 3, client=np.array(["a"] * 6))
    text = write_report(load_runs(run_dirs), tmp_path / "report.html", title="toy").read_text()
    part = text[text.index('<section id="embedding"') :]
    assert '<option value="flic">flic</option><option value="fedavg">' in part
    assert '<div data-key="fedavg" hidden>' in part and '<div data-key="flic">' in part
    assert "6 samples of 3 classes, 0 anchors" in part and "60 samples of 3 classes, 3 anchors" in part


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "test"])
def test_embedded_samples_are_called_what_they_are(run_dirs, tmp_path, split):
    config = run_dirs[2] / "config.toml"
    config.write_text(f'{config.read_text()}[snapshots]\nsplit = "{split}"\n')
    page = read_page(write_report(load_runs([run_dirs[2]]), tmp_path / "report.html", title="toy"))
    assert f"t-SNE of at most 200 {'test' if split == 'test' else 'training'} samples of the first seed" in page.words


def test_combination_weights_are_drawn_as_heat_maps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 0)
    page = read_page(write_report(load_runs([run]), tmp_path / "plain.html", title="t"))
    assert "combination" not in page.sections
    write_combination(run / "combination")
    text = write_report(load_runs([run]), tmp_path / "report.html", title="t").read_text()
    for number in (1, 2, 3, 4):
        assert f"FedAvg: weights of the combination, round {number}" in text
    assert "client c2: most from c2 (1.00)" in text  # the last round's are those of each client alone
    assert text.count('type="range"') == 1
    names = [name for name in figures(load_runs([run])) if name.startswith("combination")]
    assert names == [f"combination-fedavg-round-{number}" for number in (1, 3, 4)]
    np.savez(run / "combination" / "round-0002.npz", weights=np.zeros((3, 4)), clients=np.array(["a"]))
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="t"))
    assert "round-0002.npz: needs weights" in page.words


def test_losses_of_local_epochs_are_a_line_per_client(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 0)
    (run / "losses").mkdir()
    for number, names in ((0, "ab"), (1, "aab"), (4, "bb")):
        losses = np.arange(1, len(names) + 1) / (number or 1e-3)
        np.savez(run / "losses" / f"round-{number:04d}.npz", client=np.array(list(names)), loss=losses)
    drawn = figures(load_runs([run]))["losses-fedavg"]
    for hint in ("client a, round 1: 1 to 2 in 2 epochs", "client b, round 1: 3 to 3 in 1 epochs"):
        assert hint in drawn
    assert "client b, round 4: 0.25 to 0.5 in 2 epochs" in drawn and "client b ends at 0.5" in drawn
    assert "round 0" not in drawn
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="t"))
    assert "epochs" in page.sections
    np.savez(run / "losses" / "round-0004.npz", client=np.array(["a"]), loss=np.zeros(2))
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="t"))
    assert "round-0004.npz: needs client and loss" in page.words


def test_few_rounds_of_combined_heads_stand_beside_each_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 0)
    write_combination(run / "combination", rounds=3)
    text = write_report(load_runs([run]), tmp_path / "report.html", title="t").read_text()
    assert text.count("weights of the combination, round") >= 3 and 'type="range"' not in text


@pytest.mark.long
def test_many_clients_methods_and_rounds_stay_a_small_file(tmp_path):
    """2000 clients, 5 methods, 500 rounds: bounds on bytes and elements, which a browser's time goes by."""
    rng = np.random.default_rng(0)
    runs = [write_large(tmp_path / f"m{number}", f"m{number}", rng) for number in range(5)]
    out = write_report(load_runs(runs), tmp_path / "report.html", title="large")
    text = out.read_text()
    assert out.stat().st_size < 600_000
    assert text.count("<") < 15_000
    assert "2000 clients, sorted" in text


def write_large(directory: Path, method: str, rng: np.random.Generator, clients: int = 2000, rounds: int = 500) -> Path:
    directory.mkdir()
    RunDirectory(directory).write_config(f'method = "{method}"\nseed = 0\n')
    with (directory / "rounds.jsonl").open("w") as file:
        for number in range(1, rounds + 1):
            value = spread(0.8 - 0.5 / number)
            line = {"round": number, "training_seconds": 0.5 * number, "virtual_time": 2.5 * number, "accuracy": value}
            some = [f"{i:04d}" for i in rng.choice(clients, 20)]
            sizes = {"bytes_up": 10**6, "bytes_down": 10**6, "participants": some}
            file.write(json.dumps({**line, **sizes, "metrics": {"accuracy": value}}) + "\n")
    with (directory / "clients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "n_train", "n_test", "accuracy_before", "accuracy_after", "rounds", "seconds"])
        for i, value in enumerate(rng.uniform(0.5, 1, clients)):
            table.writerow([f"{i:04d}", 20, 10, round(value, 3), round(value, 3), 3, 1 + i / 100])
    summary = {"method": method, "dataset": "large", "seed": 0, "rounds": rounds, "wall_seconds": 1.5}
    summary |= {"metrics": {"accuracy": spread(0.75)}, "accuracy": spread(0.75)}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory
