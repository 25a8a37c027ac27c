"""What needs no training imports none of it."""

from __future__ import annotations

import pytest
from command_line import EXPERIMENT, TINY, heavy_imports, perfed

COMMANDS = (
    "run",
    "compare",
    "resume",
    "tune",
    "partition",
    "export",
    "predict",
    "join",
    "list",
    "show",
    "report",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((command, "--help") for command in COMMANDS),
        *(("list", what) for what in ("methods", "datasets", "experiments", "extensions")),
        ("list", "methods", "--json"),
        ("show", "heart-disease"),
        ("data", "--help"),
        ("data", "list"),
        ("data", "where"),
        ("data", "get", "heart-disease"),
    ],
    ids=" ".join,
)
def test_what_only_says_something_imports_nothing_heavy(arguments):
    assert heavy_imports(*arguments) == []


@pytest.mark.long
def test_a_command_that_trains_imports_what_it_needs(tmp_path):
    assert "torch" in heavy_imports("run", EXPERIMENT, *TINY, "--method", "local", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.long
def test_a_model_is_written_without_what_trains_scikit_learns_models(tmp_path):
    out = tmp_path / "out"
    assert perfed("run", EXPERIMENT, *TINY, "--method", "local", "--out", out).code == 0
    site = (out / "clients.csv").read_text().splitlines()[1].split(",")[0]
    written = ("export", out, "--site", site, "--format", "safetensors", "--out", tmp_path / "model.safetensors")
    heavy = heavy_imports(*written)
    assert "torch" in heavy and not {"sklearn", "scipy.stats"} & set(heavy), heavy
