"""The report of synthetic run directories: its numbers, its structure, and what a browser draws."""

import csv
import json
import os
import re
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from engines import blobs

from perfed.engine.evaluate import spread as over_clients
from perfed.errors import PerfedError
from perfed.report import compare_table, comparison_rows, write_report
from perfed.report.arrays import Snapshot, load_combination
from perfed.report.comparison import metric_tables
from perfed.report.figures import combination_heat_maps, embedded_samples, sorted_clients
from perfed.report.html import PAGE
from perfed.report.partition import ClassTable, write_partition_page
from perfed.report.runs import load_runs

MEANS = {("fedavg", 0): 0.60, ("fedavg", 1): 0.64, ("flic", 0): 0.80, ("flic", 1): 0.82}
PLOTS = ["plot-rounds", "plot-clients", "plot-sorted", "plot-embedding"]
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=20000",
]


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "std": 0.1, "min": mean - 0.2, "p10": mean - 0.1, "p90": mean + 0.1, "max": mean + 0.15}


def write_run(directory: Path, method: str, seed: int, *, metric: str = "accuracy", finished: bool = True) -> Path:
    """A run of four clients and three rounds; ``flic`` keeps snapshots."""
    mean = MEANS[method, seed]
    rng = np.random.default_rng(seed)
    directory.mkdir()
    settings = f'name = "toy"\nmethod = "{method}"\nseed = {seed}\nrounds = 3\n[data]\nname = "<script>x & y"\n'
    (directory / "config.toml").write_text(settings)
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


def write_combination(folder: Path, clients: int = 4) -> None:
    folder.mkdir()
    names = np.array([f"c{i}" for i in range(clients)])
    for number in (1, 2, 3):
        weights = np.eye(clients) * number / 3 + (1 - number / 3) / clients
        np.savez(folder / f"round-{number:04d}.npz", weights=weights, clients=names)


@pytest.fixture
def run_dirs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / f"{method}-{seed}", method, seed) for method, seed in MEANS]


