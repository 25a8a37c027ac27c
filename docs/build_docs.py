"""The tables of the small experiments in README.md and docs/results.md, from kept numbers; pictures of a report.

``python docs/build_docs.py`` (``make docs``) runs the comparisons of :data:`KEPT` anew, keeps their numbers in
``docs/results/NAME.json``, and writes the tables; with ``--render`` it writes them from the numbers that are
kept, with ``--screens`` it makes the pictures of the report, ``docs/report-THEME-WIDTH.png`` (needs Chromium and
Pillow). ``tests/test_docs.py`` checks that the documents show the kept numbers, and that the code still gives them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anchors_tables
import leaderboard_tables
import maps_tables
import scale_tables
import sweep_tables
from markdown_tables import table
from screens import screens

from perfed.experiment.compare import Comparison, Recipe, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.report import compare_table, comparison_rows, load_runs
from perfed.report.comparison import ComparisonRow
from perfed.report.text import metric_text

ROOT = Path(__file__).parent.parent
MAPS = "docs/when.md"
LEADERBOARDS = "docs/leaderboards.md"
RESULTS = "docs/results.md"
BASELINES = ("sklearn:logistic", "sklearn:svc", "sklearn:random-forest")
SKEW = ("local", "fedrep", "fedavg-ft", "ditto", "fedpac", *BASELINES)
VIEWS = ("local", "hetfedrep", "flic-class", "flic-hl", *BASELINES)
# A tenth of the clients in each round, with the rates that were chosen for that.
RATES = {"local": "1e-2", "hetfedrep": "3e-3", "flic-class": "3e-3", "flic-hl": "1e-3"}
SAMPLED = ("participation.rate=0.1", *(f"methods.{method}.lr={rate}" for method, rate in RATES.items()))
NAMES = {
    "local": "Local",
    "fedrep": "FedRep",
    "fedavg-ft": "FedAvg-FT",
    "ditto": "Ditto",
    "fedpac": "**FedPAC**",
    "hetfedrep": "HetFedRep",
    "flic-class": "FLIC-Class",
    "flic-hl": "FLIC-HL",
    "sklearn:logistic": "logistic regression per client",
    "sklearn:svc": "SVC per client",
    "sklearn:random-forest": "random forest per client",
}


@dataclass(frozen=True)
class Kept:
    """A comparison whose numbers are kept.

    Attributes:
        experiment: a shipped one.
        methods: the first one is what the others are compared with.
        more: assignments as on the command line, beside ``dtype=float64``: with it every processor gets the same test
            samples right.
    """

    experiment: str
    methods: tuple[str, ...]
    more: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def settings(self) -> tuple[str, ...]:
        """All assignments."""
        return (*self.more, "dtype=float64")

    @property
    def command(self) -> str:
        """What gives the numbers."""
        seeds = f"--seeds {self.seeds[0]}..{self.seeds[-1]}"
        return " ".join(["perfed compare", self.experiment, "--methods", ",".join(self.methods), seeds, *self.settings])

    def run(self, seeds: Sequence[int], methods: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Train; per method and seed the ``accuracy`` over clients, and its mean over rounds, ``curve``.

        Raises:
            PerfedError: a run failed.
        """
        names = list(methods or self.methods)
        table = override(find_experiment(self.experiment), self.settings, federated(names))
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison.create(Path(folder) / "made", table, names, list(seeds), None, None)
            ready = Recipe(comparison, None, None)
            for method, seed in comparison.left():
                print(f"{self.experiment} {' '.join(self.settings)}: {method}, seed {seed}", file=sys.stderr)
                ready(method, seed).execute()
            runs = load_runs(comparison.started())
        rows = {(row["method"], row["seed"]): row["accuracy"] for row in comparison_rows(runs)}
        return [
            {
                "method": run.method,
                "seed": run.seed,
                "accuracy": rows[run.method, run.seed],
                "curve": {str(line.round): line.accuracy.mean for line in run.rounds if line.accuracy},
            }
            for run in runs
        ]


