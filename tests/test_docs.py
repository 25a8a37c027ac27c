"""The small experiments' tables in the documents show kept numbers, which the code still gives."""

import json
import re

import build_docs
import numpy as np
import pytest
import sweep_tables
import sweeps
from made_up_runs import write

from perfed.report import load_runs, verdict

SMALL = ("digits-label-skew", "digits-views")
# The numbers are kept in float64, where rounding (another processor, plan or number of threads) is 1e-16 and grows to
# far less than the distance of a test sample from a class boundary. scikit-learn's solvers stop at 1e-4 or 1e-3, so
# that one sample may change sides: of the 200 of one of 20 clients, or of its 20 or more with digits-views.
TOLERANCE = {"digits-label-skew": 1 / 200 / 20, "digits-views": 1 / 20 / 20}


@pytest.mark.parametrize("document", build_docs.DOCUMENTS)
def test_documents_show_the_kept_numbers(document):
    text = (build_docs.ROOT / document).read_text()
    assert build_docs.rendered(document, text) == text, "python docs/build_docs.py --render"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_the_pictures_of_the_report_are_there_and_small(theme, width):
    file = build_docs.ROOT / "docs" / f"report-{theme}-{width}.png"
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") == width
    assert file.stat().st_size < 150_000
    texts = [(build_docs.ROOT / name).read_text() for name in ("README.md", "docs/guide.md")]
    assert any(file.name in text for text in texts)


@pytest.mark.parametrize("name", build_docs.KEPT)
def test_numbers_are_kept_with_their_command(name):
    kept, content = build_docs.KEPT[name], json.loads(build_docs.kept_file(name).read_text())
    assert content["command"] == kept.command
    assert [(run["method"], run["seed"]) for run in content["runs"]] == [
        (m, s) for m in kept.methods for s in kept.seeds
    ]


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_sweeps_are_kept_with_their_command_and_figure(name):
    kept = json.loads(sweeps.KEPT.read_text())[name]
    assert kept["command"] == sweeps.command(name) and name in sweep_tables.TITLES
    key, values = kept["command"].split()[3].split("=")
    methods = kept["command"].partition("--methods ")[2].split()[0].split(",")
    pairs = [(f"{key}={value}", method) for value in values.split(",") for method in methods]
    assert [(row["comparison"], row["method"]) for row in kept["rows"]] == pairs
    drawn = (sweeps.DOCS / f"sweep-{name}.svg").read_text()
    if sweeps.SWEEPS[name][0] == "sweep-mean":
        for method in {row["method"] for row in kept["rows"]}:
            means = [100 * row["mean"] for row in kept["rows"] if row["method"] == method]
            said = drawn[drawn.index(f"{method}: ") + len(method) + 2 :]
            shown = [float(value) for value in said.split("<")[0].split(";")[0].split(", ")]
            assert shown == pytest.approx(means, abs=0.006)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_the_code_gives_the_kept_numbers(name):
    kept = [run for run in build_docs.kept_runs(name) if run["seed"] == 0]
    for run, again in zip(kept, build_docs.KEPT[name].run([0]), strict=True):
        assert (run["method"], run["seed"]) == (again["method"], again["seed"])
        difference = abs(np.mean(list(run["clients"].values())) - np.mean(list(again["clients"].values())))
        assert difference <= TOLERANCE[name] + 1e-12, f"{run['method']}: docs/results/{name}.json; make docs"


def test_a_table_holds_means_deviations_and_the_verdicts_intervals(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    made = {method: mean + 0.1 * rng.random((3, 4)) for method, mean in (("fedrep", 0.8), ("local", 0.5))}
    runs, folders = [], []
    for method, table in made.items():
        for seed, values in enumerate(table):
            folders.append(write(tmp_path, method, seed, values))
            clients = {f"site-{i}": value for i, value in enumerate(values)}
            runs.append({"method": method, "seed": seed, "clients": clients})
    monkeypatch.setattr(build_docs, "kept_runs", lambda name: runs)
    monkeypatch.setitem(build_docs.KEPT, "made up", build_docs.Kept("digits-label-skew", ("local", "fedrep")))
    header, _, local, fedrep = build_docs.markdown({"title": "made up"}).splitlines()
    assert "against Local [95 %]" in header and local.endswith("|  |")
    (said,) = verdict(load_runs(folders)).methods
    mean, std = 100 * made["fedrep"].mean(), 100 * made["fedrep"].mean(1).std(ddof=1)
    middle, low, high = (f"{100 * v:+.2f}" for v in (said.gain.mean, said.gain.low, said.gain.high))
    assert fedrep == f"| FedRep | {mean:.2f} ± {std:.2f} | {middle} [{low}, {high}] |"


def test_a_document_without_a_place_for_a_table_is_an_error():
    with pytest.raises(ValueError, match=r"README.md: 0 places for the table 'label skew'"):
        build_docs.rendered("README.md", "no mark")


def test_the_guide_says_where_what_it_shows_in_python_comes_from():
    """Names that ``perfed`` itself does not have: each has an import in the text, and the import is right."""
    text = (build_docs.ROOT / "docs" / "guide.md").read_text()
    imports = re.findall(r"from perfed[\w.]* import [\w, ]+", text)
    known: dict[str, object] = {}
    for line in imports:
        exec(line, known)
    assert {"Plan", "register_extension"} <= known.keys()
    assert known["Plan"]("ray", chunk=2, threads=1).to_dict()["chunk"] == 2