class Page(HTMLParser):
    """What the tests ask of a page: sections, plots, table cells, settings, references to other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.plots: list[str] = []
        self.references: list[str] = []
        self.scripts: list[str] = []
        self.cells: list[str] = []
        self.settings: list[str] = []
        self.words = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._inside = tag
        if tag == "section":
            self.sections.append(values["id"])
        if values.get("class") == "plotly-graph-div":
            self.plots.append(values["id"])
        self.references += [value for key, value in attrs if key in {"src", "href", "data", "action"}]
        for kind, texts in (("script", self.scripts), ("td", self.cells), ("pre", self.settings)):
            if tag == kind:
                texts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        texts = {"script": self.scripts, "td": self.cells, "pre": self.settings}.get(self._inside)
        if texts is not None:
            texts[-1] += data
        if self._inside not in {"script", "style"}:
            self.words += data


def read_page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def test_table_has_the_means_and_the_paired_interval(run_dirs):
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
    # Differences 0.20 and 0.18: mean 0.19, standard error 0.01; Student t, 1 degree of freedom: 12.7062.
    assert flic.difference.mean == pytest.approx(0.19)
    assert (flic.difference.low, flic.difference.high) == pytest.approx((0.19 - 0.127062, 0.19 + 0.127062))


def test_differences_pair_common_seeds_only(run_dirs):
    rows = comparison_rows(load_runs([run_dirs[1], *run_dirs[2:]]))
    assert [(row["method"], row["seed"]) for row in rows] == [("fedavg", 1), ("flic", 0), ("flic", 1)]
    difference = compare_table(rows)[1].difference
    assert (difference.seeds, difference.low, difference.high) == ((1,), None, None)
    assert difference.mean == pytest.approx(0.18)
    assert compare_table(comparison_rows(load_runs([run_dirs[0], run_dirs[3]])))[1].difference is None


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
    out = write_report(load_runs(run_dirs), tmp_path / "new" / "report.html", title="A <b> & c")
    page = read_page(out)
    assert page.sections == ["comparison", "rounds", "clients", "embedding", "settings"]
    assert page.plots == PLOTS
    assert page.references == []
    assert sum("* plotly.js v" in script[:100] for script in page.scripts) == 1
    assert page.cells[:3] == ["fedavg", "2", "62.00 ± 2.83"]
    assert page.cells[8:] == [
        "flic",
        "2",
        "81.00 ± 1.41",
        "10.00",
        "61.00",
        "71.00",
        "+19.00 [+6.29, +31.71]",
        "2.0",
    ]
    assert page.settings[0] == (run_dirs[0] / "config.toml").read_text()
    assert "A <b> & c" in page.words and "flic: 1 client < 2 samples (seed 0, 1)" in page.words
    text = out.read_text(encoding="utf-8")
    assert "<script>x" not in text and "<b>" not in text.split("</script>", 1)[1]
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


def test_unfinished_runs_are_reported_as_far_as_they_are(tmp_path):
    run = write_run(tmp_path / "run", "flic", 0, finished=False)
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Half"))
    assert page.plots == ["plot-rounds"]
    assert "Not finished, so not in the table: flic with seed 0." in page.words
    (run / "rounds.jsonl").unlink()
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Nothing yet"))
    assert page.plots == [] and "No round has been evaluated yet." in page.words


def test_regression_shows_its_own_metric(tmp_path):
    run = write_run(tmp_path / "run", "fedavg", 0, metric="mse")
    page = read_page(write_report(load_runs([run]), tmp_path / "report.html", title="Regression"))
    assert page.cells[:6] == ["fedavg", "1", "0.6", "0.1", "0.75", "0.7"]
    assert page.plots == PLOTS[:3]
    assert "accuracy" not in comparison_rows(load_runs([run]))[0]


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
        ("snapshots/round-0002.npz", "no zip", "round-0002.npz: not a snapshot"),
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
    with pytest.raises(PerfedError, match="both hold method 'fedavg' with seed 0"):
        load_runs([run_dirs[0], shutil.copytree(run_dirs[0], tmp_path / "copy")])
    summary = run_dirs[0] / "summary.json"
    summary.write_text(summary.read_text().replace('"toy"', '"digits"'))
    with pytest.raises(PerfedError, match="different data sets cannot be compared: digits, toy"):
        load_runs(run_dirs)


@pytest.mark.parametrize(("samples", "dimension"), [(1, 2), (3, 1), (5, 1), (700, 3)])
def test_embedding_adapts_to_the_number_of_samples(samples, dimension):
    rng = np.random.default_rng(0)
    client = np.full(samples, "a")
    snapshot = Snapshot(1, rng.normal(size=(samples, dimension)), np.zeros(samples, np.int64), client, None)
    figure = embedded_samples([snapshot])
    shown = sum(len(trace.text or ()) for trace in figure.data)
    assert shown == (0 if samples < 4 else min(samples, 600))


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_sorted_curves_show_what_the_table_reports(run_dirs, when):
    """Not always "after local training", which is of participants alone: one of four clients here, not all of them."""
    for number, directory in enumerate(run_dirs):
        config = directory / "config.toml"
        config.write_text(config.read_text() + f'[evaluation]\nwhen = "{when}"\n')
        rows = [["a", 0.2, 0.9], ["b", 0.4, ""], ["c", 0.3, ""], ["d", "", ""]]
        text = "".join(f"{name},{before},{after}\n" for name, before, after in rows[: 4 if number < 3 else 3])
        (directory / "clients.csv").write_text(f"id,accuracy_before,accuracy_after\n{text}")
    figure = sorted_clients(load_runs(run_dirs), "accuracy")
    assert figure is not None and figure.layout.xaxis.title.text.endswith(f"sorted; {when} local training")
    fedavg, flic = figure.data
    if when == "before":
        assert list(fedavg.y) == pytest.approx([20, 20, 30, 30, 40, 40]) and fedavg.name == "fedavg (6 of 8 clients)"
        assert list(fedavg.x) == pytest.approx(100 * (np.arange(6) + 0.5) / 6)
        assert flic.name == "flic (6 of 7 clients)"
    else:
        assert list(flic.y) == [90, 90] and flic.name == "flic (2 of 7 clients)"


def browser() -> str:
    found = shutil.which("chromium")
    if found is None:
        missing = "needs chromium on the PATH (Debian: apt install chromium)"
        if os.environ.get("PERFED_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def test_browser_draws_every_plot(run_dirs, tmp_path):
    chromium = browser()
    out = write_report(load_runs(run_dirs), tmp_path / "report.html", title="Two methods")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [chromium, *CHROMIUM_FLAGS, profile, "--dump-dom", out.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not re.findall(r".*(?:CONSOLE|Uncaught).*", done.stderr)
    body = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    positions = [body.index(f'id="{plot}"') for plot in PLOTS]
    for start, end in zip(positions, [*positions[1:], len(body)], strict=True):
        assert '<svg class="main-svg"' in body[start:end]


@contextmanager
def proxy() -> Iterator[tuple[list[str], list[str]]]:
    """Flags that send what a page asks of any server to a proxy, which answers nothing, and what it was asked.

    The browser's own requests, for updates of itself, go to names that are not found.
    """
    asked: list[str] = []

    class Note(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode(errors="replace").strip())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Note) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = ("*.google.com", "*.googleapis.com")
        flags = [f"--proxy-server=http://127.0.0.1:{server.server_address[1]}"]
        flags += [f"--proxy-bypass-list=<-loopback>;{';'.join(own)}"]
        flags += ["--host-resolver-rules=" + ", ".join(f"MAP {names} ~NOTFOUND" for names in own)]
        yield flags, asked
        server.shutdown()


PRESS = """<script>
window.opened = [];
window.open = (...given) => { window.opened.push(String(given[0])); return null; };
window.addEventListener('load', async () => {
  const buttons = Array.from(document.querySelectorAll('.modebar-btn'));
  for (const button of buttons) {
    button.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    await new Promise(done => setTimeout(done, 50));
    for (const more of document.querySelectorAll('[class*="cloud-dialog"] button')) more.click();
  }
  const found = document.createElement('pre');
  found.id = 'found';
  const links = Array.from(document.querySelectorAll('a[href]')).map(link => link.href).filter(Boolean);
  const titles = buttons.map(button => button.getAttribute('data-title'));
  const loaded = performance.getEntriesByType('resource').map(entry => entry.name);
  found.textContent = JSON.stringify({titles, links, loaded, opened: window.opened});
  document.body.append(found);
});
</script>"""


def pressed(page: Path, profile: Path) -> tuple[dict[str, list[str]], list[str]]:
    """What a browser finds that opens the page and presses every button of every plot, and what it asked of servers."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PRESS}</body>"), encoding="utf-8")
    with proxy() as (flags, asked):
        command = [browser(), *CHROMIUM_FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, list[str]] = json.loads(unescape(re.findall('<pre id="found">(.*?)</pre>', done.stdout)[0]))
    return found, asked


