"""The tables of the small experiments in docs/results.md, from kept numbers; pictures of a report.

``python docs/build_docs.py`` (``make docs``) runs the comparisons of :data:`KEPT` again, keeps their numbers in
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
import audit_tables
import blend_tables
import coverage_tables
import duel_tables
import forests_tables
import init_tables
import leaderboard_tables
import maps_tables
import named_tables
import numpy as np
import private_tables
import pulls_tables
import robust_tables
import scale_tables
import sweep_tables
from markdown_tables import table
from screens import screens

from perfed.engine.metrics import metric_of
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.experiment.study import Study
from perfed.methods.titles import display_name
from perfed.report import load_runs
from perfed.report.against import best_reference, compare_methods
from perfed.report.paired import ClientTable
from perfed.report.text import format_metric

ROOT = Path(__file__).parent.parent
ACCURACY = metric_of("accuracy")
MAPS = "docs/when.md"
BENCHMARKS = "docs/benchmarks.md"
LEADERBOARDS = "docs/leaderboards.md"
RESULTS = "docs/results.md"
BASELINES = ("sklearn:logistic", "sklearn:svc", "sklearn:random-forest")
SKEW = ("local", "fedrep", "fedavg-ft", "ditto", "fedpac", *BASELINES)
VIEWS = ("local", "hetfedrep", "flic-class", "flic-hl", *BASELINES)
# A tenth of the clients in each round, with the rates that were chosen for that.
RATES = {"local": "1e-2", "hetfedrep": "3e-3", "flic-class": "3e-3", "flic-hl": "1e-3"}
SAMPLED = ("participation.rate=0.1", *(f"methods.{method}.lr={rate}" for method, rate in RATES.items()))
BOLD = "fedpac"


@dataclass(frozen=True)
class Kept:
    """A comparison whose numbers are kept.

    Attributes:
        experiment: a shipped one.
        methods: in the order of the table's rows.
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
        """Train; per method and seed the accuracy of each client, ``clients``, and its mean over rounds, ``curve``.

        Raises:
            PerfedError: a run failed.
        """
        names = list(methods or self.methods)
        table = override(find_experiment(self.experiment), self.settings, federated(names))
        with tempfile.TemporaryDirectory() as folder:
            study = Study.create(Path(folder) / "made", ComparisonSpec(table, names, list(seeds)))
            ready = study.runs()
            for key in study.list_unfinished():
                print(f"{self.experiment} {' '.join(self.settings)}: {ready.label(*key)}", file=sys.stderr)
                ready(*key).execute()
            runs = load_runs(study.comparisons[""].started())
        return [
            {
                "method": run.method,
                "seed": run.seed,
                "clients": dict(zip(run.clients.ids, run.clients.reported.tolist(), strict=True)),
                "curve": {str(line.round): line.accuracy.mean for line in run.rounds if line.accuracy},
            }
            for run in runs
            if run.clients
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

OWN_TABLES = {**scale_tables.TABLES, **audit_tables.TABLES}
OWN_TABLES[BENCHMARKS] = {**OWN_TABLES[BENCHMARKS], **duel_tables.TABLES}
DOCUMENTS = (*TABLES, MAPS, LEADERBOARDS, *OWN_TABLES)


def kept_file(name: str) -> Path:
    """Where the numbers are."""
    return ROOT / "docs" / "results" / f"{name}.json"


def kept_runs(name: str) -> list[dict[str, Any]]:
    """The kept numbers, as :meth:`Kept.run` gave them."""
    runs: list[dict[str, Any]] = json.loads(kept_file(name).read_text())["runs"]
    return runs


def markdown(groups: dict[str, str]) -> str:
    """Methods x groups of columns: accuracy, mean ± std over seeds, and what the verdict says against its reference."""
    tables = {title: client_table(kept_runs(name)) for title, name in groups.items()}
    bases = [best_reference(table, ACCURACY) for table in tables.values()]
    against_ = [f"against {display_name(base)} [95 %]" for base in bases]
    header = ["accuracy in %, three seeds", *(cell for pair in zip(groups, against_, strict=True) for cell in pair)]
    lines = []
    for method in KEPT[next(iter(groups.values()))].methods:
        pairs = zip(tables.values(), bases, strict=True)
        name = f"**{display_name(method)}**" if method == BOLD else display_name(method)
        lines.append([name, *(cell for of, base in pairs for cell in _cells(of, method, base))])
    return table(header, lines)


def client_table(runs: Sequence[dict[str, Any]]) -> ClientTable:
    """The kept accuracy of each client in ``runs``, as the verdict takes it."""
    sites, seeds = list(runs[0]["clients"]), sorted({run["seed"] for run in runs})
    found = {
        method: np.array([[run["clients"][site] for site in sites] for run in runs if run["method"] == method])
        for method in dict.fromkeys(run["method"] for run in runs)
    }
    return ClientTable(sites, seeds, np.ones(len(sites)), np.full(len(sites), np.inf), found)


def _cells(of: ClientTable, method: str, base: str) -> list[str]:
    means = of.of_method[method].mean(1)
    mean = f"{format_metric('accuracy', means.mean())} ± {format_metric('accuracy', means.std(ddof=1))}"
    if method == base:
        return [mean, ""]
    gain = compare_methods(base, of, ACCURACY)[method].gain
    assert gain.low is not None and gain.high is not None
    middle, low, high = (format_metric("accuracy", v, "+").replace("-", "−") for v in (gain.mean, gain.low, gain.high))
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
        maps = {name: maps_tables.markdown(name) for name in maps_tables.maps()}
        return {**maps, **maps_tables.named(), "views": maps_tables.views()}
    if document == LEADERBOARDS:
        return {name: leaderboard_tables.markdown(name) for name in leaderboard_tables.boards()}
    if document in OWN_TABLES:
        return {name: made() for name, made in OWN_TABLES[document].items()}
    found = {}
    for name, groups in TABLES[document].items():
        commands = "\n".join(KEPT[kept].command for kept in groups.values())
        found[name] = f"```\n{commands}\n```\n\n{markdown(groups)}"
    if document == RESULTS:
        found |= {
            "anchors": anchors_tables.markdown(),
            "blend": blend_tables.markdown(),
            "forests": forests_tables.markdown(),
            "init": init_tables.markdown(),
            "named columns": named_tables.markdown(),
            "pulls": pulls_tables.markdown(),
            "robust": robust_tables.markdown(),
            "sweeps": sweep_tables.markdown(),
        }
        found["how often the verdict is wrong"] = coverage_tables.markdown()
        found |= private_tables.results()
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
        shown = KEPT["digits-label-skew"]
        screens(
            shown.experiment, shown.methods, shown.seeds, (*shown.settings, "plan.engine=stacked", "plan.threads=2")
        )
        return
    if not sys.argv[1:]:
        for name, kept in KEPT.items():
            content = {"command": kept.command, "runs": kept.run(kept.seeds)}
            kept_file(name).write_text(json.dumps(content, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()
