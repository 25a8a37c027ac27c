"""Sizes that keep the code readable, with the exceptions by name; CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

from engines import blobs, make, serve

import perfed

ROOT = Path(perfed.__file__).parent
FILES = 400
PARAMETERS = 8
LINES = 40
ONE_ROUND = 23

# Their parameters are what a user writes, each with a default or a word of its own.
MANY_PARAMETERS = {
    "model/lstm.py": {"lstm"},
    "run/run.py": {"__init__"},
    "testing/runs.py": {"serve"},
    "training/cohort.py": {"__init__"},  # called in one place, by the engine
}
LONG_FILES = {"data/federation.py"}  # one class, whose constructors say all that they take
WRITTEN_BY_USERS = ("app.", "site_app.", "dataset(", "pooled(")  # a command or a data set: parameters are options


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def test_files_are_short():
    long = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if p.read_text().count("\n") > FILES}
    assert long == LONG_FILES


def test_functions_are_short():
    def lines(node: ast.FunctionDef) -> int:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        return body[-1].end_lineno - body[0].lineno + 1 if body else 0

    long = [f"{path} {node.name}: {lines(node)}" for path, node in functions() if lines(node) > LINES]
    assert not long, long


def test_functions_have_few_parameters():
    many: dict[str, set[str]] = {}
    for path, node in functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
        written = any(ast.unparse(decorator).startswith(WRITTEN_BY_USERS) for decorator in node.decorator_list)
        if len(names) > PARAMETERS and not written:
            many.setdefault(path, set()).add(node.name)
    assert many == MANY_PARAMETERS


def test_one_round_of_fedrep_passes_as_many_files_as_contributing_says():
    server = serve(make("fedrep"), blobs())
    server.prepare()
    server.round(1)
    found = set()

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents and not frame.f_code.co_name.startswith("<"):
            found.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        server.round(2)
    finally:
        sys.setprofile(before)
    assert len(found) <= ONE_ROUND, sorted(found)
    contributing = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    said = re.search(r"passes (\d+) files", contributing)
    assert said is not None and int(said[1]) == ONE_ROUND


def test_help_of_a_benchmark_computes_nothing():
    programs = [
        file for file in (Path(__file__).parent.parent / "benchmarks").glob("*.py") if "__main__" in file.read_text()
    ]
    assert len(programs) > 40
    for text in (file.read_text() for file in programs):
        assert "ArgumentParser" in text or 'if __name__ == "__main__":\n    usage(__doc__)\n' in text, text[:100]
