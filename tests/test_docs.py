"""The small experiments' tables in the documents show kept numbers, which the code still gives."""

import json

import build_docs
import numpy as np
import pytest
import sweep_tables
import sweeps

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


@pytest.mark.parametrize("name", SMALL)
def test_the_code_gives_the_kept_numbers(name):
    kept = [run for run in build_docs.kept_runs(name) if run["seed"] == 0]
    for run, again in zip(kept, build_docs.KEPT[name].run([0]), strict=True):
        assert (run["method"], run["seed"]) == (again["method"], again["seed"])
        difference = abs(run["accuracy"]["mean"] - again["accuracy"]["mean"])
        assert difference <= TOLERANCE[name] + 1e-12, f"{run['method']}: docs/results/{name}.json; make docs"


def test_a_table_holds_means_deviations_and_paired_intervals(monkeypatch):
    spread = {"std": 0.0, "min": 0.0, "p10": 0.0, "max": 1.0}
    values = {"local": (0.5, 0.6, 0.7), "fedpac": (0.8, 0.7, 0.9)}
    runs = [
        {"method": m, "seed": s, "accuracy": {"mean": v, **spread}}
        for m, of in values.items()
        for s, v in enumerate(of)
    ]
    monkeypatch.setattr(build_docs, "kept_runs", lambda name: runs)
    monkeypatch.setitem(build_docs.KEPT, "made up", build_docs.Kept("digits-label-skew", ("local", "fedpac")))
    last = build_docs.markdown({"title": "made up"}).splitlines()[-1]
    half = 4.302652729911275 * np.std([0.3, 0.1, 0.2], ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    assert last == f"| **FedPAC** | 80.00 ± 10.00 | +20.00 [−{100 * half - 20:.2f}, +{20 + 100 * half:.2f}] |"


def test_a_document_without_a_place_for_a_table_is_an_error():
    with pytest.raises(ValueError, match=r"README.md: 0 places for the table 'label skew'"):
        build_docs.rendered("README.md", "no mark")