def test_a_page_has_no_button_that_sends_anything_and_asks_no_server(run_dirs, tmp_path):
    report = write_report(load_runs(run_dirs), tmp_path / "report.html", title="Two methods")
    partition = write_partition_page(ClassTable.of(blobs()), tmp_path / "partition.html")
    for number, page in enumerate((report, partition)):
        found, asked = pressed(page, tmp_path / f"profile-{number}")
        assert "Download plot as a PNG" in found["titles"]
        assert not [title for title in found["titles"] if re.search("cloud|share|plotly|edit|studio", title, re.I)]
        assert found["links"] == found["opened"] == found["loaded"] == asked == []


def test_a_request_of_a_page_would_be_noticed_and_is_forbidden(tmp_path):
    picture = '<img src="http://example.invalid/picture.png">'
    bare = f"<html><body>{picture}</body></html>"
    policy = PAGE.format(title="t", facts="", plotlyjs="", sections=picture)
    for number, (text, seen) in enumerate(((bare, 1), (policy, 0))):
        page = tmp_path / f"{number}.html"
        page.write_text(text)
        assert len([line for line in pressed(page, tmp_path / f"profile-{number}")[1] if "example" in line]) == seen


def test_half_a_last_line_of_a_killed_run_is_passed_over(run_dirs):
    file = run_dirs[2] / "rounds.jsonl"
    before = len(load_runs(run_dirs)[2].rounds)
    file.write_text(file.read_text() + '{"rou')
    assert len(load_runs(run_dirs)[2].rounds) == before


def test_the_embedding_shown_is_of_a_run_with_anchors(run_dirs, tmp_path):
    without = next(d for d in run_dirs if not (d / "snapshots").exists())
    (without / "snapshots").mkdir()
    np.savez(without / "snapshots" / "round-0000.npz", z=np.eye(6), y=np.arange(6) % 3, client=np.array(["a"] * 6))
    ordered = [without, *(d for d in run_dirs if d != without)]
    page = write_report(load_runs(ordered), tmp_path / "report.html", title="toy").read_text()
    assert "(at most 600) and anchors of flic with seed" in page and '"Before round 1"' in page
    page = write_report(load_runs([without]), tmp_path / "report.html", title="toy").read_text()
    assert "t-SNE of training samples (at most 600) of fedavg with seed" in page


def test_combination_weights_are_drawn_as_heat_maps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", 0)
    assert (
        "combination"
        not in Page(write_report(load_runs([run]), tmp_path / "plain.html", title="t").read_text()).sections
    )
    write_combination(run / "combination")
    page = Page(write_report(load_runs([run]), tmp_path / "report.html", title="t").read_text())
    assert "combination" in page.sections and "plot-combination-0" in page.plots
    figure = combination_heat_maps([load_combination(file) for file in load_runs([run])[0].combination_files])
    assert [annotation.text for annotation in figure.layout.annotations] == ["Round 1", "Round 2", "Round 3"]
    np.testing.assert_allclose(figure.data[2].z, np.eye(4))
    np.savez(run / "combination" / "round-0002.npz", weights=np.zeros((3, 4)), clients=np.array(["a"]))
    with pytest.raises(PerfedError, match=r"round-0002.npz: needs weights"):
        write_report(load_runs([run]), tmp_path / "report.html", title="t")
