"""What a shell offers, through typer's own completion."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import perfed

from perfed.cli.index import index


def offered(monkeypatch, line: str) -> list[str]:
    """What bash gets for the last word of ``line``."""
    words = line.split(" ")
    monkeypatch.setenv("_PERFED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    return perfed().out.split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one/config.toml", "runs/three/comparisons.toml", "runs/other/notes.txt", "study.toml", "x.csv"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    return Path(tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("perfed comp", {"compare"}),
        ("perfed show flic-h", {"flic-hl"}),
        ("perfed show heart-dis", {"heart-disease", "heart-disease-union"}),
        ("perfed run stu", {"study.toml"}),
        ("perfed run digits-l", {"digits-label-skew"}),
        ("perfed run x --method fedpac-", {"fedpac-cc", "fedpac-fa", "fedpac-none"}),
        ("perfed compare x --methods local,scaf", {"local,scaffold"}),
        ("perfed compare x --methods local,sklearn:s", {"local,sklearn:svc"}),
        ("perfed compare --extend runs/", {"runs/one", "runs/three"}),
        ("perfed resume runs/o", {"runs/one"}),
        ("perfed report runs/one runs/t", {"runs/three"}),
        ("perfed report run", {"runs/"}),
        (
            "perfed list ",
            {"methods", "datasets", "experiments", "extensions", "leaderboards", "policies", "aggregations"},
        ),
        ("perfed run x --engine s", {"sequential", "stacked"}),
    ],
)
def test_completion(monkeypatch, line, expected):
    assert set(offered(monkeypatch, line)) == expected


def test_every_method_is_offered(monkeypatch):
    assert set(offered(monkeypatch, "perfed run x --method ")) == {item["name"] for item in index()["methods"]}


def test_the_script_is_typers_own(monkeypatch):
    assert "--install-completion" in perfed("--help").out
    monkeypatch.setenv("_PERFED_COMPLETE", "source_bash")
    assert "_PERFED_COMPLETE=complete_bash" in perfed().out