KEPT = {
    "digits-label-skew": Kept("digits-label-skew", SKEW),
    "digits-label-skew-6": Kept("digits-label-skew", SKEW, ("samples=24",)),
    "digits-label-skew-12": Kept("digits-label-skew", SKEW, ("samples=48",)),
    "digits-views": Kept("flic-digits-views", VIEWS),
    "digits-views-sampled": Kept("flic-digits-views", VIEWS, SAMPLED),
}
# Document -> table's name -> title of each group of columns -> whose numbers.
TABLES: dict[str, dict[str, dict[str, str]]] = {
    "README.md": {
        "label skew": {"3 samples a class": "digits-label-skew"},
        "views": {"60 samples a client": "digits-views"},
    },
    RESULTS: {
        "label skew": {
            "3 a class": "digits-label-skew",
            "6 a class": "digits-label-skew-6",
            "12 a class": "digits-label-skew-12",
        },
        "views": {
            "all clients in every round": "digits-views",
            "a tenth of the clients in a round": "digits-views-sampled",
        },
    },
}

DOCUMENTS = (*TABLES, MAPS, LEADERBOARDS, *scale_tables.TABLES)


def kept_file(name: str) -> Path:
    """Where the numbers are."""
    return ROOT / "docs" / "results" / f"{name}.json"


def kept_runs(name: str) -> list[dict[str, Any]]:
    """The kept numbers, as :meth:`Kept.run` gave them."""
    runs: list[dict[str, Any]] = json.loads(kept_file(name).read_text())["runs"]
    return runs


def markdown(groups: dict[str, str]) -> str:
    """Methods x groups of columns: accuracy, mean ± std over seeds, and paired difference to the first method."""
    tables = {title: _accuracy(name) for title, name in groups.items()}
    methods = KEPT[next(iter(groups.values()))].methods
    first = NAMES[methods[0]]
    header = ["accuracy in %, three seeds", *(cell for title in groups for cell in (title, f"against {first} [95 %]"))]
    lines = []
    for method in methods:
        cells = [cell for of in tables.values() for cell in _cells(of[method])]
        lines.append([NAMES[method], *cells])
    return table(header, lines)


def _accuracy(name: str) -> dict[str, ComparisonRow]:
    rows = [{**run, "wall_seconds": 0.0} for run in kept_runs(name)]  # times are not kept
    return {row.method: row for row in compare_table(rows)}


def _cells(row: ComparisonRow) -> list[str]:
    mean = f"{metric_text('accuracy', row.mean)} ± {metric_text('accuracy', row.mean_std or 0.0)}"
    if row.difference is None or row.difference.low is None or row.difference.high is None:
        return [mean, ""]
    ends = [metric_text("accuracy", v, "+") for v in (row.difference.mean, row.difference.low, row.difference.high)]
    middle, low, high = (end.replace("-", "−") for end in ends)
    return [mean, f"{middle} [{low}, {high}]"]


def rendered(document: str, text: str) -> str:
    """``text`` with the tables of ``document`` between their marks.

    Raises:
        ValueError: a table has no place there.
    """
    for name, content in _contents(document).items():
        start, end = f"<!-- made by docs/build_docs.py: {name} -->", "<!-- end -->"
        if text.count(start) != 1:
            raise ValueError(f"{document}: {text.count(start)} places for the table '{name}'; one is needed")
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


def _contents(document: str) -> dict[str, str]:
    """What stands between the marks of a document, by their names."""
    if document == MAPS:
        return {name: maps_tables.markdown(name) for name in maps_tables.maps()}
    if document == LEADERBOARDS:
        return {name: leaderboard_tables.markdown(name) for name in leaderboard_tables.boards()}
    if document in scale_tables.TABLES:
        return {name: made() for name, made in scale_tables.TABLES[document].items()}
    found = {}
    for name, groups in TABLES[document].items():
        commands = "\n".join(KEPT[kept].command for kept in groups.values())
        found[name] = f"```\n{commands}\n```\n\n{markdown(groups)}"
    if document == RESULTS:
        found |= {"anchors": anchors_tables.markdown(), "sweeps": sweep_tables.markdown()}
    return found


def write() -> None:
    """Tables from the kept numbers."""
    for document in DOCUMENTS:
        file = ROOT / document
        file.write_text(rendered(document, file.read_text()))


def main() -> None:
    """Run everything again unless ``--render`` is given, then write; or make pictures of the report."""
    if sys.argv[1:] not in ([], ["--render"], ["--screens"]):
        sys.exit("usage: python docs/build_docs.py [--render | --screens]")
    if sys.argv[1:] == ["--screens"]:
        screens()
        return
    if not sys.argv[1:]:
        for name, kept in KEPT.items():
            content = {"command": kept.command, "runs": kept.run(kept.seeds)}
            kept_file(name).write_text(json.dumps(content, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()
